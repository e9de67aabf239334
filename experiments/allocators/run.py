"""One training step under glibc's malloc, jemalloc, tcmalloc and the arena: charged bytes, seconds, page faults, results.

`python experiments/allocators/run.py [--models NAME...] [--time 300]` measures in turns and writes `results/`.
"""

import argparse
import ctypes.util
import json
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.child import Child
from autotune.measure.device.this_device import this_device
from autotune.measure.messages import Spec
from autotune.predict.simulate import simulate
from autotune.records.json_codec import from_json, to_json

HERE = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 8},
    "mobilenet_v2": {"batch": 8},
    "gpt2": {"batch": 8},
    "lstm": {"batch": 32},
}
ALLOCATORS = {"glibc": "", "jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal", "arena": ""}
"""By name: the library that is preloaded."""
PACKAGES = "libjemalloc2 libtcmalloc-minimal4"
LEAST_ROUNDS = 6
LIMIT_SECONDS = 600.0
"""For one answer of a process."""
SLOWER, EXCESS = 1.02, 0.01
"""What the arena is held to: its time over the best of the others', its charge over what is predicted."""
RESAMPLES = 10_000
MIB = 2**20


def preload(library: str) -> dict[str, str]:
    """What puts a library's malloc in front of glibc's."""
    if not library:
        return {}
    found = ctypes.util.find_library(library)
    if found is None:
        raise SystemExit(
            f"there is no lib{library} here: apt-get install {PACKAGES}, or leave it out with --allocators"
        )
    return {"LD_PRELOAD": found}


def loaded(pid: int, library: str) -> str:
    """The file of that library in a process; empty for glibc's own. Raises where it is not there."""
    if not library:
        return ""
    names = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if f"lib{library}" in line}
    if not names:
        raise SystemExit(f"lib{library} was not loaded into the process")
    return Path(min(names)).name


def measure(
    model: str, arguments: dict[str, Any], allocators: list[str], rounds: int, seconds: float
) -> dict[str, Any]:
    """Every allocator in a process of its own, all alive at once; one runs a block of steps while the others rest."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allocators-")))
        spec = Spec(model, arguments, str(scratch))

        def start(name: str) -> Child:
            library = ALLOCATORS.get(name, "")
            child = Child.start(spec, scratch / f"{name}.log", preload(library))
            stack.callback(child.end)
            return child

        say(f"{model}: profile")
        child = start("prepare")
        known = child.ask({"do": "prepare"}, LIMIT_SECONDS)
        child.end()
        graph, costs = (
            from_json(TrainGraph, known["graph"], where="graph"),
            from_json(Costs, known["costs"], where="costs"),
        )
        traced = Plan.traced(graph)
        made: dict[str, Any] = {
            "arguments": arguments,
            "predicted_step_bytes": simulate(graph, lower(graph, traced), costs).peak_bytes,
            "static_bytes": graph.static_bytes,
            "ops": len(graph.ops),
            "load": [os.getloadavg()[0]],
            "allocators": {name: {"charged_bytes": 0} for name in allocators},
            "blocks": [],
        }
        plans = {
            name: to_json(Plan(traced.order, allocator="arena" if name == "arena" else "system")) for name in allocators
        }
        children: dict[str, Child] = {}
        for name in allocators:
            say(f"{model}: {name} gets ready")
            child = children[name] = start(name)
            child.ask({"do": "begin", "plan": plans[name]}, LIMIT_SECONDS)
            first = child.ask({"do": "block"}, LIMIT_SECONDS)
            seen = made["allocators"][name]
            seen |= {"library": loaded(child.pid, ALLOCATORS[name]), "meter": first["meter"]}
            seen["charged_bytes"] = first["charged_bytes"]
        began = time.monotonic()
        for number in range(rounds):
            if number >= LEAST_ROUNDS and time.monotonic() - began > seconds:
                break
            for name in random.Random(number).sample(allocators, len(allocators)):
                block = children[name].ask({"do": "block"}, LIMIT_SECONDS)
                seen = made["allocators"][name]
                seen["charged_bytes"] = block["charged_bytes"]
                made["blocks"].append(
                    {"round": number, "allocator": name} | {key: block[key] for key in ("seconds", "page_faults")}
                )
        for name, child in children.items():
            say(f"{model}: what {name} left behind")
            ended = child.ask({"do": "finish"}, LIMIT_SECONDS)
            if "floor_bytes" not in ended:
                raise SystemExit(f"{model}, {name}: {ended['detail']}")
            made["allocators"][name]["floor_bytes"] = ended["floor_bytes"]
            digests = child.ask({"do": "digests", "plan": plans[name]}, LIMIT_SECONDS)["digests"]
            made["allocators"][name]["digests"] = digests
        made["load"].append(os.getloadavg()[0])
    compare(made)
    return made


def compare(made: dict[str, Any]) -> None:
    """Put in the place of the hashes which of them are another's than the first allocator's."""
    digests = {name: seen.pop("digests") for name, seen in made["allocators"].items()}
    first = next(iter(digests.values()))
    for name, own in digests.items():
        names = {*own, *first}
        differs = sorted(one for one in names if own.get(one) != first.get(one))
        made["allocators"][name] |= {"results": len(names), "differs": differs}


@dataclass(frozen=True, slots=True)
class Row:
    """One allocator on one model."""

    allocator: str
    charged_bytes: int
    """Of the step, above the floor."""
    waste: float
    """Of what is predicted for the step: what is charged beyond it."""
    excess: float
    """The same of the whole process, floor and all."""
    median_seconds: float
    ratio: float
    """The arena's time over this one's: geometric mean of the rounds."""
    low: float
    high: float
    """95 % of it."""
    page_faults: float
    """Median of a step's."""
    equal: bool
    """Every result and weight has the bits of the first allocator's."""


