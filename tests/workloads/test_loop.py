"""A loop is written in few words, and a wrong word is one line that names the right ones."""

import pytest
import torch

from autotune.errors import ConfigError
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload, check_workload
from tests.support.small import make, mlp


@pytest.mark.parametrize("loop", [Loop(), Loop(clip=True, scaler=True, accumulate=4), Loop(gradients=True)])
def test_a_loop_is_read_back_as_it_is_written(loop: Loop):
    assert Loop.parse(str(loop)) == loop


def test_the_order_of_the_words_and_spaces_do_not_matter():
    assert Loop.parse(" accumulate=4 ,clip") == Loop.parse("clip,accumulate=4") == Loop(clip=True, accumulate=4)


def test_the_number_of_micro_batches_is_no_part_of_the_kind():
    assert Loop(accumulate=2).kind == Loop(accumulate=9).kind == "accumulate"
    assert Loop(accumulate=1).kind == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clap", r"no word 'clap'; known: clip, scaler, accumulate=N, gradients; did you mean 'clip'\?"),
        ("clip=2", "no word 'clip=2'"),
        ("accumulate", "accumulate has no number; write accumulate=4 for 4 steps per update"),
        ("accumulate=two", "accumulate=two has no number"),
        ("accumulate=0", "accumulate is 0; it is the number of steps per update, so at least 1"),
        ("clip,clip", "clip is repeated"),
        ("gradients,clip", "gradients leaves the update to the loop; use it alone"),
    ],
)
def test_a_wrong_loop_is_refused_in_one_line(text: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        Loop.parse(text)
    assert "\n" not in str(caught.value)


def test_a_loop_that_takes_the_gradients_leaves_the_optimizer_out():
    workload = make(mlp)
    taken = Workload(workload.model, workload.loss_fn, workload.optimizer, workload.batch, Loop(gradients=True))
    assert taken.optimizer is None


def test_a_loop_without_the_parts_that_it_needs_is_refused():
    model, inputs = mlp(), torch.ones(6, 8)
    with pytest.raises(ConfigError, match="net: loop clip without an optimizer; give one, or leave the loop out"):
        check_workload(Workload(model, lambda model, batch: model(batch).sum(), None, inputs, Loop(clip=True)), "net")
    with pytest.raises(ConfigError, match="net: loop gradients without loss_fn"):
        check_workload(Workload(model, None, None, inputs, Loop(gradients=True)), "net")
