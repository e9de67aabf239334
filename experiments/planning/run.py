"""Every planner on graphs of growing size: seconds, peak, and the gap to the proved bound.

`python experiments/planning/run.py [--families NAME...] [--planners NAME...] [--patience 120] [--out results/NAME] [--tiny]`

Plans what the results do not hold yet, a row at a time: run it again to go on.
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

from graphs import graphs, random_training, randwire

from autotune.errors import AutotuneError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.this_device import this_device
from autotune.planners import KINDS, make_plan
from autotune.planners.auto import FIRST, auto
from autotune.planners.order.best import best_order
from autotune.predict.order_bounds import order_lower_bound
from autotune.predict.simulate import peak_bytes, simulate

HERE = Path(__file__).parent
SHARES = (0.75, 0.5, 0.0)
"""Budgets of planners that heed one: of what the step needs beside its static bytes as traced, updates placed. At 0 they find their lowest."""
UNTIMED = ("update", "inplace", "offload", "allocator")
"""Kinds that take no time, or need a store."""
WHOLE = ("first", "auto")
"""Of the kind `whole`, all kinds together: what `autotune plan` makes first, and the fastest that every planner's plans lead to."""


@dataclass(frozen=True, slots=True)
class Row:
    """One planner's answer to one graph and budget."""

    family: str
    graph: str
    ops: int
    kind: str
    planner: str
    share: float | None
    """Of the traced step's bytes beside its static ones; None for orders, which heed no budget."""
    budget_bytes: int | None = None
    seconds: float | None = None
    """That planning took."""
    peak_bytes: int | None = None
    static_bytes: int | None = None
    bound_bytes: int | None = None
    gap: float | None = None
    """Of the peak to the bound that no plan falls below; for orders, which run every op once, that no order does."""
    fits: bool | None = None
    extra_seconds: float | None = None
    """Of the step, over one run of every op."""
    extra_bound: float | None = None
    """Of these what no plan within the budget avoids."""
    recomputed: int | None = None
    remark: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.graph, self.kind, self.planner, str("" if self.share is None else self.share)


def questions(family: str, name: str, graph: TrainGraph, traced_bytes: int) -> Iterator[Row]:
    """A row to fill for every planner, and every budget that it heeds."""
    for kind, planners in {**KINDS, "whole": WHOLE}.items():
        for planner in planners if kind not in UNTIMED else ():
            for share in (None,) if kind == "order" else SHARES:
                room = traced_bytes - graph.static_bytes
                budget = None if share is None else int(graph.static_bytes + share * room)
                yield Row(family, name, len(graph.ops), kind, planner, share, budget)


