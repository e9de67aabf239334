"""What differs between the graph of a plan and the present one is named in the user's terms."""

import pytest

from autotune.ir.graph import TrainGraph
from autotune.ir.graph_summary import describe_differences, summarize_graph
from autotune.testing.graphs import training_chain

PLANNED = training_chain(8, 10, 2)


@pytest.mark.parametrize(
    ("present", "text"),
    [
        (training_chain(8, 20, 2), "batch of 20 B instead of 10 B"),
        (training_chain(8, 10, 4), "parameters of 32 B instead of 16 B, optimizer state of 32 B instead of 16 B"),
        (
            training_chain(7, 10, 2),
            "parameters of 14 B in 7 tensors instead of 16 B in 8 tensors, "
            "optimizer state of 14 B in 7 tensors instead of 16 B in 8 tensors, "
            "8 ops of forward instead of 9, 14 ops of backward instead of 16, 7 ops of update instead of 8",
        ),
        (
            training_chain(8, 10, 2**20),
            "parameters of 8.0 MiB instead of 16 B, optimizer state of 8.0 MiB instead of 16 B",
        ),
        (
            PLANNED,
            "equal bytes and ops, but other shapes, types, arguments or wiring, or the plan is of an older autotune",
        ),
    ],
)
def test_differences_are_named_by_bytes_tensors_and_ops(present: TrainGraph, text: str) -> None:
    assert describe_differences(summarize_graph(PLANNED), summarize_graph(present)) == text


def test_bytes_that_are_equal_when_rounded_are_given_exactly() -> None:
    planned, present = (summarize_graph(training_chain(1, nbytes)) for nbytes in (2**20, 2**20 + 4))
    assert describe_differences(planned, present) == "batch of 1048580 B instead of 1048576 B"
