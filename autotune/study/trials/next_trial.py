"""Prepare the next trial: its settings, its plan, and what is decided about it without a measurement."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.measure.survey import PreparedWorkload
from autotune.planners.candidates import Candidate, Planning
from autotune.planners.knobs import Settings
from autotune.predict.bounds import seconds_lower_bound
from autotune.records.config import Config
from autotune.records.trial import Trial, TrialKind
from autotune.study import optuna_space
from autotune.study.trial_store import TrialStore, add_plan
from autotune.study.verdicts.front import compute_front_stop_ratio
from autotune.study.verdicts.ranking import (
    Rules,
    compute_stop_ratio,
    compute_target_bytes,
    estimate_spread,
    exceeds_budget,
    reject_by_estimate,
    reuse_measurement,
    select_leader,
)

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings of the next trial, and its plan if that is made already (`candidate`)."""

    kind: TrialKind
    settings: Settings
    candidate: Candidate | None = None
    request: "optuna.Trial | None" = None
    """Optuna trial that receives the result; None if Optuna did not suggest the settings."""
    target_bytes: int | None = None
    """Peak bytes that the planners have to meet; the study's target by default."""


@dataclass(frozen=True, slots=True)
class TrialMaker:
    """Maker of a study's trials: asks Optuna for settings and the planners for plans."""

    config: Config
    prepared: PreparedWorkload
    rules: Rules
    planning: Planning
    store: TrialStore

    @property
    def target_bytes(self) -> int:
        """Peak bytes that planners have to meet now, so that the charge meets the budget."""
        return compute_target_bytes(self.rules.budget_bytes, self.store.overheads, estimate_spread(self.store.trials))

    def suggest(
        self, kind: TrialKind, settings: Settings | None = None, candidate: Candidate | None = None
    ) -> Proposal:
        """Ask Optuna for a trial, and return it as a proposal.

        `settings` are enqueued, but a queued retry may precede them. `candidate` is the plan already made from `settings`.
        It is dropped if Optuna returns other settings, or if the target is lower now.
        """
        space = self.store.space
        fixed, _ = optuna_space.to_parameters(settings, space) if settings else ({}, {})
        request = self.store.ask(fixed, candidate.target_bytes if candidate else None)
        suggested, target = self.store.suggest(request)
        # a retry may come before the settings; and the target may be lower than when the plan was made
        is_valid = (
            candidate is not None
            and candidate.settings == suggested
            and candidate.estimate.peak_bytes <= self.target_bytes
            and target in (None, candidate.target_bytes)
        )
        target = None if target is None else min(target, self.target_bytes)
        return Proposal(kind, suggested, candidate if is_valid else None, request, target)

    def begin(self, proposal: Proposal) -> Trial:
        """Return the trial of a proposal, with its number and its start."""
        number = self.store.next_number() if proposal.request is None else proposal.request.number
        origin = str(self.config.ref), self.prepared.graph.digest
        target = proposal.target_bytes
        return Trial(number, proposal.kind, *origin, proposal.settings, started=time.time(), target_bytes=target)

    def make_candidate(self, proposal: Proposal) -> Candidate:
        """Make the plan of a proposal, unless it has one; PlanError or InfeasibleError where there is none."""
        target = proposal.target_bytes or self.target_bytes
        return proposal.candidate or self.planning.make_candidate(proposal.settings, target)

    def add_candidate(self, trial: Trial, candidate: Candidate) -> Trial:
        """Return a trial with its plan and the estimate of the plan's layout."""
        # the bound is for the budget: planners meet a lower target, whose bound would be too high
        bound = seconds_lower_bound(self.prepared.graph, self.prepared.costs, self.rules.budget_bytes)
        estimate = replace(self.planning.estimate_layout(candidate), lower_bound_seconds=bound)
        return add_plan(trial, candidate, estimate)

    def decide_unmeasured(self, trial: Trial, candidate: Candidate, trials: Sequence[Trial]) -> Trial | None:
        """Return the complete trial if its plan was measured before (kind REPEAT), or is too large; None if it has to run.

        `trials` are the recorded trials.

        The search rejects a plan by its layout, the other phases by its peak: a planned candidate's charge calibrates
        the next target. A plan that is re-measured kept the budget before, so nothing rejects it.
        """
        if (repeat := reuse_measurement(trial, trials)) is not None:
            return repeat
        estimate = trial.estimate if trial.kind in (TrialKind.SEARCH, TrialKind.MOVE) else candidate.estimate
        if trial.kind != TrialKind.CONFIRM and estimate is not None and exceeds_budget(estimate, self.rules):
            return replace(trial, measurement=reject_by_estimate(estimate, self.rules))
        return None

    def stop_ratio(self, trial: Trial) -> float | None:
        """Return the time ratio above which a plan cannot win, or be a point of the front; None for re-measured plans."""
        if trial.kind == TrialKind.CONFIRM:
            return None
        if self.config.objective == "pareto":
            return compute_front_stop_ratio(self.store.trials, trial, self.rules)
        if self.config.objective != "time":
            return None
        return compute_stop_ratio(select_leader(self.store.trials, self.rules), trial, self.store.trials)
