"""What a process that runs a plan on a GPU is started with, seen at the seam: no GPU is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.ir.plan import Plan
from autotune.measure import children
from autotune.measure.allocator_env import allocator_environment
from autotune.measure.child import Child
from autotune.measure.children import Children, ChildRole
from autotune.measure.messages import BeginTiming, FinishTiming, StopTiming, TimeBlock
from autotune.measure.spec import Spec
from autotune.workloads.reference import WorkloadRef

GROWS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(("allocator", "kind"), [("system", "cuda"), ("system", "cpu"), ("arena", "cpu")])
def test_only_a_plan_in_the_arena_on_a_gpu_asks_for_segments_that_grow(allocator: str, kind: str) -> None:
    assert allocator_environment(allocator, kind, {}) == {}
    assert allocator_environment("arena", "cuda", {}) == GROWS


def test_what_the_user_has_set_for_the_caching_allocator_stays() -> None:
    own = {
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1, 512:2], expandable_segments:False,",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:128",
        "PATH": "/bin",
    }
    assert allocator_environment("arena", "cuda", own) == {
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1, 512:2],expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True",
    }


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every child that was started, in place of processes."""
    made: list[Any] = []

    class Fake(SimpleNamespace):
        @classmethod
        def start(cls, spec: Spec, log: Path, environment: Any) -> Any:
            made.append(cls(environment=environment, asked=[], alive=True, limit="", pid=len(made)))
            return made[-1]

        def ask(self, request: Any, seconds: float) -> None:
            self.asked.append(type(request))

        def end(self) -> None:
            self.alive = False

    monkeypatch.setattr(children, "Child", Fake)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return made


def asked(tmp_path: Path, kind: str, *allocators: str) -> None:
    """A plan of each allocator is begun, timed and finished by the same name."""
    pool = Children(Spec(WorkloadRef("zoo"), tmp_path, device_kind=kind, time_limit_seconds=1.0))
    for allocator in allocators:
        for request in (BeginTiming(Plan((), allocator=allocator)), TimeBlock(), FinishTiming()):
            pool.ask(ChildRole.PLAN_SECONDS, request)
    pool.ask(ChildRole.EAGER_SECONDS, BeginTiming(None))
    pool.close()


def test_a_plan_of_another_allocator_gets_a_process_of_its_own_on_a_gpu(tmp_path: Path, started: list[Any]) -> None:
    asked(tmp_path, "cuda", "system", "arena", "arena", "system")
    assert [child.environment for child in started] == [{}, GROWS, {}, {}]
    assert [len(child.asked) for child in started] == [3, 6, 3, 1]
    assert started[-1].asked == [BeginTiming]  # eager's, as the user's own environment is
    assert not any(child.alive for child in started)


def test_on_a_cpu_one_process_serves_plans_of_both_allocators(tmp_path: Path, started: list[Any]) -> None:
    asked(tmp_path, "cpu", "system", "arena")
    assert [child.environment for child in started] == [{}, {}]


def test_a_child_has_what_it_is_given_on_top_of_this_processs_environment(tmp_path: Path) -> None:
    child = Child.start(Spec(WorkloadRef("zoo"), tmp_path), tmp_path / "log", GROWS)
    try:
        with pytest.raises(Exception, match="no zoo workload"):  # it answers: it is Python by now
            child.ask(StopTiming(), 60.0)
        own = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
    finally:
        child.end()
    assert b"PYTORCH_ALLOC_CONF=expandable_segments:True" in own
    assert any(line.startswith(b"PATH=") for line in own)
