"""The main module of a child: `python -m autotune.measure.worker.main COORDINATOR REQUESTS REPLIES`.

The arguments are a process id and two open pipes. The first line is a `Spec`, every further one a request; each request
gets one line of reply. Standard output and standard error go to the log, so a model that prints disturbs nothing.
"""

import contextlib
import os
import signal
import sys
import traceback
from functools import partial
from typing import IO, TYPE_CHECKING, assert_never

from autotune.errors import AutotuneError
from autotune.measure.limits import classify_error
from autotune.measure.messages import (
    BatchSizeRequest,
    BeginTiming,
    BoundsRequest,
    CompileRequest,
    DigestsRequest,
    EagerPeakRequest,
    EagerResultsRequest,
    Failure,
    FinishTiming,
    PlanCheckRequest,
    RegionsRequest,
    Reply,
    Request,
    StopTiming,
    SurveyRequest,
    TimeBlock,
    TimedDigestsRequest,
    TracedResultsRequest,
    WiringRequest,
    WitnessRequest,
    decode,
    encode,
)
from autotune.measure.parent import end_with_parent
from autotune.measure.spec import Spec
from autotune.runtime import malloc

if TYPE_CHECKING:
    from autotune.measure.worker.bench import Bench


def main() -> None:
    """Answer requests until the coordinator closes its pipe."""
    coordinator, requests_end, replies_end = map(int, sys.argv[1:])
    end_with_parent(coordinator, signal.SIGKILL)  # a Ctrl-C does not arrive here: this is a session of its own
    with os.fdopen(requests_end, "rb") as requests, os.fdopen(replies_end, "wb") as replies:
        spec: Spec = decode(next(requests))
        with contextlib.suppress(Exception):  # the first request raises it again, and then it is answered
            _import_bench(spec)
        bench: Bench | None = None
        for line in requests:
            reply: Reply
            try:
                if bench is None:
                    bench = _import_bench(spec)(spec)
                    bench.report = partial(_send, replies)
                request: Request = decode(line)
                with bench.awake(parks=not (isinstance(request, TimeBlock) and not request.rests)):
                    reply = answer(bench, request)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's model may raise anything, and it must reach the coordinator
                with contextlib.suppress(Exception):  # the log may be on a full disk, and the user may have closed it
                    traceback.print_exc()
                reply = _failure(error)
            _send(replies, reply)


def answer(bench: "Bench", request: Request) -> Reply:
    """Execute one request and return its reply."""
    match request:
        case SurveyRequest():
            return bench.survey()
        case EagerPeakRequest(results):
            return bench.measure_eager_peak(results)
        case EagerResultsRequest(results):
            return bench.write_eager_results(results)
        case PlanCheckRequest(plan, reference, tolerance):
            return bench.check_plan(plan, reference, tolerance)
        case TracedResultsRequest(results):
            return bench.write_traced_results(results)
        case RegionsRequest(plan, reference, traced):
            return bench.compare_regions(plan, reference, traced)
        case WitnessRequest(reference, witness):
            return bench.write_witness(reference, witness)
        case BoundsRequest(reference, reasons):
            return bench.derive_bounds(reference, reasons)
        case BatchSizeRequest():
            return bench.batch_size()
        case WiringRequest():
            return bench.wiring()
        case CompileRequest():
            return bench.compile()
        case BeginTiming(plan, rests):
            return bench.begin_timing(plan, rests=rests)
        case TimeBlock(counts, rests):
            return bench.time_block(counts=counts, rests=rests)
        case FinishTiming(verify):
            return bench.finish_timing(verify=verify)
        case StopTiming():
            return bench.stop_timing()
        case DigestsRequest(plan):
            return bench.digests(plan)
        case TimedDigestsRequest():
            return bench.hash_timed()
    assert_never(request)


def _send(replies: IO[bytes], reply: Reply) -> None:
    replies.write(encode(reply))
    replies.flush()


def _failure(error: BaseException) -> Failure:
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    place = "" if isinstance(error, AutotuneError) else _locate(error)  # their messages name the line where it helps
    trace = "".join(traceback.format_exception(error)).strip()
    return Failure(classify_error(error), f"{lines[0] if lines else name}{place}", name, trace)


def _locate(error: BaseException) -> str:
    """Return the innermost line of the user's code that raised an error; empty where only libraries ran."""
    with contextlib.suppress(Exception):  # it may be the error of importing torch
        from autotune.workloads.factory import innermost_user_line

        if line := innermost_user_line(traceback.extract_tb(error.__traceback__)):
            return f" at {line}"
    return ""


def _import_bench(spec: Spec) -> "type[Bench]":
    """Import torch and all that a request needs: a child that is started early does so while others work."""
    if spec.return_memory:  # before torch allocates anything
        malloc.always_release()
    from autotune.measure.worker.bench import Bench

    return Bench


if __name__ == "__main__":
    main()
