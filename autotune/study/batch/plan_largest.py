"""Make a plan file for the largest batch size that fits by estimate, without measuring the plan."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune.errors import CaptureError, ConfigError, InfeasibleError
from autotune.records.budget import format_step_budget
from autotune.records.config import Config
from autotune.records.plan_file import PlanFile
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.batch.sized_steps import step_down
from autotune.study.plan_by_estimate import make_plan_file

if TYPE_CHECKING:
    from autotune.measure.survey import WorkloadSurvey

STEP_DOWN = 0.95
"""Factor to the next smaller size where the profiled workspaces leave no plan for one."""
NEAR_SIZES = 5
"""Number of sizes after which each further one is half of the one before."""


def plan_largest(
    config: Config, estimate: BatchEstimate, survey: Callable[[Config], "WorkloadSurvey"]
) -> "tuple[PlanFile, WorkloadSurvey]":
    """Return a plan file for the largest batch size that fits by estimate, and the survey of that size.

    The estimate excludes workspaces of kernels; the survey includes them. Where no plan fits with them, smaller sizes are
    tried, down to 1: first in steps of 5 %, then halved. Where the workload refuses one of them,
    `step_down` names the next one. The plan file has the batch size among its workload's arguments.

    Args:
        config: Config with a budget for the workload's own size.
        estimate: Estimate for this config.
        survey: Captures a config's step and profiles its ops.

    Raises:
        InfeasibleError: No batch size fits.
        CaptureError: The step cannot be captured at the estimated size.
    """
    size, too_large = estimate.largest, list[int]()
    while size >= 1:
        arguments = {**config.arguments, estimate.argument: size}
        sized = config.model_copy(update={"arguments": arguments, "objective": "time"})
        budget = config.budget if config.parsed_budget.share is None else format_step_budget(estimate.budget_bytes)
        try:
            try:
                surveyed = survey(sized)
            except (CaptureError, ConfigError):
                if not too_large:
                    raise
                size = step_down(size, estimate.size)
                continue
            return make_plan_file(sized.model_copy(update={"budget": budget}), surveyed), surveyed
        except InfeasibleError:  # of the plan, or of a survey for which this machine lacks memory
            too_large.append(size)
            size = int(STEP_DOWN * size) if len(too_large) < NEAR_SIZES else size // 2
    tried = (
        f"{estimate.argument}={too_large[-1]} is too large with its kernels' workspaces" if too_large else "by estimate"
    )
    refusal = f", and the workload refuses {estimate.refused}" if estimate.refused else ""
    raise InfeasibleError(f"{config.ref}: no batch size fits {config.budget}: {tried}{refusal}; raise --budget")
