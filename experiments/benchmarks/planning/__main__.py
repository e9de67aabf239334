"""Seconds, peak and gap to the proved bound of every planner on graphs of growing size.

`python -m experiments.benchmarks.planning [--families NAME...] [--planners NAME...] [--patience 120] [--out results/NAME] [--tiny]`

Plans the rows that the results do not have yet, one at a time: run it again to continue.
"""

import argparse
import csv
import gc
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from autotune.errors import AutotuneError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.this_device import this_device
from autotune.planners import KINDS, make_plan
from autotune.planners.auto import best_plan
from autotune.planners.coordinate_descent import FIRST_PLANNERS
from autotune.planners.order.best import find_best_order
from autotune.predict.order_bounds import order_lower_bound
from autotune.predict.simulate import peak_bytes, simulate
from experiments.benchmarks.planning.graphs import graph_factories, random_training, randwire
from experiments.common.facts import list_arguments

HERE = Path(__file__).parent
SHARES = (0.75, 0.5, 0.0)
"""Budgets of planners that use one, as shares of the bytes beside the static ones, as traced with updates placed. 0 asks for the lowest peak."""
UNTIMED = ("update", "inplace", "offload", "allocator")
"""Kinds that take no time, or need a store."""
WHOLE = ("first", "auto")
"""Planners of the kind `whole`, all kinds together: the first plan of `autotune plan`, and the fastest of all planners' plans."""


@dataclass(frozen=True, slots=True)
class Row:
    """Plan of one planner for one graph and budget."""

    family: str
    graph: str
    ops: int
    kind: str
    planner: str
    share: float | None
    """Budget as a share of the traced step's bytes beside its static ones; None for orders, which ignore budgets."""
    budget_bytes: int | None = None
    seconds: float | None = None
    """Planning time in seconds."""
    peak_bytes: int | None = None
    static_bytes: int | None = None
    bound_bytes: int | None = None
    gap: float | None = None
    """Peak over the lower bound, less 1; for orders, which run every op once, the bound of every order."""
    fits: bool | None = None
    extra_seconds: float | None = None
    """Modelled step time over one run of every op, less 1."""
    extra_bound: float | None = None
    """Lower bound of `extra_seconds` within the budget."""
    recomputed: int | None = None
    remark: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.graph, self.kind, self.planner, str("" if self.share is None else self.share)


def empty_rows(family: str, name: str, graph: TrainGraph, traced_bytes: int) -> Iterator[Row]:
    """Yield a row to fill for every planner, and every budget that it uses."""
    for kind, planners in {**KINDS, "whole": WHOLE}.items():
        for planner in planners if kind not in UNTIMED else ():
            for share in (None,) if kind == "order" else SHARES:
                room = traced_bytes - graph.static_bytes
                budget = None if share is None else int(graph.static_bytes + share * room)
                yield Row(family, name, len(graph.ops), kind, planner, share, budget)


