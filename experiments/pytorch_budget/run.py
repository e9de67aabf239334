"""PyTorch's `activation_memory_budget`: what a step really takes at each setting, and whether its gradients are eager's.

`python experiments/pytorch_budget/run.py [--models NAME...] [--tiny]` writes `results/result.json`, `points.csv` and the picture.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autotune.measure.device.this_device import this_device
from autotune.report.claims import RESULT, Claim, Figure, write

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "frontier"))
from bench import Bench
from knob import saved_bytes
from ours import Ours
from simulated import picture, read_rows, write_rows

HERE = Path(__file__).parent
SOURCE = "torch._functorch.config.activation_memory_budget, comment"
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "resnet18": ("resnet18", {"batch": 8}, "ResNet-18, batch 8"),
    "gpt2-dropout": ("gpt2", {"batch": 4, "depth": 4, "dropout": 0.1}, "GPT-2, 4 layers, batch 4, dropout 0.1"),
}
SETTINGS = (1.0, 0.5, 0.3, 0.1, 0.0)
CLAIMED = (0.5, 0.1)
TOLERANCE = 0.1
SECONDS = 300.0
"""For one answer."""
AT_ONCE = 2
"""Settings that are compiled beside each other: bytes do not mind."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting: bytes of the step above the process's floor, and beside what stands between steps."""

    model: str
    device: str
    who: str
    """`eager`, `pytorch`, or `ours`: a plan that was asked for the same share."""
    setting: float | None
    static_bytes: int
    saved_bytes: int | None
    """By forward for backward: what the setting is a share of."""
    peak_bytes: int
    """While malloc returns memory at once."""
    gradient_error: float
    """Largest relative error of a gradient by norm, of the second of two steps from eager's start and seed."""
    worst: str
    """Whose."""

    @property
    def made_bytes(self) -> int:
        """What the step makes: activations, and the gradients that stand beside them."""
        return self.peak_bytes - self.static_bytes


class Knob(Bench):
    """Processes of one model, in each of which forward and backward are compiled under a setting."""

    def workload(self, peer: str) -> dict[str, Any]:
        if peer == "eager":
            return super().workload(peer)
        arguments = {"setting": float(peer), "model": self.model, **self.arguments}
        return {"reference": f"{HERE / 'knob.py'}:workload", "arguments": arguments}


def points(name: str, device: str, *, tiny: bool) -> Iterator[Point]:
    """Eager, every setting, and ours where the setting would have it: that share of what eager makes beside the static bytes."""
    model, arguments, _ = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="budget-") as scratch:
        bench = Knob(name, model, _tiny(arguments) if tiny else arguments, Path(scratch))
        eager = bench.peer("eager", SECONDS)["step_peak_bytes"]
        bench.eager_results(SECONDS)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            peers = dict(
                zip(SETTINGS, pool.map(lambda setting: bench.peer(str(setting), SECONDS), SETTINGS), strict=True)
            )
        with Ours(bench, 0.0) as ours:
            static = ours.graph.static_bytes
            one = partial(Point, name, device=device, static_bytes=static)
            yield one(who="eager", setting=None, saved_bytes=None, peak_bytes=eager, gradient_error=0.0, worst="")
            for setting in SETTINGS:
                seen = peers[setting]
                found = seen["errors"]["gradients"]
                yield one(who="pytorch", setting=setting, saved_bytes=saved_bytes(setting, model, bench.arguments),
                          peak_bytes=seen["step_peak_bytes"], gradient_error=found["error"], worst=found["worst"])  # fmt: skip
            for setting in SETTINGS[1:-1]:
                made = ours.fastest(static + int(setting * (eager - static)))
                seen = ours.peak(made.plan)
                yield one(who="ours", setting=setting, saved_bytes=None, peak_bytes=seen["step_peak_bytes"],
                          gradient_error=seen["max_error"], worst=seen["differs"])  # fmt: skip


