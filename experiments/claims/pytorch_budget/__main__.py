"""PyTorch's `activation_memory_budget`: bytes and gradients of a step at each setting.

`python -m experiments.claims.pytorch_budget [--models NAME...] [--tiny]` writes `results/result.json`, `points.csv` and the picture.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autotune.measure.device.this_device import this_device
from autotune.report.claims import RESULT, Claim, Figure, write
from autotune.workloads.reference import WorkloadRef
from experiments.benchmarks.frontier.bench import ModelBench
from experiments.benchmarks.frontier.ours import Capture, PlanBench
from experiments.claims.pytorch_budget.knob import saved_bytes
from experiments.common.facts import collect_facts
from experiments.common.simulated import CAPTURED, collect_origin, open_figure, read_rows, write_rows

HERE = Path(__file__).parent
SOURCE = "torch._functorch.config.activation_memory_budget, comment"
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "resnet18": ("resnet18", {"batch": 8}, "ResNet-18, batch 8"),
    "gpt2-dropout": ("gpt2", {"batch": 4, "depth": 4, "dropout": 0.1}, "GPT-2, 4 layers, batch 4, dropout 0.1"),
}
SETTINGS = (1.0, 0.5, 0.3, 0.1, 0.0)
CLAIMED = (0.5, 0.1)
UNSTATED = "the comment speaks of the saved activations, not of the step's peak"
TOLERANCE = 0.1
SECONDS = 300.0
"""Time limit of one request to a child process, in seconds."""
AT_ONCE = 2
"""Number of settings compiled in parallel, which does not change their bytes."""


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """One setting: bytes of the step above the process's floor."""

    model: str
    device: str
    who: str
    """`eager`, `pytorch`, or `ours`: a plan for the same share."""
    setting: float | None
    static_bytes: int
    saved_bytes: int | None
    """Bytes that forward saves for backward, which the setting is a share of."""
    peak_bytes: int
    """Peak while malloc returns memory at once."""
    gradient_error: float
    """Largest relative error of a gradient by norm, in the second of two steps from eager's start and seed."""
    worst: str
    """Name of the gradient with the largest error."""

    @property
    def made_bytes(self) -> int:
        """Bytes that the step makes: activations and the gradients that live beside them."""
        return self.peak_bytes - self.static_bytes


class Knob(ModelBench):
    """Child processes of one model, each with forward and backward compiled under one setting."""

    def workload(self, peer: str, *, still: bool = False) -> WorkloadRef:
        if peer == "eager":
            return super().workload(peer, still=still)
        arguments = {"setting": float(peer), "model": self.model, "still": still, **self.arguments}
        return WorkloadRef(f"{HERE / 'knob.py'}:workload", arguments)


def measure_points(name: str, device: str, *, tiny: bool) -> Iterator[BudgetPoint]:
    """Measure eager, every setting, and our plans for the same shares of eager's bytes beside the static ones."""
    model, arguments, _ = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="budget-") as scratch:
        bench = Knob(name, model, _tiny(arguments) if tiny else arguments, Path(scratch))
        eager = bench.peer("eager", SECONDS)["step_peak_bytes"]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            peers = dict(
                zip(SETTINGS, pool.map(lambda setting: bench.peer(str(setting), SECONDS), SETTINGS), strict=True)
            )
        spare = Path(scratch) / "profile.json"
        with PlanBench(Capture(), bench.workload("eager"), Path(scratch), 0.0, spare) as ours:
            static = ours.graph.static_bytes
            CAPTURED[f"{model} {bench.arguments}"] = ours.graph.digest
            point = partial(BudgetPoint, name, device=device, static_bytes=static)
            yield point(who="eager", setting=None, saved_bytes=None, peak_bytes=eager, gradient_error=0.0, worst="")
            for setting in SETTINGS:
                result = peers[setting]
                gradients = result["errors"]["gradients"]
                yield point(who="pytorch", setting=setting, saved_bytes=saved_bytes(setting, model, bench.arguments),
                          peak_bytes=result["step_peak_bytes"], gradient_error=gradients["error"], worst=gradients["worst"])  # fmt: skip
            for setting in SETTINGS[1:-1]:
                candidate = ours.fastest(static + int(setting * (eager - static)))
                result = ours.measure_peak(candidate.plan)
                yield point(who="ours", setting=setting, saved_bytes=None, peak_bytes=result["step_peak_bytes"],
                          gradient_error=result["max_error"], worst=result["differs"])  # fmt: skip


