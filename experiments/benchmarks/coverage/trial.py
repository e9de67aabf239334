"""Try one model in this process: capture, plans, bit equality and bytes; print its record."""

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import AutotuneError
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS
from autotune.planners.auto import best_plan
from autotune.planners.candidates import find_smallest
from autotune.planners.space import build_space
from autotune.predict.simulate import resident_bytes, simulate
from autotune.runtime import step_selector
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile, read_allocations
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from experiments.benchmarks.coverage.comparison import first_difference, record, run_eagerly
from experiments.benchmarks.coverage.subject import Subject
from experiments.benchmarks.coverage.subjects import SUBJECTS
from experiments.common.facts import ROOT

SHARE = 0.65
"""Budget of the second plan, as a share of eager's peak."""


@dataclass
class Trial:
    """Record of one model. Fields stay empty behind the first failure."""

    name: str
    verdict: str = ""
    """`equal`, `rounding`, `wrong`, `refused`, `crash`, or `not run` where plain eager fails."""
    detail: str = ""
    """Text of the refusal or the crash, or the first difference."""
    ops: int | None = None
    capture_seconds: float | None = None
    """Process seconds, as all seconds here."""
    lowest_seconds: float | None = None
    """Planning of the lowest peak."""
    budget_seconds: float | None = None
    """Planning for `SHARE` of eager's peak."""
    eager_bytes: int | None = None
    """Peak of eager's warm step: weights, optimizer state and batch, and the allocator's peak beyond them."""
    graph: str = ""
    """Digest of the captured graph."""
    traced_bytes: int | None = None
    lowest_bytes: int | None = None
    """Predicted peak of the lowest plan."""
    budget_bytes: int | None = None
    """Predicted peak of the plan for the budget."""
    measured_bytes: int | None = None
    """Allocator's peak of the lowest plan, by torch's profiler."""
    lowest_difference: str = ""
    budget_difference: str = ""
    traced_difference: str = ""
    """Difference of the step as captured; tried only where a plan differs."""


def try_subject(subject: Subject) -> Trial:
    """Capture, plan, run and compare; exceptions end in the record."""
    trial = Trial(subject.name)
    try:
        workload = subject.workload()
        with torch.random.fork_rng(devices=[]):
            wanted = record(subject, workload, lambda batch: run_eagerly(workload, batch))
        rest_bytes = _measure_peak(lambda: run_eagerly(workload, subject.batch(0)))
    except Exception as error:  # noqa: BLE001 - a model that does not train here is no finding about plans
        trial.verdict, trial.detail = "not run", _one_line(error)
        return trial
    try:
        _try_plans(subject, trial, wanted, rest_bytes)
    except AutotuneError as error:
        trial.verdict, trial.detail = "refused", " ".join(str(error).replace(f"{ROOT}/", "").split())
    except Exception as error:  # noqa: BLE001 - a crash is a finding
        trial.verdict, trial.detail = "crash", _one_line(error)
        traceback.print_exc()
    return trial


def _one_line(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text[:400]} (in {place.filename.rpartition('/')[2]}:{place.lineno})"


def _try_plans(subject: Subject, trial: Trial, wanted: list[dict[str, Any]], eager_peak: int) -> None:
    workload = subject.workload()
    program, trial.capture_seconds = _timed(lambda: capture(workload, subject.name))
    graph, costs = program.graph, profile(program)
    trial.ops, trial.graph = len(graph.ops), graph.digest
    trial.eager_bytes = resident_bytes(graph, lower(graph, Plan.traced(graph)), costs) + eager_peak
    space = build_space(KINDS, costs.stores)
    lowest, trial.lowest_seconds = _timed(lambda: find_smallest(graph, costs, space))
    trial.lowest_bytes = lowest.estimate.peak_bytes
    trial.traced_bytes = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    budget = int(SHARE * trial.eager_bytes)
    if budget < trial.lowest_bytes:  # the lowest plan is the answer for every lower budget
        budget = (trial.lowest_bytes + trial.traced_bytes) // 2
    middle, trial.budget_seconds = _timed(lambda: best_plan(graph, costs, budget, space, accept_first=True))
    trial.budget_bytes = middle.estimate.peak_bytes
    trial.lowest_difference = _run_plan(subject, workload, lowest.plan, wanted, program)
    trial.budget_difference = _run_plan(subject, subject.workload(), middle.plan, wanted)
    if trial.lowest_difference or trial.budget_difference:
        trial.traced_difference = _run_plan(subject, subject.workload(), Plan.traced(graph), wanted)
    trial.measured_bytes = _measure_plan(subject, program, lowest.plan, costs)
    trial.verdict = _verdict(trial)
    trial.detail = trial.lowest_difference or trial.budget_difference


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def _run_plan(
    subject: Subject, workload: Workload, plan: Plan, wanted: list[dict[str, Any]], program: Program | None = None
) -> str:
    """Train a twin under a plan, in an arena; return the difference from eager, empty for equal bits.

    `program` is the capture of this twin, where there is one.
    """
    captured = mock.patch.object(step_selector, "capture", return_value=program)
    plan = replace(plan, allocator="arena")
    with captured if program is not None else mock.patch.object(step_selector, "capture", capture):
        step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan)
    with step:
        difference = first_difference(wanted, record(subject, workload, step))
    return "" if difference is None else f"{'rounding' if difference.is_rounding else 'wrong'}, {difference}"


def _verdict(trial: Trial) -> str:
    differences = [text for text in (trial.lowest_difference, trial.budget_difference) if text]
    if not differences:
        return "equal"
    return "rounding" if all(text.startswith("rounding") for text in differences) else "wrong"


def _measure_plan(subject: Subject, program: Program, plan: Plan, costs: Costs) -> int:
    """Return the peak of a plan on torch's allocator; memory at rest is that of the graph."""
    schedule = lower(program.graph, plan)
    execute, updates = Executor(program, schedule), program.updates
    assert updates is not None
    tensors = [leaf for leaf in pytree.tree_leaves(subject.batch(0)) if isinstance(leaf, torch.Tensor)]

    def step() -> Any:
        with updates.step():
            return execute(tensors)

    return resident_bytes(program.graph, schedule, costs) + _measure_peak(step)


def _measure_peak(step: Callable[[], Any]) -> int:
    """Return the peak of the allocator's events during a warm step, beyond the bytes at its begin.

    The profiler misses the release of memory that is older than itself, so it records two steps, and the second counts.
    """
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        for number in range(2):
            with torch.profiler.record_function(f"autotune {number}"):
                result = step()
            del result
    windows, changes = read_allocations(recorded)
    begin = windows["autotune 1"][0]
    live = before = sum(nbytes for moment, nbytes in changes if moment < begin)
    peak = live
    for moment, nbytes in changes:
        if moment >= begin:
            live += nbytes
            peak = max(peak, live)
    return peak - before


def main() -> None:
    """Try the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SUBJECTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trial = try_subject(SUBJECTS[options.name])
    print(json.dumps(asdict(trial), indent=1))


if __name__ == "__main__":
    sys.exit(main())
