import re
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import ConfigError, InfeasibleError, NumericsError, OutOfTimeError, WorkerError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.plan import Plan
from autotune.planners.auto import best_plan
from autotune.predict.bounds import peak_lower_bound
from autotune.records.budget import Budget
from autotune.records.config import load_config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.outcome import (
    check_plans_directory,
    explain_failure,
    explain_no_time,
    prove_infeasible,
    remove_plan,
)
from autotune.study.verdicts.ranking import Rules
from autotune.testing.graphs import training_chain
from tests.study.test_ranking import estimate

CONFIG = load_config("resnet18", overrides={"budget": "1%"})
GRAPH = training_chain(2, nbytes=10, param_bytes=2)
COSTS = Costs((1.0,) * len(GRAPH.ops), (0,) * len(GRAPH.ops))


def rules(budget_bytes: int) -> Rules:
    return Rules(budget_bytes, 0, None, 0.0)


def test_a_budget_that_is_proved_too_small_names_the_op_that_forbids_it():
    error = prove_infeasible(CONFIG, rules(18 + 19), GRAPH, COSTS)
    assert error is not None
    assert error.exit_code == 4
    text = str(error)
    assert any(f" at {op.name} alone, with any recomputation: no plan fits" in text for op in GRAPH.ops)
    assert "the budget 1% leaves the step 37 B. Raise --budget to step:1MiB or more, or allow --store ssd=DIR" in text


def test_bytes_that_round_to_the_same_text_are_named_exactly():
    graph = training_chain(8, nbytes=20 * 2**20, param_bytes=2**20)
    low = peak_lower_bound(graph, Costs.unit(graph))[0]
    error = prove_infeasible(CONFIG, rules(low - 1), graph, Costs.unit(graph))
    assert f"needs {low} B at " in str(error)
    assert f"leaves the step {low - 1} B" in str(error)


def test_the_suggested_budget_is_one_that_a_plan_keeps():
    graph = training_chain(8, nbytes=20 * 2**20, param_bytes=2**20)
    costs = Costs.unit(graph)
    error = prove_infeasible(CONFIG, rules(2**20), graph, costs)
    suggested = re.search(r"Raise --budget to (step:\d+MiB) or more", str(error))
    assert suggested is not None
    budget_bytes = Budget.parse(suggested[1]).step_bytes(floor_bytes=7, baseline_step_bytes=0)
    assert best_plan(graph, costs, budget_bytes).estimate.peak_bytes <= budget_bytes
    assert prove_infeasible(CONFIG, rules(budget_bytes), graph, costs) is None


def test_with_a_store_at_hand_none_is_asked_for():
    stored = Costs(COSTS.seconds, COSTS.scratch_bytes, {"ssd": StoreCost(1.0, 1.0, 1.0, 1.0)})
    assert "--store" not in str(prove_infeasible(CONFIG, rules(0), GRAPH, stored))


def test_a_recorded_run_is_not_tried_again_with_another_budget_under_its_name():
    error = prove_infeasible(CONFIG, rules(18 + 19), GRAPH, COSTS, is_recorded=True)
    assert "Raise --budget to step:1MiB or more under another --name, or allow --store ssd=DIR" in str(error)
    over = trial(2, charged=303 * 2**20, outcome=Outcome.OVER_BUDGET)
    assert "or more under another --name" in said(over)


def test_on_a_gpu_the_store_of_host_memory_is_asked_for():
    error = prove_infeasible(CONFIG.model_copy(update={"device": "cuda"}), rules(18 + 19), GRAPH, COSTS)
    assert str(error).endswith("or allow --store host=DIR")


def test_a_place_that_no_plan_can_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_plans_directory(CONFIG.model_copy(update={"plans": str(tmp_path / "new" / "plans")}))
    (tmp_path / "plans").touch()
    for plans in (tmp_path / "plans", tmp_path / "plans" / "below"):
        with pytest.raises(
            ConfigError, match=r"/plans is not a directory; name another directory by plans: in the config"
        ):
            check_plans_directory(CONFIG.model_copy(update={"plans": str(plans)}))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"new: cannot write plans: .* is read-only; name another directory"):
        check_plans_directory(CONFIG.model_copy(update={"plans": str(tmp_path / "new")}))


@pytest.mark.parametrize("budget_bytes", [18 + 31, 1000])
def test_a_budget_that_no_proof_forbids_is_left_to_the_planners(budget_bytes: int):
    assert prove_infeasible(CONFIG, rules(budget_bytes), GRAPH, COSTS) is None


def trial(plan: int, *, charged: int | None = None, outcome: Outcome = Outcome.OK, detail: str = "") -> Trial:
    seen = Measurement(outcome, detail, charged_bytes=charged, floor_bytes=0)
    return Trial(plan, TrialKind.SEARCH, "w", "d", plan=Plan((plan,)), measurement=seen)


