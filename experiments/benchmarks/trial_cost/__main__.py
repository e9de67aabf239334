"""Measure where the time of a trial goes, by kind of request to the worker processes.

`python -m experiments.benchmarks.trial_cost`
"""

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.planners.candidates import DevicePlanning
from autotune.planners.space import space_for_device
from autotune.predict.simulate import simulate
from autotune.workloads.reference import WorkloadRef
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
ARGUMENTS = '{"batch": 10, "size": 224}'
"""JSON of the factory's arguments, by default."""
HOPELESS = 0.1
"""A ratio to eager's time that no plan reaches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="resnet18")
    parser.add_argument("--arguments", default=ARGUMENTS, help="JSON of the factory's arguments")
    parser.add_argument("--share", type=float, default=0.65, help="budget, as a share of the traced step's peak")
    parser.add_argument("--plans", type=int, default=3, help="number of plans of each kind")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    refuse_busy_machine(anyway=options.anyway)
    workload = {"workload": options.workload, "model": options.workload, "arguments": json.loads(options.arguments)}
    document = {**collect_facts(), **workload} | measure(options)
    write_result(options.out / "results.json", document, {options.workload: document.pop("graph")})
    (options.out / "summary.md").write_text(summary(document), encoding="utf-8")
    print(summary(document))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure plans that are stopped early and plans that are measured whole; return the seconds by phase and request."""
    clock = RequestClock()
    with tempfile.TemporaryDirectory() as folder:
        workload = WorkloadRef(options.workload, json.loads(options.arguments))
        with Harness(Spec(workload, Path(folder), samples=10)) as harness:
            ask = harness._children.ask

            def timed(role: Any, request: Any, **others: Any) -> Any:
                with clock.add(f"{type(request).__name__}, {role.value}"):
                    return ask(role, request, **others)

            harness._children.ask = timed  # type: ignore[method-assign]
            with clock.phase("preparation"):
                prepared = harness.prepare()
            traced = Plan.traced(prepared.graph)
            peak_bytes = simulate(prepared.graph, lower(prepared.graph, traced), prepared.costs).peak_bytes
            planning = DevicePlanning(prepared.graph, prepared.costs, space_for_device({}, "cpu", {}))
            budget = int(options.share * peak_bytes)
            proposals = list(itertools.islice(planning.propose(budget), options.plans))
            with clock.phase("first measured trial, starts its processes"):
                harness.measure(proposals[0].plan)
            eager = harness.baseline().median_seconds
            outcomes = []
            for phase, beat in (("trial that cannot win", HOPELESS), ("whole trial", None)):
                for proposal in proposals:
                    with clock.phase(phase):
                        with clock.add("planning"):
                            candidate = planning.make_candidate(proposal.settings, budget)
                        with clock.add("layout"):
                            planning.estimate_layout(candidate)
                        outcomes.append(harness.measure(candidate.plan, beat=beat).outcome.value)
    return {"graph": prepared.graph.digest, "eager_seconds": eager, "outcomes": outcomes, "phases": clock.result()}


class RequestClock:
    """Seconds of each phase, by what they were spent on."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = {}
        self._totals: dict[str, list[float]] = {}
        self._phase = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count everything inside the context to one pass of a phase."""
        self._phase, began = name, time.monotonic()
        yield
        self._totals.setdefault(name, []).append(time.monotonic() - began)

    @contextlib.contextmanager
    def add(self, work: str) -> Iterator[None]:
        """Count the time inside the context to some work."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds.setdefault(self._phase, {}).setdefault(work, []).append(time.monotonic() - began)

    def result(self) -> list[dict[str, Any]]:
        """Return each phase with its mean seconds, and those of each work in a pass, the longest first."""
        return [
            {
                "phase": name,
                "passes": len(totals),
                "seconds": sum(totals) / len(totals),
                "work": sorted(
                    (
                        {"work": work, "count": len(seconds) / len(totals), "seconds": sum(seconds) / len(totals)}
                        for work, seconds in self._seconds.get(name, {}).items()
                    ),
                    key=itemgetter("seconds"),
                    reverse=True,
                ),
            }
            for name, totals in self._totals.items()
        ]


def summary(document: dict[str, Any]) -> str:
    """Format a table: phase, work, number of requests, seconds."""
    lines = [
        format_origin(document),
        "",
        f"{document['workload']}, eager's step {1e3 * document['eager_seconds']:.0f} ms. Means of one pass.",
        "",
        "| phase | work | requests | seconds |",
        "|---|---|--:|--:|",
    ]
    for phase in document["phases"]:
        lines.append(f"| **{phase['phase']}** | all | | **{phase['seconds']:.2f}** |")
        lines += [f"| | {row['work']} | {row['count']:.1f} | {row['seconds']:.2f} |" for row in phase["work"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
