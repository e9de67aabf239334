"""nntrainer #789's table on this machine: ResNet-18's step, and all that may leave written and read back, by medium.

`python experiments/nntrainer_offload/run.py --ssd DIR [--ramdisk /dev/shm] [--batches 10 32 128] [--sizes 32 224]`
"""

import argparse
import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autotune.arena import Arena
from autotune.capture import capture
from autotune.devices import this_device
from autotune.execute import Executor, offloaded, open_slots
from autotune.measurement import busy
from autotune.plan import Plan
from autotune.planners.offload.window import Window
from autotune.profile import profile
from autotune.records import to_json
from autotune.schedule import lower
from autotune.stores import SwapStore, measured, open_store
from autotune.workload import load

HERE = Path(__file__).parent
WARM = 4
"""Steps before the ten: two are recorded by the arena, and a file's first writes are slower."""
KEYS = ("forward + backward", "offload", "onload", "waiting")
PUBLISHED = {
    (10, ""): {"forward + backward": 1084403, "offload": 351008, "onload": 11183},
    (32, ""): {"forward + backward": 3331549, "offload": 897888, "onload": 29808},
    (128, ""): {"forward + backward": 13362108, "offload": 3299996, "onload": 111764},
    (10, "ssd"): {"forward + backward": 1101922, "offload": 164734, "onload": 11395},
}
"""Averages in microseconds of the thread, by batch and medium; it does not name the first medium, nor the image size."""


class AtOnce:
    """A store whose caller waits for every transfer: nothing is overlapped, as in the thread."""

    def __init__(self, store: SwapStore) -> None:
        self._store = store
        self.transfers = store.transfers

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]":
        return _waited(self._store.put(key, tensor))

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]":
        return _waited(self._store.fetch(key, into))


def _waited(future: "Future[Any]") -> "Future[Any]":
    future.exception()
    return future


def measure(*, batch: int, size: int, medium: str, directory: str, overlapped: bool, iterations: int) -> dict[str, Any]:
    """Ten steps under the plan that sends away weights, momentum and all that layers keep for backward."""
    workload = load("resnet18", {"batch": batch, "size": size})
    program = capture(workload)
    graph = program.graph
    costs = measured(profile(program), {medium: Path(directory)})
    # a RAM-disk frees nothing on a CPU, and no planner would choose it: here it stands for a fast medium
    costs = replace(costs, stores={medium: replace(costs.stores[medium], holds_memory=False)})
    plan = Window(1, medium, what="all").plan(graph, Plan.traced(graph), 0, costs)
    schedule = lower(graph, plan)
    leaves = [leaf for leaf in workload.batch if isinstance(leaf, torch.Tensor)]
    rows: dict[str, list[float]] = {key: [] for key in KEYS}
    assert program.updates is not None
    with open_store(medium, directory, open_slots(program, schedule)) as store:
        step = Executor(program, schedule, store if overlapped else AtOnce(store), arena=Arena())
        for number in range(WARM + iterations):
            with program.updates.step():
                began = time.perf_counter()
                step(leaves)
                whole = time.perf_counter() - began
            if number < WARM:
                continue
            offload, onload = busy(step.lanes.saves), busy(step.lanes.loads)
            waited = step.stall_seconds if overlapped else offload + onload
            for key, seconds in zip(KEYS, (whole - waited, offload, onload, waited), strict=True):
                rows[key].append(seconds)
        return {
            "batch": batch, "size": size, "medium": medium, "overlapped": overlapped, "direct": store.direct,
            "values": len(offloaded(schedule)), "bytes_each_way": step.transfer_bytes // 2, "seconds": rows,
        }  # fmt: skip


def summary(results: dict[str, Any]) -> str:
    """The table as the thread prints it, in microseconds, with the thread's own averages beside it."""
    device = results["device"]
    lines = [
        f"{device['silicon']}, cores: {device['cores']}, torch {device['torch']}; load {results['load'][0]:.2f} to"
        f" {results['load'][1]:.2f}; `{results['command']}`",
        "",
        "Microseconds an iteration. Beside the step: of forward + backward. Published: nntrainer #789's average, on its own"
        " device, and its share; the thread names neither the first medium nor the image size.",
        "",
        "| batch | size | medium | moved | each way MiB | key | avg | min | max | sum | beside the step | published avg | share |",
        "|--:|--:|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for run in results["runs"]:
        base = statistics.mean(run["seconds"][KEYS[0]])
        published = PUBLISHED.get(
            (run["batch"], run["medium"] if run["batch"] == 10 and run["medium"] == "ssd" else "")
        )
        for key in KEYS:
            took = [1e6 * seconds for seconds in run["seconds"][key]]
            theirs = (published or {}).get(key)
            share = f"{theirs / published[KEYS[0]]:.1%}" if published and theirs else ""
            lines.append(
                f"| {run['batch']} | {run['size']} | {run['medium']} | {'overlapped' if run['overlapped'] else 'at once'} |"
                f" {run['bytes_each_way'] / 2**20:.0f} | {key} | {statistics.mean(took):.0f} | {min(took):.0f} |"
                f" {max(took):.0f} | {sum(took):.0f} | {statistics.mean(took) / 1e6 / base:.1%} | {theirs or ''} | {share} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk")
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 32, 128])
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 224])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return
    told = [part if part not in {str(options.ssd), str(options.ramdisk)} else "DIR" for part in sys.argv[1:]]
    results: dict[str, Any] = {
        "command": shlex.join(["python", "experiments/nntrainer_offload/run.py", *told]),
        "device": to_json(this_device("cpu")),
        "load": [os.getloadavg()[0]],
        "runs": [],
    }
    for size in options.sizes:
        for batch in options.batches:
            for medium in ("ssd", "ramdisk"):
                for overlapped in (False, True):
                    asked = {
                        "batch": batch, "size": size, "medium": medium, "directory": str(getattr(options, medium)),
                        "overlapped": overlapped, "iterations": options.iterations,
                    }  # fmt: skip
                    print(f"batch {batch}, size {size}, {medium}{', overlapped' if overlapped else ''}", flush=True)
                    # each in a process of its own: the heap that one leaves behind changes the next one's times
                    done = subprocess.run(
                        [sys.executable, __file__, "--one", json.dumps(asked)],
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    if done.returncode:
                        sys.exit(done.stderr[-2000:])
                    results["runs"].append(json.loads(done.stdout.splitlines()[-1]))
    results["load"].append(os.getloadavg()[0])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    with (options.out / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["batch", "size", "medium", "overlapped", "bytes_each_way", "key", "iteration", "seconds"])
        for run in results["runs"]:
            for key in KEYS:
                for number, seconds in enumerate(run["seconds"][key]):
                    facts = [run[name] for name in ("batch", "size", "medium", "overlapped", "bytes_each_way")]
                    writer.writerow([*facts, key, number, f"{seconds:.6f}"])
    (options.out / "summary.md").write_text(summary(results))
    print(summary(results))


if __name__ == "__main__":
    main()
