"""Record a landscape: settings drawn at random over the whole space, each plan measured once, in one small file."""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.harness import Harness
from autotune.measure.survey import Prepared, Surveyed
from autotune.predict.plan_layout import with_layout
from autotune.predict.simulate import Estimate, simulate
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.report.tables import verdict
from autotune.study import session as study
from autotune.study.events import Event, Finished
from autotune.study.offline import landscape
from autotune.study.verdicts.ranking import plan_hash
from autotune.units import mib

HERE = Path(__file__).parent
FRONTIER = HERE.parent / "frontier" / "results"
PLANNERS = {
    "order": ["traced", "list_by_bytes", "depth_first", "longest_path", "beam"],
    "recompute": ["keep", "segments", "per_block", "greedy", "blocks"],
}
"""All but the two orders that search by themselves, for up to minutes a plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", nargs="?", default="resnet18", help="a zoo name, or file.py:factory")
    parser.add_argument(
        "--set", nargs="*", default=["batch=16", "size=112", "width=32"], metavar="KEY=VALUE", help="the factory's"
    )
    parser.add_argument("--budget", default="75%")
    parser.add_argument("--time", default="18m", help="for everything")
    parser.add_argument("--trials", type=int, default=150, help="at most")
    parser.add_argument("--samples", type=int, default=6, help="timed steps of a trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="run no step: the simulator, with recorded noise")
    parser.add_argument("--out", type=Path, help="the file; under results/ by default")
    chosen = parser.parse_args()
    sys.modules["ortools"] = None  # type: ignore[assignment]  # no windows by CP-SAT either, of up to 3 s each
    name = Path(chosen.workload.partition(":")[0]).stem + ("-simulated" if chosen.simulated else "")
    out = chosen.out or HERE / "results" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "experiments/landscape/run.py", *sys.argv[1:]])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        config = configured(chosen, Path(folder))
        with Harness(config.ref, log_dir=Path(folder) / "logs", samples=config.samples, seed=config.seed) as harness:
            runner: Any = Simulated(harness.survey(), config.samples) if chosen.simulated else harness
            study.tune(config, runner, Path(folder) / "run", progress=tell)
        what = "simulated, with the errors and the noise of experiments/frontier" if chosen.simulated else "measured"
        found = landscape.of_run(Path(folder) / "run", f"{what}: {command}; load {load:.1f} before")
    landscape.write(out, found)
    ran = {point.plan for point in found.points if point.measurement.step_seconds}
    print(f"{out}: {len(found.points)} settings, {len(ran)} plans that ran, the best at {found.known_best:.3f}x")


def configured(chosen: argparse.Namespace, folder: Path) -> Config:
    """A study that draws at random, does not stop for lack of a gain, and gives no slow plan up."""
    arguments = {key: json.loads(value) for key, _, value in (text.partition("=") for text in chosen.set)}
    return Config.model_validate(
        {
            "workload": chosen.workload,
            "arguments": arguments,
            "budget": chosen.budget,
            "time": chosen.time,
            "trials": chosen.trials,
            "samples": chosen.samples,
            "seed": chosen.seed,
            "sampler": "random",
            "objective": "pareto",
            "patience": 10**6,
            "planners": PLANNERS,
            "runs": str(folder),
            "plans": str(folder / "plans"),
        }
    )


def tell(event: Event) -> None:
    match event:
        case Finished(trial, ratio):
            charged = trial.measurement.step_charged_bytes if trial.measurement else None
            pace = "-" if ratio is None else f"{ratio:.3f}x"
            print(f"trial {trial.number}  {trial.kind}  {mib(charged)} MiB  {pace}  {verdict(trial)}", flush=True)


@dataclass
class Simulated:
    """A runner that measures what the simulator predicts, off by as much as its predictions were seen to be off."""

    surveyed: Surveyed
    samples: int
    recorded: "Recorded" = field(default_factory=lambda: Recorded.of(FRONTIER))
    measured: int = 0

    def prepare(self) -> Prepared:
        known = self.surveyed
        return Prepared(known.graph, known.costs, known.device, known.floor_bytes, True, 0.0)

    def baseline(self) -> Measurement:
        traced = self._estimate(Plan.traced(self.surveyed.graph))
        return self._seen(traced.peak_bytes, traced.peak_bytes, traced.seconds, random.Random("eager"))

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """Every plan is off by its own share of bytes, and each kind of op by its own of seconds."""
        del budget_bytes, beat
        expected, dice = self._estimate(plan), random.Random(plan_hash(plan))
        more = 1 + dice.choice(self.recorded.bytes_off)
        charged = expected.charged_bytes or expected.peak_bytes
        self.measured += 1
        noise = random.Random(self.measured)
        return self._seen(int(expected.peak_bytes * more), int(charged * more), expected.seconds, noise)

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass

    @cached_property
    def costs(self) -> Costs:
        """What ops really take here."""
        known = self.surveyed.costs
        off = [random.Random(op.target).choice(self.recorded.seconds_off) for op in self.surveyed.graph.ops]
        return replace(known, seconds=tuple(one * other for one, other in zip(known.seconds, off, strict=True)))

    def _estimate(self, plan: Plan) -> Estimate:
        graph = self.surveyed.graph
        return with_layout(graph, plan, self.costs, simulate(graph, lower(graph, plan), self.costs))

    def _seen(self, peak: int, charged: int, seconds: float, dice: random.Random) -> Measurement:
        floor = self.surveyed.floor_bytes
        eager = self._estimate(Plan.traced(self.surveyed.graph)).seconds
        noise = [one for one in self.recorded.turns(dice, self.samples // 2) for _ in range(2)]
        return Measurement(
            Outcome.OK,
            peak_bytes=floor + peak,
            charged_bytes=floor + charged,
            floor_bytes=floor,
            step_seconds=tuple(seconds * one for one in noise),
            baseline_seconds=(eager,) * len(noise),
            max_error=0.0,
            meter="simulated",
            device=self.surveyed.device,
        )


@dataclass(frozen=True)
class Recorded:
    """What plans of experiments/frontier showed beside their predictions, and their turns beside each other."""

    bytes_off: tuple[float, ...]
    """Peak over the predicted one, less 1."""
    seconds_off: tuple[float, ...]
    """Seconds over the predicted ones, over the median of the model's plans."""
    ratios: tuple[tuple[float, ...], ...]
    """Per plan: its turns beside eager's over their median, in the order in which they ran."""

    @classmethod
    def of(cls, results: Path) -> "Recorded":
        """Of all models there whose plans were timed."""
        paths = [path for path in sorted(results.glob("*/*.json")) if not path.name.endswith(".plans.json")]
        documents = (json.loads(path.read_text()) for path in paths)
        found = [list(_of_model(document)) for document in documents if document["sessions"]]
        plans = [plan for model in found for plan in model]
        return cls(
            tuple(plan[0] for plan in plans),
            tuple(plan[1] / statistics.median(other[1] for other in model) for model in found for plan in model),
            tuple(plan[2] for plan in plans),
        )

    def turns(self, dice: random.Random, count: int) -> list[float]:
        """So many, a plan's neighbours after each other."""
        found: list[float] = []
        while len(found) < count:
            found += dice.choice(self.ratios)
        return found[:count]


def _of_model(document: dict[str, Any]) -> Iterator[tuple[float, float, tuple[float, ...]]]:
    """(bytes off, seconds over predicted, turns) of each plan of ours that was timed beside eager."""
    blocks: dict[str, dict[int, float]] = {}
    for block in document["sessions"][0]["blocks"]:
        blocks.setdefault(block["variant"], {})[block["round"]] = statistics.fmean(block["seconds"])
    for name, plan in document["ours"].items():
        expected, ran = plan.get("estimate"), blocks.get(name, {})
        both = sorted(ran.keys() & blocks["eager"].keys())
        if expected is None or not both:
            continue
        ratios = [ran[turn] / blocks["eager"][turn] for turn in both]
        middle = statistics.median(ratios)
        yield (
            plan["step_peak_bytes"] / expected["peak_bytes"] - 1,
            statistics.median(ran.values()) / expected["seconds"],
            tuple(ratio / middle for ratio in ratios),
        )


if __name__ == "__main__":
    main()
