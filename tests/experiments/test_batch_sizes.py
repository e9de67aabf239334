"""Table of the benchmark of batch sizes: ratios are of samples per second, and largest batches are those that were measured to fit."""

import pytest

from experiments.benchmarks.batch_sizes import __main__ as run


def test_speed_counts_samples_not_steps():
    """A plan with twice the samples in 1.6 times the seconds processes a quarter more."""
    blocks = [
        {"round": 0, "variant": "eager", "seconds": [1.0]},
        {"round": 0, "variant": "plan", "seconds": [1.6]},
        {"round": 0, "variant": "eager", "seconds": [1.0]},
    ]
    turns = {"eager": {"batch": 8, "accumulate": 1}, "plan": {"batch": 16, "accumulate": 1}, "blocks": blocks}
    assert run.speedups(turns) == pytest.approx([1.25])


def test_a_size_that_did_not_fit_is_no_largest_batch():
    def measured(batch: int, outcome: str) -> dict[str, object]:
        return {"size": {"batch": batch, "accumulate": 1}, "eager": {"outcome": outcome}, "plan": None}

    search = {"measured": [measured(4, "ok"), measured(9, "out_of_memory"), measured(7, "ok")]}
    assert run.largest_batch(search, "eager") == 7
    assert run.largest_batch(search, "plan") == 0
    assert run.largest_batch({"error": "no size fits"}, "plan") == 0


@pytest.mark.parametrize(("settled", "cells"), [(True, "| 4 | 8 | 2.00 |"), (False, "| at least 4 | 8 | - |")])
def test_a_ratio_needs_eager_s_largest_batch_to_be_known(settled: bool, cells: str):
    ok = {"outcome": "ok"}
    measured = [{"size": {"batch": size, "accumulate": 1}, side: ok} for size, side in ((4, "eager"), (8, "plan"))]
    measured = [{"eager": None, "plan": None, **each} for each in measured]
    batch = {"measured": measured, "settled": {"eager": settled, "plan": True}}
    document = {
        "machine": {"silicon": "x"}, "commit": "c", "date": "d", "load_before": 0.0, "command": "python", "budget": "200%",
        "workloads": {"gpt2": {"arguments": {}, "batch": batch}},
    }  # fmt: skip
    text = run.summarize(document)
    assert cells in text
    assert ("geometric mean 2.00" in text) == settled


def test_a_workload_that_failed_is_a_row_without_figures():
    document = {
        "machine": {"silicon": "x"}, "commit": "c", "date": "d", "load_before": 0.0, "command": "python", "budget": "200%",
        "workloads": {"gpt2": {"arguments": {}, "batch": {"error": "no"}, "throughput": {"error": "no"}}},
    }  # fmt: skip
    assert "| gpt2 | nan | -, - | - | - | - | - | - | - |" in run.summarize(document)
