"""Every meter: the highest since it was entered, kept after its end; and what each one must not miss."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.measure.meters import METERS, Meter, Repeated, best_meter
from autotune.measure.meters.cgroup import Cgroup, CgroupMeter, OwnCgroup, remove_stale
from autotune.measure.meters.cuda import CudaMeter
from autotune.measure.meters.nvml import NvmlMeter
from autotune.measure.meters.rss import RssMeter
from autotune.measure.meters.store_bytes import StoreBytesMeter
from autotune.testing.meter_contract import MIB, FakeMachine, MeterContract
from tests.measure.harness.test_limit import needs_cgroup
from tests.support.fake_nvml import FakeNvml, Gpu, fake_torch_cuda

CREATE: dict[str, Callable[[FakeMachine], Meter]] = {
    "cgroup v1": lambda machine: CgroupMeter(machine.cgroup_v1),
    "cgroup v2": lambda machine: CgroupMeter(machine.cgroup_v2),
    "rss": lambda machine: RssMeter(root=machine.root, resident=machine.read_bytes),
    "rss sampled": lambda machine: RssMeter(root=machine.root / "nowhere", resident=machine.read_bytes),
    "store bytes": lambda machine: StoreBytesMeter(machine.read_bytes),
    "cuda reserved": lambda machine: CudaMeter(cuda=machine.cuda()),
    "cuda allocated": lambda machine: CudaMeter(cuda=machine.cuda(), charged=False),
    "nvml": lambda machine: NvmlMeter(nvml=machine.nvml(42), pid=42),
    "nvml hidden": lambda machine: NvmlMeter(nvml=machine.nvml(42, hidden=True), pid=42),
}
SAMPLED = {"rss sampled", "store bytes", "nvml", "nvml hidden"}


def contract_of(name: str) -> type[MeterContract]:
    create = CREATE[name]
    members = {"sampled": name in SAMPLED, "make_meter": lambda self, machine: create(machine), "__module__": __name__}
    return type(f"Test{name.title().replace(' ', '')}", (MeterContract,), members)


for name in CREATE:
    globals()[contract_of(name).__name__] = contract_of(name)


def test_every_meter_is_run_through_the_contract() -> None:
    tested = {
        value for value in list(globals().values()) if isinstance(value, type) and issubclass(value, MeterContract)
    }
    assert len(tested - {MeterContract}) == len(CREATE)
    kinds = {type(make(lambda: 0)) for make in METERS.values()}
    assert kinds == {CgroupMeter, RssMeter, StoreBytesMeter, CudaMeter, NvmlMeter}


class Forgetful:
    """A meter that does not keep its peak after the end."""

    name, unsure_bytes = "forgetful", 0

    def __init__(self, machine: FakeMachine) -> None:
        self.now_bytes = machine.read_bytes
        self._read_peak = machine.cuda().max_memory_allocated

    @property
    def peak_bytes(self) -> int:
        return int(self._read_peak())

    def unavailable_reason(self) -> str:
        return ""

    def __enter__(self) -> "Forgetful":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_contract_finds_a_meter_that_does_not_start_again(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with pytest.raises(AssertionError):
        MeterContract().test_peak_is_of_the_time_since_entering_and_stays(machine, Forgetful(machine))
    machine = FakeMachine(tmp_path)
    with pytest.raises(AssertionError):
        MeterContract().test_entering_again_starts_from_what_is_used_then(machine, Forgetful(machine))


def test_cached_files_from_before_do_not_count_but_new_ones_do(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    stat = machine.cgroup_v1.path / "memory.stat"
    stat.write_text(f"total_cache {40 * MIB}\ntotal_shmem {10 * MIB}\n")
    with CgroupMeter(machine.cgroup_v1) as meter:
        (machine.cgroup_v1.path / "memory.max_usage_in_bytes").write_text(str(200 * MIB))
        stat.write_text(f"total_cache {90 * MIB}\ntotal_shmem {10 * MIB}\n")
        assert meter.peak_bytes == 170 * MIB


def test_cache_that_a_limit_squeezed_out_is_not_subtracted(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    stat = machine.cgroup_v1.path / "memory.stat"
    stat.write_text(f"total_cache {40 * MIB}\ntotal_shmem 0\n")
    with CgroupMeter(machine.cgroup_v1) as meter:
        (machine.cgroup_v1.path / "memory.max_usage_in_bytes").write_text(str(200 * MIB))
        stat.write_text(f"total_cache {5 * MIB}\ntotal_shmem 0\n")
        assert meter.peak_bytes == 195 * MIB


@pytest.mark.parametrize("after", [5, 60], ids=["dropped", "grown"])
def test_cache_that_went_or_came_meanwhile_makes_the_peak_unsure(tmp_path: Path, after: int) -> None:
    machine = FakeMachine(tmp_path)
    stat = machine.cgroup_v1.path / "memory.stat"
    stat.write_text(f"total_cache {40 * MIB}\ntotal_shmem 0\n")
    with CgroupMeter(machine.cgroup_v1) as meter:
        assert meter.unsure_bytes == 0
        stat.write_text(f"total_cache {after * MIB}\ntotal_shmem 0\n")
    stat.write_text("total_cache 0\ntotal_shmem 0\n")
    assert meter.unsure_bytes == abs(after - 40) * MIB


@given(
    steps=st.integers(0, 50),
    before=st.integers(0, 100),
    caches=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5),
)
def test_of_repeated_steps_the_peak_is_within_what_the_surest_reading_leaves_open(
    steps: int, before: int, caches: list[tuple[int, int, int]]
) -> None:
    seen = Repeated()
    seen.add(SimpleNamespace(peak_bytes=before, unsure_bytes=0), same=False)
    for at_enter, at_peak, at_end in caches:
        between = sorted([at_enter, at_peak, at_end])[1]  # it went or came in one direction
        highest = steps + between
        seen.add(SimpleNamespace(peak_bytes=highest - min(at_enter, at_end), unsure_bytes=abs(at_enter - at_end)))
    least_open = min(abs(at_enter - at_end) for at_enter, _, at_end in caches)
    assert max(before, steps) <= seen.peak_bytes <= max(before, steps + least_open)


def test_a_peak_that_the_kernel_lets_nobody_reset_is_refused_to_root_too(tmp_path: Path) -> None:
    cgroup = Cgroup(tmp_path / "autotune-7", 2)
    cgroup.path.mkdir()
    peak = cgroup.path / "memory.peak"
    peak.touch(mode=0o444)  # before Linux 6.12
    assert "v2 needs Linux 6.12" in CgroupMeter(cgroup).unavailable_reason()
    peak.chmod(0o644)
    assert CgroupMeter(cgroup).unavailable_reason() == ""


def test_a_cgroup_shared_with_others_is_refused(tmp_path: Path) -> None:
    assert "shares" in CgroupMeter(Cgroup(tmp_path, 1)).unavailable_reason()


def test_resident_memory_and_the_stores_bytes_add_up(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    with RssMeter(lambda: 30 * MIB, root=machine.root, resident=machine.read_bytes) as meter:
        machine.use_bytes(300 * MIB)
        assert meter.peak_bytes == 330 * MIB
        assert meter.now_bytes() == 330 * MIB


def test_a_meter_that_samples_says_so(tmp_path: Path) -> None:
    assert RssMeter(root=tmp_path, resident=lambda: 0).name == "rss (sampled)"


def test_reserved_is_charged_and_the_context_counts(tmp_path: Path) -> None:
    cuda = FakeMachine(tmp_path).cuda(cached_bytes=25 * MIB)
    assert CudaMeter(cuda=cuda, context_bytes=lambda: 400 * MIB).now_bytes() == 525 * MIB
    assert CudaMeter(cuda=cuda, context_bytes=lambda: 400 * MIB, charged=False).now_bytes() == 500 * MIB


def test_the_context_is_the_processs_total_less_the_allocators(tmp_path: Path) -> None:
    assert NvmlMeter(nvml=FakeMachine(tmp_path).nvml(42), pid=42).context_bytes(60 * MIB) == 40 * MIB


def test_hidden_processes_are_named_and_have_no_known_context(tmp_path: Path) -> None:
    meter = NvmlMeter(nvml=FakeMachine(tmp_path).nvml(42, hidden=True), pid=42)
    assert "hidden" in meter.name
    assert meter.context_bytes(60 * MIB) == 0


def test_nvml_without_a_driver_says_why(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    nvml = FakeMachine(tmp_path).nvml(42)
    nvml.nvmlInit = broken
    assert "Not Found" in NvmlMeter(nvml=nvml).unavailable_reason()


@pytest.mark.parametrize(
    ("line", "path", "version"),
    [("4:memory:/user/one", "sys/fs/cgroup/memory/user/one", 1), ("0::/user/one", "sys/fs/cgroup/user/one", 2)],
)
def test_the_cgroup_of_a_process_is_found(tmp_path: Path, line: str, path: str, version: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / path / "cgroup.procs").touch()
    assert Cgroup.current(tmp_path) == Cgroup(tmp_path / path, version)


def test_a_container_sees_its_own_cgroup_as_the_mount(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/3f\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    mount.mkdir(parents=True)
    (mount / "cgroup.procs").touch()
    assert Cgroup.current(tmp_path) == Cgroup(mount, 1)


LIMITED: dict[int, dict[str, str]] = {
    1: {
        "memory.limit_in_bytes": f"{400 * MIB}\n",
        "memory.usage_in_bytes": f"{300 * MIB}\n",
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {150 * MIB}\ntotal_active_file {50 * MIB}\n",
    },
    2: {
        "memory.max": f"{400 * MIB}\n",
        "memory.current": f"{300 * MIB}\n",
        "memory.stat": f"inactive_file {150 * MIB}\nactive_file {50 * MIB}\n",
    },
}
"""Files of a cgroup of each version with a limit of 400 MiB, which uses 300, among them 150 of inactive page cache."""


@pytest.mark.parametrize("version", LIMITED)
def test_page_cache_that_no_process_used_lately_counts_as_left_by_a_limit(tmp_path: Path, version: int) -> None:
    for name, text in {"cgroup.procs": "", **LIMITED[version]}.items():
        (tmp_path / name).write_text(text)
    assert Cgroup(tmp_path, version).tightest_limit() == (250 * MIB, 400 * MIB)


def home_without_room_below(root: Path) -> Path:
    """Create the cgroup of this process, below which none can be made; beside it one can."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/slice/scope\n")
    home = root / "sys/fs/cgroup/slice/scope"
    home.mkdir(parents=True)
    (home / "cgroup.procs").touch()  # and no subtree_control that could be written
    (home.parent / "cgroup.subtree_control").write_text("memory\n")
    return home


