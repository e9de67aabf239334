"""A captured step is compared with eager relative to eager's own rounding error.

The questions are asked in this process: to start four processes with torch and its tracer for each takes twenty times as
long.
"""

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import NumericsError
from autotune.ir.plan import Plan
from autotune.measure.children import ChildRole
from autotune.measure.harness import Harness
from autotune.measure.messages import (
    BoundsRequest,
    Comparison,
    Done,
    GateDescription,
    MemoryPeak,
    PlanCheck,
    PlanCheckRequest,
    WitnessRequest,
)
from autotune.measure.numerics import ExpectedResults, check_plan
from autotune.measure.spec import Spec
from autotune.records.measurement import Outcome
from autotune.testing.graphs import chain
from autotune.workloads.reference import WorkloadRef
from tests.workloads.zoo.tiny import TINY

SEEDED = str(Path(__file__).with_name("seeded.py"))
SLOW = pytest.mark.slow


def harness(tmp_path: Path, reference: str, arguments: dict[str, object]) -> Harness:
    return Harness(Spec(WorkloadRef(reference, arguments), tmp_path / "logs", samples=2))


def refuse(tmp_path: Path, factory: str, parameter: str, loss_scale: float) -> None:
    wrong = {"factory": factory, "parameter": parameter, "loss_scale": loss_scale}
    with (
        harness(tmp_path, f"{SEEDED}:scaled", wrong) as runner,
        pytest.raises(NumericsError, match=rf"step 0\.gradient {parameter} is off by \d+ of its bound"),
    ):
        runner.prepare()


@pytest.mark.usefixtures("children_in_process")
@pytest.mark.parametrize(
    ("factory", "parameter", "loss_scale"),
    [
        ("mlp", "3.weight", 1e-6),
        pytest.param("mlp", "0.bias", 1e6, marks=SLOW),
        pytest.param("gpt2", "transformer.h.0.mlp.c_fc.weight", 1e-6, marks=SLOW),
    ],
)
def test_a_gradient_off_by_a_thousandth_is_refused_at_any_scale_of_the_loss(
    tmp_path: Path, factory: str, parameter: str, loss_scale: float
) -> None:
    refuse(tmp_path, factory, parameter, loss_scale)


@pytest.mark.usefixtures("children_in_process")
@pytest.mark.parametrize(
    ("reference", "arguments", "against"),
    [
        pytest.param("segformer", TINY["segformer"], "float64", id="segformer", marks=SLOW),
        # other masks are drawn in float64, which is another computation then
        pytest.param("segformer", {**TINY["segformer"], "dropout": 0.1}, "eager", id="dropout", marks=SLOW),
        pytest.param(f"{SEEDED}:language_model", {"name": "Llama"}, "float64", id="llama", marks=SLOW),
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


class Answers:
    """Children that find the given errors, one plan after the other, and count the requests."""

    def __init__(self, *errors: float) -> None:
        self.errors, self.asked = list(errors), []

    def ask(self, role: ChildRole, request: Any, *, arguments: object = None) -> Any:
        self.asked.append(type(request))
        match request:
            case PlanCheckRequest(reference=reference):
                assert reference is not None
                return PlanCheck(Comparison(self.errors.pop(0), "some"), MemoryPeak(2, 1, "fake"))
            case BoundsRequest():
                return GateDescription("relative gate")
        return Done()

    def end(self, role: ChildRole) -> None:
        pass


def test_bounds_are_derived_once_for_the_first_plan_on_a_gpu_that_is_not_bit_equal(tmp_path: Path) -> None:
    children: Any = Answers(0.0, 3.0, 0.5, 0.25)
    expected: ExpectedResults | None = ExpectedResults({}, tmp_path)
    plan = Plan.traced(chain(2))
    errors, requests = [], []
    for _ in range(3):
        children.asked.clear()
        check, expected = check_plan(children, expected, ChildRole.PLAN_BYTES, plan, tolerance=1.0, compares=True)
        assert check.comparison is not None
        errors.append(check.comparison.max_error)
        requests.append(list(children.asked))
    assert errors == [0.0, 0.5, 0.25]
    derived = [WitnessRequest, WitnessRequest, WitnessRequest, BoundsRequest]
    assert requests == [[PlanCheckRequest], [PlanCheckRequest, *derived, PlanCheckRequest], [PlanCheckRequest]]
    assert expected is not None
    assert expected.gate == "relative gate"


def test_no_bounds_are_derived_where_every_bit_has_to_agree(tmp_path: Path) -> None:
    children: Any = Answers(3.0)
    expected = ExpectedResults({}, tmp_path)
    check, after = check_plan(
        children, expected, ChildRole.PLAN_BYTES, Plan.traced(chain(2)), tolerance=0.0, compares=True
    )
    assert check.comparison == Comparison(3.0, "some")
    assert (after, children.asked) == (expected, [PlanCheckRequest])


@pytest.mark.usefixtures("children_in_process")
def test_no_process_is_started_ahead_for_a_survey_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its libraries' memory beside every later measurement."""
    started: list[ChildRole] = []
    monkeypatch.setattr("autotune.measure.harness.Children.start_early", lambda _, *roles: started.extend(roles))
    for surveys_first in (True, False):
        started.clear()
        with harness(tmp_path, f"{SEEDED}:scaled_up", {}) as runner:
            if surveys_first:
                runner.survey()
            runner.baseline()
        assert (ChildRole.SURVEY in started) is not surveys_first
