"""Nine models of the coverage suite train under two plans as in plain eager; the whole suite is a benchmark."""

import json

import pytest
import torch

from experiments.benchmarks.coverage.comparison import Difference, first_difference
from experiments.benchmarks.coverage.subject import Subject
from experiments.benchmarks.coverage.subjects import SUBJECTS
from experiments.benchmarks.coverage.summary import counts, rows
from experiments.benchmarks.coverage.trial import try_subject
from tests.experiments.paths import BENCHMARKS

FAST = (
    "convolutions_3d", "convolutions_3d_transposed", "weight_norm", "complex", "fft", "embedding_bags", "scatter",
    "autograd_function", "queue",
)  # fmt: skip
"""Models of one or two seconds each, of kinds that no test of the capture trains."""


@pytest.mark.parametrize("name", FAST)
def test_a_model_trains_under_two_plans_as_in_eager(name: str) -> None:
    trial = try_subject(SUBJECTS[name])
    assert (trial.verdict, trial.detail) == ("equal", "")
    assert trial.measured_bytes == trial.lowest_bytes


def test_twins_have_equal_bits_and_each_step_another_batch() -> None:
    subject = SUBJECTS["mlp"]
    one, other = (subject.workload().model.state_dict() for _ in range(2))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert torch.equal(subject.batch(1)[0], subject.batch(1)[0])
    assert not torch.equal(subject.batch(1)[0], subject.batch(2)[0])


def test_a_model_that_eager_cannot_train_is_no_finding() -> None:
    def fail(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such layer")

    subject = SUBJECTS["mlp"]
    broken = Subject("broken", "", subject.make_model, subject.draw, fail, subject.optimizer)
    trial = try_subject(broken)
    assert trial.verdict == "not run"
    assert "no such layer" in trial.detail


def test_a_difference_names_the_first_part_and_counts_the_worst() -> None:
    same, off, far = {"a": torch.ones(2)}, {"a": torch.ones(2) + 1e-6}, {"a": torch.zeros(2)}
    assert first_difference([same, same], [same, same]) is None
    assert first_difference([same], [{"a": torch.full((2,), torch.nan)}]) == Difference(0, "a", float("inf"))
    rounding = first_difference([same, same], [same, off])
    assert rounding is not None
    assert (rounding.step, rounding.name, rounding.is_rounding) == (1, "a", True)
    wrong = first_difference([same, same], [off, far])
    assert wrong is not None
    assert (wrong.step, wrong.worst, wrong.is_rounding) == (0, 1.0, False)
    assert first_difference([same], [{}]) == Difference(0, "a", float("inf"))


def test_the_table_has_a_row_for_each_record() -> None:
    document = json.loads((BENCHMARKS / "coverage" / "results" / "results.json").read_text(encoding="utf-8"))
    assert len(rows(document)) == 2 + len(document["models"])
    assert set(document["models"]) <= set(SUBJECTS)
    assert len(counts(document)) == 5
