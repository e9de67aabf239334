"""Search on several devices: one running trial for each device, recorded when it ends.

Optuna stores running trials too. With `constant_liar` the sampler treats them like the worst known trials, so it does not
suggest their settings again (Ginsbourger et al. 2010, "Kriging is well-suited to parallelize optimization").
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autotune.errors import DeviceLostError, InfeasibleError, PlanError, StoreError
from autotune.planners.candidates import Candidate
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial
from autotune.study.events import Disturbed, Logged, Measuring, Progress
from autotune.study.interrupts import Interrupts, Stopped
from autotune.study.runner import MAX_LOSSES, make_lost_measurement
from autotune.study.trials.device_pool import (
    DeviceDisturbed,
    DeviceFailed,
    DevicePool,
    DeviceReady,
    MeasureTask,
    TrialEnded,
)
from autotune.study.trials.next_trial import Proposal, TrialMaker
from autotune.study.verdicts.ranking import apply_rules

LOOK_SECONDS = 1.0
"""Pause between two looks at the study's time while no event comes."""


@dataclass(slots=True)
class PendingTrial:
    """A trial that is planned and not recorded."""

    trial: Trial
    candidate: Candidate
    proposal: Proposal
    planning_seconds: float
    """Seconds that the proposal and its plan took."""
    began: float = 0.0
    """Start of the measurement less the planning time, in seconds of the monotonic clock."""
    lost_nodes: tuple[str, ...] = ()
    """Hosts that were lost while they measured it."""


