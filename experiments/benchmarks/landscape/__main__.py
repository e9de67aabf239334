"""Record a landscape in one small file: settings drawn at random over the whole space, and the fastest plans measured afresh."""

import argparse
import contextlib
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
from autotune.measure.spec import Spec
from autotune.measure.survey import PreparedWorkload, WorkloadSurvey
from autotune.predict.plan_layout import add_layout
from autotune.predict.simulate import Estimate, simulate
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir
from autotune.records.trial import load_trials
from autotune.report.tables import trial_verdict
from autotune.study import session as study
from autotune.study.events import Event, Finished, PhaseStarted, StudyPhase
from autotune.study.offline import landscape
from autotune.study.runner import CompleteRunner, QuietRunner
from autotune.study.verdicts.ranking import plan_hash
from autotune.units import mib
from experiments.benchmarks.frontier.records import capture_of, ratios_by_round
from experiments.benchmarks.landscape.leaders import remeasure_leaders
from experiments.common.facts import collect_facts, list_arguments

HERE = Path(__file__).parent
FRONTIER = HERE.parent / "frontier" / "results"
RAM_DISK = Path("/dev/shm")
PLANNERS = {
    "order": ["traced", "list_by_bytes", "depth_first", "longest_path", "beam"],
    "recompute": ["keep", "segments", "per_block", "greedy", "blocks"],
}
"""All planners except the two orders that search by themselves, for up to minutes per plan."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", nargs="?", default="resnet18", help="a zoo name, or file.py:factory")
    parser.add_argument(
        "--set", nargs="*", default=["batch=16", "size=112", "width=32"], metavar="KEY=VALUE", help="the factory's"
    )
    parser.add_argument("--budget", default="75%")
    parser.add_argument(
        "--stores", nargs="*", default=[], choices=("ssd", "ramdisk"), help="where plans may move bytes"
    )
    parser.add_argument("--time", default="18m", help="for everything")
    parser.add_argument("--trials", type=int, default=150, help="at most")
    parser.add_argument("--samples", type=int, default=6, help="timed steps of a trial")
    parser.add_argument("--remeasure", type=int, default=10, help="number of leading plans that are measured afresh")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="run no step: the simulator, with recorded noise")
    parser.add_argument("--out", type=Path, help="the file; under results/ by default")
    parser.add_argument("--work", type=Path, help="directory of the study, which a second call continues")
    record(parser.parse_args())


def record(options: argparse.Namespace) -> None:
    """Run the study of a landscape, or continue it in `options.work`, and write its file."""
    sys.modules["ortools"] = None  # type: ignore[assignment]  # no windows by CP-SAT either, of up to 3 s each
    name = Path(options.workload.partition(":")[0]).stem + ("-simulated" if options.simulated else "")
    out = options.out or HERE / "results" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "-m", "experiments.benchmarks.landscape", *list_arguments()])
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        config = build_config(options, folder)
        spec = make_spec(config, folder / "logs")
        with open_runner(spec, options) as runner, contextlib.suppress(SearchEndedError):
            result = study.tune(config, CompleteRunner(runner), folder / "run", progress=follow)
            if result.interrupted:
                raise SystemExit(128 + result.interrupted)
        method = "simulated, with the errors and the noise of experiments/frontier" if options.simulated else "measured"
        recorded = landscape.landscape_from_run(folder / "run", f"{method}: {command}; load {load:.1f} before")
        with open_runner(spec, options) as runner:
            runner.prepare()
            quiet = QuietRunner(CompleteRunner(runner), lambda _: True, lambda reason: print(reason, flush=True))
            recorded = remeasure_leaders(recorded, load_trials(RunDir(folder / "run").trials), quiet, options.remeasure)
    facts = collect_facts()
    recorded = replace(recorded, **{name: facts[name] for name in ("commit", "date", "command")})
    landscape.write_landscape(out, recorded)
    ran = {point.plan for point in recorded.points if point.measurement.step_seconds}
    print(f"{out}: {len(recorded.points)} settings, {len(ran)} plans that ran, the best at {recorded.best_ratio:.3f}x")


@contextlib.contextmanager
def open_runner(spec: Spec, options: argparse.Namespace) -> Iterator[Any]:
    """Open the harness, or the simulator with the harness's survey."""
    with Harness(spec) as harness:
        yield SimulatedRunner(harness.survey(), options.samples) if options.simulated else harness


def make_spec(config: Config, log_dir: Path) -> Spec:
    """Return the harness's specification of a landscape's config."""
    stores = {name: Path(directory) for name, directory in config.stores.items()}
    return Spec(config.ref, log_dir, stores, samples=config.samples, seed=config.seed)


def build_config(options: argparse.Namespace, folder: Path) -> Config:
    """Return the config of a study that draws at random and does not end for lack of a gain."""
    arguments = {key: json.loads(value) for key, _, value in (text.partition("=") for text in options.set)}
    return Config.model_validate(
        {
            "workload": options.workload,
            "arguments": arguments,
            "budget": options.budget,
            "time": options.time,
            "trials": options.trials,
            "samples": options.samples,
            "seed": options.seed,
            "sampler": "random",
            "patience": 10**6,
            "planners": PLANNERS,
            "moves": False,
            "stores": {name: str(RAM_DISK if name == "ramdisk" else folder) for name in options.stores},
            "runs": str(folder),
            "plans": str(folder / "plans"),
        }
    )


