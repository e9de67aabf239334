"""Batch norm as statistics and what is made of them: the same bits, computed only where it is made again."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.capture.rewrites import batch_norm
from autotune.capture.tracer import capture
from autotune.ir.graph import Op, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Run, lower
from tests.support.eager import assert_equals_eager
from tests.support.small import make, normalized

aten = torch.ops.aten
IMAGES_OF = [(2, 16, 9, 9), (4, 64, 28, 28), (4, 3, 1, 1), (8, 960, 7, 7)]
OTHERS = [(8, 16), (64, 33), (2, 16, 7), (2, 5, 4, 4, 4)]
CASES = [
    *((shape, torch.contiguous_format) for shape in (*IMAGES_OF, *OTHERS)),
    *((shape, torch.channels_last) for shape in IMAGES_OF),
]
IMAGES = (6, 3, 8, 8)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "memory_format"), CASES, ids=str)
def test_what_is_made_of_the_statistics_equals_the_training_kernels_result_bit_for_bit(
    shape: tuple[int, ...], memory_format: torch.memory_format, dtype: torch.dtype, affine: bool
):
    for scale in (0.01, 1.0, 300.0):
        data = (torch.randn(shape) * scale + scale).to(dtype).contiguous(memory_format=memory_format)
        weight, bias = (torch.randn(2, shape[1], dtype=dtype)) if affine else (None, None)
        running = torch.zeros(shape[1], dtype=dtype), torch.ones(shape[1], dtype=dtype)
        whole = aten._native_batch_norm_legit_functional(data, weight, bias, *running, True, 0.1, 1e-5)
        again = batch_norm.make_normalize(1e-5)(data, weight, bias, whole[1], whole[2])
        assert torch.equal(again, whole[0])
        assert again.stride() == whole[0].stride()


STRIDED = [
    ((2, 16, 9, 9), lambda data: data.transpose(2, 3)),
    ((4, 1, 6, 6), lambda data: data.transpose(2, 3)),
    ((4, 8, 12, 12), lambda data: data[:, :, ::2, ::2]),
    ((4, 8, 12, 12), lambda data: data[:, ::2]),
    ((8, 32), lambda data: data[:, ::2]),
    ((2, 16, 7), lambda data: data.transpose(0, 2).contiguous().transpose(0, 2)),
]
"""Shapes, and views of them that are contiguous in no memory format."""


@pytest.mark.parametrize(("shape", "view"), STRIDED, ids=range(len(STRIDED)))
def test_data_that_is_contiguous_in_no_format_is_normalized_to_the_same_bits(
    shape: tuple[int, ...], view: Callable[[Tensor], Tensor]
):
    for eps in (1e-5, 0.1):
        data = view(torch.randn(shape) * 3 + 1)
        weight, bias = torch.randn(2, data.shape[1])
        running = torch.zeros(data.shape[1]), torch.ones(data.shape[1])
        whole = aten._native_batch_norm_legit_functional(data, weight, bias, *running, True, 0.1, eps)
        assert torch.equal(batch_norm.make_normalize(eps)(data, weight, bias, whole[1], whole[2]), whole[0])


def split(graph: TrainGraph) -> list[Op]:
    return [op for op in graph.ops if op.alias_of is not None]


@cache
def traced() -> TrainGraph:
    return capture(make(normalized, IMAGES)).graph


def test_every_training_batch_norm_is_split_and_its_result_read_by_nobody_else():
    graph = traced()
    found = split(graph)
    assert [op.target for op in found] == ["autotune.batch_norm.normalize"] * 2
    for op in found:
        whole = graph.ops[graph.producer[op.alias_of]]
        assert whole.target == "aten._native_batch_norm_legit_functional.default"
        assert (whole.layer, whole.phase, whole.id) == (op.layer, op.phase, op.id - 1)
        assert set(whole.outputs[1:3]) <= set(op.inputs)
        assert graph.consumers[op.alias_of] == ()
        assert op.repeatable


def half() -> nn.Module:
    return normalized().bfloat16()


def evaluated() -> nn.Module:
    return normalized().eval()


@pytest.mark.parametrize("model", [half, evaluated])
def test_where_the_bits_or_the_statistics_would_be_others_it_stays_whole(model: Callable[[], nn.Module]):
    workload = make(model, IMAGES)
    if model is half:
        workload = replace(workload, batch=(workload.batch[0].bfloat16(), workload.batch[1]))
    assert split(capture(workload).graph) == []


def again_before_backward(graph: TrainGraph) -> Plan:
    """The results of all batch norms are made again at the end of forward."""
    order = list(range(len(graph.ops)))
    at = next(op.id for op in graph.ops if op.phase != "forward")
    unread = [op.id for op in split(graph)]
    return Plan((*order[:at], *unread, *order[at:]))


def apart(graph: TrainGraph) -> Plan:
    """Between the statistics of the second and what is made of them its like runs: nothing is handed over."""
    first, second = split(graph)
    order = [op for op in range(len(graph.ops)) if op != second.id]
    order[second.id : second.id] = [first.id, second.id]
    return Plan(tuple(order))


@pytest.mark.parametrize(("plan", "computed"), [(Plan.traced, 0), (apart, 2), (again_before_backward, 2)])
def test_the_step_equals_eager_and_computes_only_what_is_not_handed_over(
    plan: Callable[[TrainGraph], Plan], computed: int, monkeypatch: pytest.MonkeyPatch
):
    calls = []
    normalize = batch_norm.make_normalize(1e-5)

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return normalize(*args)

    counted.__module__, counted.__name__ = normalize.__module__, normalize.__name__
    monkeypatch.setattr(batch_norm, "make_normalize", lambda _: counted)
    one, other = make(normalized, IMAGES), make(normalized, IMAGES)
    made = plan(traced())
    assert_equals_eager(one, other, made, steps=2)
    assert len(calls) == 2 * computed


def test_a_result_is_handed_over_without_a_free_and_given_back_where_it_is_not():
    graph = traced()
    first, second = split(graph)
    handed = lower(graph, Plan.traced(graph)).instructions
    assert Run(first.id, first.alias_of) in handed
    assert Free(first.alias_of) not in handed
    late = lower(graph, apart(graph)).instructions
    assert Run(second.id) in late
    assert late.index(Free(second.alias_of)) == late.index(Run(second.id - 1)) + 1