def claims_of(name: str, found: Sequence[Point]) -> list[Claim]:
    """The setting against what is really made, at one setting and all of them, and the gradients."""
    label, device = MODELS[name][2], found[0].device
    at = {point.setting: point for point in found if point.who == "pytorch"}
    full = at[1.0]
    mine = {point.setting: point for point in found if point.who == "ours"}
    eager = next(point for point in found if point.who == "eager")
    kept = sum(point.made_bytes <= 1.01 * setting * eager.made_bytes for setting, point in mine.items() if setting)
    how = (
        f"{label}, backend aot_eager, peak above the process's floor and the {full.static_bytes / 2**20:.0f} MiB that stand "
        f"between steps, on {device}"
    )
    about = partial(Claim, source=SOURCE, kind="measured")
    exact = ", bit for bit" if not any(point.gradient_error for point in mine.values()) else ""
    ours = f"; plans of ours for the same shares of eager's keep {kept} of {len(mine)}{exact}"
    made = []
    for setting in CLAIMED:
        share = partial(about, unit="x", published=Figure(setting), tolerance=TOLERANCE, sense="at most")
        saved, peak = (getattr(at[setting], part) / getattr(full, part) for part in ("saved_bytes", "made_bytes"))
        how_saved = (
            f"{label}: what forward saves for backward, parameters, buffers and batch aside, by backend aot_eager"
        )
        made += [
            share(f"{label}: saved at a budget of {setting:g}, over 1.0", conditions=how_saved, ours=Figure(saved)),
            share(
                f"{label}: peak at a budget of {setting:g}, over 1.0", conditions=how + ours, ours=Figure(peak),
                headline=setting == CLAIMED[0],
            ),
        ]  # fmt: skip
    pairs = itertools.pairwise(at[setting].peak_bytes for setting in SETTINGS)
    higher = sum(lower > 1.01 * peak for peak, lower in pairs)
    made.append(
        about(
            f"{label}: lower budgets that take more", conditions=f"{how}; more by over 1 % than the next of {SETTINGS}",
            unit="", published=Figure(0), ours=Figure(higher), headline=True,
        )
    )  # fmt: skip
    wrong = [point for point in at.values() if point.gradient_error > 1e-2]
    worst = max(at.values(), key=lambda point: point.gradient_error)
    which = f"; worst: {worst.gradient_error:.2g} at {worst.setting:g}, {worst.worst}" if worst.gradient_error else ""
    made.append(
        about(
            f"{label}: budgets with gradients off by over 1 %",
            conditions=f"relative to eager's by norm, second of two steps from one start and seed, on {device}{which}",
            unit="", published=Figure(0), ours=Figure(len(wrong)), headline=True,
        )
    )  # fmt: skip
    return made


def all_claims(every: Sequence[Point]) -> list[Claim]:
    """Of every model that was measured."""
    models = [name for name in MODELS if any(point.model == name for point in every)]
    return [claim for name in models for claim in claims_of(name, [point for point in every if point.model == name])]


def draw(found: Sequence[Point], path: Path) -> None:
    """Peak against the setting, ours beside it."""
    names = list(dict.fromkeys(point.model for point in found))
    with picture(path, len(names), 4.5) as axes:
        for part, name in zip(axes, names, strict=True):
            mine = [point for point in found if point.model == name]
            eager = next(point for point in mine if point.who == "eager")
            for who in ("pytorch", "ours"):
                rows = [point for point in mine if point.who == who]
                xs = [point.setting for point in rows]
                part.plot(xs, [point.peak_bytes / 2**20 for point in rows], "o-", label=f"{who}, peak")
                wrong = [point for point in rows if point.gradient_error > 1e-2]
                if wrong:
                    ys = [point.peak_bytes / 2**20 for point in wrong]
                    part.plot([point.setting for point in wrong], ys, "rx", markersize=10, label="wrong gradients")
            full = next(point for point in mine if point.who == "pytorch" and point.setting == 1.0)
            asked = [(full.static_bytes + setting * full.made_bytes) / 2**20 for setting in SETTINGS]
            part.plot(SETTINGS, asked, "k--", linewidth=0.8, label="what the setting asks for")
            part.axhline(eager.peak_bytes / 2**20, color="grey", linewidth=0.8, label="eager")
            part.margins(y=0.35)
            part.set(title=MODELS[name][2], xlabel="activation_memory_budget", ylabel="MiB above the floor")
            part.legend(fontsize=7, loc="upper left", ncols=2)


def _tiny(arguments: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.zoo.tiny import TINY

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
    device = this_device("cpu")
    words = f"{device.silicon}, cores: {device.cores}, torch {device.torch}"
    path = options.out / RESULT.parent / "points.csv"
    every = [point for point in (read_rows(path, Point) if path.exists() else []) if point.model not in options.models]
    for name in options.models:
        every += points(name, words, tiny=options.tiny)
    write(options.out, all_claims(every))
    write_rows(path, every)
    draw(every, path.with_name("budget.png"))


if __name__ == "__main__":
    main()
