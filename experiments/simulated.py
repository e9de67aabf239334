"""Training steps captured on fake tensors, with modelled costs: bytes of any size, exact on any machine, nothing allocated."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.capture.program import Program, Read, View
from autotune.capture.tracer import capture
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.planners.auto import FIRST
from autotune.predict.simulate import Estimate, simulate
from autotune.workloads.workload import Workload

FLOPS_PER_SECOND = 100e9
BYTES_PER_SECOND = 8e9
LAUNCH_SECONDS = 5e-6
"""A model, not a measurement: an op takes its launch, its flops and the bytes that it reads and writes, one after the other."""

Made = tuple[TrainGraph, Costs]
T = TypeVar("T")


def captured(make: Callable[[], Workload], name: str) -> Made:
    """The step of a workload that is made under fake tensors: no weight is drawn and nothing allocated."""
    with _fake():
        workload = make()
    program = capture(workload, name)
    graph = program.graph
    known: dict[str, float] = {}
    for op in graph.ops:
        if op.signature not in known:
            known[op.signature] = _flops(program, op.id)
    seconds = [modelled_seconds(graph, op, known[op.signature]) for op in graph.ops]
    return graph, Costs.of(graph, seconds, [0] * len(graph.ops))


def classified(
    make: Callable[[], torch.nn.Module], batch: int, height: int = 224, width: int = 224, momentum: float = 0.0
) -> Callable[[], Workload]:
    """What makes a model of images, trained on the sum of all that it gives, as papers of memory time it."""

    def workload() -> Workload:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        return Workload(model, _summed, optimizer, torch.randn(batch, 3, height, width))

    return workload


def drawn(
    name: str, ops: Sequence[tuple[str, Sequence[str], Mapping[str, int]]], inplace: Mapping[str, str] | None = None
) -> Made:
    """A graph by hand, of (op, names read, bytes of what it makes by name) and the input that an op may overwrite.

    Every op costs a second. What nobody reads ends with the op that makes it.
    """
    values: list[Value] = []
    number: dict[str, int] = {}
    made: list[Op] = []
    for op, reads, makes in ops:
        for value, nbytes in makes.items():
            number[value] = len(values)
            values.append(Value(number[value], value, nbytes, Role.ACTIVATION))
        over = (inplace or {}).get(op)
        made.append(
            Op(
                len(made),
                op,
                op,
                tuple(number[read] for read in reads),
                tuple(number[value] for value in makes),
                Phase.FORWARD,
                op,
                inplace=() if over is None else (number[over],),
            )
        )
    graph = TrainGraph(name, tuple(made), tuple(values), (), ())
    return graph, Costs.unit(graph)


def modelled_seconds(graph: TrainGraph, op: Op, flops: float) -> float:
    """What an op is taken to cost."""
    moved = sum(graph.values[value].nbytes for value in (*op.inputs, *op.outputs))
    return LAUNCH_SECONDS + flops / FLOPS_PER_SECOND + moved / BYTES_PER_SECOND


def traced(graph: TrainGraph, costs: Costs) -> Estimate:
    """The step as it was traced: every op once, updates at the end, nothing in place."""
    return simulate(graph, lower(graph, Plan.traced(graph)), costs)


def planned(graph: TrainGraph, costs: Costs, budget_bytes: int, **planners: str) -> tuple[Plan, Estimate]:
    """The first plan that `autotune plan` makes, with these planners in place of its own."""
    settings = {kind: {"planner": planner} for kind, planner in {**FIRST, **planners}.items()}
    plan = make_plan(graph, settings, budget_bytes, costs)
    check(graph, plan)
    return plan, simulate(graph, lower(graph, plan), costs, budget_bytes)


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of one net for a budget; at a budget of None as traced."""

    net: str
    budget_bytes: int | None
    peak_bytes: int
    mean_bytes: int
    lower_bound_bytes: int
    overhead_percent: float


