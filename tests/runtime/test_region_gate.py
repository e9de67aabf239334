"""Compiled regions are compared one by one: other rounding passes, also where it changes a sign, and wrong kernels do not.

Most kernels here are inductor's decompositions, run op by op: they round differently from ATen's kernels, need no compiler,
and can be made wrong in one op.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import fx

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import NumericsError
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.region_program import compile_regions, fuse
from autotune.runtime.executor import Executor
from autotune.runtime.train_step import TrainStep
from autotune.runtime.verification import gates
from autotune.runtime.verification.region_gate import RegionGate, one_by_one, output_share
from autotune.runtime.verification.region_reference import OutputValues, RegionReference
from autotune.workloads.workload import Workload
from tests.support.decomposed_kernels import decompose, run_graph
from tests.support.norm_models import draw_norm_net

aten = torch.ops.aten
MOST_UNNOTICED = 1e-5
"""Change of an output, relative to its largest element, from which a wrong kernel must be refused."""


@pytest.fixture
def _decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    decompose(monkeypatch)


def run_step(workload: Workload, watch: Callable[[Program], Program]) -> list[torch.Tensor]:
    program = fuse(capture(workload))
    execute = Executor(watch(program), lower(program.graph, Plan.traced(program.graph)))
    assert program.updates is not None
    with program.updates.step():
        execute([*workload.batch])
    return list(workload.model.parameters())


def check_net(seed: int) -> RegionGate:
    gate = RegionGate()
    run_step(draw_norm_net(seed), gate.watch)
    assert gate.max_share <= 1.0, gate.detail
    assert gate.max_share > 0.0, "the kernels round as ATen's, so nothing was compared"
    return gate


@pytest.mark.usefixtures("_decomposed")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 7))])
def test_kernels_that_round_differently_pass_on_nets_of_batch_norm_and_relu(seed: int):
    check_net(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
def test_kernels_of_inductor_pass_on_a_net_of_batch_norm_and_relu():
    compile_regions(fuse(capture(draw_norm_net(2))))
    check_net(2)


def test_regions_run_one_by_one_have_the_bits_of_the_captured_step():
    captured = run_step(draw_norm_net(3), one_by_one)
    eager = draw_norm_net(3)
    eager.loss_fn(eager.model, eager.batch).backward()
    eager.optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager.model.parameters(), strict=True))


@dataclass
class Case:
    """A region of a net with the inputs that it has in the first step, and its honest kernel."""

    region: CompiledRegion
    tensors: list[torch.Tensor]
    graph: fx.GraphModule


def list_cases(seed: int) -> list[Case]:
    cases: dict[str, Case] = {}

    class Recorder(RegionGate):
        def run(self, region: CompiledRegion, name: str, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            inputs = [
                tensor + 0.1 * torch.rand_like(tensor) if tensor.is_floating_point() else tensor for tensor in tensors
            ]
            cases.setdefault(region.signature, Case(region, inputs, region._trace()[0]))
            return region.region(*tensors)

    run_step(draw_norm_net(seed), Recorder().watch)
    return list(cases.values())


def list_mutants(graph: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield wrong versions of a kernel: each has one wrong op."""
    for position, node in enumerate(graph.graph.nodes):
        if node.op != "call_function":
            continue
        tensors = [number for number, argument in enumerate(node.args) if isinstance(argument, fx.Node)]
        changes: list[tuple[str, Callable[[fx.Node], None]]] = []
        if any(isinstance(argument, float) for argument in node.args):
            changes.append(("a wrong constant", _change_constant))
        if node.target is aten.add.Tensor and len(tensors) == 2:
            changes.append(("a missing term", lambda each: each.replace_all_uses_with(each.args[0])))
        if node.target in (aten.sub.Tensor, aten.div.Tensor) and len(tensors) == 2:
            changes.append(("swapped operands", _swap))
        if node.target in (aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction):
            changes.append(("a sum in bfloat16", _halve))
        for kind, change in changes:
            mutant = copy.deepcopy(graph)
            change(list(mutant.graph.nodes)[position])
            mutant.recompile()
            yield f"{kind}: {node.target}", mutant