def claims_of(name: str, points: Sequence[BudgetPoint]) -> list[Claim]:
    """Return the claims about one setting, about all settings together, and about the gradients."""
    label, device = MODELS[name][2], points[0].device
    by_setting = {point.setting: point for point in points if point.who == "pytorch"}
    full = by_setting[1.0]
    plans = {point.setting: point for point in points if point.who == "ours"}
    eager = next(point for point in points if point.who == "eager")
    fitting = sum(point.made_bytes <= 1.01 * setting * eager.made_bytes for setting, point in plans.items() if setting)
    conditions = (
        f"{label}, backend aot_eager, peak above the process's floor and the {full.static_bytes / 2**20:.0f} MiB that stand "
        f"between steps, on {device}"
    )
    about = partial(Claim, source=SOURCE, kind="measured")
    exact = ", bit for bit" if not any(point.gradient_error for point in plans.values()) else ""
    ours = f"; plans of ours for the same shares of eager's keep {fitting} of {len(plans)}{exact}"
    claims = []
    for setting in CLAIMED:
        share = partial(about, unit="x", tolerance=TOLERANCE, sense="at most")
        saved, peak = (
            getattr(by_setting[setting], part) / getattr(full, part) for part in ("saved_bytes", "made_bytes")
        )
        saved_conditions = (
            f"{label}: what forward saves for backward, parameters, buffers and batch aside, by backend aot_eager"
        )
        claims += [
            share(
                f"{label}: saved at a budget of {setting:g}, over 1.0", conditions=saved_conditions, published=Figure(setting),
                ours=Figure(saved), headline=setting == CLAIMED[0],
            ),
            share(
                f"{label}: peak at a budget of {setting:g}, over 1.0", conditions=conditions + ours, published=None,
                ours=Figure(peak), headline=setting == CLAIMED[0], why_not=UNSTATED,
            ),
        ]  # fmt: skip
    pairs = itertools.pairwise(by_setting[setting].peak_bytes for setting in SETTINGS)
    higher = sum(lower > 1.01 * peak for peak, lower in pairs)
    claims.append(
        about(
            f"{label}: lower budgets that take more", conditions=f"{conditions}; more by over 1 % than the next of {SETTINGS}",
            unit="", published=None, ours=Figure(higher), headline=True, why_not=UNSTATED,
        )
    )  # fmt: skip
    wrong = [point for point in by_setting.values() if point.gradient_error > 1e-2]
    worst = max(by_setting.values(), key=lambda point: point.gradient_error)
    worst_text = (
        f"; worst: {worst.gradient_error:.2g} at {worst.setting:g}, {worst.worst}" if worst.gradient_error else ""
    )
    claims.append(
        about(
            f"{label}: budgets with gradients off by over 1 %",
            conditions=f"relative to eager's by norm, second of two steps from one start and seed, on {device}{worst_text}",
            unit="", published=None, ours=Figure(len(wrong)), headline=True, why_not="the comment does not speak of gradients",
        )
    )  # fmt: skip
    return claims


def all_claims(points: Sequence[BudgetPoint]) -> list[Claim]:
    """Return the claims of every measured model."""
    models = [name for name in MODELS if any(point.model == name for point in points)]
    return [claim for name in models for claim in claims_of(name, [point for point in points if point.model == name])]


def draw(points: Sequence[BudgetPoint], path: Path) -> None:
    """Draw the peak against the setting, with ours beside it."""
    names = list(dict.fromkeys(point.model for point in points))
    with open_figure(path, len(names), 4.5) as axes:
        for ax, name in zip(axes, names, strict=True):
            of_model = [point for point in points if point.model == name]
            eager = next(point for point in of_model if point.who == "eager")
            for who in ("pytorch", "ours"):
                rows = [point for point in of_model if point.who == who]
                xs = [point.setting for point in rows]
                ax.plot(xs, [point.peak_bytes / 2**20 for point in rows], "o-", label=f"{who}, peak")
                wrong = [point for point in rows if point.gradient_error > 1e-2]
                if wrong:
                    ys = [point.peak_bytes / 2**20 for point in wrong]
                    ax.plot([point.setting for point in wrong], ys, "rx", markersize=10, label="wrong gradients")
            full = next(point for point in of_model if point.who == "pytorch" and point.setting == 1.0)
            expected = [(full.static_bytes + setting * full.made_bytes) / 2**20 for setting in SETTINGS]
            ax.plot(SETTINGS, expected, "k--", linewidth=0.8, label="what the setting asks for")
            ax.axhline(eager.peak_bytes / 2**20, color="grey", linewidth=0.8, label="eager")
            ax.margins(y=0.35)
            ax.set(title=MODELS[name][2], xlabel="activation_memory_budget", ylabel="MiB above the floor")
            ax.legend(fontsize=7, loc="upper left", ncols=2)


def _tiny(arguments: dict[str, Any]) -> dict[str, Any]:
    from tests.workloads.zoo.tiny import TINY

    dropout = {key: arguments[key] for key in ("dropout",) if key in arguments}
    return {**TINY["gpt2" if dropout else "resnet18"], **dropout}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="what stands of others stays")
    parser.add_argument("--tiny", action="store_true", help="models of a blink, to try the script itself")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    if options.tiny and options.out == HERE:
        parser.error("--tiny measures nothing worth keeping: name another folder with --out")
    device, facts = this_device("cpu"), collect_facts()
    device_text = f"{device.silicon}, cores: {device.cores}, torch {device.torch}"
    path = options.out / RESULT.parent / "points.csv"
    points = [
        point for point in (read_rows(path, BudgetPoint) if path.exists() else []) if point.model not in options.models
    ]
    for name in options.models:
        points += measure_points(name, device_text, tiny=options.tiny)
    write(options.out, all_claims(points), {"measured": collect_origin(facts)})
    write_rows(path, points)
    draw(points, path.with_name("budget.png"))


if __name__ == "__main__":
    main()