def fill_row(row: Row, graph: TrainGraph, placed: Plan, costs: Costs) -> Row:
    """Plan, check and simulate.

    Orders start from the traced one, and updates are placed afterwards. `reorder` starts from the recomputations of
    `greedy`. Both of these are not timed.
    """
    budget = row.budget_bytes or graph.static_bytes
    first_plan = Plan.traced(graph) if row.kind == "order" else placed
    bound = None
    try:
        if row.kind == "reorder":
            first_plan = KINDS["recompute"]["greedy"]().plan(graph, placed, budget, costs)
        gc.collect()
        start = time.perf_counter()
        if row.kind == "whole":
            plan = plan_all_kinds(row.planner, graph, costs, budget)
        elif (row.kind, row.planner) == ("order", "best"):
            ordered = find_best_order(graph, costs)
            plan, bound = Plan(ordered.order), ordered.lower_bound_bytes
        else:
            plan = KINDS[row.kind][row.planner]().plan(graph, first_plan, budget, costs)
    except AutotuneError as error:
        return replace(row, remark=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    if row.kind == "order":
        with_updates = KINDS["update"]["with_gradient"]().plan(graph, plan, 0, costs)
        plan = min(plan, with_updates, key=lambda made: peak_bytes(graph, made, costs))
        bound = bound or order_lower_bound(graph, costs)[0]
    check(graph, plan)
    estimate = simulate(graph, lower(graph, plan), costs, row.budget_bytes)
    bound = bound or estimate.lower_bound_bytes
    single_pass = sum(costs.seconds)
    return replace(
        row,
        seconds=seconds,
        peak_bytes=estimate.peak_bytes,
        static_bytes=graph.static_bytes,
        bound_bytes=bound,
        gap=estimate.peak_bytes / bound - 1 if bound else None,
        fits=None if row.budget_bytes is None else estimate.peak_bytes <= row.budget_bytes,
        extra_seconds=estimate.seconds / single_pass - 1,
        extra_bound=estimate.lower_bound_seconds / single_pass - 1,
        recomputed=plan.recomputed,
    )


def plan_all_kinds(name: str, graph: TrainGraph, costs: Costs, budget_bytes: int) -> Plan:
    """Return a plan of all kinds of planners together."""
    if name == "auto":
        return best_plan(graph, costs, budget_bytes).plan
    settings = {kind: {"planner": planner} for kind, planner in FIRST_PLANNERS.items()}
    return make_plan(graph, settings, budget_bytes, costs)


def run_in_process(work: Any, row: Row, patience: float) -> Row:
    """Return the result of the work in a child process, or a row with the reason where it fails or exceeds the patience."""
    forking = multiprocessing.get_context("fork")  # the graph, which may be large, is there at once
    receiver, sender = forking.Pipe(duplex=False)
    process = forking.Process(target=_send_result, args=(work, sender))
    process.start()
    sender.close()
    try:
        # simulating and checking take their own time
        result = receiver.recv() if receiver.poll(patience + 30 + row.ops / 500) else None
    except EOFError:
        process.join()
        return replace(row, remark=f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    if result is None or (result.seconds or 0.0) > patience:
        return replace(
            result or row, remark=f"no answer within {patience:g} s" if result is None else f"over {patience:g} s"
        )
    return cast("Row", result)


def _send_result(work: Any, pipe: Any) -> None:
    pipe.send(work())
    pipe.close()


def main() -> None:
    families = graph_factories()
    names = sorted(
        {planner for kind, planners in KINDS.items() if kind not in UNTIMED for planner in planners} | {*WHOLE}
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    parser.add_argument("--planners", nargs="+", choices=names, default=names)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds that a planner may take for one plan")
    parser.add_argument("--out", type=Path, help="a folder, from here: results/NAME; by default named by the processor")
    parser.add_argument("--tiny", action="store_true", help="two small graphs, to try the script itself")
    options = parser.parse_args()
    if options.tiny:
        families = {
            "randwire": {"randwire8": partial(randwire, 0, 8)},
            "random": {"random-60": partial(random_training, 60)},
        }
    out = HERE / (options.out or f"results/{'tiny-' if options.tiny else ''}{this_device('cpu').key}")
    out.mkdir(parents=True, exist_ok=True)
    rows = read(out / "results.csv")
    known_keys = {row.key for row in rows}
    _append_run(out)
    for family in (name for name in families if name in options.families):
        for name, make in families[family].items():
            began = time.perf_counter()
            graph, costs = make()
            print(f"{name}: {len(graph.ops)} ops, made in {time.perf_counter() - began:.1f} s", flush=True)
            placed = KINDS["update"]["with_gradient"]().plan(graph, Plan.traced(graph), 0, costs)
            for row in empty_rows(family, name, graph, peak_bytes(graph, placed, costs)):
                if row.planner not in options.planners or row.key in known_keys:
                    continue
                if too_slow(row, rows):
                    filled = replace(row, remark="not tried: too slow for a smaller graph")
                else:
                    filled = run_in_process(partial(fill_row, row, graph, placed, costs), row, options.patience)
                rows.append(filled)
                write(out / "results.csv", rows)
                print(describe(filled), flush=True)
    plot(out, rows)


def too_slow(row: Row, rows: list[Row]) -> bool:
    """Return True if the planner had no plan in time for a graph of this size or smaller, at this budget or a higher one."""
    slow = (r for r in rows if (r.family, r.kind, r.planner) == (row.family, row.kind, row.planner))
    return any(
        r.remark.startswith(("no answer", "over")) and r.ops <= row.ops and (r.share or 0.0) >= (row.share or 0.0)
        for r in slow
    )


def describe(row: Row) -> str:
    """Format a row as one line."""
    share = "" if row.share is None else f" at {row.share:.0%}"
    if row.seconds is None or row.gap is None or row.extra_seconds is None:
        return f"  {row.kind} {row.planner}{share}: {row.remark}"
    over = " OVER" if row.fits is False and row.share else ""
    return (
        f"  {row.kind} {row.planner}{share}: {row.seconds:.3f} s, peak {(row.peak_bytes or 0) / 2**20:.1f} MiB{over},"
        f" gap {row.gap:.2%}, step +{row.extra_seconds:.1%} {row.remark}"
    )


def read(path: Path) -> list[Row]:
    """Read the rows of an earlier run."""
    if not path.exists():
        return []
    kinds = {field.name: str(field.type) for field in fields(Row)}
    with path.open(newline="") as file:
        return [Row(**{name: _cell(kinds[name], text) for name, text in line.items()}) for line in csv.DictReader(file)]


def _cell(kind: str, text: str) -> Any:
    if kind == "<class 'str'>":
        return text
    if not text:
        return None
    return text == "True" if "bool" in kind else float(text) if "float" in kind else int(text)


def write(path: Path, rows: list[Row]) -> None:
    """Write all rows atomically."""
    draft = path.with_suffix(".draft")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    draft.replace(path)


def _append_run(out: Path) -> None:
    """Append the command and the machine of this run."""
    device = this_device("cpu")
    command = shlex.join(["python", "-m", "experiments.benchmarks.planning", *list_arguments()])
    with (out / "runs.txt").open("a", encoding="utf-8") as file:
        file.write(
            f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {command}: {device.silicon}, cores: {device.cores},"
            f" Python {sys.version.split()[0]}, torch {device.torch}\n"
        )


def plot(out: Path, rows: list[Row]) -> None:
    """Draw a picture for every kind: planning seconds and gap against ops."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for kind in dict.fromkeys(row.kind for row in rows):
        timed = [row for row in rows if row.kind == kind and row.seconds is not None]
        shares = list(dict.fromkeys(row.share for row in timed))
        figure, grid = pyplot.subplots(
            2,
            max(1, len(shares)),
            figsize=(5.5 * max(1, len(shares)), 8),
            squeeze=False,
            sharex=True,
            layout="constrained",
        )
        for column, share in enumerate(shares):
            for number, planner in enumerate(dict.fromkeys(row.planner for row in timed)):
                for family, marker in zip(dict.fromkeys(row.family for row in timed), "osv^DP", strict=False):
                    points = sorted(
                        (r for r in timed if (r.share, r.planner, r.family) == (share, planner, family)),
                        key=lambda r: r.ops,
                    )
                    style: dict[str, Any] = {"marker": marker, "color": f"C{number}", "markersize": 4, "linewidth": 0.8}
                    label = f"{planner}, {family}" if points else None
                    grid[0][column].plot(
                        [r.ops for r in points], [max(r.seconds or 0, 1e-5) for r in points], label=label, **style
                    )
                    grid[1][column].plot([r.ops for r in points], [1e2 * (r.gap or 0) for r in points], **style)
            grid[0][column].set(
                xscale="log",
                yscale="log",
                ylabel="planning, seconds",
                title=kind if share is None else f"{kind} at {share:.0%}",
            )
            grid[1][column].set(xscale="log", yscale="symlog", ylabel="peak above the bound, %", xlabel="ops")
            for part in grid[:, column]:
                part.grid(alpha=0.3)
        if len(grid):
            grid[0][0].legend(fontsize=6)
        figure.savefig(out / f"{kind}.png", dpi=120, metadata={"Software": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
