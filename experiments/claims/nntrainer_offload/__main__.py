"""nntrainer #789: its table of ResNet-18's step with everything offloaded, and its window of N + 2 layers.

`python -m experiments.claims.nntrainer_offload [--ssd DIR] [--ramdisk /dev/shm] [--batches 10 32 128] [--sizes 32 224] [--full]`

A run measures the cases that its options select. Earlier results of other cases on the same device stay.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune.capture.tracer import capture
from autotune.ir.costs import StoreCost
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.this_device import this_device
from autotune.planners.offload.window import OffloadWindow
from autotune.predict.simulate import peak_bytes
from autotune.records.json_codec import to_json
from autotune.records.measurement import total_seconds
from autotune.report.claims import RESULT, Claim, Figure, read, write
from autotune.runtime.arena import StepArena
from autotune.runtime.executor import Executor
from autotune.runtime.offload.slots import offloaded_values, slot_sizes
from autotune.runtime.op_profiler import profile
from autotune.runtime.stores import SwapStore, measure_stores, open_store
from autotune.workloads.factory import load_workload
from experiments.common.facts import collect_facts, is_same_machine
from experiments.common.measured import PARTS
from experiments.common.result_file import write_result
from experiments.common.simulated import build_graph, collect_origin, open_figure

HERE = Path(__file__).parent
THREAD = "nntrainer #789"
WARM = 4
"""Warm-up steps: the arena records two, and a file's first writes are slower."""
STEP, OFFLOAD, ONLOAD, WAITING = KEYS = ("forward + backward", "offload", "onload", "waiting")
MEDIA = ("ssd", "ramdisk")
CASE = ("batch", "size", "medium", "overlapped")
LONG = (128, 224)
"""Batch and size that take ten minutes."""
LAYERS, UNIT = 40, 2**20
"""Number of layers of the chain for the window, and the bytes of each."""
WINDOWS = range(1, 9)
TOLERANCE = 0.1
UNNAMED = "the thread names neither the medium nor the image size"
PUBLISHED = {
    (10, ""): {"forward + backward": 1084403, "offload": 351008, "onload": 11183},
    (32, ""): {"forward + backward": 3331549, "offload": 897888, "onload": 29808},
    (128, ""): {"forward + backward": 13362108, "offload": 3299996, "onload": 111764},
    (10, "ssd"): {"forward + backward": 1101922, "offload": 164734, "onload": 11395},
}
"""Averages of the thread in microseconds, by batch and medium. It names neither the first medium nor the image size."""


class BlockingStore:
    """Store whose caller waits for every transfer: nothing overlaps, as in the thread."""

    def __init__(self, store: SwapStore) -> None:
        self._store = store
        self.transfers = store.transfers

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]":
        return _wait(self._store.put(key, tensor))

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]":
        return _wait(self._store.fetch(key, into))


def _wait(future: "Future[Any]") -> "Future[Any]":
    future.exception()
    return future


def measure(
    *, batch: int, size: int, medium: str, directory: str, overlapped: bool, iterations: int, cache: str
) -> dict[str, Any]:
    """Measure steps under a plan that offloads weights, momentum and everything that layers keep for backward."""
    workload = load_workload("resnet18", {"batch": batch, "size": size})
    program = capture(workload)
    graph = program.graph
    costs = measure_stores(profile(program, cache=Path(cache)), {medium: Path(directory)})
    # a RAM-disk frees nothing on a CPU, and no planner would choose it: here it stands for a fast medium
    costs = replace(costs, stores={medium: replace(costs.stores[medium], holds_memory=False)})
    plan = OffloadWindow(1, medium, what="all").plan(graph, Plan.traced(graph), 0, costs)
    schedule = lower(graph, plan)
    leaves = [leaf for leaf in workload.batch if isinstance(leaf, torch.Tensor)]
    rows: dict[str, list[float]] = {key: [] for key in KEYS}
    assert program.updates is not None
    with open_store(medium, directory, slot_sizes(program, schedule)) as store:
        step = Executor(program, schedule, store if overlapped else BlockingStore(store), arena=StepArena())
        for iteration in range(WARM + iterations):
            with program.updates.step():
                start = time.perf_counter()
                step(leaves)
                total = time.perf_counter() - start
            if iteration < WARM:
                continue
            offload, onload = total_seconds(step.transfer_trace.saves), total_seconds(step.transfer_trace.loads)
            wait = step.stall_seconds if overlapped else offload + onload
            for key, seconds in zip(KEYS, (total - wait, offload, onload, wait), strict=True):
                rows[key].append(seconds)
        return {
            "batch": batch, "size": size, "medium": medium, "overlapped": overlapped, "direct": store.direct,
            "graph": graph.digest,
            "values": len(offloaded_values(schedule)), "bytes_each_way": step.transfer_bytes // 2, "seconds": rows,
        }  # fmt: skip


