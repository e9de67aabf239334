import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from autotune.cli.doctor import software
from autotune.cli.doctor.software import TorchInfo
from autotune.errors import ConfigError

QUIET = TorchInfo("2.13.0+cpu", "", 0, "", (1.0,) * 20)


@pytest.mark.parametrize(("version", "status"), [("2.11.0", "bad"), ("2.12.0", "ok"), ("2.14.0a0+git", "bad")])
def test_only_versions_of_torch_that_are_tried_are_ok(version: str, status: str) -> None:
    assert software.check_torch(dataclasses.replace(QUIET, version=version, cuda="13.0")).status == status


def test_a_full_gpu_does_not_hide_the_facts_about_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*sizes: int, device: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr("autotune.measure.device.probe.noise_seconds", lambda timer, seconds: (1.0,))
    software.print_torch()
    assert json.loads(capsys.readouterr().out) | {"version": "", "cuda": ""} == {
        "version": "", "cuda": "", "gpus": 1, "gpu_meter": "", "noise_seconds": [1.0],
    }  # fmt: skip


def test_torchs_process_imports_nothing_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shadow.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(software, "_QUERY", "import shadow")
    with pytest.raises(ConfigError, match="No module named 'shadow'"):
        software.query_torch()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(software, "usable_cores", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval: SimpleNamespace(steal=0.0))


@pytest.mark.usefixtures("idle")
def test_work_that_varies_on_an_idle_machine_is_noise() -> None:
    assert software.check_noise(QUIET).status == "ok"
    assert "varies by 0.0 %" in software.check_noise(QUIET).detail
    one_in_five_slow = dataclasses.replace(QUIET, noise_seconds=(1.0, 1.0, 1.0, 1.0, 1.5) * 4)
    found = software.check_noise(one_in_five_slow)
    assert (found.status, "varies by 50.0 %" in found.detail) == ("warn", True)
    assert found.fix


@pytest.mark.parametrize(("load", "stolen", "status"), [(1.9, 0, "ok"), (2.1, 0, "warn"), (0.1, 6, "warn")])
@pytest.mark.usefixtures("idle")
def test_load_of_others_and_stolen_time_are_noise_too(
    load: float, stolen: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval: SimpleNamespace(steal=stolen))
    assert software.check_noise(QUIET).status == status


@pytest.mark.usefixtures("idle")
def test_beside_other_work_spinning_threads_are_named_unless_they_wait_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 0, 0))
    assert "OMP_WAIT_POLICY=PASSIVE" in software.check_noise(QUIET).fix
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert "OMP_WAIT_POLICY" not in software.check_noise(QUIET).fix


def test_without_a_compiler_the_cure_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert software.check_compiler().status == "warn"
    assert "g++" in software.check_compiler().fix
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert (software.check_compiler().status, software.check_compiler().detail) == ("ok", "/usr/bin/g++")
