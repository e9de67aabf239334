import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import ConfigError, DeviceRefusedError
from autotune.measure.device.this_device import cpu_flags, cpu_name, cpu_quota, this_device, usable_cores

THREADED = """processor\t: 0
model name\t: Some CPU @ 2.5GHz
physical id\t: 0
core id\t\t: 0

processor\t: 1
physical id\t: 0
core id\t\t: 1

processor\t: 2
physical id\t: 0
core id\t\t: 0

processor\t: 3
physical id\t: 1
core id\t\t: 0
"""


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    (tmp_path / "cpuinfo").write_text(THREADED)
    return tmp_path / "cpuinfo"


def test_two_threads_of_one_core_are_one_core(cpuinfo: Path) -> None:
    assert usable_cores(cpuinfo, {0, 1, 2, 3}) == 3
    assert usable_cores(cpuinfo, {0, 2}) == 1


def test_the_same_core_number_in_another_package_is_another_core(cpuinfo: Path) -> None:
    assert usable_cores(cpuinfo, {0, 3}) == 2


def test_processors_that_name_no_core_count_each(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd0c\n")
    assert usable_cores(tmp_path / "cpuinfo", {0, 1}) == 2
    assert usable_cores(tmp_path / "nothing", {0, 1, 2}) == 3


def test_the_silicon_has_a_name_even_where_the_kernel_gives_none(cpuinfo: Path, tmp_path: Path) -> None:
    assert cpu_name(cpuinfo) == "Some CPU @ 2.5GHz"
    assert cpu_name(tmp_path / "nothing").endswith(" CPU")


def test_what_a_processor_can_do_is_read_from_either_word_for_it(tmp_path: Path) -> None:
    for number, line in enumerate(("flags\t\t: fpu avx512_bf16 sse", "Features\t: fp bf16")):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
        assert ("avx512_bf16" if number == 0 else "bf16") in cpu_flags(tmp_path / "cpuinfo")
    assert cpu_flags(tmp_path / "nothing") == frozenset()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({}, None),
    ],
)
def test_a_quota_is_read_from_either_version_of_cgroups(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpu_quota(tmp_path) == cores


def test_this_cpu_is_known_without_importing_torch() -> None:
    code = "import sys; from autotune.measure.device.this_device import this_device; this_device(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_this_cpu_names_the_torch_that_would_be_imported() -> None:
    import torch

    device = this_device("cpu")
    assert device.torch == torch.__version__
    assert device.memory_bytes > 2**28
    assert device.cores >= 1


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'; known: cpu, cuda"):
        this_device("tpu")


def test_a_gpu_that_is_not_there_is_refused_with_a_next_move() -> None:
    import torch

    if torch.cuda.is_available():
        assert this_device("cuda").memory_bytes > 2**30
    else:
        with pytest.raises(DeviceRefusedError, match="torch sees no GPU; check the driver"):
            this_device("cuda")