def window_peaks(gradient_bytes: int = 0) -> list[float]:
    """Return peaks of a chain of equal layers with everything offloaded, in layers, for every N of `WINDOWS`."""
    forward = [f"forward {number}" for number in range(LAYERS)]
    ops: list[tuple[str, list[str], dict[str, int]]] = []
    for number, name in enumerate(forward):
        ops.append((name, [f"kept {number - 1}"] if number else [], {f"kept {number}": UNIT}))
    for number in reversed(range(LAYERS)):
        reads = [f"kept {number}", *([f"gradient {number + 1}"] if number + 1 < LAYERS else [])]
        ops.append((f"backward {number}", reads, {f"gradient {number}": gradient_bytes}))
    graph, costs = build_graph("equal layers", ops)
    costs = replace(costs, stores={"ssd": StoreCost(UNIT, UNIT, UNIT, UNIT)})
    plans = [OffloadWindow(window, "ssd").plan(graph, Plan.traced(graph), 0, costs) for window in WINDOWS]
    return [peak_bytes(graph, plan, costs) / UNIT for plan in plans]


def claims_of_window() -> list[Claim]:
    """Return the claims about N resident layers, one being saved and one being loaded."""
    peaks = window_peaks()
    extra = window_peaks(UNIT)[0] - peaks[0]
    conditions = (
        f"{LAYERS} equal layers drawn by hand, everything away that may leave, gradients of no bytes; with gradients as "
        f"large as layers {extra:g} more for every N"
    )
    about = partial(Claim, source=THREAD, conditions=conditions, unit="layers")
    claims = [
        about(f"window of N = {window}: peak", published=Figure(window + 2), ours=Figure(peak))
        for window, peak in zip(WINDOWS, peaks, strict=True)
    ]
    return [claims[0], replace(claims[-1], headline=True)]


def percent_of_step(run: dict[str, Any], key: str) -> float:
    """Return the average time of a key over that of forward and backward, in percent."""
    return 100 * statistics.mean(run["seconds"][key]) / statistics.mean(run["seconds"][STEP])


def published_percent(row: tuple[int, str], key: str) -> float:
    """Return the same percentage from the thread's averages."""
    return 100 * PUBLISHED[row][key] / PUBLISHED[row][STEP]


