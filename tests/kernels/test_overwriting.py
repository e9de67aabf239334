"""Regions that write an output over an input: the same bits, in fewer bytes by that output."""

from collections.abc import Callable

import pytest
import torch

from autotune.capture.program import Call, Meta, Program, Read, View, reads
from autotune.capture.tracer import capture
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import Op
from autotune.kernels.compile_pool import compile_in_pool
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.overwriting import find_target, has_short_sums, write_over
from autotune.kernels.region_program import fuse
from autotune.planners import make_plan
from autotune.runtime import op_profiler
from autotune.workloads.workload import Workload

F = torch.nn.functional


def step(loss: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> Program:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    return fuse(capture(Workload(model, loss, None, torch.randn(16, 32))))


def attention(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    scores = model[0](x) @ model[1](x).T
    return (F.softmax(scores * 0.5, 1) @ x).sum()


def transposed(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model[0](x) @ x.T
    return ((y + y.T).sigmoid() @ model[1](x)).sum()


def regions(program: Program) -> list[Op]:
    return [op for op in program.graph.ops if op.target == "autotune.kernels.fused"]


def overwritten(program: Program) -> dict[str, list[str]]:
    names = [value.name for value in program.graph.values]
    return {op.name: [names[value] for value in op.inplace] for op in regions(program)}


def test_an_output_may_take_the_memory_of_an_input_that_it_is_computed_from_element_by_element():
    assert any(overwritten(step(attention)).values())


def test_no_output_takes_the_memory_of_an_input_that_it_reads_transposed():
    program = step(transposed)
    mixed = [op for op in regions(program) if any("sigmoid" in program.graph.values[v].name for v in op.outputs)]
    assert mixed
    assert not any(op.inplace for op in mixed)


def test_a_loss_that_is_counted_with_all_its_terms_is_overwritten_by_no_smaller_output():
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (F.mse_loss(self.first(x)[:, :64], target) + F.mse_loss(self.second(x)[:, :64], target)) * 0.5

    batch = torch.randn(8, 64), torch.randn(8, 64)
    graph = fuse(capture(Workload(Two(), None, None, batch))).graph
    check(graph, make_plan(graph, {}, 10**9, Costs.unit(graph)))


def test_no_region_overwrites_the_users_own_tensors():
    graph = step(attention).graph
    assert not any(graph.static & set(op.inplace) for op in graph.ops)


def scaled_by_its_rows(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    gram = x.T @ x
    hidden = model[0](gram)
    for row in range(4):
        hidden = model[0](torch.sin(gram * gram[row] + hidden))
    return hidden.sum()


def test_no_output_takes_the_memory_of_an_input_of_which_the_region_also_gets_a_part():
    program = step(scaled_by_its_rows)
    in_parts = {
        op.id: {
            value for argument in program.calls[op.id].args if isinstance(argument, View) for value in reads(argument)
        }
        for op in regions(program)
    }
    assert any(in_parts.values()), "steps that read another row share a kernel"
    assert not any(in_parts[op.id] & set(op.inplace) for op in regions(program))


def normalized_rows(columns: int) -> Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]:
    return lambda model, x: F.log_softmax(model(x).view(-1, columns), 1).square().sum()


def test_no_output_takes_the_memory_of_an_input_whose_short_sums_inductor_computes_in_the_same_loop():
    assert any(overwritten(step(normalized_rows(16))).values())
    assert not any(overwritten(step(normalized_rows(4))).values())


def test_a_full_sum_of_a_view_is_no_short_sum_and_a_sum_over_few_of_its_elements_is_one():
    matrix, number, row = (Meta(shape, stride, torch.float32, torch.device("cpu"))
                           for shape, stride in (((4, 6), (6, 1)), ((), ()), ((6,), (1,))))  # fmt: skip
    aten = torch.ops.aten
    part = View(aten.slice.Tensor, (Read(0), 0, 0, 2))
    for call, result, expected in (
        (Call(aten.sum.default, (part,), (), 1), number, False),
        (Call(aten.sum.dim_IntList, (part, [0]), (), 1), row, True),
        (Call(aten.amax.default, (View(aten.expand.default, (View(aten.unsqueeze.default, (Read(0), 0)), [8, 4, 6])), [0]),
              (), 1), matrix, False),
    ):  # fmt: skip
        assert has_short_sums(call, [matrix, result]) is expected


def test_only_tensors_that_lie_alike_in_memory_share_it():
    def meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Meta:
        return Meta(shape, stride, dtype, torch.device("cpu"))

    matrix = meta((4, 6), (6, 1))
    assert find_target(matrix, [meta((2,), (1,)), meta((2, 2, 6), (12, 6, 1))]) == 1
    assert find_target(matrix, [meta((4, 6), (1, 4))]) is None
    assert find_target(matrix, [meta((4, 6), (6, 1), torch.int32)]) is None
    assert find_target(meta((4, 6), (12, 1)), [meta((4, 6), (12, 1))]) is None, "its memory holds other elements too"


@pytest.mark.parametrize(
    "returned", [("first", "difference"), ("difference", "first"), ("second", "difference"), ("difference", "view")]
)
def test_an_output_that_is_an_input_once_its_op_is_dropped_leaves_the_other_results_right(returned: tuple[str, str]):
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("first", "second")}
    nodes["difference"] = graph.call_function(torch.ops.aten.sub.Tensor, (nodes["first"], nodes["second"]))
    for node in nodes.values():
        node.meta["val"] = torch.empty(4, device="meta")
    nodes["view"] = graph.call_function(torch.ops.aten.view.default, (nodes["first"], [2, 2]))
    nodes["view"].meta["val"] = torch.empty(2, 2, device="meta")
    graph.output(tuple(nodes[name] for name in returned))
    write_over(graph, 0, 0)
    first, second = torch.rand(4), torch.rand(4)
    expected = {"first": first.clone(), "second": second.clone(), "difference": first - second}
    expected["view"] = first.clone().view(2, 2)
    (other,) = torch.fx.GraphModule({}, graph)(first, second)
    assert torch.equal(first, expected[returned[0]])
    assert torch.equal(other, expected[returned[1]])


def compile_overwriting(program: Program) -> list[Op]:
    """Compile the regions that may overwrite an input, and their variants, in one pool; return their ops."""
    ops = [op for op in regions(program) if op.inplace]
    kernels: dict[str, CompiledRegion] = {}
    for op in ops:
        region = region_of(program, op)
        for each in (region, *(region.over(op.inputs.index(value)) for value in op.inplace)):
            kernels[each.signature] = each
    compile_in_pool(list(kernels.values()))
    return ops


def region_of(program: Program, op: Op) -> CompiledRegion:
    region = program.calls[op.id].target
    assert isinstance(region, CompiledRegion)
    return region


def check_bits(program: Program, op: Op, value: int) -> None:
    """Compare the variant of a region that overwrites a value with the region itself."""
    region, number = region_of(program, op), op.inputs.index(value)
    tensors = [torch.rand(program.metas[v].shape).to(program.metas[v].dtype) for v in op.inputs]
    expected = region(*[tensor.clone() for tensor in tensors])
    results = region.over(number)(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    assert any(result.data_ptr() == tensors[number].data_ptr() for result in results)


def allocated_bytes(program: Program, op: Op, value: int) -> int:
    """Return the bytes that the variant of a region that overwrites a value allocates."""
    tensors = [torch.rand(program.metas[v].shape) for v in op.inputs]
    with torch.profiler.profile(profile_memory=True) as recorded:
        region_of(program, op).over(op.inputs.index(value))(*tensors)
    allocated = [e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return sum(nbytes for nbytes in allocated if nbytes > 0)


def biased(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model[1](F.gelu(model[0](x))).square().sum()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("loss", [attention, biased])
def test_a_region_that_overwrites_an_input_gives_the_same_bits_and_needs_no_second_buffer(
    loss: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
):
    program = step(loss)
    ops = compile_overwriting(program)
    costs = op_profiler._measure(program, ops, op_profiler.ignore_count)
    for op in ops:
        for value in op.inplace:
            check_bits(program, op, value)
            outputs = sum(program.graph.values[v].nbytes for v in op.outputs) - program.graph.values[value].nbytes
            assert allocated_bytes(program, op, value) <= outputs + costs[op.signature].scratch_bytes
    assert loss is not attention or sum(len(op.inplace) for op in ops) >= 2
