"""Capture and plan new batch shapes in another process, while the training goes on in eager."""

import contextlib
import itertools
import os
import pickle
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from autotune.capture.program import Program
from autotune.capture.signature import Signature
from autotune.errors import AutotuneError
from autotune.ir.plan import Plan
from autotune.records.plan_file import PlanFile
from autotune.runtime.shapes.program_change import ProgramChange
from autotune.workloads.batch import flatten_batch, make_build, span_bytes
from autotune.workloads.live_workload import save_workload
from autotune.workloads.workload import Workload

WORKER = "autotune.runtime.shapes.background_worker"
MAX_OUTSTANDING = 8
"""Maximum number of shapes that wait for their answers; each has a copy of a batch."""
MAX_ANSWERS = 64
"""Maximum number of answers for shapes that did not come again; the oldest is dropped first."""


@dataclass(frozen=True)
class Job:
    """Data that the other process needs once, beside the workload: the first program's digest, and how plans are made."""

    workload: Path
    loop: str
    gradients: bool
    digest: str
    plan: PlanFile | Plan | None
    stores: dict[str, Path]


@dataclass(frozen=True)
class Answer:
    """The program and the plan for one requested shape."""

    number: int
    change: ProgramChange | None
    """None where this process must capture the step itself."""
    plan: Plan | None
    reason: str = ""
    """Reason why there is no change."""


class BackgroundShapes:
    """The shapes that one other process captures and plans, in the order of their requests.

    The process has a copy of model, optimizer and first batch, and runs with low priority. Where it cannot serve a shape, the
    training process captures that shape itself, with a warning.
    """

    def __init__(
        self,
        first: Program,
        first_call: Signature,
        workload: Workload,
        plan: PlanFile | Plan | None,
        stores: dict[str, Path],
        *,
        gradients: bool,
    ) -> None:
        """`workload` is the first batch's step, whose program is `first`."""
        self._first_call, self._pid = first_call, os.getpid()
        self._ids = itertools.count()
        self._numbers: dict[Signature, int] = {}
        self._answers: dict[int, Answer] = {}
        self._arrived: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        resources = contextlib.ExitStack()
        self._release = weakref.finalize(self, resources.close)
        try:
            directory = Path(tempfile.mkdtemp(prefix="autotune-shapes-"))
            resources.callback(shutil.rmtree, directory, ignore_errors=True)
            compact = replace(workload, batch=_without_spare_memory(workload.batch))
            save_workload(compact, directory / "workload")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except (AutotuneError, OSError) as error:
            self._fail(str(error))
            return
        resources.callback(self._process.wait)
        resources.callback(self._process.kill)
        resources.callback(self._requests.put, None)
        job = Job(directory / "workload", str(workload.loop), gradients, first.graph.digest, plan, stores)
        self._send(lambda: job)
        assert self._process.stdin is not None
        writing = self._process.stdin, self._requests
        threading.Thread(target=_write_requests, args=writing, daemon=True).start()
        threading.Thread(target=_read_answers, args=(self._process, self._arrived), daemon=True).start()

    def serves(self, call: Signature) -> bool:
        """Return True if a call differs from the first one in the batch's shapes alone, and the other process works.

        A forked process lacks the threads that ask the other one: it would wait for an answer for ever.
        """
        self._receive()
        first = self._first_call
        is_same = replace(call, batch=first.batch) == first
        return is_same and not self._failure and os.getpid() == self._pid

    def take(self, call: Signature, batch: Any) -> Answer | None:
        """Return the answer for a call's shape, once; None while there is none. The first call requests it.

        While `MAX_OUTSTANDING` shapes wait, no other is requested: it is when it comes again.
        """
        self._receive()
        if call not in self._numbers:
            if len(self._numbers) - len(self._answers) >= MAX_OUTSTANDING:
                return None
            number = self._numbers[call] = next(self._ids)
            # a pickle within a pickle: the other process answers a batch that it cannot load, too
            self._send(lambda: (number, pickle.dumps(_without_spare_memory(batch))))
        answer = self._answers.pop(self._numbers[call], None)
        if answer is not None:
            del self._numbers[call]
            if answer.change is None:
                self._warn(answer.reason)
        return answer

    def close(self) -> None:
        """End the other process, and remove its copy of the workload."""
        self._release()
        self._failure = self._failure or "closed"

    def _send(self, make_message: Callable[[], Any]) -> None:
        try:
            self._requests.put(pickle.dumps(make_message()))
        except Exception as error:  # noqa: BLE001 - a part of the user's batch may raise anything
            self._fail(" ".join(str(error).split()) or type(error).__name__)

    def _receive(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._arrived.get_nowait()
                if answer is None:
                    self._fail(f"the process that plans new shapes {self._describe_end()}")
                else:
                    self._answers[answer.number] = answer
                    if len(self._answers) > MAX_ANSWERS:
                        self._drop_oldest_answer()

    def _describe_end(self) -> str:
        """Return why no answer follows. The process still runs where it wrote something else: a library's output, say."""
        try:
            code = self._process.wait(1) if self._process is not None else 0
        except subprocess.TimeoutExpired:
            return "wrote something that is no answer"
        return f"ended with exit code {code}"

    def _drop_oldest_answer(self) -> None:
        """Drop an answer; if its shape comes again, it is requested again."""
        oldest = next(iter(self._answers))
        del self._answers[oldest]
        self._numbers = {call: number for call, number in self._numbers.items() if number != oldest}

    def _fail(self, reason: str) -> None:
        if not self._failure:
            self._failure = reason
            self._release()
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        warnings.warn(
            f"other_shapes='background': a shape is captured by the training process, which waits for it: {reason}",
            stacklevel=5,
        )


def _without_spare_memory(batch: Any) -> Any:
    """Return the batch with a copy of each tensor that is a part of a larger storage: a pickle contains whole storages."""
    flat = flatten_batch(batch)
    copies = {id(tensor): _copy_part(tensor) for tensor in flat.tensors}  # a tensor that comes twice stays one object
    if all(copies[id(tensor)] is tensor for tensor in flat.tensors):
        return batch
    return make_build(flat.structure)([copies[id(tensor)] for tensor in flat.tensors], flat.constants)


def _copy_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides of a tensor in a larger storage; any other tensor itself."""
    nbytes = span_bytes(tensor)
    if not nbytes or tensor.untyped_storage().nbytes() <= nbytes:
        return tensor
    span = tensor.detach().as_strided((nbytes // tensor.itemsize,), (1,))
    return span.clone().as_strided(tensor.shape, tensor.stride())


def _write_requests(pipe: IO[bytes], requests: "queue.SimpleQueue[bytes | None]") -> None:
    """Write requests into the pipe until the request is None. So the training process never waits for a full pipe.

    An error of the pipe is ignored here: the thread that reads the answers reports that the process ended.
    """
    with contextlib.suppress(OSError), pipe:
        while (request := requests.get()) is not None:
            pipe.write(request)
            pipe.flush()
            del request  # it may be large, and the next one may be far off


def _read_answers(process: "subprocess.Popen[bytes]", arrived: "queue.SimpleQueue[Answer | None]") -> None:
    """Pass on each answer, and None after the last one."""
    try:
        while process.stdout is not None:
            arrived.put(pickle.load(process.stdout))
    except Exception:  # noqa: BLE001 - the pipe ended, or the process wrote anything else
        arrived.put(None)