def claims_of_table(results: dict[str, Any]) -> list[Claim]:
    """Return each row of the thread's table beside the measured one, with every transfer waited for."""
    runs = {tuple(run[part] for part in CASE): run for run in results["runs"]}
    device = results["device"]

    def claim(
        text: str, published_row: tuple[int, str], key: str, size: int, medium: str, *, since: int | None = None
    ) -> Claim:
        batches = [published_row[0]] if since is None else [since, published_row[0]]
        selected = [runs.get((batch, size, medium, False)) for batch in batches]
        published = Figure(
            published_percent(published_row, key), None if since is None else published_percent((since, ""), key)
        )
        conditions = f"{size} x {size}, {medium}, every transfer waited for; the thread names no image size"
        if not all(selected):
            why = f"not measured at batch {next(b for b, run in zip(batches, selected, strict=True) if run is None)}"
            return Claim(f"ResNet-18, {text}", THREAD, conditions, "%", published, None, why_not=why, kind="measured")
        moved = " and ".join(f"{run['bytes_each_way'] / 2**20:.0f}" for run in selected if run)
        conditions += (
            f"; weights, momentum and what layers keep for backward, {moved} MiB each way; averages of "
            f"{len(selected[-1]['seconds'][key])} steps on {device['silicon']}, cores: {device['cores']}"
        )  # fmt: skip
        shares = [percent_of_step(run, key) for run in selected if run]
        ours = Figure(shares[-1], shares[0] if since is not None else None)
        on_disk = medium != "ssd" or all(run["direct"] for run in selected if run)
        return Claim(
            f"ResNet-18, {text}", THREAD, conditions, "%", published, ours, TOLERANCE, "at most", transferred=True,
            why_not="" if on_disk else "the directory lies on no disk that is read and written directly", kind="measured",
        )  # fmt: skip

    claims = []
    for size in (32, 224):
        text = f"batch 10, SSD, size {size}: offload beside the step"
        claims.append(replace(claim(text, (10, "ssd"), OFFLOAD, size, "ssd"), headline=size == 224))
    for since, batch in ((10, 32), (32, 128)):
        for size in (32, 224):
            for medium in MEDIA:
                text = f"batch {since} -> {batch}, {medium}, size {size}: offload beside the step"
                claim_of_row = claim(text, (batch, ""), OFFLOAD, size, medium, since=since)
                headline = (since, size) == (10, 224)
                claims.append(replace(claim_of_row, headline=headline, why_not=claim_of_row.why_not or UNNAMED))
    for published_row in PUBLISHED:
        speedup = PUBLISHED[published_row][OFFLOAD] / PUBLISHED[published_row][ONLOAD]
        text = f"batch {published_row[0]}, {published_row[1] or 'medium unnamed'}: onload beside the step"
        claim_of_row = claim(
            text, published_row, ONLOAD, 32 if published_row[0] == 128 else 224, published_row[1] or "ramdisk"
        )
        cached = f"theirs came back {speedup:.0f} times as fast as it left: from the page cache, not from the medium"
        claims.append(replace(claim_of_row, why_not=claim_of_row.why_not or cached))
    return claims


def draw(results: dict[str, Any]) -> None:
    """Draw the window's bytes, and offload time over the step for each row of the thread's table."""
    runs = {tuple(run[part] for part in CASE): run for run in results["runs"]}
    with open_figure(HERE / "results" / "offload.png", 2) as (left, right):
        left.plot(WINDOWS, window_peaks(), "o-", label="ours")
        left.plot(WINDOWS, window_peaks(UNIT), "o-", label="ours, with gradients as large")
        left.plot(WINDOWS, [window + 2 for window in WINDOWS], "kx", label="N + 2")
        left.set(title=f"{LAYERS} equal layers", xlabel="window N", ylabel="peak, layers")
        left.legend()
        rows = list(PUBLISHED)
        right.plot([published_percent(row, OFFLOAD) for row in rows], "kx", label="published")
        for size in (32, 224):
            for medium in MEDIA:
                selected = [runs.get((batch, size, medium, False)) for batch, _ in rows]
                ours = [percent_of_step(run, OFFLOAD) if run and (not row[1] or medium == row[1]) else None
                        for run, row in zip(selected, rows, strict=True)]  # fmt: skip
                right.plot(ours, "o", label=f"{medium}, size {size}")
        right.set(title="ResNet-18: offload beside forward + backward", ylabel="%")
        right.set_xticks(range(len(rows)), [f"batch {batch}{', SSD' if medium else ''}" for batch, medium in rows])
        right.legend(loc="upper center")