def answer(row: Row, graph: TrainGraph, placed: Plan, costs: Costs) -> Row:
    """Plan, check and simulate.

    Orders start from the traced one, and get their updates placed afterwards; `reorder` from what `greedy` computes again.
    Both of these are not timed.
    """
    budget = row.budget_bytes or graph.static_bytes
    start = Plan.traced(graph) if row.kind == "order" else placed
    bound = None
    try:
        if row.kind == "reorder":
            start = KINDS["recompute"]["greedy"]().plan(graph, placed, budget, costs)
        gc.collect()
        began = time.perf_counter()
        if row.kind == "whole":
            plan = whole(row.planner, graph, costs, budget)
        elif (row.kind, row.planner) == ("order", "best"):
            ordered = best_order(graph, costs)
            plan, bound = Plan(ordered.order), ordered.lower_bound_bytes
        else:
            plan = KINDS[row.kind][row.planner]().plan(graph, start, budget, costs)
    except AutotuneError as error:
        return replace(row, remark=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    if row.kind == "order":
        with_updates = KINDS["update"]["with_gradient"]().plan(graph, plan, 0, costs)
        plan = min(plan, with_updates, key=lambda made: peak_bytes(graph, made, costs))
        bound = bound or order_lower_bound(graph, costs)[0]
    check(graph, plan)
    seen = simulate(graph, lower(graph, plan), costs, row.budget_bytes)
    bound = bound or seen.lower_bound_bytes
    once = sum(costs.seconds)
    return replace(
        row,
        seconds=seconds,
        peak_bytes=seen.peak_bytes,
        static_bytes=graph.static_bytes,
        bound_bytes=bound,
        gap=seen.peak_bytes / bound - 1 if bound else None,
        fits=None if row.budget_bytes is None else seen.peak_bytes <= row.budget_bytes,
        extra_seconds=seen.seconds / once - 1,
        extra_bound=seen.lower_bound_seconds / once - 1,
        recomputed=plan.recomputed,
    )


def whole(name: str, graph: TrainGraph, costs: Costs, budget_bytes: int) -> Plan:
    """All kinds of planners together."""
    if name == "auto":
        return auto(graph, costs, budget_bytes)[1]
    settings = {kind: {"planner": planner} for kind, planner in FIRST.items()}
    return make_plan(graph, settings, budget_bytes, costs)


def in_a_process(work: Any, row: Row, patience: float) -> Row:
    """What the work gives; a row with the reason where it takes too long or dies."""
    forking = multiprocessing.get_context("fork")  # the graph, which may be large, is there at once
    ours, theirs = forking.Pipe(duplex=False)
    process = forking.Process(target=_send, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        # simulating and checking take their own time
        found = ours.recv() if ours.poll(patience + 30 + row.ops / 500) else None
    except EOFError:
        process.join()
        return replace(row, remark=f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    if found is None or (found.seconds or 0.0) > patience:
        return replace(
            found or row, remark=f"no answer within {patience:g} s" if found is None else f"over {patience:g} s"
        )
    return cast("Row", found)


def _send(work: Any, pipe: Any) -> None:
    pipe.send(work())
    pipe.close()


def main() -> None:
    families = graphs()
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
    known = {row.key for row in rows}
    _note(out)
    for family in (name for name in families if name in options.families):
        for name, make in families[family].items():
            began = time.perf_counter()
            graph, costs = make()
            print(f"{name}: {len(graph.ops)} ops, made in {time.perf_counter() - began:.1f} s", flush=True)
            placed = KINDS["update"]["with_gradient"]().plan(graph, Plan.traced(graph), 0, costs)
            for row in questions(family, name, graph, peak_bytes(graph, placed, costs)):
                if row.planner not in options.planners or row.key in known:
                    continue
                if too_slow(row, rows):
                    found = replace(row, remark="not tried: too slow for a smaller graph")
                else:
                    found = in_a_process(partial(answer, row, graph, placed, costs), row, options.patience)
                rows.append(found)
                write(out / "results.csv", rows)
                print(describe(found), flush=True)
    plot(out, rows)


def too_slow(row: Row, rows: list[Row]) -> bool:
    """Whether the planner gave no answer for this graph, or a smaller one of its family, at this budget or a higher one."""
    slow = (r for r in rows if (r.family, r.kind, r.planner) == (row.family, row.kind, row.planner))
    return any(
        r.remark.startswith(("no answer", "over")) and r.ops <= row.ops and (r.share or 0.0) >= (row.share or 0.0)
        for r in slow
    )


def describe(row: Row) -> str:
    """One line."""
    share = "" if row.share is None else f" at {row.share:.0%}"
    if row.seconds is None or row.gap is None or row.extra_seconds is None:
        return f"  {row.kind} {row.planner}{share}: {row.remark}"
    over = " OVER" if row.fits is False and row.share else ""
    return (
        f"  {row.kind} {row.planner}{share}: {row.seconds:.3f} s, peak {(row.peak_bytes or 0) / 2**20:.1f} MiB{over},"
        f" gap {row.gap:.2%}, step +{row.extra_seconds:.1%} {row.remark}"
    )


def read(path: Path) -> list[Row]:
    """The rows of an earlier run."""
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
    """All rows, whole or not at all."""
    draft = path.with_suffix(".draft")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    draft.replace(path)


def _note(out: Path) -> None:
    """Which command on which machine, one line for every run."""
    device = this_device("cpu")
    command = shlex.join(["python", "experiments/planning/run.py", *sys.argv[1:]])
    with (out / "runs.txt").open("a") as file:
        file.write(
            f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {command}: {device.silicon}, cores: {device.cores},"
            f" Python {sys.version.split()[0]}, torch {device.torch}\n"
        )


def plot(out: Path, rows: list[Row]) -> None:
    """A picture for every kind: seconds, gap and, where ops are run again, the step's extra time, against ops."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind and row.seconds is not None]
        shares = list(dict.fromkeys(row.share for row in mine))
        figure, grid = pyplot.subplots(
            2,
            max(1, len(shares)),
            figsize=(5.5 * max(1, len(shares)), 8),
            squeeze=False,
            sharex=True,
            layout="constrained",
        )
        for column, share in enumerate(shares):
            for number, planner in enumerate(dict.fromkeys(row.planner for row in mine)):
                for family, marker in zip(dict.fromkeys(row.family for row in mine), "osv^DP", strict=False):
                    at = sorted(
                        (r for r in mine if (r.share, r.planner, r.family) == (share, planner, family)),
                        key=lambda r: r.ops,
                    )
                    style: dict[str, Any] = {"marker": marker, "color": f"C{number}", "markersize": 4, "linewidth": 0.8}
                    label = f"{planner}, {family}" if at else None
                    grid[0][column].plot(
                        [r.ops for r in at], [max(r.seconds or 0, 1e-5) for r in at], label=label, **style
                    )
                    grid[1][column].plot([r.ops for r in at], [1e2 * (r.gap or 0) for r in at], **style)
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
