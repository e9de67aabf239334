"""Make one plan for a budget by estimate alone."""

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS
from autotune.planners.auto import tried_first
from autotune.planners.candidates import Candidate, answers, candidate, smallest
from autotune.planners.space import chosen_space, preset
from autotune.predict.plan_layout import with_layout
from autotune.predict.simulate import simulate
from autotune.records.plan_file import PlanFile
from autotune.study.outcome import impossible, too_small
from autotune.study.verdicts.ranking import Rules

if TYPE_CHECKING:
    from autotune.measure.survey import Surveyed
    from autotune.records.config import Config


def make(config: "Config", surveyed: "Surveyed") -> PlanFile:
    """The first planners' answer, or the fastest of any planners' that fits; InfeasibleError if none does."""
    graph, costs = surveyed.graph, surveyed.costs
    whole = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
    step = config.parsed_budget.step_bytes(floor_bytes=surveyed.floor_bytes, baseline_step_bytes=whole)
    rules = Rules(step, surveyed.floor_bytes, None, 0.0)
    if (error := impossible(config, rules, graph, costs)) is not None:
        raise error
    searched = chosen_space(config.planners.model_dump(), surveyed.device.kind, costs.stores)
    made = candidate(graph, costs, preset(KINDS, searched, tried_first(searched)), step)
    if made.estimate.peak_bytes > step:
        others = (*answers(graph, costs, searched, step), smallest(graph, costs, searched))
        made = min(others, key=lambda one: _rank(one, step))
    if made.estimate.peak_bytes > step:
        low = made.estimate
        raise too_small(config, rules, low.peak_bytes, low.peak_op, stores=bool(costs.stores))
    return PlanFile(
        workload=config.ref,
        graph_digest=graph.digest,
        budget=config.budget,
        budget_bytes=step,
        floor_bytes=surveyed.floor_bytes,
        settings=made.settings,
        plan=replace(made.plan, memory_format=config.memory_format),
        estimate=with_layout(graph, made.plan, costs, made.estimate),
        device=surveyed.device,
    )


def _rank(made: Candidate, step_bytes: int) -> tuple[int, float]:
    """What fits before what does not, the fast before the slow."""
    return max(made.estimate.peak_bytes - step_bytes, 0), made.estimate.seconds
