"""Time of the traced step in the arena beside eager with tcmalloc, in alternating blocks."""

import argparse
import ctypes.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from autotune.study.verdicts.statistics import median_interval
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts, format_interval, format_origin, judge_at_most
from experiments.common.result_file import write_result

ROOT = Path(__file__).parents[3]

TCMALLOC = "libtcmalloc_minimal.so.4"
HERE = Path(__file__).parent

SIZES = {
    "usual": {
        "resnet18": {"batch": 4}, "resnet50": {"batch": 2}, "resnet152": {"batch": 1}, "mobilenet_v2": {"batch": 4},
        "segformer": {"batch": 1}, "vit": {"batch": 2}, "gpt2": {"batch": 1}, "bert": {"batch": 1}, "lstm": {"batch": 8},
        "lstm_fused": {"batch": 8}, "unet": {"size": 64}, "gru": {"size": 32}, "rnn": {"size": 32},
    },
    "small": {
        "resnet18": {"batch": 4, "size": 64}, "resnet50": {"batch": 2, "size": 64}, "resnet152": {"batch": 1, "size": 64},
        "mobilenet_v2": {"batch": 4, "size": 64}, "segformer": {"batch": 1, "size": 64}, "vit": {"batch": 1, "depth": 4},
        "gpt2": {"batch": 1, "tokens": 64, "depth": 2}, "bert": {"batch": 1, "tokens": 64, "depth": 2},
        "lstm": {"batch": 8, "tokens": 32}, "lstm_fused": {"batch": 8, "tokens": 32},
        "unet": {"size": 16}, "gru": {"size": 16}, "rnn": {"size": 16},
    },
}  # fmt: skip
"""Arguments of each workload: usual sizes take 100 to 500 ms a step on two cores, small ones 15 to 150."""
MEAN, WORST = 1.02, 1.05
"""Largest accepted geometric mean of the ratios, and largest accepted single ratio."""


def make_workload(name: str, sizes: str):
    """Make a workload of the zoo or of the tests at the named sizes."""
    import torch
    from torch import nn

    from autotune.workloads.workload import Workload
    from autotune.workloads.zoo import ZOO
    from tests.support.kernel_models import UNet, square_loss
    from tests.workloads.zoo.tiny import TINY

    torch.manual_seed(0)
    if name in ZOO:
        return ZOO[name](**(TINY[name] if sizes == "tiny" else SIZES[sizes][name]))
    size = 1 if sizes == "tiny" else SIZES[sizes][name]["size"]
    models = {
        "unet": lambda: (UNet("nearest"), (2, 3, 16 * size, 16 * size)),
        "gru": lambda: (nn.GRU(8 * size, 16 * size, 2, dropout=0.1), (2 * size, 2 * size, 8 * size)),
        "rnn": lambda: (nn.RNN(8 * size, 16 * size, 2, dropout=0.1), (4 * size, 2 * size, 8 * size)),
    }
    model, shape = models[name]()
    batch = (torch.randn(shape), torch.zeros(shape[0], dtype=torch.int64))
    return Workload(model, square_loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batch)


