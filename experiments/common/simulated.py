"""Training steps captured on fake tensors with modelled costs: exact bytes of any size, nothing allocated."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.capture.fake.fake_workload import capture_on_fake_tensors
from autotune.capture.fake.modelled_costs import CPU_RATES, DeviceRates, model_costs
from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, Role, TrainGraph, Value
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.auto import best_plan
from autotune.planners.coordinate_descent import FIRST_PLANNERS
from autotune.predict.simulate import Estimate, simulate
from autotune.workloads.workload import Workload
from experiments.common.facts import collect_facts

GraphAndCosts = tuple[TrainGraph, Costs]
"""Captured graph and the modelled costs of its ops."""
T = TypeVar("T")
CAPTURED: dict[str, str] = {}
"""Digests of the graphs that this process captured, by name: the origin of a claim's figures."""


def collect_origin(facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return machine, commit, date and command of this run, and the digests of the graphs that it captured.

    `facts` were collected before a measurement, so that they have the load before it.
    """
    return {**(collect_facts() if facts is None else facts), "graphs": dict(CAPTURED)}


def capture_step(make: Callable[[], Workload], name: str, rates: DeviceRates = CPU_RATES) -> GraphAndCosts:
    """Capture the step of a workload on fake tensors and model its costs.

    `make` runs under fake tensors: no weight is initialized and no memory is allocated.
    """
    program = capture_on_fake_tensors(make, name)
    digest = program.graph.digest
    if CAPTURED.setdefault(name, digest) != digest:
        raise ValueError(f"{name}: another graph has this name in the result; give each graph its own name")
    return program.graph, model_costs(program, rates)


def image_workload(
    make: Callable[[], torch.nn.Module], batch: int, height: int = 224, width: int = 224, momentum: float = 0.0
) -> Callable[[], Workload]:
    """Return a factory of a model on random images of shape (batch, 3, height, width).

    The loss is the sum of all outputs, as papers about memory use it, and the optimizer is SGD.
    """

    def workload() -> Workload:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        return Workload(model, _sum_outputs, optimizer, torch.randn(batch, 3, height, width))

    return workload


def build_graph(
    name: str, ops: Sequence[tuple[str, Sequence[str], Mapping[str, int]]], inplace: Mapping[str, str] | None = None
) -> GraphAndCosts:
    """Build a graph by hand, with a cost of one second for each op.

    Each op is (name, values read, bytes of its results by name). `inplace` maps an op to the input that it may overwrite.
    A result without a reader ends with its op.
    """
    values: list[Value] = []
    numbers: dict[str, int] = {}
    steps: list[Op] = []
    for op, reads, makes in ops:
        for value, nbytes in makes.items():
            numbers[value] = len(values)
            values.append(Value(numbers[value], value, nbytes, Role.ACTIVATION))
        overwritten = (inplace or {}).get(op)
        steps.append(
            Op(
                len(steps),
                op,
                op,
                tuple(numbers[read] for read in reads),
                tuple(numbers[value] for value in makes),
                Phase.FORWARD,
                op,
                inplace=() if overwritten is None else (numbers[overwritten],),
            )
        )
    graph = TrainGraph(name, tuple(steps), tuple(values), (), ())
    return graph, Costs.unit(graph)


def simulate_traced(graph: TrainGraph, costs: Costs) -> Estimate:
    """Simulate the traced step: every op once, updates at the end, nothing in place."""
    return simulate(graph, lower(graph, Plan.traced(graph)), costs)


def plan_for_budget(graph: TrainGraph, costs: Costs, budget_bytes: int, **planners: str) -> tuple[Plan, Estimate]:
    """Return the first plan of `autotune plan` and its estimate, with `planners` in place of its own by kind."""
    choices = {kind: (planner,) for kind, planner in {**FIRST_PLANNERS, **planners}.items()}
    best = best_plan(graph, costs, budget_bytes, choices=choices)
    return best.plan, best.estimate


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """Plan of one network for a budget in bytes; a budget of None is the traced step."""

    net: str
    budget_bytes: int | None
    peak_bytes: int
    mean_bytes: int
    lower_bound_bytes: int
    overhead_percent: float


def plan_frontier(
    make: Callable[[], Workload], net: str, budgets: Callable[[int], Iterable[int]], rates: DeviceRates
) -> list[FrontierPoint]:
    """Return the traced step, then a plan for each budget; `budgets` receives the traced peak in bytes."""
    graph, costs = capture_step(make, net, rates)
    baseline = simulate_traced(graph, costs)
    points = [_to_point(net, None, baseline, costs)]
    for budget in budgets(baseline.peak_bytes):
        points.append(_to_point(net, budget, plan_for_budget(graph, costs, budget)[1], costs))
    return points


def _to_point(net: str, budget: int | None, estimate: Estimate, costs: Costs) -> FrontierPoint:
    return FrontierPoint(
        net,
        budget,
        estimate.peak_bytes,
        estimate.mean_bytes,
        estimate.lower_bound_bytes,
        overhead_percent(estimate, costs),
    )


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write dataclass records of one type as a CSV file."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_rows(path: Path, kind: type[T]) -> list[T]:
    """Read the records of a CSV file that `write_rows` wrote."""
    with path.open(newline="") as file:
        return [kind(**{name: _parse_cell(text) for name, text in row.items()}) for row in csv.DictReader(file)]


def _parse_cell(text: str) -> Any:
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text or None


def overhead_percent(estimate: Estimate, costs: Costs) -> float:
    """Return the modelled time of a plan beyond one run of every op, in percent."""
    return 100 * (estimate.seconds / sum(costs.seconds) - 1)


@contextmanager
def open_figure(path: Path, columns: int = 1, width: float = 5.5) -> Iterator[Any]:
    """Yield axes side by side, and save them as a small PNG file at the end."""
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
    points: Sequence[FrontierPoint],
    published: Mapping[str, tuple[str, Sequence[tuple[float, float]]]],
    unit: int,
    *,
    by: str,
    measured: Sequence[tuple[str, float, float]],
) -> None:
    """Draw overhead in percent against bytes, one network per pair of axes.

    `published` holds a title and points of (bytes in units, percent) by network. `measured` holds rows of (network,
    bytes in units for the measured share, percent).
    """
    with open_figure(path, len(published), 3.2) as axes:
        for part, (net, (title, curve)) in zip(axes, published.items(), strict=True):
            planned = [(point.peak_bytes / unit, point.overhead_percent) for point in points if point.net == net]
            part.plot(*zip(*planned, strict=True), "o-", label="ours, modelled")
            part.plot(*zip(*curve, strict=True), "kx", label=f"{by}, measured")
            for _, nbytes, percent in (row for row in measured if row[0] == net):
                part.plot(nbytes, percent, "r*", markersize=12)
            part.set(title=title, xlabel="GiB" if unit == 2**30 else "GB")
        if measured:
            axes[0].plot([], [], "r*", markersize=12, label="ours, measured at a small batch")
        axes[0].set(ylabel="overhead, %")
        axes[0].legend()


def _sum_outputs(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    outputs = model(images)
    outputs = getattr(outputs, "logits", outputs)
    return sum(output.sum() for output in outputs) if isinstance(outputs, tuple) else outputs.sum()