def rows(made: Mapping[str, Any]) -> list[Row]:
    """What was seen of each allocator.

    A preloaded malloc gives nothing back when it is asked, so it has no floor that could be weighed: it gets glibc's.
    """
    found = []
    predicted = made["predicted_step_bytes"]
    for name, seen in made["allocators"].items():
        floors = [made["allocators"][one]["floor_bytes"] for one in (name, "glibc") if one in made["allocators"]]
        floor = floors[-1] if ALLOCATORS[name] else floors[0]
        charged = seen["charged_bytes"] - floor
        mine = [block for block in made["blocks"] if block["allocator"] == name]
        logs = log_ratios(made, name)
        low, high = interval([logs])
        found.append(
            Row(
                name,
                charged,
                charged / predicted - 1,
                (seen["charged_bytes"] - floor - predicted) / (floor + predicted),
                statistics.median(second for block in mine for second in block["seconds"]),
                math.exp(statistics.mean(logs)),
                low,
                high,
                statistics.median(faults for block in mine for faults in block["page_faults"]),
                not seen["differs"],
            )
        )
    return found


def log_ratios(made: Mapping[str, Any], other: str) -> list[float]:
    """Of each round: the logarithm of the arena's median step over the other's."""
    steps: dict[int, dict[str, float]] = {}
    for block in made["blocks"]:
        steps.setdefault(block["round"], {})[block["allocator"]] = statistics.median(block["seconds"])
    return [math.log(one["arena"] / one[other]) for one in steps.values() if other in one and "arena" in one]


def interval(groups: list[list[float]]) -> tuple[float, float]:
    """95 % of the geometric mean over groups, which count alike: within each, rounds are drawn with replacement."""
    generator = np.random.default_rng(0)
    means = np.zeros(RESAMPLES)
    for group in groups:
        drawn = generator.integers(0, len(group), (RESAMPLES, len(group)))
        means += np.array(group)[drawn].mean(axis=1) / len(groups)
    low, high = np.quantile(np.exp(means), (0.025, 0.975))
    return float(low), float(high)


def best_other(found: list[Row]) -> Row:
    """The fastest but the arena: the one beside which the arena's time is the longest."""
    return max((row for row in found if row.allocator != "arena"), key=lambda row: row.ratio)


def overall(models: Mapping[str, Mapping[str, Any]]) -> tuple[float, float, float]:
    """Geometric mean over the models of the arena's time over the best other's, with 95 % of it."""
    groups = [log_ratios(made, best_other(rows(made)).allocator) for made in models.values()]
    low, high = interval(groups)
    return math.exp(statistics.mean(map(statistics.mean, groups))), low, high


def summary(results: Mapping[str, Any]) -> str:
    """For people."""
    device = results["device"]
    models = results["models"]
    lines = [
        f"{device['silicon']}, cores: {device['cores']}, {device['driver']}, torch {device['torch']}; measured by"
        f" {', then by '.join(results['commands'])}",
        "",
        "Charged: the highest that the kernel charged the process at any time from its first step on, above the floor. Waste: of it"
        " what lies beyond the predicted bytes of the step (weights, state, batch and the most that lives at once). Excess: the"
        " same bytes, as a part of the whole process that is predicted, floor included. Arena's time: over this allocator's,"
        " geometric mean of the rounds. Page faults: median of the measured steps. Results: loss, weights, buffers and optimizer"
        " state after four steps.",
    ]
    for model, made in models.items():
        found = rows(made)
        count = 1 + max(block["round"] for block in made["blocks"])
        lines += [
            "",
            f"## {model} {json.dumps(made['arguments'])}",
            "",
            f"Predicted: {made['predicted_step_bytes'] / MIB:.1f} MiB of a step, {made['static_bytes'] / MIB:.1f} of them static;"
            f" {made['ops']} ops; {count} rounds; load {made['load'][0]:.2f} to {made['load'][1]:.2f}.",
            "",
            "| allocator | charged MiB | waste | excess | step s | arena's time (95 %) | page faults a step | results |",
            "|---|--:|--:|--:|--:|--:|--:|---|",
        ]
        for row in found:
            seen = made["allocators"][row.allocator]
            name = row.allocator + (f" ({seen['library']})" if seen["library"] else "")
            ratio = "" if row.allocator == "arena" else f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f})"
            bits = f"{seen['results']} equal" if row.equal else f"{len(seen['differs'])} of {seen['results']} differ"
            lines.append(
                f"| {name} | {row.charged_bytes / MIB:.1f} | {row.waste:+.1%} | {row.excess:+.2%} | {row.median_seconds:.3f}"
                f" | {ratio} | {row.page_faults:.0f} | {bits} |"
            )
    lines += ["", "## Held to", "", *verdicts(models)]
    return "\n".join(lines) + "\n"


