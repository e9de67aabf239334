"""A captured step on compiled regions is accepted for its regions, one by one, and a wrong region is refused by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from autotune.errors import NumericsError
from autotune.ir.plan import Plan
from autotune.measure.children import ChildRole
from autotune.measure.messages import ChildError, EagerResultsRequest, Expects, RegionsRequest
from autotune.measure.numerics import ExpectedResults, find_expected_results
from autotune.measure.spec import Spec
from autotune.measure.worker.bench import Bench
from autotune.records.measurement import Outcome
from autotune.runtime.verification import gates
from autotune.workloads.reference import WorkloadRef
from tests.measure.harness.conftest import InProcessChildren
from tests.support.decomposed_kernels import decompose

FACTORY = """
from tests.support.norm_models import draw_norm_net
def factory():
    return draw_norm_net(3, batch=2, size=8)
"""
pytestmark = pytest.mark.usefixtures("children_in_process")


@dataclass
class Net:
    """Directory of a workload and of its eager results, and the process that compares plans, once there is one."""

    directory: Path
    bench: Bench | None = None


@pytest.fixture(scope="module", autouse=True)
def decomposed() -> Iterator[None]:
    """Trace each region once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        decompose(patch)
        yield


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Net:
    return Net(tmp_path_factory.mktemp("net"))


class WithoutRegions(InProcessChildren):
    """Children that run out of memory when they compare regions."""

    def ask(self, role: ChildRole, request: Expects[Any], **options: Any) -> Any:
        if isinstance(request, RegionsRequest):
            raise ChildError(Outcome.OUT_OF_MEMORY, "not enough memory")
        return super().ask(role, request, **options)


def find(
    net: Net, kind: Callable[[Spec], InProcessChildren] = InProcessChildren, *, exact: bool = False
) -> ExpectedResults:
    """Compare the captured step with eager; a net is run in eager and captured once."""
    directory = net.directory
    (directory / "net.py").write_text(FACTORY)
    reference = WorkloadRef(f"{directory}/net.py:factory")
    children = kind(Spec(reference, directory / "logs", kernels="inductor", exact=exact, scratch=directory))
    spec = children._spec
    if net.bench is None:
        children.ask(ChildRole.EAGER, EagerResultsRequest(directory / "eager"))
        net.bench = Bench(spec)
    children._benches[ChildRole.PLAN_BYTES] = net.bench
    traced = replace(Plan.traced(net.bench._plans.program.graph), kernels="inductor")
    expected, _ = find_expected_results(children, spec, traced, directory / "eager")  # type: ignore[arg-type]
    assert expected is not None
    return expected


def refuse_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gate of the whole step admit no difference."""
    monkeypatch.setattr(gates, "NOISE", 1e-9)
    monkeypatch.setattr(gates, "EPS", 1e-9)


def test_regions_are_named_in_the_comparison(net: Net):
    expected = find(net)
    assert 0.0 < expected.capture_error <= 1.0
    assert expected.method.startswith("relative gate against float64, worst 0.")
    assert "; each region within the relative gate against float64, worst 0." in expected.method


def test_a_step_beyond_its_bound_is_accepted_if_each_region_is_within_its_own(
    net: Net, monkeypatch: pytest.MonkeyPatch
):
    refuse_every_step(monkeypatch)
    expected = find(net)
    assert 0.0 < expected.capture_error <= 1.0
    assert expected.method.startswith("each region within the relative gate against float64, worst 0.")
    assert "moves the whole step by" in expected.method


def test_a_wrong_region_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def add_too_much(graph: fx.GraphModule) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default):
            with graph.graph.inserting_after(node):
                wrong = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.0001))
            node.replace_all_uses_with(wrong, delete_user_cb=lambda user, wrong=wrong: user is not wrong)

    decompose(monkeypatch, add_too_much)
    with pytest.raises(NumericsError, match=r"output \d of 0\.norm\.fused\d+.* is off by .*; use --kernels aten"):
        find(Net(tmp_path))


def test_where_eagers_bits_are_demanded_other_rounding_is_refused(net: Net):
    with pytest.raises(NumericsError, match=r"does not have eager's bits: .*; leave exact out"):
        find(net, exact=True)


def test_without_memory_to_compare_regions_the_gate_of_the_whole_step_decides(
    net: Net, monkeypatch: pytest.MonkeyPatch
):
    expected = find(net, WithoutRegions)
    assert expected.method.endswith("regions were not compared one by one: out_of_memory: not enough memory")
    refuse_every_step(monkeypatch)
    with pytest.raises(NumericsError, match=r"the captured step of .* differs from eager"):
        find(net, WithoutRegions)