def test_v2_goes_beside_the_own_cgroup_with_its_limits_where_below_is_refused(tmp_path: Path) -> None:
    home = home_without_room_below(tmp_path)
    limits = {"memory.max": "8000", "cpu.max": "150000 100000", "cpuset.cpus": "0-1"}
    none = {"memory.high": "max", "cpuset.mems": ""}
    for name, limit in {**limits, **none}.items():
        (home / name).write_text(f"{limit}\n")
    made = OwnCgroup("7", tmp_path).cgroup
    assert made.path == home.parent / "autotune-7"
    assert {path.name: path.read_text() for path in made.path.iterdir()} == limits
    assert made.limit_bytes() == 8000


def test_a_cgroup_beside_the_own_one_that_takes_no_limit_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_without_room_below(tmp_path)
    (home / "cpu.max").write_text("150000 100000\n")
    write_text = Path.write_text

    def refuse_limits(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name == "cpu.max":
            raise PermissionError(errno.EACCES, "Permission denied")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", refuse_limits)
    with pytest.raises(PermissionError):
        OwnCgroup("7", tmp_path)
    assert not (home.parent / "autotune-7").exists()


def test_cgroups_of_dead_processes_are_swept_and_of_living_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/12").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n")
    mount = tmp_path / "sys/fs/cgroup/memory"
    for name in ("autotune-12-1", "autotune-13-1", "theirs-13"):
        (mount / name).mkdir(parents=True)
    (mount / "cgroup.procs").touch()
    remove_stale(tmp_path)
    assert sorted(path.name for path in mount.iterdir() if path.is_dir()) == ["autotune-12-1", "theirs-13"]