def summary(results: dict[str, Any]) -> str:
    """Format the thread's table in microseconds, with its own averages beside ours."""
    device = results["device"]
    lines = [
        f"{device['silicon']}, cores: {device['cores']}, torch {device['torch']}; "
        + "; ".join(
            f"`{record['command']}`, load {record['load'][0]:.2f} to {record['load'][1]:.2f}"
            for record in results["commands"]
        ),
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
            microseconds = [1e6 * seconds for seconds in run["seconds"][key]]
            published_microseconds = (published or {}).get(key)
            share = f"{published_microseconds / published[KEYS[0]]:.1%}" if published and published_microseconds else ""
            lines.append(
                f"| {run['batch']} | {run['size']} | {run['medium']} | {'overlapped' if run['overlapped'] else 'at once'} |"
                f" {run['bytes_each_way'] / 2**20:.0f} | {key} | {statistics.mean(microseconds):.0f} | {min(microseconds):.0f} |"
                f" {max(microseconds):.0f} | {sum(microseconds):.0f} | {statistics.mean(microseconds) / 1e6 / base:.1%} | {published_microseconds or ''} | {share} |"
            )
    return "\n".join(lines) + "\n"


def measured_before(out: Path, *, is_continued: bool) -> dict[str, Any]:
    """Return the results of an earlier run, or empty results. Those of another machine are not continued."""
    device = to_json(this_device("cpu"))
    if (path := out / "results.json").exists():
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not is_continued or is_same_machine(stored["device"], device):
            # the other facts are those of the run that writes
            return {part: stored[part] for part in ("device", "commands", "runs")}
    return {"device": device, "commands": [], "runs": []}


def measure_in_process(case: dict[str, Any]) -> dict[str, Any]:
    """Measure one case in a fresh process, because the heap of an earlier case changes later times."""
    process = subprocess.run(
        [sys.executable, "-m", "experiments.claims.nntrainer_offload", "--one", json.dumps(case)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(process.stderr[-2000:])
    return dict(json.loads(process.stdout.splitlines()[-1]))


def select_cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the cases that the options select."""
    chosen = itertools.product(options.sizes, options.batches, MEDIA, (False, True) if options.full else (False,))
    return [
        {"batch": batch, "size": size, "medium": medium, "overlapped": overlapped}
        for size, batch, medium, overlapped in chosen
        if options.full or (batch, size) != LONG
    ]  # fmt: skip


def save(results: dict[str, Any], out: Path, facts: dict[str, Any]) -> None:
    """Write every number as JSON and CSV, and the table; `facts` are those before the measurements."""
    out.mkdir(parents=True, exist_ok=True)
    graphs = {f"batch {run['batch']}, size {run['size']}": run["graph"] for run in results["runs"] if "graph" in run}
    write_result(out / "results.json", collect_origin(facts) | results, graphs)
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*CASE, "bytes_each_way", "key", "iteration", "seconds"])
        for run in results["runs"]:
            for key in KEYS:
                for number, seconds in enumerate(run["seconds"][key]):
                    columns = [run[name] for name in (*CASE, "bytes_each_way")]
                    writer.writerow([*columns, key, number, f"{seconds:.6f}"])
    (out / "summary.md").write_text(summary(results), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk")
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")
    parser.add_argument("--batches", type=int, nargs="*", default=[10, 32, 128])
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 224])
    parser.add_argument("--full", action="store_true", help="batch 128 at 224 as well, and everything overlapped, too")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="of the claims")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(**json.loads(options.one))))
        return
    updates_claims = options.out / RESULT.name == HERE / RESULT
    if "measured" not in options.parts:
        if updates_claims:
            write(
                HERE,
                [*(claim for claim in read(HERE) if claim.kind == "measured"), *claims_of_window()],
                {"simulated": collect_origin()},
            )
        return
    cases, facts = select_cases(options), collect_facts()
    results = measured_before(options.out, is_continued=bool(cases))
    if cases:
        command = {"command": facts["command"], "load": [os.getloadavg()[0]]}
        with tempfile.TemporaryDirectory(prefix="profiles-") as profiles:
            common = {"iterations": options.iterations, "cache": str(Path(profiles) / "costs.json")}
            measured = []
            for case in cases:
                print(", ".join(f"{key} {value}" for key, value in case.items()), flush=True)
                run = measure_in_process(case | common | {"directory": str(getattr(options, case["medium"]))})
                run["commit"] = facts["commit"]
                measured.append(run)
                other_runs = [run for run in results["runs"] if any(run[part] != case[part] for part in CASE)]
                results["runs"] = sorted([*other_runs, run], key=lambda run: [run[part] for part in CASE])
        command["load"].append(os.getloadavg()[0])
        is_new = all(run in measured for run in results["runs"])
        results["commands"] = [*([] if is_new else results["commands"]), command]
        save(results, options.out, facts)
    if updates_claims:
        origin = collect_origin(facts)
        parts = PARTS if cases else ["simulated"]
        write(HERE, [*claims_of_table(results), *claims_of_window()], dict.fromkeys(parts, origin))
        draw(results)
    print(summary(results))


if __name__ == "__main__":
    main()
