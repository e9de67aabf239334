"""Model the seconds of captured ops from their flops and bytes; nothing is measured."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autotune.capture.program import Program, Read, View
from autotune.ir.costs import Costs
from autotune.ir.graph import Op, TrainGraph


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of a modelled device. An op takes its launch, its flops, and the bytes that it reads and writes, in sequence."""

    name: str
    flops_per_second: float
    """Floating-point operations per second in float32."""
    bytes_per_second: float
    launch_seconds: float = 5e-6


CPU_RATES = DeviceRates("two CPU cores", 100e9, 8e9)
"""Rates of the default device."""


def model_costs(program: Program, rates: DeviceRates = CPU_RATES) -> Costs:
    """Return modelled seconds for every op of a captured step; workspaces count as zero bytes."""
    graph = program.graph
    flops: dict[str, float] = {}
    for op in graph.ops:
        if op.signature not in flops:
            flops[op.signature] = _count_flops(program, op.id)
    seconds = [model_seconds(graph, op, flops[op.signature], rates) * program.share_of_steps(op) for op in graph.ops]
    return Costs.from_measurements(graph, seconds, [0] * len(graph.ops))


def model_seconds(graph: TrainGraph, op: Op, flops: float, rates: DeviceRates = CPU_RATES) -> float:
    """Return the modelled seconds of one op."""
    moved = sum(graph.values[value].nbytes for value in (*op.inputs, *op.outputs))
    return rates.launch_seconds + flops / rates.flops_per_second + moved / rates.bytes_per_second


def _count_flops(program: Program, op: int) -> float:
    """Count the flops of a matrix product or convolution, as torch does; 0 for all other ops."""
    call = program.calls[op]
    count = flop_registry.get(getattr(call.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args = _on_meta(program, call.args)
    kwargs = {key: _on_meta(program, part) for key, part in call.kwargs}
    return float(count(*args, **kwargs, out_val=call.target(*args, **kwargs)))


def _on_meta(program: Program, argument: Any) -> Any:
    """Return an argument with tensors of the meta device for the values in it."""
    match argument:
        case Read(value):
            meta = program.metas[value]
            assert meta is not None
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        case View(target, args, kwargs):
            return target(*_on_meta(program, args), **{key: _on_meta(program, part) for key, part in kwargs})
        case tuple():
            return tuple(_on_meta(program, part) for part in argument)
        case list():
            return [_on_meta(program, part) for part in argument]
        case _:
            return argument
