"""A child's main: `python -m autotune.measure.worker.main COORDINATOR REQUESTS REPLIES`, a process and two open pipes.

The first line is a Spec, every further one a request `{"do": NAME, ...}`; each gets one line of reply. Standard output
and error are the log's: a model that prints disturbs nothing.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import IO, Any

from autotune.measure.limits import outcome_of
from autotune.measure.messages import Spec
from autotune.records.json_codec import from_json
from autotune.runtime import malloc

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer until the coordinator closes its end."""
    coordinator, requests_end, replies_end = map(int, sys.argv[1:])
    _die_with(coordinator)
    requests, replies = os.fdopen(requests_end), os.fdopen(replies_end, "w")
    asked = iter(requests)
    spec = from_json(Spec, json.loads(next(asked)), where="spec")
    bench: Any = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal bench
        if bench is None:
            bench = _bench(spec)
        return dict(getattr(bench, request.pop("do"))(**request))

    for line in asked:
        _reply(replies, answer, json.loads(line))


def _reply(replies: IO[str], answer: Any, request: dict[str, Any]) -> None:
    try:
        reply = {"ok": answer(request)}
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything, and it must reach the coordinator
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        name = type(error).__name__
        detail = lines[0] if lines else name
        reply = {"failed": {"outcome": outcome_of(error), "detail": detail, "error": name}}
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _bench(spec: Spec) -> Any:
    if spec.return_memory:  # before torch allocates anything
        malloc.return_always()
    from autotune.measure.worker.bench import Bench

    return Bench(spec)


def _die_with(coordinator: int) -> None:
    """Also when it is killed with -9; a terminal's Ctrl-C never comes here, as this is a session of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != coordinator:  # it died before we asked
        sys.exit(1)


if __name__ == "__main__":
    main()
