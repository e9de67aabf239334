"""Bytes and seconds of plans on compiled regions beside eager and beside plans on ATen kernels.

`python -m experiments.benchmarks.regions [--models NAME...] [--blocks 8] [--tiny]`
"""

import argparse
import ctypes.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.benchmarks.regions.summary import write_summary
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts
from experiments.common.result_file import write_result

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
MODELS: dict[str, tuple[str, dict[str, Any], str, tuple[float, ...]]] = {
    "gpt2": ("gpt2", {"batch": 8}, "", (0.45,)),
    "gpt2-dropout": ("gpt2", {"batch": 8, "dropout": 0.1}, "", (0.45,)),
    "bert": ("bert", {"batch": 8}, "", (0.45,)),
    "vit": ("vit", {"batch": 8}, "", (0.5,)),
    "lstm": ("lstm", {"batch": 32}, "", (0.6,)),
    "resnet50": ("resnet50", {"batch": 4}, "channels_last", (0.67,)),
    "mobilenet_v2": ("mobilenet_v2", {"batch": 8}, "channels_last", (0.5,)),
}
"""Workload, its arguments, memory format, and shares of eager's own bytes for which a plan is made, by name."""
PLANNING_SECONDS = 12.0


class ModelRun:
    """One model in this process: its programs, their costs, and the measured bytes of plans."""

    def __init__(self, name: str, *, tiny: bool) -> None:
        from autotune.capture.tracer import capture
        from autotune.kernels.region_program import compile_regions, fuse, list_regions
        from autotune.workloads.memory_format import convert_batch, convert_model

        reference, arguments, self.memory_format, self.shares = MODELS[name]
        if tiny:
            from tests.workloads.zoo.tiny import TINY

            arguments = TINY[reference]
        self.reference, self.arguments = reference, arguments
        workload = self.make()
        convert_model(workload.model, workload.optimizer, self.memory_format)
        batch = convert_batch(workload.batch, self.memory_format)
        self.aten = capture(replace(workload, batch=batch), name)
        start = time.perf_counter()
        self.program = fuse(self.aten)
        self.record: dict[str, Any] = {"model": reference, "arguments": arguments, "memory_format": self.memory_format}
        graph = self.program.graph
        self.record |= {
            "graph": self.aten.graph.digest,
            "ops": len(self.aten.graph.ops),
            "ops_fused": len(graph.ops),
            "regions": sum(op.target == "autotune.kernels.fused" for op in graph.ops),
            "kernels": len(list_regions(self.program)),
            "overwriting": sum(bool(op.inplace) for op in graph.ops if op.target == "autotune.kernels.fused"),
            "fuse_seconds": time.perf_counter() - start,
        }
        start = time.perf_counter()
        compile_regions(self.program)
        self.record["compile_seconds"] = time.perf_counter() - start

    def make(self) -> Any:
        """Return the workload, with seeded weights and batch."""
        from autotune.workloads.factory import load_workload

        return load_workload(self.reference, self.arguments, "")

    def measure_bytes(self) -> None:
        """Add the own peak of eager, of both traced steps, of the smallest plans, and of a plan for each share."""
        from autotune.ir.plan import Plan
        from autotune.planners.auto import best_plan
        from autotune.planners.candidates import find_smallest
        from autotune.planners.space import space_for_device
        from autotune.runtime.op_profiler import profile

        eager = self.record["eager_bytes"] = own_peak(self.eager_step())
        space = space_for_device({}, "cpu", {})
        self.plans = {}
        for kernels, program in (("aten", self.aten), ("inductor", self.program)):
            costs = profile(program)
            graph = program.graph
            smallest = find_smallest(graph, costs, space)
            plans = {"traced": Plan.traced(graph), "lowest": smallest.plan}
            for share in self.shares:
                budget = graph.static_bytes + int(share * eager)
                plans[f"{share}"] = best_plan(graph, costs, budget, space, seconds=PLANNING_SECONDS).plan
            for name, plan in plans.items():
                self.record[f"{kernels} {name}"] = self.describe(program, plan, costs, kernels)
                self.plans[f"{kernels} {name}"] = replace(
                    plan,
                    allocator="arena",
                    kernels="" if kernels == "aten" else kernels,
                    memory_format=self.memory_format,
                )

    def describe(self, program: Any, plan: Any, costs: Any, kernels: str) -> dict[str, Any]:
        """Return estimate and measured own peak of a plan."""
        from autotune.ir.schedule import lower
        from autotune.predict.simulate import simulate

        static = program.graph.static_bytes
        estimate = simulate(program.graph, lower(program.graph, plan), costs)
        plain = replace(
            plan, allocator="system", kernels="" if kernels == "aten" else kernels, memory_format=self.memory_format
        )
        return {
            "predicted_bytes": estimate.peak_bytes - static,
            "measured_bytes": own_peak(self.planned_step(plain)),
            "bound_bytes": estimate.lower_bound_bytes - static,
            "estimated_seconds": estimate.seconds,
            "recompute_seconds": estimate.recompute_seconds,
            "peak_op": estimate.peak_op,
            "overwritten": len(plan.inplace),
        }

    def eager_step(self) -> Callable[[], Any]:
        """Return a function that runs one eager step on contiguous tensors."""
        workload = self.make()

        def run() -> None:
            output = workload.loss_fn(workload.model, workload.batch)
            (output[0] if isinstance(output, tuple) else output).backward()
            workload.optimizer.step()
            workload.optimizer.zero_grad(set_to_none=True)

        return run

    def planned_step(self, plan: Any) -> Callable[[], Any]:
        """Return a function that runs one step of a plan on a workload of its own."""
        from autotune.runtime.train_step import TrainStep
        from autotune.workloads.memory_format import convert_batch

        workload = self.make()
        batch = convert_batch(workload.batch, self.memory_format)  # a step would copy it, in bytes that no plan has
        step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, batch, plan)
        return lambda: step(batch)

    def time_plans(self, blocks: int) -> None:
        """Add seconds of contiguous eager and of our plans in alternating blocks, all in this process."""
        sides = {"eager": self.eager_step()}
        sides |= {name: self.planned_step(plan) for name, plan in self.plans.items() if not name.endswith("lowest")}
        for run in sides.values():
            for _ in range(3):
                run()
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        order = list(sides)
        for _ in range(blocks):
            for name in order:
                samples = []
                for _ in range(2):
                    start = time.perf_counter()
                    sides[name]()
                    samples.append(time.perf_counter() - start)
                seconds[name].append(min(samples))
            order.reverse()
        self.record["seconds"] = seconds


