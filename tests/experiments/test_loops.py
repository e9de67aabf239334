"""Training loops under a plan are equal to plain PyTorch or refused clearly; the whole suite is a benchmark."""

import json
from collections.abc import Iterator

import pytest
import torch

from experiments.benchmarks.loops.cases import CASES
from experiments.benchmarks.loops.summary import counts, summarize
from experiments.benchmarks.loops.trial import Verdict, try_case
from experiments.benchmarks.loops.ways import Way
from tests.experiments.paths import BENCHMARKS

RECORDS = json.loads((BENCHMARKS / "loops" / "results" / "results.json").read_text(encoding="utf-8"))
FAST = (
    "tensor_in_the_closure_bound_anew", "python_buffer_assigned_anew_in_forward", "forward_hook_that_counts",
    "batch_that_requires_a_gradient_from_the_third_step_on", "same_tensor_twice_in_the_batch", "empty_last_batch",
    "head_resized_optimizer_forgotten", "nested_accumulation", "accumulation_that_changes", "checkpoint_loaded_between_micro_batches",
    "lbfgs_with_a_loss", "retain_graph", "double_backward", "autograd_grad_instead_of_backward", "hook_on_the_loss",
    "two_losses_backward_in_another_order", "loss_kept_over_an_update", "keyboard_interrupt_in_a_step", "loss_from_another_thread",
    "random_numbers_between_loss_and_backward", "parameter_that_the_loss_never_reads", "weights_changed_between_loss_and_backward",
    "extras_in_a_second_loss", "checkpoint_in_the_model", "pickle_and_deepcopy_of_the_planned_loss",
)  # fmt: skip
"""Loops of a second or less each."""
CAPTURED_ELSEWHERE = (
    "nested_accumulation", "accumulation_that_changes", "retain_graph", "double_backward",
    "weights_changed_between_loss_and_backward", "forward_hook_that_counts", "tensor_in_the_closure_bound_anew",
    "loss_kept_over_an_update", "two_losses_backward_in_another_order", "checkpoint_in_the_model",
)  # fmt: skip
"""Loops whose kind default tests of the capture run, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in CAPTURED_ELSEWHERE else ()) for name in FAST]
)
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

    trials = [try_case(case) for case in (differs, crashes, hides, draws)]
    assert [trial.verdict for trial in trials] == [
        Verdict.DIFFERENT,
        Verdict.CRASH,
        Verdict.DIFFERENT,
        Verdict.DIFFERENT,
    ]
    assert trials[0].detail == "result 1 of 3 differs by 1"
    assert "AssertionError: no (at crashes" in trials[1].detail
