"""The harness's child processes by name: each started at its first request, replaced when it fails, ended with its files."""

import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.measure.allocator_env import allocator_environment
from autotune.measure.child import Child
from autotune.measure.messages import Failed, Spec

_FOR_BYTES = ("bytes", "eager", "numerics")
_BEGUN = ("block", "finish")
"""Requests that only the process which began can answer: if it died, it says why."""


class Children:
    """Processes of one workload; `spec` is what all have in common but `scratch` and `return_memory`, which are set here."""

    def __init__(self, spec: Spec, log_dir: Path, time_limit_seconds: float) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=log_dir))
        self.time_limit_seconds = time_limit_seconds
        self.limit = ""
        """What enforces the memory limit, if one was asked for; known once a child has started."""
        self.living: dict[str, Child] = {}
        self._spec = spec
        self._log_dir = log_dir
        self._numbers = itertools.count(1)

    def ask(
        self,
        name: str,
        request: dict[str, Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Ask the child of this name, a new one if need be (with other `arguments` of the factory, where given).

        Raises Failed where it does not answer; it is ended, and the next request gets a new one. So does a plan whose
        allocator needs another environment.
        """
        child, environment = self.living.get(name), self._environment(request)
        usable = child is not None and environment in (None, child.environment)
        if child is None or not (usable and (child.alive or request["do"] in _BEGUN)):
            self.end(name)
            child = self.living[name] = self._start(name, arguments, environment or {})
        try:
            return child.ask(request, self.time_limit_seconds if seconds is None else seconds)
        except BaseException:
            self.end(name)
            raise

    def try_to_ask(self, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """The same, where a failure is no one's fault: None then."""
        try:
            return self.ask(name, request)
        except Failed:
            return None

    def end(self, name: str) -> None:
        child = self.living.pop(name, None)
        if child is not None:
            child.end()
            shutil.rmtree(self.scratch / f"initial-{child.pid}", ignore_errors=True)  # as large as the model

    def end_all(self) -> None:
        for name in list(self.living):
            self.end(name)

    def close(self) -> None:
        """End all and remove their files; the logs stay."""
        self.end_all()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _environment(self, request: Mapping[str, Any]) -> dict[str, str] | None:
        """None where any will do."""
        plan = request.get("plan")
        return None if plan is None else allocator_environment(plan["allocator"], self._spec.device_kind, os.environ)

    def _start(self, name: str, arguments: Mapping[str, Any] | None, environment: Mapping[str, str]) -> Child:
        spec = replace(self._spec, scratch=str(self.scratch), return_memory=name in _FOR_BYTES)
        if arguments is not None:
            spec = replace(spec, arguments=dict(arguments))
        child = Child.start(spec, self._log_dir / f"{name}-{next(self._numbers)}.log", environment)
        self.limit = child.limit
        return child
