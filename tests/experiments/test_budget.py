"""What is claimed of PyTorch's knob follows from the points, and a step compiled under it is the user's step."""

from dataclasses import replace
from pathlib import Path

import torch

from autotune.report.claims import ClaimVerdict, Figure, read, write
from experiments.claims.pytorch_budget import __main__ as run
from experiments.claims.pytorch_budget import knob
from tests.experiments.paths import CLAIMS
from tests.workloads.zoo.tiny import TINY

NAME = "resnet18"


def points(made_bytes: dict[float, int], *, wrong: tuple[float, ...] = ()) -> list[run.BudgetPoint]:
    """Settings with what they make beside 100 static bytes; ours exactly what was asked for."""
    eager = run.BudgetPoint(NAME, "a processor", "eager", None, 100, None, 100 + made_bytes[1.0], 0.0, "")
    theirs = [
        replace(eager, who="pytorch", setting=setting, saved_bytes=int(500 * setting), peak_bytes=100 + size)
        for setting, size in made_bytes.items()
    ]
    theirs = [replace(point, gradient_error=0.5, worst="w") if point.setting in wrong else point for point in theirs]
    ours = [
        replace(eager, who="ours", setting=setting, peak_bytes=100 + int(setting * made_bytes[1.0]))
        for setting in run.SETTINGS[1:-1]
    ]
    return [eager, *theirs, *ours]


def test_a_knob_that_is_honoured_is_reproduced():
    found = points({setting: int(1000 * setting) for setting in run.SETTINGS})
    claims = run.claims_of(NAME, found)
    assert {claim.verdict for claim in claims if "saved" in claim.text} == {ClaimVerdict.REPRODUCED}
    assert {claim.verdict for claim in claims if "saved" not in claim.text} == {ClaimVerdict.NOT_COMPARABLE}
    assert "keep 3 of 3, bit for bit" in claims[1].conditions


def test_a_lower_setting_that_takes_more_and_wrong_gradients_are_counted():
    made = {1.0: 1000, 0.5: 900, 0.3: 950, 0.1: 1000, 0.0: 1000}
    claims = {claim.text.partition(": ")[2]: claim for claim in run.claims_of(NAME, points(made, wrong=(0.5, 0.0)))}
    assert claims["saved at a budget of 0.5, over 1.0"].verdict is ClaimVerdict.REPRODUCED
    assert claims["peak at a budget of 0.5, over 1.0"].verdict is ClaimVerdict.NOT_COMPARABLE  # nobody published one
    assert claims["peak at a budget of 0.5, over 1.0"].ours == Figure(0.9)
    assert claims["lower budgets that take more"].ours == Figure(2)
    assert claims["budgets with gradients off by over 1 %"].ours == Figure(2)
    assert "0.5 at 0.5, w" in claims["budgets with gradients off by over 1 %"].conditions


def test_the_committed_claims_are_what_the_stored_points_give(tmp_path: Path):
    folder = CLAIMS / "pytorch_budget"
    write(tmp_path, run.all_claims(run.read_rows(folder / "results/points.csv", run.BudgetPoint)))
    assert read(tmp_path) == read(folder)


def test_a_compiled_step_without_random_numbers_has_eager_s_loss():
    torch._dynamo.reset()
    given, plain = knob.workload(0.5, "resnet18", **TINY["resnet18"]), knob.ZOO["resnet18"](**TINY["resnet18"])
    assert torch.equal(given.loss_fn(given.model, given.batch), plain.loss_fn(plain.model, plain.batch))
