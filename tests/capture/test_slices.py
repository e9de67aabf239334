"""A step that writes to parts of tensors is eager's step, and its bytes are those that its kernels allocate."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.capture.rewrites import slices
from autotune.capture.tracer import capture
from autotune.errors import CaptureError
from autotune.ir.costs import Costs
from autotune.planners import make_plan
from autotune.runtime.op_profiler import profile, read_allocations
from tests.capture.twins import Twins
from tests.support.kernel_models import square_loss
from tests.support.small import make, normalized
from tests.support.value_bytes import too_small


class Writes(nn.Module):
    def __init__(self, write) -> None:
        super().__init__()
        self.conv, self.write = nn.Conv2d(3, 16, 3, padding=1), write

    def forward(self, data: Tensor) -> Tensor:
        made = self.conv(data) * 1.0
        self.write(made)
        return made


def scale(made: Tensor) -> None:
    made[:, :8] = made[:, :8] * 0.3


def fill(made: Tensor) -> None:
    made[0, 2:4] = 1.0


def multiply(made: Tensor) -> None:
    made[:, 11] *= 2


def diagonal(made: Tensor) -> None:
    made.diagonal(0, 2, 3).copy_(made[:, :, :, 0] * 2)


def strided(made: Tensor) -> None:
    made[:, ::2, 1:, :3] = made[:, :8, :-1, 1:4] + 1


WRITES = [scale, fill, multiply, diagonal, strided]
SHAPE = (1, 3, 8, 8)


def of(write):
    return make(lambda: Writes(write), SHAPE, loss_fn=square_loss)


@cache
def twins(write) -> Twins:
    return Twins(partial(of, write))


@pytest.mark.parametrize("write", WRITES, scope="module")
def test_no_value_is_smaller_than_the_storage_of_its_kernel(write):
    assert too_small(twins(write).program) == []


@pytest.mark.parametrize("planner", ["keep", "greedy"])
@pytest.mark.parametrize("write", WRITES, scope="module")
def test_parts_that_are_written_to_end_at_eagers_bits_under_plans(write, planner: str):
    graph = twins(write).graph
    plan = make_plan(graph, {"recompute": {"planner": planner}}, 0, Costs.unit(graph))
    twins(write).assert_equals_eager(plan)


def test_a_part_is_written_in_the_buffer_of_a_tensor_that_nothing_reads_later():
    (write,) = [op for op in twins(scale).graph.ops if "write_part" in op.target and op.phase == "forward"]
    assert write.inplace


def mixed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def test_mixed_precision_with_batch_norm_is_profiled_and_equals_eager():
    made = Twins(lambda: make(normalized, (2, 3, 8, 8), loss_fn=mixed_loss))
    assert too_small(made.program) == []
    profile(made.program)
    made.assert_equals_eager()


def test_an_op_that_cannot_run_on_synthetic_tensors_is_named_and_estimated():
    def unlikely(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        torch._assert_async((batch[0] > 5).any(), "unlikely")
        return model(batch[0]).square().mean()

    program = capture(make(normalized, (2, 3, 8, 8), loss_fn=unlikely))
    original = program.graph.ops[0]

    def broken(*arguments):
        raise ArithmeticError("no such kernel")

    object.__setattr__(program.calls[0], "target", broken)
    with pytest.warns(UserWarning, match=rf"{original.name}.*no such kernel"):
        costs = profile(program)
    assert costs.seconds[0] > 0


def test_a_foreign_exception_while_the_trace_is_read_names_the_op(monkeypatch):
    def fail(*arguments):
        raise KeyError("val")

    monkeypatch.setattr("autotune.capture.joint_graph.JointTrace._add_op", fail)
    with pytest.raises(CaptureError, match=r"Writes.*conv.*KeyError"):
        capture(of(scale))


def test_the_bytes_of_the_copy_behind_a_part_are_allocated_once():
    program = twins(scale).program
    (index,) = [op.id for op in program.graph.ops if "write_part" in op.target and op.phase == "forward"]
    call, base, part = program.calls[index], torch.ones(1, 16, 8, 8), torch.zeros(1, 8, 8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        call.target(base, part, call.args[2])
    assert sum(nbytes for _, nbytes in read_allocations(recorded)[1] if nbytes > 0) == base.nbytes


class CountedMeta(dict[str, Any]):
    """Entries of a node that count how often they are looked up."""

    lookups = 0

    def __getitem__(self, key: str) -> Any:
        CountedMeta.lookups += 1
        return super().__getitem__(key)


def test_folding_writes_takes_time_in_proportion_to_their_number():
    aten, lookups = torch.ops.aten, []
    for writes in (10, 40):
        graph = fx.Graph()
        with FakeTensorMode():
            base = graph.placeholder("base")
            base.meta = CountedMeta(val=torch.empty(8, 8))
            for _ in range(writes):  # a row each, with another tensor than those of the other rows
                tensor = graph.call_function(aten.neg.default, (base,))
                part = graph.call_function(aten.select.int, (tensor, 0, 1))
                row = graph.call_function(aten.select.int, (base, 0, 2))
                copied = graph.call_function(aten.copy.default, (part, row))
                written = graph.call_function(aten.select_scatter.default, (tensor, copied, 0, 1))
                for node in (tensor, part, row, copied, written):
                    arguments = fx.node.map_arg(node.args, lambda source: source.meta["val"])
                    node.meta = CountedMeta(val=node.target(*arguments))
        before = CountedMeta.lookups
        slices.fold_writes(graph)
        lookups.append(CountedMeta.lookups - before)
        assert sum(node.target is slices.write_part for node in graph.nodes) == writes
    assert lookups[1] < 5 * lookups[0]
