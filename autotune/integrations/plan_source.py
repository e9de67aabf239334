"""Read the arguments `plan` and `budget` of an integration."""

from collections.abc import Mapping
from pathlib import Path

from autotune.api.auto_plan import AutoPlan
from autotune.errors import ConfigError
from autotune.runtime.prepared_step import PlanSource

DEFAULT_BUDGET = "65%"
"""Budget of `plan="auto"`, as a share of the eager step's bytes."""


def resolve_plan(
    plan: PlanSource | None, budget: str | int | None, stores: Mapping[str, str | Path] | None
) -> PlanSource | None:
    """Return the plan's source; for "auto" an `AutoPlan` for the budget, which may offload to the stores.

    >>> resolve_plan("auto", "50%", None).budget
    '50%'

    Raises:
        ConfigError: The budget is invalid, or there is one for a plan that exists.
    """
    if plan == "auto":
        return AutoPlan(budget=DEFAULT_BUDGET if budget is None else budget, stores=stores or {})
    if budget is not None:
        source = "there is no plan to make" if plan is None else "the plan exists already"
        raise ConfigError(f"budget is {budget!r}, but {source}; pass plan='auto', or leave budget out")
    return plan
