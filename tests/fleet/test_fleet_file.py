"""The file of a fleet: what it promises, what it refuses, and how a study finds its class."""

from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.fleet.fleet_file import load_fleet
from autotune.fleet.open_runner import apply_class, open_runner, refuse_fleet, to_reach
from autotune.nightly.config import load_nightly_config
from autotune.records.config import load_config
from autotune.report.mlflow_store import experiment_name

FLEET = """
classes:
  a100:
    resource: A100
    device: cuda
    name: A100
    memory: 80GiB
    devices: 2
    stores: {}
  epyc: {engine: command, command: [ssh, epyc-1, autotune, serve], cores: 16, limit: 64GiB, stores: {ssd: /nvme}}
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(FLEET)
    return Path("fleet.yaml")


def test_a_class_promises_what_it_names_and_is_reached_by_its_engine(fleet: Path):
    found = load_fleet(fleet)
    promise = found.find("a100").promise
    assert (promise.kind, promise.name, promise.memory_bytes, promise.cores) == ("cuda", "A100", 80 * 2**30, None)
    reach = to_reach(found, "a100", Path())
    assert (reach.resource, reach.uses_gpu, reach.address) == ("A100", True, "auto")
    assert to_reach(found, "epyc", Path()).command == ("ssh", "epyc-1", "autotune", "serve")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("classes: {}", "fleet.yaml:1: classes: dictionary should have at least 1 item"),
        (
            "classes:\n  a: {engine: dask}",
            "fleet.yaml:2: classes.a.engine: input should be 'local', 'command' or 'ray'",
        ),
        ("classes:\n  a: {memroy: 1GiB}", "fleet.yaml:2: unknown key 'memroy' in a; known: engine, command, "),
        ("classes:\n  a: {memory: big}", "fleet.yaml:2: classes.a.memory: cannot read 'big' as bytes"),
        (
            "classes:\n  a: {engine: command}",
            "fleet.yaml:1: classes: class 'a': `engine: command` and `command: [...]` need",
        ),
        ("classes:\n  a/b: {}", "fleet.yaml:1: classes: class 'a/b' is a path, or has an @; give a plain name"),
        ("classes:\n  a: {engine: local, devices: 2}", "fleet.yaml:1: classes: class 'a': this machine is one device"),
        ("classes:\n  a: {stores: {nvme: /x}}", "fleet.yaml:2: "),
    ],
)
def test_a_fault_is_named_with_its_line(fleet: Path, text: str, words: str):
    fleet.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_fleet(fleet)
    assert str(caught.value).startswith(words)


@pytest.mark.usefixtures("fleet")
def test_a_study_has_the_device_the_limit_and_the_stores_of_its_class():
    config = load_config("resnet18", overrides={"fleet": "fleet.yaml", "stores": {"ssd": "/here"}, "limit": "1GiB"})
    gpu = apply_class(config.model_copy(update={"on": "a100"}))
    assert (gpu.device, gpu.stores, gpu.limit) == ("cuda", {}, "1GiB")
    cpu = apply_class(config.model_copy(update={"on": "epyc"}))
    assert (cpu.device, cpu.stores, cpu.limit) == ("cpu", {"ssd": "/nvme"}, "1GiB")
    assert apply_class(cpu) == cpu
    assert apply_class(cpu.model_copy(update={"limit": "100GiB"})).limit == "64GiB"
    assert apply_class(cpu.model_copy(update={"limit": None})).limit == "64GiB"


@pytest.mark.usefixtures("fleet")
def test_a_class_needs_a_fleet_and_a_fleet_a_class(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AUTOTUNE_FLEET", raising=False)
    for fields, words in (
        ({"on": "a100"}, "--on a100: no fleet is named; add --fleet FILE, or set AUTOTUNE_FLEET"),
        ({"fleet": "fleet.yaml"}, "--fleet fleet.yaml: no class is named; add --on CLASS"),
        (
            {"fleet": "fleet.yaml", "on": "a10"},
            "--on a10: the fleet has no such class; known: a100, epyc; did you mean",
        ),
    ):
        with pytest.raises(ConfigError) as caught, open_runner(load_config("resnet18", overrides=fields), Path("logs")):
            pass
        assert str(caught.value).startswith(words)
    monkeypatch.setenv("AUTOTUNE_FLEET", "fleet.yaml")
    with open_runner(load_config("resnet18", overrides={"on": "epyc"}), Path("logs")) as runner:
        assert runner.request.config["stores"] == {"ssd": "/nvme"}
    with pytest.raises(ConfigError, match="dry-run profiles this machine, the config names class epyc"):
        refuse_fleet(load_config("resnet18", overrides={"on": "epyc"}), "dry-run")


@pytest.mark.usefixtures("fleet")
def test_a_nightly_entry_on_two_classes_is_two_entries_with_a_history_each():
    Path("night.yaml").write_text(
        "fleet: fleet.yaml\nentries:\n  - {workload: resnet18, on: [a100, epyc]}\n  - workload: gpt2\n    time: soon\n"
    )
    with pytest.raises(ConfigError, match=r"^night\.yaml:5: "):
        load_nightly_config(Path("night.yaml"))
    Path("night.yaml").write_text(
        "fleet: fleet.yaml\nentries:\n  - {workload: resnet18, on: [a100, epyc]}\n  - workload: gpt2\n"
    )
    options = load_nightly_config(Path("night.yaml"))
    assert [entry.key for entry in options.entries] == ["resnet18@a100", "resnet18@epyc", "gpt2"]
    assert [entry.fleet for entry in options.entries] == ["fleet.yaml", "fleet.yaml", None]
    text = Path("night.yaml").read_text()
    Path("night.yaml").write_text(text.replace("on: [a100, epyc]}", "on: a100, fleet: own.yaml}"))
    assert [entry.fleet for entry in load_nightly_config(Path("night.yaml")).entries] == ["own.yaml", None]
    options = load_nightly_config(Path("night.yaml"), on="epyc", fleet="other.yaml")
    assert [(entry.key, entry.fleet) for entry in options.entries] == [
        ("resnet18@epyc", "other.yaml"), ("gpt2@epyc", "other.yaml"),
    ]  # fmt: skip


@pytest.mark.usefixtures("fleet")
def test_a_nightly_fleet_that_no_entry_measures_on_is_refused():
    Path("night.yaml").write_text("entries:\n  - workload: gpt2\n")
    with pytest.raises(ConfigError, match=r"^--fleet fleet\.yaml: no entry names a class; add `on` to the entries"):
        load_nightly_config(Path("night.yaml"), fleet="fleet.yaml")
    assert load_nightly_config(Path("night.yaml"), fleet="fleet.yaml", on="epyc").entries[0].key == "gpt2@epyc"
    Path("night.yaml").write_text("time: 1h\nfleet: fleet.yaml\nentries:\n  - workload: gpt2\n")
    with pytest.raises(ConfigError, match=r"^night\.yaml:2: fleet fleet\.yaml: no entry names a class"):
        load_nightly_config(Path("night.yaml"))


def test_an_experiment_is_that_of_one_class():
    assert experiment_name("gpt2", "cpu-x", "a100") != experiment_name("gpt2", "cpu-x") == "autotune.gpt2.cpu-x"
