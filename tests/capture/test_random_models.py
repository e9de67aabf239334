"""Steps that nobody wrote, under plans that nobody chose: equal to eager bit for bit, at the bytes that were estimated.

The slow tests run the seeds below 16; `AUTOTUNE_RANDOM_MODELS=300` in the environment runs those below 300.
"""

import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from tests.support.planned import Case, difference, eager_trace, planned_trace, problem
from tests.support.random_chains import Chain, chains
from tests.support.random_models import draw, runs_in_eager, shrink

MANY, FEW = int(os.environ.get("AUTOTUNE_RANDOM_MODELS", "16")), 4
"""Seeds of the slow and the default tests."""


@pytest.fixture(scope="module")
def stores() -> Iterator[Mapping[str, Path]]:
    """Directories of stores, one of them in memory where this machine has such a place."""
    with tempfile.TemporaryDirectory() as disk:
        shared = Path("/dev/shm")
        if not shared.is_dir():
            yield {"ssd": Path(disk)}
            return
        with tempfile.TemporaryDirectory(dir=shared) as memory:
            yield {"ssd": Path(disk), "ramdisk": Path(memory)}


def assert_plans_change_nothing(seed: int, stores: Mapping[str, Path]) -> None:
    """Compare a seed's step under two plans with eager; a failure shows the step's source."""
    source = draw(seed)
    try:
        found = problem(Case(f"seed{seed}", source.workload, source.batch), random.Random(seed), stores)
    except Exception as error:
        error.add_note(f"of random_models.draw({seed}):\n{source}")
        raise
    assert not found, f"{found}\n{source}"


@pytest.mark.parametrize("seed", range(FEW))
def test_plans_of_random_models_change_no_bit_and_no_estimated_byte(seed: int, stores: Mapping[str, Path]):
    assert_plans_change_nothing(seed, stores)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, MANY))
def test_plans_of_many_random_models_change_no_bit_and_no_estimated_byte(seed: int, stores: Mapping[str, Path]):
    assert_plans_change_nothing(seed, stores)


NO_SHRINKING = [Phase.explicit, Phase.generate]
"""A chain takes seconds; to shrink one that fails, run the test with all phases."""


def assert_a_chain_changes_nothing(chain: Chain, seed: int, stores: Mapping[str, Path]) -> None:
    assume(chain.runs_in_eager())
    assert problem(Case("chain", chain.make, chain.batch), random.Random(seed), stores) == ""


@settings(max_examples=2, derandomize=True, phases=NO_SHRINKING)
@given(chain=chains(), seed=st.integers(0, 1000))
def test_plans_of_chains_of_layers_change_no_bit_and_no_estimated_byte(
    stores: Mapping[str, Path], chain: Chain, seed: int
):
    assert_a_chain_changes_nothing(chain, seed, stores)


@pytest.mark.slow
@settings(max_examples=4, derandomize=True, phases=NO_SHRINKING)
@given(chain=chains(), seed=st.integers(0, 1000))
def test_plans_of_more_chains_of_layers_change_no_bit_and_no_estimated_byte(
    stores: Mapping[str, Path], chain: Chain, seed: int
):
    assert_a_chain_changes_nothing(chain, seed, stores)


def test_a_batch_norm_of_a_transposed_view_is_made_again_to_the_same_bits(stores: Mapping[str, Path]):
    branches = ("branches", (("pool", None), ("dropout", False, 1.0)), (("norm", "batch"),))
    chain = Chain((("residual", ()), ("activation", "relu"), branches, ("residual", ())), 1, 1, "adamw", 0.0)
    case = Case("transposed", chain.make, chain.batch)
    wanted, graph = eager_trace(case), capture(case.make()).graph
    (again,) = [op for op in graph.ops if op.alias_of is not None]
    commit = next(op.id for op in graph.ops if op.target == "commit")
    order = [op for op in range(len(graph.ops)) if op != commit]
    order.insert(order.index(again.id), commit)  # what is handed over otherwise is computed
    assert difference(wanted, planned_trace(case, Plan(tuple(order)), stores)) == ""


def test_nine_in_ten_random_models_run_in_eager_as_drawn():
    assert sum(draw(seed).attempt for seed in range(60)) <= 6


def test_a_seed_makes_twins_and_another_seed_another_model():
    case = Case("twin", draw(5).workload, draw(5).batch)
    assert difference(eager_trace(case), eager_trace(case)) == ""
    assert str(draw(5)) != str(draw(6))


def test_one_changed_bit_of_a_gradient_is_found_by_name():
    case = Case("twin", draw(5).workload, draw(5).batch)
    wanted, made = eager_trace(case), eager_trace(case)
    name = next(key for key in made[3] if key.startswith("gradient of "))
    made[3][name].view(torch.int32).view(-1)[0] ^= 1
    assert difference(wanted, made).startswith(f"step 3: {name} differs by ")


def test_shrinking_leaves_the_lines_that_fail():
    source = next(draw(seed) for seed in range(50) if len(draw(seed).nodes) > 15 and "LayerNorm" in str(draw(seed)))
    shrunk = shrink(source, lambda smaller: "LayerNorm" in str(smaller))
    assert runs_in_eager(shrunk)
    assert "LayerNorm" in str(shrunk)
    assert len(shrunk.nodes) < len(source.nodes) / 2