def test_unknown_device_kind_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: cpu, cuda"):
        best_meter("tpu")


# Real ones, each in a process of its own: what this one did before stays out of it.

SEES = """
import json, mmap, sys
from autotune.measure.meters.cgroup import OwnCgroup
from autotune.measure.meters import METERS
from contextlib import ExitStack
def fill():
    block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, 64 << 20, 4096):
        block[at] = 1
    return block
with ExitStack() as stack:
    if sys.argv[1] == "cgroup":
        stack.enter_context(OwnCgroup())
    with METERS[sys.argv[1]](lambda: 0) as meter:
        before = meter.now_bytes()
        fill().close()
        after = meter.now_bytes()
    print(json.dumps([meter.peak_bytes - before, after - before]))
"""


@pytest.mark.parametrize("name", ["rss", pytest.param("cgroup", marks=needs_cgroup)])
def test_64_mib_that_come_and_go_are_seen_within_1_mib(name: str) -> None:
    seen = subprocess.run([sys.executable, "-c", SEES, name], capture_output=True, text=True, check=True)
    peak, after = json.loads(seen.stdout)
    assert peak == pytest.approx(64 * MIB, abs=MIB)
    assert after == pytest.approx(0, abs=MIB)


@needs_cgroup
def test_an_own_cgroup_is_gone_afterwards() -> None:
    script = "from autotune.measure.meters.cgroup import OwnCgroup\nwith OwnCgroup() as own: print(own.path)"
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not Path(seen.stdout.strip()).exists()