def said(*trials: Trial) -> str:
    error = explain_failure(CONFIG, rules(301 * 2**20), trials, estimate(), Path("run"))
    assert error.exit_code == 4
    return str(error)


def test_a_plan_needs_the_most_that_it_was_charged_in_any_run():
    kept, over = trial(1, charged=300 * 2**20), trial(1, charged=302 * 2**20, outcome=Outcome.OVER_BUDGET)
    larger = trial(2, charged=303 * 2**20, outcome=Outcome.OVER_BUDGET)
    assert "needs 302.0 MiB at conv1 with the smallest plan; the budget 1% leaves the step 301.0 MiB" in said(
        kept, over, larger
    )


def test_a_plan_whose_process_was_killed_from_outside_is_no_infeasible_budget():
    over = trial(1, charged=302 * 2**20, outcome=Outcome.OVER_BUDGET)
    killed = trial(2, outcome=Outcome.CRASHED, detail="killed by SIGTERM: its log ends there")
    error = explain_failure(CONFIG, rules(301 * 2**20), (over, killed), estimate(), Path("run"))
    assert (type(error), error.exit_code) == (WorkerError, 9)
    assert "was killed by SIGTERM; continue with: autotune resume run" in str(error)


def test_wrong_results_explain_a_failure_unless_every_right_plan_was_too_large():
    over = trial(1, charged=302 * 2**20, outcome=Outcome.OVER_BUDGET)
    wrong = trial(2, outcome=Outcome.WRONG_RESULT, detail="results differ")
    assert "needs 302.0 MiB at conv1 with the smallest plan" in said(over, wrong)
    small = trial(3, charged=300 * 2**20, outcome=Outcome.WRONG_RESULT, detail="results differ")
    for trials in ([wrong], [over, small]):
        error = explain_failure(CONFIG, rules(301 * 2**20), trials, estimate(), Path("run"))
        assert isinstance(error, NumericsError)
        assert "no plan passed: results differ. See run/trials.jsonl" in str(error)


def test_where_bytes_did_not_rule_a_plan_out_it_is_told_what_did():
    kept, died = trial(1, charged=300 * 2**20), trial(1, outcome=Outcome.TIMEOUT, detail="no answer within 300 s")
    over = trial(2, charged=302 * 2**20, outcome=Outcome.OVER_BUDGET, detail="the step was charged 302.0 MiB")
    assert "no plan ran to its end: no answer within 300 s. See run/trials.jsonl" in said(over, kept, died)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([Outcome.CRASHED, Outcome.TIMEOUT], 1),
        ([Outcome.DISK_FULL], 2),
        ([Outcome.CRASHED, Outcome.OUT_OF_MEMORY], 4),
    ],
)
def test_plans_that_failed_for_other_reasons_than_memory_are_no_infeasible_budget(outcomes: list[Outcome], code: int):
    trials = [trial(number, outcome=outcome, detail="killed by SIGSEGV") for number, outcome in enumerate(outcomes, 1)]
    error = explain_failure(CONFIG, rules(301 * 2**20), trials, estimate(), Path("run"))
    assert error.exit_code == code
    assert "no plan ran to its end: killed by SIGSEGV" in str(error)


def test_a_budget_is_not_infeasible_where_the_time_was_over_before_the_planners_plans_were_measured():
    over = trial(1, charged=302 * 2**20, outcome=Outcome.OVER_BUDGET)
    planned = replace(trial(2, charged=303 * 2**20, outcome=Outcome.OVER_BUDGET), kind=TrialKind.PLANNER)
    for trials, is_late, kind in (
        ([over], True, OutOfTimeError),
        ([over], False, InfeasibleError),
        ([over, planned], True, InfeasibleError),
    ):
        error = explain_failure(CONFIG, rules(301 * 2**20), trials, estimate(), Path("run"), is_late=is_late)
        assert type(error) is kind


@pytest.mark.parametrize("fails", [False, True])
def test_the_files_of_a_plan_are_removed_only_where_a_plan_failed(tmp_path: Path, fails: bool):
    record, path = tmp_path / "run" / "plan.json", tmp_path / "plans" / "run.json"
    for file in (record, path):
        file.parent.mkdir()
        file.write_text("{}")
    again = [trial(1, outcome=Outcome.OUT_OF_MEMORY)] if fails else []
    remove_plan(CONFIG.model_copy(update={"plans": str(tmp_path / "plans")}), tmp_path / "run", [trial(1), *again])
    assert (record.exists(), path.exists()) == (not fails, not fails)


def test_a_suggested_command_is_quoted_for_a_shell():
    text = str(explain_no_time(CONFIG, Path("runs/my run")))
    assert text.endswith("continue with a longer one: autotune resume 'runs/my run' --time 20m")
