"""All findings together: nothing stops the rest, nothing is left behind, and the answer comes in time."""

import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.doctor import CheckResult, kernel, run_checks, software
from autotune.cli.doctor.software import TorchInfo

TORCH = TorchInfo("2.13.0+cpu", "", 0, "", (1.0, 1.01, 0.99, 1.0, 1.0))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "query_torch", lambda: TORCH)


def by_name(stores: dict[str, Path], runs: Path) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in run_checks(stores, runs)}


@pytest.mark.usefixtures("quick")
def test_a_healthy_store_is_ok_and_a_missing_one_comes_with_its_cure(tmp_path: Path) -> None:
    found = by_name({"ssd": tmp_path, "ramdisk": tmp_path / "nowhere", "sdd": tmp_path}, tmp_path)
    assert found["store ssd"].status in ("ok", "warn")
    assert "free" in found["store ssd"].detail
    assert found["store ramdisk"].status == "bad"
    assert found["store ramdisk"].detail == f"ramdisk store: no directory {tmp_path / 'nowhere'}"
    assert "--store ramdisk=DIR" in found["store ramdisk"].fix
    assert found["store sdd"].status == "bad"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_whatever_breaks_is_a_finding_and_the_rest_is_still_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Any:
        raise RuntimeError("first line\nsecond line")

    whole = set(by_name({}, tmp_path))
    assert whole >= {"python", "torch", "gpu", "memory", "free memory", "swap", "cores", "clock", "noise", "runs"}
    monkeypatch.setattr(software, "query_torch", breaks)
    monkeypatch.setattr(kernel, "usable_cores", breaks)
    found = by_name({}, tmp_path)
    assert set(found) == whole
    for name in ("torch", "cores", "noise"):
        assert found[name].status == "bad"
        assert found[name].detail == "cannot be checked: RuntimeError: first line"


def test_a_torch_that_cannot_be_imported_is_bad_and_crashes_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "_QUERY", "import os; os.abort()")
    torch = by_name({}, tmp_path)["torch"]
    assert torch.status == "bad"
    assert "pip install" in torch.fix


def test_a_torch_that_does_not_answer_is_not_waited_for_and_is_no_fault_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "_QUERY", "import time; time.sleep(600)")
    monkeypatch.setattr(software, "_TIME_LIMIT_SECONDS", 0.05)
    found = by_name({}, tmp_path)
    for name in ("torch", "noise"):
        assert found[name].status == "warn"
        assert "not imported and timed within 0.05 s" in found[name].detail
        assert "run again" in found[name].fix


def test_torchs_process_tells_what_this_one_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(software, "_TIME_LIMIT_SECONDS", 120.0)  # this machine may be busy; what is told is looked at
    told = software.query_torch()
    assert (told.version, told.gpus) == (torch.__version__, torch.cuda.device_count())
    assert bool(told.gpu_meter) == bool(told.gpus)
    assert len(told.noise_seconds) >= 5
    assert min(told.noise_seconds) > 0


@pytest.mark.usefixtures("quick")
def test_a_runs_folder_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    assert by_name({}, tmp_path / "not" / "yet")["runs"].status in ("ok", "warn")
    (tmp_path / "file").touch()
    assert by_name({}, tmp_path / "file")["runs"].status == "bad"


def test_python_is_the_one_that_runs() -> None:
    assert software.check_python().detail.endswith(sys.executable)
