"""What is said of memory and processors, over files as the kernel writes them."""

from pathlib import Path

import pytest

from autotune.cli.doctor import kernel

GIB = 2**20
"""In the kernel's KiB."""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def memory(root: Path, *, free: int = 12, swap: int = 0, swap_free: int = 0, **files: str) -> Path:
    rows = {"MemTotal": 16 * GIB, "MemAvailable": free * GIB, "SwapTotal": swap, "SwapFree": swap_free}
    return write(root, {"proc/meminfo": "\n".join(f"{name}:  {kib} kB" for name, kib in rows.items()), **files})


def test_memory_that_others_hold_is_told(tmp_path: Path) -> None:
    assert kernel.check_free_memory(memory(tmp_path)).status == "ok"
    found = kernel.check_free_memory(memory(tmp_path, free=3))
    assert (found.status, found.detail) == ("warn", "3072.0 MiB of 16384.0 MiB")
    assert found.fix


@pytest.mark.parametrize(
    ("home", "files"),
    [
        ("0::/", {"cgroup.procs": "", "memory.max": f"{4 * 2**30}", "memory.current": f"{3 * 2**30 + 2**29}"}),
        ("4:memory:/", {"memory/cgroup.procs": "", "memory/memory.limit_in_bytes": f"{4 * 2**30}",
                        "memory/memory.usage_in_bytes": f"{3 * 2**30 + 2**29}"}),
    ],
)  # fmt: skip
def test_a_containers_limit_counts_and_not_the_machines_memory(
    tmp_path: Path, home: str, files: dict[str, str]
) -> None:
    placed = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    root = write(memory(tmp_path), {"proc/self/cgroup": home, **placed})
    found = kernel.check_free_memory(root)
    assert (found.status, found.detail) == ("warn", "512.0 MiB of 4096.0 MiB, the limit of the cgroup")


@pytest.mark.parametrize(
    ("home", "name", "text"),
    [("0::/", "memory.max", "max"), ("4:memory:/", "memory/memory.limit_in_bytes", "9223372036854771712")],
)
def test_a_cgroup_without_a_limit_gives_the_machines_memory(tmp_path: Path, home: str, name: str, text: str) -> None:
    procs = str(Path(name).with_name("cgroup.procs"))
    placed = {"proc/self/cgroup": home, f"sys/fs/cgroup/{name}": text, f"sys/fs/cgroup/{procs}": ""}
    found = kernel.check_free_memory(write(memory(tmp_path), placed))
    assert (found.status, found.detail) == ("ok", "12288.0 MiB of 16384.0 MiB")


def test_only_swap_in_use_is_a_warning(tmp_path: Path) -> None:
    assert kernel.check_swap(memory(tmp_path)).detail == "none: a step that does not fit fails at once"
    assert kernel.check_swap(memory(tmp_path, swap=GIB, swap_free=GIB)).status == "ok"
    found = kernel.check_swap(memory(tmp_path, swap=GIB, swap_free=GIB // 2))
    assert (found.status, found.detail) == ("warn", "512.0 MiB of 1024.0 MiB in use")
    assert "swapoff" in found.fix


@pytest.mark.parametrize(
    ("text", "status", "mode"),
    [
        ("[always] madvise never", "warn", "always"),
        ("always [madvise] never", "ok", "madvise"),
        ("", "ok", "unknown"),
    ],
)
def test_huge_pages_for_everyone_are_a_warning(tmp_path: Path, text: str, status: str, mode: str) -> None:
    found = kernel.check_huge_pages(write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text}))
    assert (found.status, found.detail) == (status, mode)
    assert ("madvise" in found.fix) == (status == "warn")


@pytest.mark.parametrize(
    ("governor", "driver", "status"),
    [
        ("performance", "acpi-cpufreq", "ok"),
        ("schedutil", "acpi-cpufreq", "ok"),
        ("powersave", "acpi-cpufreq", "warn"),
        ("powersave", "intel_pstate", "ok"),
        ("powersave", "amd-pstate-epp", "ok"),
        ("userspace", "acpi-cpufreq", "warn"),
    ],
)
def test_a_clock_that_stays_low_under_load_is_a_warning(
    tmp_path: Path, governor: str, driver: str, status: str
) -> None:
    cpus = "sys/devices/system/cpu"
    files = {f"{cpus}/cpu0/cpufreq/scaling_governor": governor, f"{cpus}/cpu0/cpufreq/scaling_driver": driver}
    found = kernel.check_clock(write(tmp_path, files))
    assert (found.status, found.detail) == (status, f"governor {governor}")
    assert ("cpupower" in found.fix) == (status == "warn")


def test_turbo_is_told_by_either_driver_and_a_machine_that_tells_no_clock_is_believed(tmp_path: Path) -> None:
    assert kernel.check_clock(tmp_path).detail == "unknown: controlled by the host, or fixed"
    cpus = "sys/devices/system/cpu"
    write(tmp_path, {f"{cpus}/cpu0/cpufreq/scaling_governor": "performance", f"{cpus}/intel_pstate/no_turbo": "0"})
    assert "turbo on" in kernel.check_clock(tmp_path).detail
    write(tmp_path, {f"{cpus}/intel_pstate/no_turbo": "1"})
    assert "turbo off" in kernel.check_clock(tmp_path).detail
    (tmp_path / cpus / "intel_pstate/no_turbo").unlink()
    write(tmp_path, {f"{cpus}/cpufreq/boost": "1"})
    assert "turbo on" in kernel.check_clock(tmp_path).detail


def test_a_quota_below_the_cores_comes_with_the_threads_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "usable_cores", lambda: 8)
    monkeypatch.setattr(kernel, "cpu_quota", lambda: 2.5)
    assert (kernel.check_cores().status, "OMP_NUM_THREADS=2" in kernel.check_cores().fix) == ("warn", True)
    monkeypatch.setattr(kernel, "cpu_quota", lambda: None)
    assert kernel.check_cores().status == "ok"


def test_a_memory_cgroup_that_is_not_writable_says_what_limits_become(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, name: str = "") -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("autotune.cli.doctor.kernel.OwnCgroup.__init__", refuse)
    found = kernel.check_cgroup()
    assert found.status == "warn"
    assert "not writable" in found.detail
    assert "emulated" in found.fix
