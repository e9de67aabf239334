"""Children without processes, for tests whose subject is what a child computes and not the process."""

import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from autotune.measure.children import Children, ChildRole
from autotune.measure.limits import classify_error
from autotune.measure.messages import ChildError, Expects, ReplyT, decode, encode, ignore_progress
from autotune.measure.spec import Spec
from autotune.measure.worker import planned_steps as procedure
from autotune.measure.worker.bench import Bench
from autotune.measure.worker.main import answer


class InProcessChildren:
    """`Children` whose work is done in this process."""

    limit = ""
    report = staticmethod(ignore_progress)

    def __init__(self, spec: Spec) -> None:
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(dir=spec.log_dir))
        self.time_limit_seconds = spec.time_limit_seconds
        self._spec = spec
        self._benches: dict[ChildRole, Bench] = {}

    def ask(
        self,
        role: ChildRole,
        request: Expects[ReplyT],
        *,
        arguments: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> ReplyT:
        if role not in self._benches:
            spec = replace(self._spec, scratch=Path(tempfile.mkdtemp(prefix=role, dir=self.scratch)))
            if arguments is not None:
                spec = replace(spec, workload=replace(spec.workload, arguments=dict(arguments)))
            self._benches[role] = Bench(spec)
        try:
            reply = answer(self._benches[role], decode(encode(request)))
            return cast("ReplyT", decode(encode(reply)))
        except RuntimeError as error:  # masks drawn in float64 end so, and the harness then does without
            raise ChildError(classify_error(error), str(error), type(error).__name__) from error

    def start_early(self, *roles: ChildRole) -> None:
        """There are no processes to start."""

    try_to_ask = ask
    ask_for_survey = Children.ask_for_survey

    def counters(self) -> None:
        """This process does all work, whose load nobody asks for."""

    def end(self, role: ChildRole) -> None:
        self._benches.pop(role, None)

    def end_all(self) -> None:
        self._benches.clear()

    close = end_all


@pytest.fixture
def children_in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No processes; generators and the capture that a workload replaces are put back."""
    monkeypatch.setattr("autotune.measure.harness.Children", InProcessChildren)
    monkeypatch.setattr(procedure, "capture", procedure.capture)
    python, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpys)