class SearchEndedError(Exception):
    """End a study before it confirms its winner: all leading plans are measured afresh instead."""


def follow(event: Event) -> None:
    """Print each trial, and end the study with its search."""
    match event:
        case PhaseStarted(StudyPhase.CONFIRM):
            raise SearchEndedError
        case Finished(trial, ratio):
            charged = trial.measurement.step_charged_bytes if trial.measurement else None
            pace = "-" if ratio is None else f"{ratio:.3f}x"
            print(f"trial {trial.number}  {trial.kind}  {mib(charged)} MiB  {pace}  {trial_verdict(trial)}", flush=True)


@dataclass
class SimulatedRunner:
    """Runner that returns the simulator's predictions, with the recorded errors of such predictions."""

    surveyed: WorkloadSurvey
    samples: int
    recorded: "RecordedNoise" = field(default_factory=lambda: RecordedNoise.from_results(FRONTIER))
    measured: int = 0

    def prepare(self) -> PreparedWorkload:
        survey = self.surveyed
        return PreparedWorkload(survey.graph, survey.costs, survey.device, survey.floor_bytes, True, 0.0)

    def baseline(self) -> Measurement:
        traced = self._estimate(Plan.traced(self.surveyed.graph))
        return self._measurement(traced.peak_bytes, traced.peak_bytes, traced.seconds, random.Random("eager"))

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """Simulate a plan with an error in bytes of its own; the errors in seconds are per kind of op."""
        del budget_bytes, beat
        expected, dice = self._estimate(plan), random.Random(plan_hash(plan))
        factor = 1 + dice.choice(self.recorded.bytes_off)
        charged = expected.charged_bytes or expected.peak_bytes
        self.measured += 1
        noise = random.Random(self.measured)
        return self._measurement(int(expected.peak_bytes * factor), int(charged * factor), expected.seconds, noise)

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass

    @cached_property
    def costs(self) -> Costs:
        """Costs with the recorded errors: the simulated truth."""
        costs = self.surveyed.costs
        factors = [random.Random(op.target).choice(self.recorded.seconds_off) for op in self.surveyed.graph.ops]
        return replace(
            costs, seconds=tuple(seconds * factor for seconds, factor in zip(costs.seconds, factors, strict=True))
        )

    def _estimate(self, plan: Plan) -> Estimate:
        graph = self.surveyed.graph
        return add_layout(graph, plan, self.costs, simulate(graph, lower(graph, plan), self.costs))

    def _measurement(self, peak: int, charged: int, seconds: float, dice: random.Random) -> Measurement:
        floor = self.surveyed.floor_bytes
        eager = self._estimate(Plan.traced(self.surveyed.graph)).seconds
        noise = [factor for factor in self.recorded.draw_turns(dice, self.samples // 2) for _ in range(2)]
        return Measurement(
            Outcome.OK,
            peak_bytes=floor + peak,
            charged_bytes=floor + charged,
            floor_bytes=floor,
            step_seconds=tuple(seconds * factor for factor in noise),
            baseline_seconds=(eager,) * len(noise),
            max_error=0.0,
            meter="simulated",
            device=self.surveyed.device,
        )


@dataclass(frozen=True)
class RecordedNoise:
    """Measurements of experiments/benchmarks/frontier over their predictions, and rounds over their median."""

    bytes_off: tuple[float, ...]
    """Peak over the predicted one, less 1."""
    seconds_off: tuple[float, ...]
    """Seconds over the predicted ones, divided by the median of the plans of the same capture, which share one profile."""
    ratios: tuple[tuple[float, ...], ...]
    """Rounds over eager's, divided by their median, in order of time, for each plan."""

    @classmethod
    def from_results(cls, results: Path) -> "RecordedNoise":
        """Read all models with timed plans."""
        paths = [path for path in sorted(results.glob("*/*.json")) if not path.name.endswith(".plans.json")]
        documents = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
        profiles = [
            list(_noise_of_capture(document, capture))
            for document in documents
            for capture, described in document["captures"].items()
            if document["sessions"] and not described["kernels"]
        ]
        plans = [plan for profile in profiles for plan in profile]
        return cls(
            tuple(plan[0] for plan in plans),
            tuple(
                plan[1] / statistics.median(other[1] for other in profile) for profile in profiles for plan in profile
            ),
            tuple(plan[2] for plan in plans),
        )

    def draw_turns(self, dice: random.Random, count: int) -> list[float]:
        """Draw this number of rounds; rounds of one plan stay together."""
        turns: list[float] = []
        while len(turns) < count:
            turns += dice.choice(self.ratios)
        return turns[:count]


def _noise_of_capture(document: dict[str, Any], capture: str) -> Iterator[tuple[float, float, tuple[float, ...]]]:
    """Yield (bytes off, seconds over predicted, ratios of blocks) of each plan of a capture that was timed."""
    for name, plan in document["plans"].items():
        expected, ratios = plan.get("estimate"), list(ratios_by_round(document, name).values())
        if expected is None or not ratios or capture_of(document, name) != capture:
            continue
        blocks = [block for session in document["sessions"] for block in session["blocks"] if block["variant"] == name]
        seconds = statistics.median(statistics.fmean(block["seconds"]) for block in blocks)
        middle = statistics.median(ratios)
        yield (
            plan["step_peak_bytes"] / expected["peak_bytes"] - 1,
            seconds / expected["seconds"],
            tuple(ratio / middle for ratio in ratios),
        )


if __name__ == "__main__":
    main()
