"""A captured step is compared with eager relative to eager's own rounding error.

One case runs in processes of their own. The others ask the same questions in this process: to start four processes with
torch and its tracer for each takes twenty times as long.
"""

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import NumericsError
from autotune.ir.plan import Plan
from autotune.measure.harness import Harness
from autotune.measure.limits import outcome_of
from autotune.measure.messages import Failed, Spec
from autotune.measure.worker import bench as procedure
from autotune.measure.worker.bench import Bench
from autotune.records.measurement import Outcome
from autotune.workloads.reference import WorkloadRef
from tests.zoo.tiny import TINY

SEEDED = str(Path(__file__).with_name("seeded.py"))
SLOW = pytest.mark.slow


class Here:
    """`Children` whose work is done in this process."""

    limit = ""

    def __init__(self, spec: Spec, log_dir: Path, time_limit_seconds: float) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(dir=log_dir))
        self.time_limit_seconds = time_limit_seconds
        self._spec = spec
        self._benches: dict[str, Bench] = {}

    def ask(
        self,
        name: str,
        request: dict[str, Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        if name not in self._benches:
            scratch = tempfile.mkdtemp(prefix=name, dir=self.scratch)
            spec = replace(self._spec, scratch=scratch)
            self._benches[name] = Bench(spec if arguments is None else replace(spec, arguments=dict(arguments)))
        given = json.loads(json.dumps(request))
        done = getattr(self._benches[name], given.pop("do"))
        try:
            return dict(json.loads(json.dumps(done(**given))))
        except RuntimeError as error:  # masks drawn in float64 end so, and the harness then does without
            raise Failed(outcome_of(error), str(error), type(error).__name__) from error

    try_to_ask = ask

    def end(self, name: str) -> None:
        self._benches.pop(name, None)

    def end_all(self) -> None:
        self._benches.clear()

    close = end_all


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No processes; generators and the capture that a workload replaces are put back."""
    monkeypatch.setattr("autotune.measure.harness.Children", Here)
    monkeypatch.setattr(procedure, "capture", procedure.capture)
    python, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpys)


def harness(tmp_path: Path, reference: str, arguments: dict[str, object]) -> Harness:
    return Harness(WorkloadRef(reference, arguments), log_dir=tmp_path / "logs", samples=2)


def refuse(tmp_path: Path, factory: str, parameter: str, loss_scale: float) -> None:
    wrong = {"factory": factory, "parameter": parameter, "loss_scale": loss_scale}
    with (
        harness(tmp_path, f"{SEEDED}:scaled", wrong) as runner,
        pytest.raises(NumericsError, match=rf"step 0\.gradient {parameter} is off by \d+ of its bound"),
    ):
        runner.prepare()


@SLOW
def test_a_gradient_off_by_a_thousandth_is_refused_by_processes_of_their_own(tmp_path: Path) -> None:
    refuse(tmp_path, "mlp", "3.weight", 1e-6)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("factory", "parameter", "loss_scale"),
    [
        ("mlp", "3.weight", 1e-6),
        pytest.param("mlp", "3.weight", 1.0, marks=SLOW),
        pytest.param("mlp", "0.bias", 1e6, marks=SLOW),
        pytest.param("gpt2", "transformer.h.0.mlp.c_fc.weight", 1e-6, marks=SLOW),
        pytest.param("gpt2", "transformer.h.0.attn.c_attn.weight", 1.0, marks=SLOW),
        pytest.param("gpt2", "transformer.h.0.mlp.c_fc.weight", 1e6, marks=SLOW),
    ],
)
def test_a_gradient_off_by_a_thousandth_is_refused_at_any_scale_of_the_loss(
    tmp_path: Path, factory: str, parameter: str, loss_scale: float
) -> None:
    refuse(tmp_path, factory, parameter, loss_scale)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("reference", "arguments", "against"),
    [
        pytest.param("segformer", TINY["segformer"], "float64", id="segformer", marks=SLOW),
        # other masks are drawn in float64, which is another computation then
        pytest.param("segformer", {**TINY["segformer"], "dropout": 0.1}, "eager", id="dropout", marks=SLOW),
        pytest.param(f"{SEEDED}:language_model", {"name": "Llama"}, "float64", id="llama", marks=SLOW),
        pytest.param(f"{SEEDED}:language_model", {"name": "Qwen2"}, "float64", id="qwen2", marks=SLOW),
        pytest.param(f"{SEEDED}:language_model", {"name": "Gemma"}, "float64", id="gemma", marks=SLOW),
        pytest.param(f"{SEEDED}:transposed_volumes", {}, "float64", id="conv3d_transpose", marks=SLOW),
        pytest.param(f"{SEEDED}:scaled_up", {}, "float64", id="bilinear", marks=SLOW),
    ],
)
def test_rounding_is_admitted_and_plans_agree_with_the_captured_step_bit_for_bit(
    tmp_path: Path, reference: str, arguments: dict[str, object], against: str
) -> None:
    with harness(tmp_path, reference, arguments) as runner:
        prepared = runner.prepare()
        seen = runner.measure(Plan.traced(prepared.graph))
    assert prepared.capture_error is not None
    assert (seen.outcome, seen.max_error, seen.verified) == (Outcome.OK, 0.0, prepared.verified)
    if prepared.capture_error == 0.0:  # the kernels may agree on this machine
        assert prepared.verified == "bit-equal to eager"
    else:
        assert 0.0 < prepared.capture_error <= 1.0
        assert f"relative gate against {against}" in prepared.verified
        assert f"worst {prepared.capture_error:.2g} of the bound" in prepared.verified