def own_peak(run: Callable[[], Any]) -> int:
    """Return the highest sum of the allocator's events of a step beyond those at rest, in bytes."""
    import torch

    from autotune.runtime.op_profiler import read_allocations

    for _ in range(2):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        for number in range(2):  # the profiler does not see the end of memory older than itself
            with torch.profiler.record_function(f"autotune {number}"):
                result = run()
            del result
    windows, changes = read_allocations(recorded)
    begin = windows["autotune 1"][0]
    live = before = sum(nbytes for at, nbytes in changes if at < begin)
    highest = live
    for at, nbytes in changes:
        if at >= begin:
            live += nbytes
            highest = max(highest, live)
    return highest - before


def run_child(name: str, blocks: int, *, tiny: bool) -> None:
    """Measure one model in this process, and print its record as JSON."""
    run = ModelRun(name, tiny=tiny)
    if blocks >= 0:
        run.measure_bytes()
    if blocks > 0:
        run.time_plans(blocks)
    print(json.dumps(run.record))


def ask_child(name: str, blocks: int, cache: str, *, tiny: bool) -> dict[str, Any]:
    """Return the record of a new process that has tcmalloc and a cache directory."""
    command = [sys.executable, "-m", "experiments.benchmarks.regions", "--child", name, "--blocks", str(blocks)]
    library = ctypes.util.find_library("tcmalloc_minimal")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache, "LD_PRELOAD": library or ""}
    process = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])], env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(f"{name} failed: {process.stderr.strip().splitlines()[-1]}")
    record: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return record | {"preloaded": library}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=8, help="blocks of two steps for each side; 0 for bytes alone")
    parser.add_argument("--tiny", action="store_true", help="models of a blink, a check that the script runs")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.blocks, tiny=options.tiny)
        return
    out = HERE / "results" / ("tiny" if options.tiny else "zoo")
    out.mkdir(parents=True, exist_ok=True)
    facts = collect_facts()
    refuse_busy_machine(anyway=options.anyway or options.tiny or not options.blocks)
    for name in options.models:
        with tempfile.TemporaryDirectory(prefix="regions-") as cache:
            cold = ask_child(name, -1, cache, tiny=options.tiny)
            record = ask_child(name, options.blocks, cache, tiny=options.tiny)
        record["cold_seconds"], record["warm_seconds"] = cold["compile_seconds"], record.pop("compile_seconds")
        graphs = {name: record.pop("graph")}
        write_result(out / f"{name}.json", facts | record, graphs)
        print(write_summary(out), flush=True)


if __name__ == "__main__":
    main()
