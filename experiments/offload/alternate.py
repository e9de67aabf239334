"""Steps of several plans in one process, each right between two of a plan to compare with.

The machine's pace changes by a third within seconds: blocks of one plan after blocks of another, in processes of their own,
told a plan from itself by up to 1.28x. A step between two others shares their pace.
"""

import contextlib
import json
import random
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
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import busy
from autotune.runtime.arena import Arena
from autotune.runtime.executor import Executor
from autotune.runtime.offload_slots import open_slots
from autotune.runtime.stores import open_store
from autotune.workloads.factory import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from turns import interval

UNMEASURED, ROUNDS = 4, 24
"""Steps of every plan first, in which arenas are laid out; then each plan has one a round."""


def alternate(
    reference: str, arguments: Mapping[str, Any], plans: Mapping[str, Plan], stores: Mapping[str, Path]
) -> dict[str, list[dict[str, Any]]]:
    """Every step of every plan, in a process of its own; the first plan is the one that others are compared with."""
    asked = {
        "reference": reference,
        "arguments": dict(arguments),
        "plans": {name: to_json(plan) for name, plan in plans.items()},
        "stores": {name: str(path) for name, path in stores.items()},
    }
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(asked: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """In this process."""
    workload = load(asked["reference"], asked["arguments"])
    program = capture(workload)
    batch = [leaf for leaf in pytree.tree_leaves(workload.batch) if isinstance(leaf, torch.Tensor)]
    with contextlib.ExitStack() as stack:
        executors = {}
        for name, document in asked["plans"].items():
            schedule = lower(program.graph, from_json(Plan, document, where="plan"))
            store = None
            if schedule.store:
                directory = asked["stores"][schedule.store]
                store = stack.enter_context(open_store(schedule.store, directory, open_slots(program, schedule)))
            executors[name] = Executor(program, schedule, store, arena=Arena())

        def step(name: str) -> dict[str, Any]:
            executor = executors[name]
            begun = time.perf_counter()
            with program.updates.step() if program.updates is not None else contextlib.nullcontext():
                executor(batch)
            seconds, lanes = time.perf_counter() - begun, executor.lanes
            if executor.problem:
                raise SystemExit(f"{name}: {executor.problem}")
            return {
                "seconds": seconds,
                "stall_seconds": executor.stall_seconds,
                "transfer_bytes": executor.transfer_bytes,
                "transfer_seconds": busy(lanes.saves) + busy(lanes.loads),
                "hidden": lanes.hidden,
            }

        for name in executors:
            for _ in range(UNMEASURED):
                step(name)
        first, *others = executors
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in executors}
        for number in range(ROUNDS):
            for name in random.Random(number).sample(others, len(others)):
                found[first].append(step(first))
                found[name].append(step(name) | {"after": len(found[first]) - 1})
        found[first].append(step(first))
    return found


def told(found: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, Any]:
    """Of one plan: its step over the mean of the two beside it, with 95 % of the median, and medians of the rest."""
    first = next(iter(found))
    seconds = [step["seconds"] for step in found[first]]
    if name == first:
        ratios = [1.0]
    else:
        ratios = [step["seconds"] / statistics.mean(seconds[step["after"] : step["after"] + 2]) for step in found[name]]
    hidden = [step["hidden"] for step in found[name] if step["hidden"] is not None]
    return {
        "ratio_without": statistics.median(ratios),
        "ratio_without_95": interval(ratios),
        "hidden": statistics.median(hidden) if hidden else None,
        "steps": len(found[name]),
    } | {
        key: statistics.median(step[key] for step in found[name])
        for key in ("seconds", "stall_seconds", "transfer_bytes", "transfer_seconds")
    }


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
