"""The main module of the process that captures and plans new shapes: `python -m ...background_worker PARENT`.

It reads pickles from standard input: a `Job`, then a number and a pickled batch for each shape. It answers each shape
with an `Answer`.
"""

import os
import pickle
import shutil
import sys
import threading
import time
import warnings
from dataclasses import replace
from typing import Any, BinaryIO

import torch

from autotune.capture.tracer import capture
from autotune.errors import AutotuneError
from autotune.runtime.prepared_step import StepPreparer
from autotune.runtime.shapes.background import Answer, Job
from autotune.runtime.shapes.program_change import describe_change, dump
from autotune.workloads.live_workload import load_live_workload
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload

_LOWEST_PRIORITY = 19
_CHECK_SECONDS = 1.0


def main() -> None:
    """Answer requests until standard input ends."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    os.nice(_LOWEST_PRIORITY)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print what they like
    warnings.simplefilter("ignore")
    requests = sys.stdin.buffer
    job: Job = pickle.load(requests)
    serve(job, load(job), requests, answers)


def _end_with(parent: int) -> None:
    """End this process, whatever it does, soon after the one that started it.

    The kernel's signal would come when the thread that started it ends. Standard input alone may never end: processes that
    the parent forked, such as data loaders, keep it open.
    """
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    os._exit(1)


def load(job: Job) -> Workload:
    """Return the job's workload, and remove its file and directory whether it can be loaded or not."""
    try:
        return replace(load_live_workload(job.workload), loop=Loop.parse(job.loop))
    finally:
        shutil.rmtree(job.workload.parent, ignore_errors=True)


def serve(job: Job, workload: Workload, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer each request; what goes wrong with one is the reason of its answer."""
    preparer = StepPreparer(job.plan, job.stores, adapts=False)
    first = capture(workload, gradients=job.gradients)
    while True:
        try:
            request: tuple[int, bytes] = pickle.load(requests)
        except EOFError:
            return
        answers.write(_answer(job, preparer, first, workload, request))
        answers.flush()


def _answer(job: Job, preparer: StepPreparer, first: Any, workload: Workload, request: tuple[int, bytes]) -> bytes:
    number, batch = request
    try:
        if first.graph.digest != job.digest:
            return pickle.dumps(Answer(number, None, None, "the copy of the step is another graph"))
        program = capture(replace(workload, batch=pickle.loads(batch)), gradients=job.gradients)
        change = describe_change(first, program)
        if isinstance(change, str):
            return pickle.dumps(Answer(number, None, None, change))
        return dump(Answer(number, change, preparer.make_plan(program)))
    except AutotuneError as error:
        return pickle.dumps(Answer(number, None, None, " ".join(str(error).split())))
    except Exception as error:  # noqa: BLE001 - the training process can still capture the shape itself
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return pickle.dumps(Answer(number, None, None, f"{type(error).__name__}: {reason[:200]}"))
    finally:
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
