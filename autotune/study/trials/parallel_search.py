"""Search with several devices: as many trials at once as there are devices, each recorded when it ends.

Optuna sees the trials that run: `constant_liar` gives them the values of the worst known trials, so that the sampler does not
suggest them again (Ginsbourger et al. 2010, "Kriging is well-suited to parallelize optimization").
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
from autotune.study.trials.device_pool import DeviceDisturbed, DeviceFailed, DevicePool, MeasureTask, TrialEnded
from autotune.study.trials.next_trial import Proposal, TrialMaker
from autotune.study.verdicts.ranking import apply_rules

MAX_LOSSES = 2
"""Number of devices lost under one plan after which the plan counts as crashed."""


@dataclass(slots=True)
class PendingTrial:
    """A trial that is planned and not recorded."""

    trial: Trial
    candidate: Candidate
    proposal: Proposal
    planning_seconds: float
    began: float = 0.0
    """Begin of planning on the monotonic clock, as if the measurement had followed at once."""
    lost_nodes: tuple[str, ...] = ()
    """Hosts that were lost while they measured it."""


@dataclass(slots=True)
class ParallelSearch:
    """Search of one session."""

    maker: TrialMaker
    pool: DevicePool
    interrupts: Interrupts
    progress: Progress
    is_spent: Callable[[int], bool]
    """`is_spent(pending)`: return True if no trial may begin, while so many are pending."""
    propose: Callable[[Sequence[Trial]], Proposal]
    """Propose the next trial, given those that are pending."""
    record: Callable[[Trial, Proposal, float], None]
    """`record(trial, proposal, began)`: record a trial that ended."""
    running: dict[int, PendingTrial] = field(default_factory=dict)
    """Trials that are measured now, by number."""
    waiting: list[PendingTrial] = field(default_factory=list)
    """Trials that lost their device, or whose plan is measured now."""

    def run(self) -> None:
        """Search until time or trials run out; Stopped where a signal ends it before the running trials have ended."""
        try:
            self._start_trials()
            while self.running or self.waiting:
                if self._is_ending():
                    self.pool.close_free()
                with self.interrupts.breakable():
                    event = self.pool.wait()
                match event:
                    case TrialEnded(number, result):
                        self._finish(self.running.pop(number), result)
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
        """Return True if no further trial is proposed: a first signal lets the running trials end."""
        return bool(self.interrupts.received) or self.is_spent(len(self.running) + len(self.waiting))

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
        ratio = self.maker.stop_ratio(pending.trial.kind)
        accepted = self.maker.rules.accepted_bytes
        self.pool.start(MeasureTask(pending.trial.number, pending.candidate.plan, accepted, ratio))

    def _plan_next(self) -> PendingTrial | None:
        """Plan the next trial; None where it is recorded already, or waits for the measurement of its plan."""
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
        """Return a proposal with a trial of Optuna, which keeps its number until it ends."""
        if proposal.request is not None:
            return proposal
        return replace(proposal, request=self.maker.store.reserve())

    def _take_waiting(self) -> PendingTrial | None:
        """Return a waiting trial whose plan is not measured at the moment; one that was measured meanwhile is recorded."""
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
                self.progress(Logged(f"{result}; trial {pending.trial.number} is measured again", "device"))
                if len(pending.lost_nodes) < MAX_LOSSES:
                    self.waiting.insert(0, pending)
                    return
                hosts = ", ".join(pending.lost_nodes)
                detail = f"{len(pending.lost_nodes)} devices were lost while it ran: {hosts}"
                measurement = Measurement(Outcome.CRASHED, detail, device=self.maker.prepared.device)
            case PlanError() | InfeasibleError() | StoreError():
                measurement = Measurement(Outcome.CRASHED, str(result))
            case BaseException():
                raise result
            case Measurement():
                measurement = apply_rules(result, self.maker.rules)
        measurement = replace(measurement, lost_nodes=pending.lost_nodes + measurement.lost_nodes)
        self.record(replace(pending.trial, measurement=measurement), pending.proposal, pending.began)

    def _retry(self, proposal: Proposal) -> None:
        """Let the next session begin with a suggestion that was not measured; a move is chosen again."""
        if proposal.request is not None:
            self.maker.store.retry(proposal.request)
