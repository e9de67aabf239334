"""Steps of several plans in one process, each between two steps of a plan to compare with.

The machine's speed changes by a third within seconds: in blocks and processes of their own, two runs of one plan
differed by up to 1.28x. A step between two others shares their speed.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.interleaving import turn_order
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import total_seconds
from autotune.runtime.arena import StepArena
from autotune.runtime.executor import Executor
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.stores import open_store
from autotune.study.verdicts.statistics import median_interval
from autotune.workloads.factory import load_workload

UNMEASURED, ROUNDS = 4, 24
"""Unmeasured steps of each plan, in which arenas are laid out; then the number of rounds, with one step of each plan."""


def alternate(
    reference: str, arguments: Mapping[str, Any], plans: Mapping[str, Plan], stores: Mapping[str, Path]
) -> dict[str, list[dict[str, Any]]]:
    """Return every step of every plan, run in a fresh process; the others are compared with the first plan."""
    request = {
        "reference": reference,
        "arguments": dict(arguments),
        "plans": {name: to_json(plan) for name, plan in plans.items()},
        "stores": {name: str(path) for name, path in stores.items()},
    }
    process = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.offload.alternate"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(process.stderr[-2000:])
    steps: dict[str, list[dict[str, Any]]] = json.loads(process.stdout.splitlines()[-1])
    return steps


def run_rounds(request: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Run the rounds in this process."""
    workload = load_workload(request["reference"], request["arguments"])
    program = capture(workload)
    batch = [leaf for leaf in pytree.tree_leaves(workload.batch) if isinstance(leaf, torch.Tensor)]
    with contextlib.ExitStack() as stack:
        executors = {}
        for name, document in request["plans"].items():
            schedule = lower(program.graph, from_json(Plan, document, where="plan"))
            store = None
            if schedule.store:
                directory = request["stores"][schedule.store]
                store = stack.enter_context(open_store(schedule.store, directory, slot_sizes(program, schedule)))
            executors[name] = Executor(program, schedule, store, arena=StepArena())

        def step(name: str) -> dict[str, Any]:
            executor = executors[name]
            start = time.perf_counter()
            with program.updates.step() if program.updates is not None else contextlib.nullcontext():
                executor(batch)
            seconds, trace = time.perf_counter() - start, executor.transfer_trace
            if executor.problem:
                raise SystemExit(f"{name}: {executor.problem}")
            return {
                "seconds": seconds,
                "stall_seconds": executor.stall_seconds,
                "transfer_bytes": executor.transfer_bytes,
                "transfer_seconds": total_seconds(trace.saves) + total_seconds(trace.loads),
                "hidden": trace.hidden,
            }

        for name in executors:
            for _ in range(UNMEASURED):
                step(name)
        first, *others = executors
        steps: dict[str, list[dict[str, Any]]] = {name: [] for name in executors}
        for number in range(ROUNDS):
            for name in turn_order(others, number, baseline=first, between=1):
                reference = {} if name == first else {"after": len(steps[first]) - 1}
                steps[name].append(step(name) | reference)
        steps[first].append(step(first))
    return steps


def summarize_steps(steps: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, Any]:
    """Return a plan's step over the mean of its two neighbours with the median's 95 % interval, and other medians."""
    first = next(iter(steps))
    seconds = [step["seconds"] for step in steps[first]]
    if name == first:
        ratios = [1.0]
    else:
        ratios = [step["seconds"] / statistics.mean(seconds[step["after"] : step["after"] + 2]) for step in steps[name]]
    interval = median_interval(ratios)
    hidden = [step["hidden"] for step in steps[name] if step["hidden"] is not None]
    return {
        "ratio_without": interval.middle,
        "ratio_without_95": (interval.low, interval.high),
        "hidden": statistics.median(hidden) if hidden else None,
        "steps": len(steps[name]),
    } | {
        key: statistics.median(step[key] for step in steps[name])
        for key in ("seconds", "stall_seconds", "transfer_bytes", "transfer_seconds")
    }


if __name__ == "__main__":
    print(json.dumps(run_rounds(json.load(sys.stdin))))