def time_model(name: str, sizes: str, blocks: int, seconds: float) -> None:
    """Time eager and the traced step of one model in alternating blocks, and print the medians of the blocks as JSON."""
    from autotune.capture.tracer import capture
    from autotune.ir.plan import Plan
    from autotune.runtime.train_step import TrainStep

    eager, traced = make_workload(name, sizes), make_workload(name, sizes)

    def run_eager() -> None:
        output = eager.loss_fn(eager.model, eager.batch)
        (output[0] if isinstance(output, tuple) else output).backward()
        eager.optimizer.step()
        eager.optimizer.zero_grad(set_to_none=True)

    graph = capture(traced).graph
    plan = Plan(Plan.traced(graph).order, allocator="arena")
    with TrainStep(traced.model, traced.loss_fn, traced.optimizer, traced.batch, plan) as step:
        sides = {"eager": run_eager, "traced": lambda: step(traced.batch)}
        for run in sides.values():
            for _ in range(3):
                run()
        start = time.perf_counter()
        run_eager()
        steps = max(1, math.ceil(seconds / blocks / 2 / max(1e-4, time.perf_counter() - start)))
        seconds_by_side: dict[str, list[float]] = {side: [] for side in sides}
        sides_in_order = list(sides)
        for _ in range(blocks):
            for side in sides_in_order:
                samples = []
                for _ in range(steps):
                    start = time.perf_counter()
                    sides[side]()
                    samples.append(time.perf_counter() - start)
                seconds_by_side[side].append(statistics.median(samples))
            sides_in_order.reverse()
    print(json.dumps({**seconds_by_side, "graph": graph.digest}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="usual", choices=[*SIZES, "tiny"], help="tiny shows that the script runs")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=40.0, help="per model")
    parser.add_argument("--models", nargs="*", default=list(SIZES["usual"]))
    parser.add_argument("--child", default="")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    arguments = parser.parse_args()
    if arguments.child:
        time_model(arguments.child, arguments.sizes, arguments.blocks, arguments.seconds)
        return
    library = ctypes.util.find_library("tcmalloc_minimal")
    if library is None:
        sys.exit(f"{TCMALLOC} is missing; install it: apt-get install libtcmalloc-minimal4")
    refuse_busy_machine(anyway=arguments.anyway or arguments.sizes == "tiny")
    document = collect_facts() | {"sizes": arguments.sizes, "preloaded": library, "models": {}}
    graphs: dict[str, str] = {}
    for name in arguments.models:
        command = [
            sys.executable,
            "-m",
            "experiments.benchmarks.kernels",
            "--child",
            name,
            "--blocks",
            str(arguments.blocks),
        ]
        command += ["--seconds", str(arguments.seconds), "--sizes", arguments.sizes]
        environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": str(ROOT)}
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if process.returncode:
            sys.exit(f"{name} failed: {process.stderr.strip().splitlines()[-1]}")
        record = json.loads(process.stdout.strip().splitlines()[-1])
        graphs[name] = record.pop("graph")
        document["models"][name] = record
        print(row(name, document["models"][name]), flush=True)
    out = HERE / "results" / ("tiny-kernels" if arguments.sizes == "tiny" else arguments.sizes)
    out.mkdir(parents=True, exist_ok=True)
    write_result(out / "results.json", document, graphs)
    (out / "summary.md").write_text(summary(document), encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8").splitlines()[-1])


def block_ratios(seconds_by_side: dict[str, list[float]]) -> list[float]:
    """Return the ratio of each block's median step, traced over eager."""
    return [traced / eager for traced, eager in zip(seconds_by_side["traced"], seconds_by_side["eager"], strict=True)]


def row(name: str, seconds_by_side: dict[str, list[float]]) -> str:
    interval = median_interval(block_ratios(seconds_by_side))
    return f"| {name} | {1e3 * statistics.median(seconds_by_side['eager']):.1f} | {format_interval(interval)} |"


def list_names(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def summary(document: dict[str, Any]) -> str:
    """Format a table of all models."""
    ratios = {name: median_interval(block_ratios(sides)) for name, sides in document["models"].items()}
    mean = math.exp(statistics.fmean(math.log(ratio.middle) for ratio in ratios.values()))
    worst = max(ratios, key=lambda name: ratios[name].middle)
    verdicts = {name: judge_at_most(ratio, WORST) for name, ratio in ratios.items()}
    undecided = [name for name, verdict in verdicts.items() if verdict == "not decided"]
    missed = [name for name, verdict in verdicts.items() if verdict == "missed"]
    lines = [
        "| workload | eager with tcmalloc, ms | traced in the arena over eager |",
        "|---|--:|--:|",
        *(row(name, seconds_by_side) for name, seconds_by_side in document["models"].items()),
        "",
        f"Geometric mean of the medians {mean:.3f}; at most {MEAN} was asked: {'kept' if mean <= MEAN else 'missed'} by the medians. "
        f"Worst {worst} {ratios[worst].middle:.3f}; at most {WORST} was asked of each: {len(ratios) - len(undecided + missed)} kept, "
        f"{len(missed)} missed{list_names(missed)}, {len(undecided)} not decided{list_names(undecided)}. {format_origin(document)}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