ENVIRONMENTS = {
    "all are visible, CUDA puts the second first": ({}, ("b", "a"), 0, "GPU-b"),
    "an index of another order": ({"CUDA_VISIBLE_DEVICES": "1"}, ("a",), 0, "GPU-a"),
    "a UUID": ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, ("b",), 0, "GPU-b"),
    "the second of two that are visible is current": ({"CUDA_VISIBLE_DEVICES": "1,0"}, ("b", "a"), 1, "GPU-a"),
    "a slice by its UUID": ({"CUDA_VISIBLE_DEVICES": "MIG-2"}, ("c",), 0, "MIG-2"),
    "the first slice where none is named": ({}, ("c",), 0, "MIG-1"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_bytes_are_those_on_the_gpu_or_slice_that_torch_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, visible, current, expected = ENVIRONMENTS[name]
    sizes = {"GPU-a": 1, "GPU-b": 2, "MIG-1": 3, "MIG-2": 4}
    slices = [Gpu(uuid, {42: sizes[uuid] * MIB}) for uuid in ("MIG-1", "MIG-2")]
    gpus = [
        *(Gpu(uuid, {42: sizes[uuid] * MIB, 7: 9 * MIB}) for uuid in ("GPU-a", "GPU-b")),
        Gpu("GPU-c", slices=slices),
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    meter = NvmlMeter(nvml=FakeNvml(gpus), pid=42, cuda=fake_torch_cuda(*visible, current=current))
    assert meter.unavailable_reason() == ""
    assert meter.name == "nvml"
    assert meter.context_bytes(0) == sizes[expected] * MIB


def test_a_gpu_that_nvml_does_not_know_is_told() -> None:
    meter = NvmlMeter(nvml=FakeNvml([Gpu("GPU-a")]), pid=42, cuda=fake_torch_cuda("z"))
    assert "Not Found" in meter.unavailable_reason()