def frontier(make: Callable[[], Workload], net: str, budgets: Callable[[int], Iterable[int]]) -> list[Point]:
    """The traced step, then a plan for each budget; `budgets` is told the traced step's bytes."""
    graph, costs = captured(make, net)
    before = traced(graph, costs)
    found = [_point(net, None, before, costs)]
    for budget in budgets(before.peak_bytes):
        found.append(_point(net, budget, planned(graph, costs, budget)[1], costs))
    return found


def _point(net: str, budget: int | None, seen: Estimate, costs: Costs) -> Point:
    return Point(net, budget, seen.peak_bytes, seen.mean_bytes, seen.lower_bound_bytes, overhead(seen, costs))


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Records of one type as a CSV."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """The records of such a CSV."""
    with path.open(newline="") as file:
        return [kind(**{name: _cell(text) for name, text in row.items()}) for row in csv.DictReader(file)]


def _cell(text: str) -> Any:
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text or None


def overhead(estimate: Estimate, costs: Costs) -> float:
    """Modelled time beyond every op once, in percent."""
    return 100 * (estimate.seconds / sum(costs.seconds) - 1)


@contextmanager
def picture(path: Path, columns: int = 1, width: float = 5.5) -> Iterator[Any]:
    """Axes side by side, saved as a small PNG at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width * columns, 4), squeeze=False, layout="constrained")
    yield axes[0]
    for part in axes[0]:
        part.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(figure)


def draw_frontiers(
    path: Path,
    found: Sequence[Point],
    theirs: Mapping[str, tuple[str, Sequence[tuple[float, float]]]],
    unit: int,
    *,
    by: str,
    seen: Sequence[tuple[str, float, float]],
) -> None:
    """Overhead against bytes, a net at a time: ours as a line, theirs, (bytes in units, %) under a title, as crosses.

    `seen`: nets, the bytes that stand for the share at which ours was measured, and percent.
    """
    with picture(path, len(theirs), 3.2) as axes:
        for part, (net, (title, measured)) in zip(axes, theirs.items(), strict=True):
            ours = [(point.peak_bytes / unit, point.overhead_percent) for point in found if point.net == net]
            part.plot(*zip(*ours, strict=True), "o-", label="ours, modelled")
            part.plot(*zip(*measured, strict=True), "kx", label=f"{by}, measured")
            for _, nbytes, percent in (one for one in seen if one[0] == net):
                part.plot(nbytes, percent, "r*", markersize=12)
            part.set(title=title, xlabel="GiB" if unit == 2**30 else "GB")
        if seen:
            axes[0].plot([], [], "r*", markersize=12, label="ours, measured at a small batch")
        axes[0].set(ylabel="overhead, %")
        axes[0].legend()


def _summed(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    made = model(images)
    made = getattr(made, "logits", made)
    return sum(part.sum() for part in made) if isinstance(made, tuple) else made.sum()


@contextmanager
def _fake() -> Iterator[None]:
    from unittest import mock

    from torch._subclasses.fake_tensor import FakeTensorMode

    # a workload's cast and move change nothing here, and a fake parameter cannot be swapped for another
    with FakeTensorMode(), mock.patch.object(torch.nn.Module, "to", lambda model, **_: model):
        yield


def _flops(program: Program, op: int) -> float:
    """Of products and convolutions, as torch counts them; 0 for all other ops."""
    from torch.utils.flop_counter import flop_registry

    call = program.calls[op]
    count = flop_registry.get(getattr(call.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = _meta(program, call.args), {key: _meta(program, part) for key, part in call.kwargs}
    return float(count(*args, **kwargs, out_val=call.target(*args, **kwargs)))


def _meta(program: Program, argument: Any) -> Any:
    """An argument with tensors that have a shape and no memory for the values in it."""
    match argument:
        case Read(value):
            meta = program.metas[value]
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        case View(target, args, kwargs):
            return target(*_meta(program, args), **{key: _meta(program, part) for key, part in kwargs})
        case tuple():
            return tuple(_meta(program, part) for part in argument)
        case list():
            return [_meta(program, part) for part in argument]
        case _:
            return argument