@dataclass(slots=True)
class ParallelSearch:
    """Search of one session."""

    maker: TrialMaker
    pool: DevicePool
    interrupts: Interrupts
    progress: Progress
    has_enough: Callable[[int], bool]
    """`has_enough(pending)`: return True if no further trial may start. `pending` counts the unrecorded trials."""
    is_used_up: Callable[[int], bool]
    """`is_used_up(pending)`: return True if time or trials are used up, whatever the running trials yield."""
    propose: Callable[[Sequence[Trial]], Proposal]
    """Propose the next trial, given those that are pending."""
    record: Callable[[Trial, Proposal, float], None]
    """`record(trial, proposal, began)`: record a trial that ended."""
    running: dict[int, PendingTrial] = field(default_factory=dict)
    """Trials that are measured now, by number."""
    last_loss: DeviceLostError = field(default_factory=lambda: DeviceLostError("no device is left; start one"))
    """Reason why the first device is not used any more."""
    waiting: list[PendingTrial] = field(default_factory=list)
    """Planned trials that do not run: their device was lost, or another trial runs the same plan."""

    def run(self) -> None:
        """Search until time or trials run out; Stopped where a signal ends it before the running trials have ended."""
        further = len(self.pool) - 1
        self.progress(Logged(f"the search prepares {further} further device{'s' if further > 1 else ''}", "device"))
        try:
            self._start_trials()
            while self.running or self.waiting:
                if self.interrupts.received or self.is_used_up(len(self.running) + len(self.waiting)):
                    self.pool.close_free()
                if not self.running and not self.pool.has_device:
                    raise self.last_loss
                with self.interrupts.breakable():
                    event = self.pool.wait(LOOK_SECONDS)  # time passes without an event, too
                match event:
                    case TrialEnded(number, result):
                        self._finish(self.running[number], result)
                        del self.running[number]
                    case DeviceReady():
                        self.progress(Logged("a further device is ready", "device"))
                    case DeviceDisturbed(reason):
                        self.progress(Disturbed(reason))
                    case DeviceFailed(reason):
                        self.progress(Logged(f"a further device is not used: {reason}", "device"))
                self._start_trials()
        except BaseException:
            for pending in [*self.running.values(), *self.waiting]:
                self._retry(pending.proposal)
            raise
        finally:
            self.pool.close()

    def _is_ending(self) -> bool:
        """Return True if no further trial is proposed: the search is complete, or a first signal arrived.

        After a first signal the running trials still end.
        """
        return bool(self.interrupts.received) or self.has_enough(len(self.running) + len(self.waiting))

    def _start_trials(self) -> None:
        """Give each free device a trial."""
        while self.pool.has_free_device:
            pending = self._take_waiting()
            if pending is None:
                if len(self.waiting) >= len(self.pool) or self._is_ending():
                    return
                pending = self._plan_next()
            if pending is not None:
                self._start(pending)

    def _start(self, pending: PendingTrial) -> None:
        self.progress(Measuring(pending.trial))
        pending.began = time.monotonic() - pending.planning_seconds  # without the wait for another measurement
        self.running[pending.trial.number] = pending
        ratio = self.maker.stop_ratio(pending.trial)
        accepted = self.maker.rules.accepted_bytes
        self.pool.start(MeasureTask(pending.trial.number, pending.candidate.plan, accepted, ratio))

    def _plan_next(self) -> PendingTrial | None:
        """Plan the next trial, and return it if it has to run now.

        Return None if it was recorded without a run, or if it waits because another trial has the same plan.
        """
        began = time.monotonic()
        known = [pending.trial for pending in [*self.running.values(), *self.waiting]]
        proposal = self._reserve(self.propose(known))
        trial = self.maker.begin(proposal)
        try:
            with self.interrupts.breakable():
                candidate = self.maker.make_candidate(proposal)
            trial = self.maker.add_candidate(trial, candidate)
            decided = self.maker.decide_unmeasured(trial, candidate, self.maker.store.trials)
        except (PlanError, InfeasibleError, StoreError) as error:
            decided = replace(trial, measurement=Measurement(Outcome.CRASHED, str(error)))
        except Stopped:
            self._retry(proposal)
            raise
        if decided is not None:
            self.record(decided, proposal, began)
            return None
        pending = PendingTrial(trial, candidate, proposal, time.monotonic() - began)
        if any(other.plan == trial.plan for other in known):
            self.waiting.append(pending)
            return None
        return pending

    def _reserve(self, proposal: Proposal) -> Proposal:
        """Return the proposal with an Optuna trial, which reserves its number."""
        if proposal.request is not None:
            return proposal
        return replace(proposal, request=self.maker.store.reserve())

    def _take_waiting(self) -> PendingTrial | None:
        """Remove and return the first waiting trial whose plan does not run now; None without one.

        A waiting trial whose plan was measured in the meantime is recorded instead.
        """
        plans = [pending.trial.plan for pending in self.running.values()]
        for pending in list(self.waiting):
            if pending.trial.plan in plans:
                continue
            self.waiting.remove(pending)
            decided = self.maker.decide_unmeasured(pending.trial, pending.candidate, self.maker.store.trials)
            if decided is None:
                return pending
            self.record(decided, pending.proposal, time.monotonic() - pending.planning_seconds)
        return None

    def _finish(self, pending: PendingTrial, result: Measurement | BaseException) -> None:
        """Record a trial that ended; one whose device was lost waits for another device."""
        match result:
            case DeviceLostError() if result.host:
                pending.lost_nodes += (result.host,)
                runs_again = len(pending.lost_nodes) < MAX_LOSSES
                then = "runs again on another device" if runs_again else "is recorded as crashed"
                self.progress(Logged(f"{result}; trial {pending.trial.number} {then}", "device"))
                if runs_again:
                    self.waiting.insert(0, pending)
                    return
                measurement = make_lost_measurement(pending.lost_nodes, self.maker.prepared.device)
                pending.lost_nodes = ()  # the measurement has them
            case DeviceLostError():
                self.last_loss = result
                self.progress(Logged(f"{result}; trial {pending.trial.number} waits for a further device", "device"))
                self.waiting.insert(0, pending)
                return
            case PlanError() | InfeasibleError() | StoreError():
                measurement = Measurement(Outcome.CRASHED, str(result))
            case BaseException():
                raise result
            case Measurement():
                measurement = apply_rules(result, self.maker.rules)
        measurement = replace(measurement, lost_nodes=pending.lost_nodes + measurement.lost_nodes)
        self.record(replace(pending.trial, measurement=measurement), pending.proposal, pending.began)

    def _retry(self, proposal: Proposal) -> None:
        """Enqueue an unmeasured suggestion for the next session. The next session chooses moves again."""
        if proposal.request is not None:
            self.maker.store.retry(proposal.request)
