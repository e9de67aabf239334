"""One worker thread that does one job after another."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from autotune.errors import StoreError

T = TypeVar("T")


class Lane:
    """Does jobs in the order in which they came; a ticket lets another lane wait for one of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._begun = self._done = 0
        self._turn = threading.Condition()
        self._stopping = False
        # a process whose disk hangs must still be able to end
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> tuple["Future[T]", int]:
        """The job's future, and its ticket. A job must have let go of its tensors when it returns or raises."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # what is written or read cannot be taken back
        self._begun += 1
        self._jobs.put((job, future))
        return future, self._begun

    def wait(self, ticket: int) -> None:
        """Until that job is done, failed or dropped."""
        with self._turn:
            self._turn.wait_for(lambda: self._done >= ticket)

    def stop(self) -> None:
        """Fail the jobs that are not begun."""
        self._stopping = True
        self._jobs.put(None)

    def join(self) -> None:
        """Until the job under way is done."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            del item
            result, failure = None, None
            try:
                if self._stopping:
                    raise StoreError(f"{self.name}: the store was closed first")
                result = job()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                failure = error
            del job
            with self._turn:
                self._done += 1
                self._turn.notify_all()
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            # or the thread, idle, would keep the last tensor alive
            del future, result, failure