def verdicts(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Each aim, and whether it is met."""
    found = {model: rows(made) for model, made in models.items()}
    ours = {model: next(row for row in one if row.allocator == "arena") for model, one in found.items()}
    lines = ["| aim | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]

    def line(what: str, cells: list[tuple[str, bool]]) -> None:
        lines.append(f"| {what} | " + " | ".join(f"{text}{'' if met else ', missed'}" for text, met in cells) + " |")

    line(
        f"excess of the arena at most {EXCESS:.0%}",
        [(f"{row.excess:+.2%}", row.excess <= EXCESS) for row in ours.values()],
    )
    beside = [best_other(one) for one in found.values()]
    line(
        f"time at most {SLOWER} of the best other's",
        [
            (f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}, {row.allocator})", row.ratio <= SLOWER)
            for row in beside
        ],
    )
    line(
        "page faults of the arena's step near zero",
        [(f"{row.page_faults:.0f}", row.page_faults < 100) for row in ours.values()],
    )
    line(
        "equal bits",
        [("yes" if all(row.equal for row in one) else "no", all(row.equal for row in one)) for one in found.values()],
    )
    mean, low, high = overall(models)
    lines += [
        "",
        f"Over all models the arena takes {mean:.3f} of the best other's time (95 %: {low:.3f} to {high:.3f}).",
    ]
    return lines


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Waste and time of every allocator, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = results["models"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    names = list(next(iter(models.values()))["allocators"])
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        found = [next(row for row in rows(made) if row.allocator == name) for made in models.values()]
        places = [number + (at - (len(names) - 1) / 2) * width for number in range(len(models))]
        left.bar(places, [100 * row.waste for row in found], width, label=name)
        # the others' time beside the arena's: one over its own
        ratios = [1 / row.ratio for row in found]
        errors = [[r - 1 / row.high for r, row in zip(ratios, found, strict=True)],
                  [1 / row.low - r for r, row in zip(ratios, found, strict=True)]]  # fmt: skip
        right.bar(places, ratios, width, yerr=errors, label=name, error_kw={"linewidth": 1})
    left.set_ylabel("charged beyond the predicted bytes of the step, %")
    right.set_ylabel("time of a step, arena = 1")
    right.axhline(1.0, color="black", linewidth=0.8)
    for axes in (left, right):
        axes.set_xticks(range(len(models)), list(models))
        axes.grid(axis="y", alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS))
    parser.add_argument("--rounds", type=int, default=60, help="a block of every allocator each, at most")
    parser.add_argument("--time", type=float, default=300.0, help="seconds of rounds for each model")
    parser.add_argument("--out", type=Path, help="a folder; by default results/ beside this file")
    parser.add_argument("--tiny", action="store_true", help="models of a blink, to try the script itself")
    parser.add_argument("--summary", action="store_true", help="measure nothing, write the table and the picture anew")
    options = parser.parse_args()
    if "arena" not in options.allocators or len(options.allocators) < 2:
        parser.error("--allocators: the arena, and something to compare it with")
    out = options.out or HERE / ("results/tiny-models" if options.tiny else "results")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results: dict[str, Any] = {"device": to_json(this_device("cpu")), "commands": [], "models": {}}
    if path.exists():
        known = json.loads(path.read_text())
        if known["device"] != results["device"]:
            raise SystemExit(f"{path} is of another machine: choose another --out, or take it away")
        results = known
    for name in () if options.summary else options.models:
        arguments = _tiny(name) if options.tiny else MODELS[name]
        made = measure(name, arguments, options.allocators, options.rounds, options.time)
        results["models"] = {
            one: {**results["models"], name: made}[one] for one in MODELS if one in {*results["models"], name}
        }
        command = shlex.join(["python", "experiments/allocators/run.py", *sys.argv[1:]])
        results["commands"] = list(dict.fromkeys([*results["commands"], command]))
        path.write_text(json.dumps(results) + "\n")
    text = summary(results)
    (out / "summary.md").write_text(text)
    plot(results, out / "allocators.png")
    print(text)


def _tiny(model: str) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.zoo.tiny import TINY

    return TINY[model]


if __name__ == "__main__":
    main()
