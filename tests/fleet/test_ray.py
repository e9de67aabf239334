"""Ray as an engine: what a far end that cannot start is told by, how a cluster is joined, and which node is waited for."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.doctor import fleet as doctor
from autotune.errors import ConfigError, DeviceLostError, DeviceRefusedError
from autotune.fleet import ray as ray_engine
from autotune.fleet.channel import FarEndLostError, Reach
from autotune.fleet.fleet_file import DeviceClass, FleetConfig
from autotune.fleet.messages import OpenDevice, code_identity
from autotune.fleet.open_runner import to_reach
from autotune.fleet.remote_runner import RemoteRunner
from autotune.testing.fake_far_end import OPENER
from autotune.testing.runner_contract import make_config

ACTOR = """
class DeviceActor:
    def __init__(self, opener): ...
    def answer(self, text): ...
    def close(self): ...
"""


def make_runner(directory: Path, **fields: Any) -> RemoteRunner:
    request = OpenDevice(code_identity(), "fake", make_config(directory).model_dump(mode="json"))
    reach = Reach("fake", directory, resource="fake", **{"opener": OPENER, **fields})
    return RemoteRunner(lambda report: ray_engine.open_channel(reach, report), request, pause_seconds=0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("missing", ["opener", "class"])
def test_a_far_end_that_cannot_start_is_refused_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
):
    opener = OPENER
    if missing == "opener":
        opener = "absent_on_nodes:open"
    else:  # as on a node without autotune
        (tmp_path / "absent_on_nodes.py").write_text(ACTOR)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(ray_engine, "DeviceActor", importlib.import_module("absent_on_nodes").DeviceActor)
    with pytest.raises(DeviceRefusedError) as caught:
        make_runner(tmp_path, opener=opener).prepare()
    text = str(caught.value)
    assert text.startswith("class fake: the far end cannot start (")
    assert "No module named 'absent_on_nodes'" in text
    assert text.endswith("); install the same autotune on the node")
    assert "\n" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_gpu_that_no_node_has_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_engine, "NOTICE_SECONDS", 0.1)
    runner = make_runner(tmp_path, uses_gpu=True)
    with pytest.raises(DeviceLostError, match="no node of the cluster has the resource 'GPU'"):
        runner.prepare()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_doctor_does_not_wait_for_a_device_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_engine, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(doctor, "WAIT_SECONDS", 2.0)
    studies = [make_runner(tmp_path) for _ in range(2)]
    for study in studies:
        study.prepare()
    fleet = FleetConfig(classes={"fake": DeviceClass(engine="ray")})
    with pytest.raises(FarEndLostError, match=r"^waiting for a free device of class fake for 2 s; run doctor when"):
        doctor.inspect_class(fleet, "fake", tmp_path)
    for study in studies:
        study.close()


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options with which a cluster is joined; none is."""
    ray = pytest.importorskip("ray")
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_engine, "_joined", [])
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **fields: options.append(fields))
    return options


def test_code_is_copied_without_what_studies_leave_in_it_and_a_missing_folder_is_named(
    tmp_path: Path, joins: list[dict[str, Any]]
):
    ray_engine.connect("auto", str(tmp_path))
    ray_engine.connect("auto")
    copied = {"working_dir": str(tmp_path), "excludes": ["/runs/", "/plans/"]}
    assert [fields["runtime_env"] for fields in joins] == [copied, None]
    with pytest.raises(ConfigError, match=r"^code nowhere: no such directory; name that of the workloads as `code`"):
        ray_engine.connect("auto", "nowhere")


def test_a_study_whose_code_changed_after_this_process_joined_the_cluster_is_refused(
    tmp_path: Path, joins: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ray.is_initialized", lambda: bool(joins))
    model, log = tmp_path / "model.py", tmp_path / "runs" / "log.py"
    fleet = FleetConfig(classes={"fake": DeviceClass(engine="ray")}, code=str(tmp_path))

    def begin_study() -> Reach:
        reach = to_reach(fleet, "fake", tmp_path)
        ray_engine.connect(reach.address, reach.code, reach.code_digest)
        return reach

    model.write_text("layers = 2\n")
    first = begin_study()
    log.parent.mkdir()
    log.write_text("what a study leaves is no code of the user\n")
    begin_study()
    assert len(joins) == 1
    model.write_text("layers = 3\n")
    with pytest.raises(DeviceRefusedError, match=r"address or code changed since then; run this study in a new Python"):
        begin_study()
    ray_engine.connect(
        first.address, first.code, first.code_digest
    )  # the first study goes on with the code that it has


@pytest.mark.usefixtures("joins")
def test_a_cluster_that_cannot_be_joined_is_refused_with_the_end_of_the_reason(monkeypatch: pytest.MonkeyPatch):
    def refuse(**fields: Any) -> None:
        frames = "frames of a traceback\n" * 30
        raise RuntimeError(f"{frames}Version mismatch:\n the cluster has Python 3.12.1")

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(DeviceRefusedError) as caught:
        ray_engine.connect("n1:6379")
    text = str(caught.value)
    assert text.startswith("engine ray: cannot join a cluster at 'n1:6379' (")
    assert "Version mismatch: the cluster has Python 3.12.1); make the versions of Ray and Python equal, or" in text
    assert text.endswith("start one with: ray start --head")
    assert len(text) < 500