def _change_constant(node: fx.Node) -> None:
    node.args = tuple(1.01 * argument if isinstance(argument, float) else argument for argument in node.args)


def _swap(node: fx.Node) -> None:
    node.args = (node.args[1], node.args[0], *node.args[2:])


def _halve(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        half = node.graph.call_function(aten._to_copy.default, (node.args[0],), {"dtype": torch.bfloat16})
        single = node.graph.call_function(aten._to_copy.default, (half,), {"dtype": torch.float32})
    node.args = (single, *node.args[1:])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kernel_with_one_wrong_op_is_refused(seed: int):
    kinds = set()
    for case in list_cases(seed):
        values = RegionReference(case.region.region, case.tensors).evaluate(case.tensors)
        plain = case.region.region(*case.tensors)
        honest = run_graph(case.graph, case.tensors, plain)
        assert worst(honest, values, plain) <= 1.0
        for name, mutant in list_mutants(case.graph):
            outputs = run_graph(mutant, case.tensors, plain)
            if change(outputs, honest) > MOST_UNNOTICED:
                assert worst(outputs, values, plain) > 1.0, name
                kinds.add(name.partition(":")[0])
    assert kinds == {"a wrong constant", "a missing term", "swapped operands", "a sum in bfloat16"}


def worst(outputs: Sequence[torch.Tensor], values: Sequence[OutputValues], plain: Sequence[torch.Tensor]) -> float:
    return max(output_share(*parts) for parts in zip(outputs, values, plain, strict=True))


def change(outputs: Sequence[torch.Tensor], honest: Sequence[torch.Tensor]) -> float:
    """Return the largest change of an output, relative to its largest element."""
    changes = [0.0]
    for output, other in zip(outputs, honest, strict=True):
        if output.shape != other.shape:
            return float("inf")
        if output.numel():
            changes.append(
                float((output.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))
            )
    return max(changes)


def rebuilt_relu(data: torch.Tensor, shift: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the gradient of a ReLU whose operand is computed here, and its sum for each channel."""
    passed = aten.threshold_backward(gradient, torch.relu(data * 3 - shift), 0)
    return passed, passed.sum(0)


def saved_relu(result: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the gradient of a ReLU whose result is an input."""
    passed = aten.threshold_backward(gradient, result, 0)
    return passed, passed.sum(0)


def inputs_near_zero() -> list[torch.Tensor]:
    """Return inputs of `rebuilt_relu` with one operand of ReLU within rounding of 0, and one at 0.001."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(64, 8, generator=generator) + 1
    shift, gradient = torch.rand(64, 8, generator=generator), torch.rand(64, 8, generator=generator) + 1
    shift[5, 3] = data[5, 3] * 3
    shift[6, 4] = data[6, 4] * 3 - 1e-3
    return [data, shift, gradient]


def flip(outputs: Sequence[torch.Tensor], gradient: torch.Tensor, row: int, column: int) -> list[torch.Tensor]:
    """Return the outputs of a ReLU's gradient with one sign decided otherwise."""
    passed = outputs[0].clone()
    passed[row, column] = 0.0 if passed[row, column] else gradient[row, column]
    return [passed, passed.sum(0)]


def test_a_changed_sign_is_admitted_only_where_rounding_can_change_it():
    tensors = inputs_near_zero()
    values, plain = RegionReference(rebuilt_relu, tensors).evaluate(tensors), rebuilt_relu(*tensors)
    assert worst(flip(plain, tensors[2], 5, 3), values, plain) <= 1.0
    assert worst(flip(plain, tensors[2], 6, 4), values, plain) > 1.0
    wrong_sum = flip(plain, tensors[2], 5, 3)
    wrong_sum[1][0] *= 1.001  # a channel without an operand near zero
    assert worst(wrong_sum, values, plain) > 1.0


def test_no_changed_sign_of_an_exact_input_is_admitted_however_small_it_is():
    data, shift, gradient = inputs_near_zero()
    result = torch.relu(data * 3 - shift)
    result[5, 3] = 1e-9
    values, plain = (
        RegionReference(saved_relu, [result, gradient]).evaluate([result, gradient]),
        saved_relu(result, gradient),
    )
    assert worst(plain, values, plain) < 0.1
    assert worst(flip(plain, gradient, 5, 3), values, plain) > 1.0


def test_a_sum_of_terms_that_cancel_may_be_as_far_off_as_the_rounding_of_its_terms():
    def centered(data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((data - data.mean(0)).sum(0),)

    data = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    values, plain = RegionReference(centered, [data]).evaluate([data]), centered(data)
    other_order = centered(data.flip(0))
    assert not torch.equal(other_order[0], plain[0])
    assert worst(other_order, values, plain) <= 1.0
    assert worst([plain[0] + 1e-3], values, plain) > 1.0


def test_a_kernel_that_writes_into_its_input_is_refused(monkeypatch: pytest.MonkeyPatch):
    def compile_(region: CompiledRegion) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            outputs = list(region.region(*tensors))
            tensors[0].mul_(1.01)
            return outputs

        return run

    monkeypatch.setattr(CompiledRegion, "is_loaded", True)
    monkeypatch.setattr(CompiledRegion, "compile", compile_)
    gate = RegionGate()
    run_step(draw_norm_net(0), gate.watch)
    assert gate.max_share == float("inf")
    assert gate.detail.startswith("input 0 of")


def test_a_term_that_a_new_bias_of_zeros_hides_is_noticed_if_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    def affine(data: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (data * 2 + bias,)

    class Wrong:
        signature, region = "affine", staticmethod(affine)

        def __call__(self, data: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
            return [data * 2 + 0 * bias]

    gate = RegionGate()
    gate.run(Wrong(), "affine", torch.randn(8, 4), torch.zeros(4))  # type: ignore[arg-type]
    assert gate.max_share > 1.0
    assert gate.detail.startswith("output 0 of affine on varied inputs")


def test_uninitialized_memory_and_constants_of_another_dtype_are_no_errors():
    def region(data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = data * torch.linspace(0.5, 1.5, 4)
        return result, torch.empty_like(result)

    data = torch.rand(8, 4)
    reference = RegionReference(region, [data])
    assert reference.undefined == {1}
    values = reference.evaluate([data])
    assert output_share(region(data)[0], values[0], region(data)[0]) <= 1.0


def test_under_autocast_the_bound_is_that_of_rounding_to_half_precision():
    def region(data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((data * 3).to(torch.bfloat16).float().mean(0),)

    data = torch.rand(64, 4, generator=torch.Generator().manual_seed(0))
    reference = RegionReference(region, [data])
    (values,), (plain,) = reference.evaluate([data]), region(data)
    assert reference.epsilon == torch.finfo(torch.bfloat16).eps
    assert output_share((data * 3).mean(0), values, plain, reference.epsilon) <= 1.0
    assert output_share(1.1 * plain, values, plain, reference.epsilon) > 1.0


def train_verified() -> str:
    workload = draw_norm_net(3, batch=2, size=8)
    plan = replace(Plan.traced(fuse(capture(workload)).graph), kernels="inductor", allocator="arena")
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, verify=1) as step:
        step(workload.batch)
        return step.verified


@pytest.mark.slow
def test_a_verified_step_beyond_its_bound_is_accepted_only_if_each_region_is_within_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    decompose(monkeypatch)
    assert train_verified().startswith("relative gate against float64, worst 0.")
    monkeypatch.setattr(gates, "NOISE", 1e-9)  # the whole step is refused now
    monkeypatch.setattr(gates, "EPS", 1e-9)
    assert train_verified().startswith("each region within the relative gate against float64, worst 0.")

    def change(graph: fx.GraphModule) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            if any(isinstance(argument, float) for argument in node.args):
                _change_constant(node)

    decompose(monkeypatch, change)
    with pytest.raises(NumericsError, match="hold eager's step; plan with --kernels aten"):
        train_verified()
