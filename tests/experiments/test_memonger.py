"""The numbers of gradient sharing: at a small size anew, and those that are stored at full size."""

import json
from typing import Any

import pytest

from autotune.report.claims import Verdict, read, write
from experiments.memonger.sharing.net import held_bytes
from tests.experiments.scripts import EXPERIMENTS, script
from tests.graphs import training_chain

run = script("memonger/run.py")
STORED = json.loads((EXPERIMENTS / "memonger/results/results.json").read_text())


def without_seconds(found: Any) -> Any:
    """Bytes alone: they are the same on every machine."""
    if isinstance(found, dict):
        return {key: without_seconds(part) for key, part in found.items() if key != "seconds"}
    return found


def test_at_a_small_size_gradients_save_a_seventh_activations_more_and_an_arena_most():
    graph = run.captured(batch=8, size=64, depth=1, width=16)
    for plan in run.plans(graph).values():
        found = run.measure(graph, plan)
        assert sum(found["parts"].values()) == found["unshared_bytes"]
        assert run.savings(found)["gradients"] > 1 / 7
        assert run.savings(found)["with activations"] > 0
        shared = found["with activations"]["ways"]
        assert found["arena"]["max_live_bytes"] <= found["with activations"]["lower_bound_bytes"]
        assert found["with activations"]["lower_bound_bytes"] <= min(way["shared_bytes"] for way in shared.values())


def test_what_is_stored_saves_at_least_what_memonger_tells():
    assert (STORED["batch"], STORED["size"]) == (32, 224)
    for found in STORED["graphs"].values():
        for what, (before, after) in run.PUBLISHED.items():
            assert run.savings(found)[what] >= 1 - after / before


def test_the_committed_claims_are_what_the_stored_numbers_give(tmp_path):
    write(tmp_path, run.claims_of(STORED))
    assert read(tmp_path) == read(EXPERIMENTS / "memonger")
    assert {claim.verdict for claim in read(tmp_path)} == {Verdict.RATIOS, Verdict.INCOMPARABLE}


@pytest.mark.slow
def test_resnet_50_at_batch_32_takes_the_bytes_that_are_stored():
    graph = run.captured(batch=32, size=224)
    for name, plan in run.plans(graph).items():
        assert without_seconds(run.measure(graph, plan)) == without_seconds(STORED["graphs"][name])
    assert without_seconds(run.larger(32, 224)) == without_seconds(STORED["larger"])


@pytest.mark.slow
def test_a_segmentation_net_takes_the_bytes_that_are_stored():
    assert without_seconds(run.segmentation(run.SEGMENTED)) == without_seconds(STORED["segmentation"])


def test_every_blob_is_counted_in_one_part():
    graph = training_chain(3)
    for plan in run.plans(graph).values():
        _, blobs = run.net_of(graph, plan)
        parts = run.parts(graph, plan)
        assert sum(parts.values()) == held_bytes(run.blob_bytes(graph, blobs))
        assert parts["gradients of parameters"] == sum(v.nbytes for v in graph.values if v.role == "grad")
