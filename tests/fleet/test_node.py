"""What a far end must be: niceness, variables, promises, and locks that exclude only those who share a device."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.cli.doctor import fleet as doctor
from autotune.errors import ConfigError, DeviceRefusedError, StoreError
from autotune.fleet.far_end import device_lock, inspection
from autotune.fleet.far_end.device_lock import is_in_use, lock_device, name_locks
from autotune.fleet.far_end.opener import OPEN_DEVICE, find_opener
from autotune.fleet.fleet_file import DeviceClass, FleetConfig
from autotune.fleet.local import find_cache, open_harness
from autotune.fleet.messages import DevicePromise
from autotune.fleet.node import check_node, check_promise, check_same_device, prepare_process, read_node_facts
from autotune.fleet.ray import remove_ray_defaults
from autotune.records.config import load_config
from autotune.records.device import Device
from autotune.records.run_dir import RunDir
from autotune.records.speed_environment import AFFINITY
from tests.support.fake_nvml import FakeNvml, Gpu

A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * 2**30, 108, "2.13.0", "CUDA 13.0")


def test_a_far_end_at_another_niceness_is_refused_with_its_cure():
    facts = read_node_facts()
    check_node("a100", dataclasses.replace(facts, nice=0))
    with pytest.raises(DeviceRefusedError, match=r"would run at nice 15, .*Ray: RAY_worker_niceness=0 ray start"):
        check_node("a100", dataclasses.replace(facts, nice=15))


@pytest.mark.parametrize(
    ("promise", "words"),
    [
        (DevicePromise("cuda", "a100", 80 * 2**30, 108), ""),
        (DevicePromise("cuda", "a100", 78 * 2**30), ""),
        (DevicePromise("cpu"), "is a cuda device, the class promises cpu"),
        (DevicePromise("cuda", "H100"), "is 'NVIDIA A100-SXM4-80GB', the class promises 'H100'"),
        (DevicePromise("cuda", memory_bytes=40 * 2**30), "has 81920.0 MiB of memory, the class promises 40960.0 MiB"),
        (DevicePromise("cuda", cores=132), "has 108 cores, the class promises 132"),
    ],
)
def test_a_promise_is_what_it_names_and_nothing_else(promise: DevicePromise, words: str):
    if not words:
        check_promise("a100", "n7", A100, promise)
        return
    with pytest.raises(DeviceRefusedError) as caught:
        check_promise("a100", "n7", A100, promise)
    assert str(caught.value) == f"n7 of class a100 {words}; take the node out of the class"


@pytest.mark.parametrize("name", ["silicon", "cores", "torch", "driver"])
def test_a_device_that_differs_from_the_first_of_its_class_is_refused_by_what_differs(name: str):
    other = dataclasses.replace(A100, **{name: 1 if name == "cores" else "other"})
    check_same_device("a100", "n7", dataclasses.replace(A100, environment={"OMP_NUM_THREADS": "1"}), A100)
    with pytest.raises(DeviceRefusedError, match=f"^n7 of class a100 has {name} "):
        check_same_device("a100", "n7", other, A100)


def test_a_device_with_other_threads_than_the_first_of_its_class_is_refused_and_one_on_other_cpus_is_not():
    first = dataclasses.replace(A100, environment={"torch threads": "8", AFFINITY: "0-7"})
    check_same_device(
        "a100", "n7", dataclasses.replace(first, environment={"torch threads": "8", AFFINITY: "8-15"}), first
    )
    other = dataclasses.replace(first, environment={"torch threads": "4", AFFINITY: "0-7"})
    settings = "other settings than the class's first device: torch threads: recorded 8, now 4"
    with pytest.raises(DeviceRefusedError, match=f"^n7 of class a100 runs with {settings}; set them by `environment`"):
        check_same_device("a100", "n7", other, first)


def test_variables_that_ray_sets_are_removed_unless_the_node_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parent = tmp_path / "environ"
    for ours, theirs, left in (("1", b"HOME=/root\0", None), ("4", b"OMP_NUM_THREADS=4\0HOME=/\0", "4")):
        monkeypatch.setenv("OMP_NUM_THREADS", ours)
        parent.write_bytes(theirs)
        remove_ray_defaults(parent)
        assert os.environ.get("OMP_NUM_THREADS") == left
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare_process({"OMP_NUM_THREADS": "8"})
    assert read_node_facts().environment["OMP_NUM_THREADS"] == "8"


def test_processes_on_disjoint_cpus_measure_at_the_same_time_and_others_do_not(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path; from autotune.fleet.far_end.device_lock import is_in_use\n"
        "os.sched_setaffinity(0, {int(sys.argv[1])}); print(is_in_use('cpu', Path(sys.argv[2])))"
    )
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one CPU")
    os.sched_setaffinity(0, {usable[0]})
    try:
        with lock_device("cpu", print, tmp_path):
            told = [
                subprocess.run(
                    [sys.executable, "-c", code, str(cpu), str(tmp_path)], capture_output=True, text=True, check=True
                ).stdout.strip()
                for cpu in usable[:2]
            ]
        assert told == ["True", "False"]
        assert not is_in_use("cpu", tmp_path)
    finally:
        os.sched_setaffinity(0, usable)


def test_locks_are_for_all_users_whatever_the_umask_is(tmp_path: Path):
    before = os.umask(0o077)
    try:
        with lock_device("cpu", print, tmp_path / "locks"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "locks").iterdir()} == {0o644}
    (tmp_path / "locks").chmod(0o755)
    with lock_device("cpu", print, tmp_path / "locks"):
        assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o755


def test_a_link_in_the_place_of_locks_or_of_a_lock_is_refused_and_not_followed(tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    link = tmp_path / "locks"
    link.symlink_to(target)
    with pytest.raises(DeviceRefusedError, match="locks: a link or a file"), lock_device("cpu", print, link):
        pass
    assert (target.stat().st_mode & 0o7777, list(target.iterdir())) == (0o700, [])
    elsewhere = tmp_path / "elsewhere"
    for name in name_locks("cpu"):
        (target / f"{name}.lock").symlink_to(elsewhere)
    with pytest.raises(DeviceRefusedError, match=r"\.lock: .*; remove it"), lock_device("cpu", print, target):
        pass
    assert not elsewhere.exists()
    assert not is_in_use("cpu", target)


def test_the_lock_of_a_gpu_is_the_one_that_the_process_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_lock, "_read_uuid", lambda index: f"GPU-{index}")
    for visible, name in (("1,0", "gpu-GPU-1"), ("GPU-abc", "gpu-GPU-abc"), ("", "gpu-GPU-0")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert name_locks("cuda") == [name]


def test_the_gpu_that_is_inspected_is_the_one_that_the_process_sees(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml([Gpu("GPU-a"), Gpu("GPU-b")])
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda gpu: f"card {gpu.uuid}", raising=False)
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(total=2**30))
    monkeypatch.setattr(inspection, "open_nvml", lambda: nvml)
    for visible, name in (("1,0", "card GPU-b"), ("GPU-b", "card GPU-b"), ("", "card GPU-a"), ("7", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert inspection._read_gpu() == (name, 2**30 if name else 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    def refuse(gpu: Gpu) -> None:
        raise nvml.NVMLError("Insufficient Permissions")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert inspection._read_gpu() == ("card GPU-b", 0)


def test_doctor_inspects_the_gpu_that_the_environment_of_its_class_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nvml = FakeNvml([Gpu("GPU-a"), Gpu("GPU-b")])
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda gpu: f"card {gpu.uuid}", raising=False)
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(total=2**30))
    monkeypatch.setattr(inspection, "open_nvml", lambda: nvml)
    monkeypatch.setattr(inspection, "measure_busy_share", lambda: 0.0)
    monkeypatch.setattr(device_lock, "_read_uuid", lambda index: f"GPU-{index}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    second = {"CUDA_VISIBLE_DEVICES": "1"}
    classes = {"second": DeviceClass(engine="local", device="cuda", environment=second)}
    inspected = doctor.inspect_class(FleetConfig(classes=classes), "second", tmp_path)
    assert inspected.device_name == "card GPU-b"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_home_that_cannot_be_written_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(DeviceRefusedError, match=r"home/autotune: Not a directory; set XDG_CACHE_HOME on the node$"):
        find_cache()


def test_an_opener_that_does_not_exist_is_named():
    assert find_opener("") is find_opener(OPEN_DEVICE)
    with pytest.raises(
        ConfigError, match="opener 'no_module:open': No module named 'no_module'; write module:function"
    ):
        find_opener("no_module:open")


def test_a_recorded_run_without_its_store_suggests_another_run_because_resume_takes_no_store(tmp_path: Path):
    config = load_config("resnet18", overrides={"stores": {"ssd": str(tmp_path / "gone")}})
    files = RunDir(tmp_path / "run")
    files.path.mkdir()
    for remedy in (
        "name another directory with --store ssd=DIR",
        f"tune under another --name with --store ssd=DIR --seed-from {files.path}",
    ):
        refused = pytest.raises(StoreError, match=f"no directory .*gone; create it, or {remedy}$")
        with refused, open_harness(config, files.logs):
            pass
        files.trials.touch()
