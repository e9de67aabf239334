"""Make a plan file for a budget by estimate alone, without measuring the plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.errors import ConfigError
from autotune.ir.graph_summary import summarize_graph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.auto import best_plan
from autotune.planners.space import space_for_device
from autotune.predict.bounds import seconds_lower_bound
from autotune.predict.plan_layout import add_layout
from autotune.predict.simulate import simulate
from autotune.records.plan_file import PlanFile
from autotune.study.outcome import explain_too_small, prove_infeasible
from autotune.study.verdicts.ranking import Rules

if TYPE_CHECKING:
    from autotune.measure.survey import WorkloadSurvey
    from autotune.records.config import Config


TRIES = 4
"""Maximum number of plans to make for a budget.

While the charge is too high, the next plan aims lower by the excess; the last one is the smallest plan.
"""


def refuse_front(config: "Config") -> None:
    """Raise ConfigError where the config asks for a Pareto front, which is many plans."""
    if config.objective == "pareto":
        raise ConfigError(
            "objective pareto searches many plans, and plan makes one; plan with objective time and a budget, or run: "
            f"autotune tune {config.workload} --objective pareto"
        )


def make_plan_file(config: "Config", surveyed: "WorkloadSurvey") -> PlanFile:
    """Return a plan file with the first planners' plan, or else with the fastest plan that fits by estimate.

    The budget limits the predicted charge, which is the peak and what the arena's layout wastes. The first plan within
    the budget's tolerance is accepted: those for lower targets are slower. Raises InfeasibleError where no plan fits.
    """
    graph, costs = surveyed.graph, surveyed.costs
    traced_bytes = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    budget_bytes = config.parsed_budget.step_bytes(floor_bytes=surveyed.floor_bytes, baseline_step_bytes=traced_bytes)
    rules = Rules(budget_bytes, surveyed.floor_bytes, None, 0.0, config.parsed_budget.tolerance)
    if (error := prove_infeasible(config, rules, graph, costs)) is not None:
        raise error
    searched = space_for_device(config.planners.model_dump(), surveyed.device.kind, costs.stores)
    target = budget_bytes
    for left in reversed(range(TRIES)):
        best = best_plan(graph, costs, target, searched, accept_first=True)
        estimate = add_layout(graph, best.plan, costs, best.estimate)
        used_bytes = max(estimate.peak_bytes, estimate.charged_bytes or 0)
        if best.estimate.peak_bytes > target or used_bytes <= rules.accepted_bytes:
            break
        target = target * budget_bytes // used_bytes if left > 1 else 0
    if used_bytes > rules.accepted_bytes:
        raise explain_too_small(config, rules, used_bytes, estimate.peak_op, stores=bool(costs.stores))
    return PlanFile(
        workload=config.ref,
        graph_digest=graph.digest,
        budget=config.budget,
        budget_bytes=budget_bytes,
        floor_bytes=surveyed.floor_bytes,
        settings=best.settings,
        plan=config.captured(best.plan),
        # planners meet a lower target, whose bound would be too high
        estimate=replace(estimate, lower_bound_seconds=seconds_lower_bound(graph, costs, budget_bytes)),
        device=surveyed.device,
        loop=surveyed.loop,
        target_bytes=best.target_bytes,
        summary=summarize_graph(graph),
    )
