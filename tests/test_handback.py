from pathlib import Path

import pytest

from autotune.config import load_config
from autotune.costs import Costs, StoreCost
from autotune.errors import ConfigError
from autotune.handback import check_plans, impossible
from autotune.judge import Rules
from tests.graphs import training_chain

CONFIG = load_config("resnet18", overrides={"budget": "1%"})
GRAPH = training_chain(2, nbytes=10, param_bytes=2)
COSTS = Costs((1.0,) * len(GRAPH.ops), (0,) * len(GRAPH.ops))


def rules(budget_bytes: int) -> Rules:
    return Rules(budget_bytes, 0, None, 0.0)


def test_a_budget_that_is_proved_too_small_names_the_op_that_forbids_it():
    error = impossible(CONFIG, rules(18 + 19), GRAPH, COSTS)
    assert error is not None
    assert error.exit_code == 4
    text = str(error)
    assert any(f" at {op.name} alone, whatever is computed again: no plan fits" in text for op in GRAPH.ops)
    assert "the budget 1% leaves the step 37 B. Raise --budget or allow --store ssd=DIR" in text


def test_with_a_store_at_hand_none_is_asked_for():
    stored = Costs(COSTS.seconds, COSTS.scratch_bytes, {"ssd": StoreCost(1.0, 1.0, 1.0, 1.0)})
    assert "--store" not in str(impossible(CONFIG, rules(0), GRAPH, stored))


def test_a_place_that_no_plan_can_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_plans(CONFIG.model_copy(update={"plans": str(tmp_path / "new" / "plans")}))
    (tmp_path / "plans").touch()
    for plans in (tmp_path / "plans", tmp_path / "plans" / "below"):
        with pytest.raises(ConfigError, match=r"/plans is no directory; name another directory by plans: in the config"):
            check_plans(CONFIG.model_copy(update={"plans": str(plans)}))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="new: no plan can be written there, .* is read-only; name another directory"):
        check_plans(CONFIG.model_copy(update={"plans": str(tmp_path / "new")}))


@pytest.mark.parametrize("budget_bytes", [18 + 31, 1000])
def test_a_budget_that_no_proof_forbids_is_left_to_the_planners(budget_bytes: int):
    assert impossible(CONFIG, rules(budget_bytes), GRAPH, COSTS) is None
