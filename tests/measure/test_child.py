"""The coordinator's end of a child process."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.measure import child
from autotune.measure.child import Child
from autotune.measure.spec import Spec
from autotune.workloads.reference import WorkloadRef


def test_a_process_that_cannot_be_started_leaves_no_pipe_and_no_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    cgroup = SimpleNamespace(cgroup=SimpleNamespace(path=tmp_path / "cgroup"), remove=lambda: removed.append("cgroup"))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(child, "_create_cgroup", lambda _: cgroup)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="temporarily unavailable"):
        Child.start(Spec(WorkloadRef("resnet18"), tmp_path), tmp_path / "child.log")
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert removed == ["cgroup"]
