"""Run transfers in a worker thread, one after another."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from autotune.errors import StoreError

T = TypeVar("T")


class TransferWorker:
    """A thread that runs jobs in the order of their submission. Each job has a ticket that other threads can wait for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._submitted = self._finished = 0
        self._progress = threading.Condition()
        self._stopping = False
        self._ended = threading.Event()
        # a daemon, so that a process whose disk hangs can still exit
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> tuple["Future[T]", int]:
        """Queue a job; return its future and its ticket. A job must not hold tensors after it returns or raises."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # transfers cannot be cancelled
        self._submitted += 1
        self._jobs.put((job, future))
        return future, self._submitted

    def wait(self, ticket: int) -> None:
        """Wait until the job of this ticket has finished, failed or been dropped."""
        with self._progress:
            self._progress.wait_for(lambda: self._finished >= ticket)

    def stop(self) -> None:
        """Fail all jobs that have not started."""
        self._stopping = True
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the running job to end. After an interrupt a second call waits again."""
        # in a forked process the thread is not alive, and `_ended` may never be set
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            # before Python 3.13 an interrupted `Thread.join` marks a running thread as ended
            self._ended.wait()
            self._thread.join()

    def _run(self) -> None:
        try:
            self._run_jobs()
        finally:
            self._ended.set()

    def _run_jobs(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            del item
            result, failure = None, None
            try:
                if self._stopping:
                    raise StoreError(f"{self.name}: the store was closed before this transfer started")
                result = job()
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is waited for
                failure = error
            del job
            with self._progress:
                self._finished += 1
                self._progress.notify_all()
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            # the idle thread would otherwise keep the last tensor alive
            del future, result, failure
