"""Training loops under a plan are equal to plain PyTorch or refused clearly; the whole suite is a benchmark."""

import json
import warnings
from collections.abc import Iterator

import pytest
import torch

from autotune.capture.python.side_effects import SideEffectWarning
from experiments.benchmarks.loops.cases import CASES
from experiments.benchmarks.loops.summary import counts, summarize
from experiments.benchmarks.loops.trial import Verdict, try_case
from experiments.benchmarks.loops.ways import Way
from tests.experiments.paths import BENCHMARKS

RECORDS = json.loads((BENCHMARKS / "loops" / "results" / "results.json").read_text(encoding="utf-8"))
FAST = (
    "python_buffer_assigned_anew_in_forward", "batch_that_requires_a_gradient_from_the_third_step_on",
    "same_tensor_twice_in_the_batch", "empty_last_batch", "head_resized_optimizer_forgotten",
    "checkpoint_loaded_between_micro_batches", "lbfgs_with_a_loss", "autograd_grad_instead_of_backward", "hook_on_the_loss",
    "keyboard_interrupt_in_a_step", "loss_from_another_thread", "random_numbers_between_loss_and_backward",
    "parameter_that_the_loss_never_reads", "extras_in_a_second_loss", "pickle_and_deepcopy_of_the_planned_loss",
)  # fmt: skip
"""Loops of a second or less each, of kinds that no test of the capture runs."""
SLOW = ("nested_accumulation", "loss_kept_over_an_update", "checkpoint_in_the_model")
"""Loops of which default tests of the capture and of planned losses run a part."""


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_loop_has_the_verdict_on_record_and_is_never_another_training(name: str):
    trial = try_case(CASES[name])
    assert trial.verdict == RECORDS["loops"][name]["verdict"]
    assert trial.verdict not in (Verdict.DIFFERENT, Verdict.CRASH)


def test_every_loop_is_on_record_equal_or_refused_with_a_next_step():
    assert list(RECORDS["loops"]) == list(CASES)
    assert set(counts(RECORDS)) == {Verdict.EQUAL, Verdict.REFUSED, Verdict.WARNED}
    assert counts(RECORDS)[Verdict.EQUAL] > 100
    assert (BENCHMARKS / "loops" / "results" / "summary.md").read_text(encoding="utf-8") == summarize(RECORDS)


def test_a_trial_names_a_difference_a_crash_and_an_error_that_a_plan_hides():
    def differs(way: Way) -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        yield torch.full((2,), float(way.is_planned))

    def crashes(way: Way) -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        if way.is_planned:
            raise AssertionError("no")

    def hides(way: Way) -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        if not way.is_planned:
            raise RuntimeError("as eager says")

    def draws(way: Way) -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        if way.is_planned:
            torch.rand(1)

    def counts_and_differs(way: Way) -> Iterator[torch.Tensor]:
        if way.is_planned:
            warnings.warn("calls changes", SideEffectWarning, stacklevel=1)
        yield torch.tensor(int(way.is_planned))
        yield torch.full((2,), float(way.is_planned))

    trials = [try_case(case) for case in (differs, crashes, hides, draws, counts_and_differs)]
    assert [trial.verdict for trial in trials] == [
        Verdict.DIFFERENT,
        Verdict.CRASH,
        Verdict.DIFFERENT,
        Verdict.DIFFERENT,
        Verdict.DIFFERENT,
    ]
    assert trials[0].detail == "result 1 of 3 differs by 1"
    assert "AssertionError: no (at crashes" in trials[1].detail
