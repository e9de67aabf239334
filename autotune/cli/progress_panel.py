"""Progress of a study on standard error: a live panel on a terminal, one line for each event elsewhere."""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autotune.cli.output import escape_controls, print_note
from autotune.records.config import Config
from autotune.records.speed_environment import advise_passive_waiting
from autotune.records.trial import Trial
from autotune.report.tables import mark_disturbed, trial_verdict
from autotune.study.events import (
    Disturbed,
    Event,
    Finished,
    Logged,
    Measuring,
    PhaseStarted,
    Preparing,
    Progress,
    Ready,
    Resolved,
    StudyPhase,
)
from autotune.units import fmt_bytes, fmt_seconds, mib

if TYPE_CHECKING:
    from rich.console import RenderableType

PHASES = {
    StudyPhase.PREPARE: "capturing the step, profiling its ops, measuring the baseline: one to two minutes",
    StudyPhase.BASELINE: "baseline: plain PyTorch eager",
    StudyPhase.SMALLEST: "smallest plan",
    StudyPhase.SEEDS: "settings of another run or plan",
    StudyPhase.PLANNERS: "plans of the planners for the budget",
    StudyPhase.PRIORS: "simulating settings for the sampler",
    StudyPhase.SEARCH: "search",
    StudyPhase.CONFIRM: "re-measuring the best plans, interleaved, in new processes",
}
"""Description of each phase of a study."""
LINE_SECONDS = 10.0
"""Seconds between two lines about one activity of the first phase where standard error is no terminal."""
BUSY_RATIO = 1.5
"""Ratio of the profiled ops' total time to the eager step, above which the profile ran beside other work."""


@contextlib.contextmanager
def show_progress(config: Config) -> Iterator[Progress]:
    """Open a listener that shows the events of a study for the time of a `with` block."""
    state = _StudyState(config)
    if not (sys.stderr.isatty() and _shows_panels()):
        with _repeat_activity(state):
            yield lambda event: _print_event(state, event)
        return
    from rich.console import Console
    from rich.live import Live

    # one refresh per second: rendering must not use the cores that are being measured
    console = Console(stderr=True, highlight=False)
    try:
        with Live(console=console, refresh_per_second=1, transient=True, get_renderable=state.render):
            yield state.update
    finally:
        for line in state.logged:
            print_note(line)
        if state.warning:  # the panel, which showed it, is gone
            print_note(f"warning: {state.warning}")


def _shows_panels() -> bool:
    """Return whether rich shows a panel on standard error; a dumb terminal, such as an editor's, shows none."""
    from rich.console import Console

    return Console(stderr=True).is_interactive


@contextlib.contextmanager
def _repeat_activity(state: "_StudyState") -> Iterator[None]:
    """Print the activity of the first phase again while it reports nothing, for the time of a `with` block."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LINE_SECONDS / 10):
            _print_activity(state)

    thread = threading.Thread(target=watch, name="autotune-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _StudyState:
    """State of a study after the events so far."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.start = time.monotonic()
        self.is_timed = config.kernels != "any"
        """True once `config.time` counts: not while kernels are compared, before the study."""
        self.phase: StudyPhase | None = None
        self.summary: list[str] = []
        """Description of the workload, the device and the budget, as far as they are resolved."""
        self.outcomes: Counter[str] = Counter()
        self.best: Finished | None = None
        self.last: Finished | None = None
        self.running: dict[int, Trial] = {}
        """Trials that run now, by number: several on several devices."""
        self.warning = ""
        self.activity = ""
        self.lock = threading.Lock()
        """Lock against a second thread, which prints the activity again."""
        self.activity_printed = -LINE_SECONDS
        """Moment of the last line about an activity, in seconds on the monotonic clock."""
        self.disturbed = ""
        self.device = ""
        """Last line about further devices of a parallel search."""
        self.logged: list[str] = []

    def update(self, event: Event) -> None:
        """Include an event in the state."""
        match event:
            case PhaseStarted(phase):
                self._count_time()
                self.phase, self.activity = phase, ""
            case Preparing(activity):
                self.activity = activity
            case Ready(graph, _, device):
                self.activity = ""
                self.summary.append(f"{graph.name}, {len(graph.ops)} ops")
                self.summary.append(f"{device.silicon}, {device.cores} cores, {fmt_bytes(device.memory_bytes)}")
            case Resolved(budget_bytes, floor_bytes, ratio):
                step = f"{fmt_bytes(budget_bytes)} for the step" if budget_bytes > 0 else "nothing for the step"
                share = self.config.parsed_budget.share
                base = "the captured step's predicted peak" if ratio is None else "eager's peak"
                peak = "" if share is None else f" of {base} of {fmt_bytes(budget_bytes / share)}"
                floor = f"the process holds {fmt_bytes(floor_bytes)} without it (its floor)"
                self.summary.append(f"budget {self.config.budget}{peak}: {step}; {floor}")
                if ratio is not None and ratio > BUSY_RATIO:
                    self._warn(
                        f"the profiled ops together take {ratio:.1f} times the eager step: the machine was busy, and predicted "
                        "times are wrong; tune under another --name when it is idle"
                    )
            case Measuring(trial):
                self.running[trial.number] = trial
            case Disturbed(reason):
                self.disturbed = f"disturbed: {reason}; measuring again"
            case Finished(trial):
                self.running.pop(trial.number, None)
                # a device in the place of a lost one prepares within a trial, and no Ready follows
                self.disturbed = self.activity = ""
                self.outcomes[trial_verdict(trial)] += 1
                self.last = event
                if trial.measurement is not None and trial.measurement.disturbed and not event.resumed:
                    # a plan is timed beside eager, so the study is worth going on with after a disturbed baseline
                    advice = "" if trial.plan is None else ", and tune under another --name"
                    self._warn(f"other work disturbs the measurements: end it{advice}")
                if event.leads:
                    self.best = event
            case Logged(message, store):
                self.logged.append(f"{store}  {message}")
                if store == "device":
                    self.device = message
                if store == "size":  # the search for a batch size has no phases: its last line is the activity
                    self._count_time()
                    self.activity, self.activity_printed = message, time.monotonic()

    def _count_time(self) -> None:
        """Let the time limit count from now on, unless it counts already."""
        if not self.is_timed:
            self.is_timed, self.start = True, time.monotonic()

    def _warn(self, text: str) -> None:
        """Keep the first warning, with the advice for a machine that stays busy."""
        advice = advise_passive_waiting()
        self.warning = self.warning or (f"{text}; beside other work {advice}" if advice else text)

    @property
    def elapsed(self) -> str:
        """Elapsed time, with the time limit while that counts and is not reached: some measurements run in any case."""
        seconds = time.monotonic() - self.start
        limit = f" of {self.config.time}" if self.is_timed and seconds <= self.config.time_seconds else ""
        return (f"{seconds:.0f} s" if seconds < 120 else fmt_seconds(seconds)) + limit

    def render(self) -> "RenderableType":
        """Return the panel for a terminal."""
        from rich.console import Group
        from rich.text import Text

        count, trials = sum(self.outcomes.values()), self.config.trials
        limit = f" of {trials}" if trials and count <= trials else ""
        lines: list[Any] = [
            Text(escape_controls("  ".join([str(self.config.ref), *self.summary])), style="bold", overflow="fold")
        ]
        phase = PHASES[self.phase] if self.phase else "starting"
        lines.append(Text(f"  {phase}; {count}{limit} trials; {self.elapsed}"))
        if self.activity:
            lines.append(Text(f"  now    {self.activity}"))
        lines += [Text(f"  {warning}", style="yellow") for warning in (self.warning, self.disturbed) if warning]
        lines += [Text(f"  now    {_format_running(trial)}") for trial in self.running.values()]
        if self.device:
            lines.append(Text(f"  device {self.device}"))
        if self.best is not None:
            lines.append(Text(f"  best   {_format_finished(self.best)}", style="green"))
        if self.last is not None:
            lines.append(Text(f"  last   {_format_finished(self.last)}"))
        if self.outcomes:
            lines.append(Text("  " + "  ".join(f"{name} {n}" for name, n in self.outcomes.most_common()), style="dim"))
        return Group(*lines)


def _print_event(state: _StudyState, event: Event) -> None:
    summarized, warned = len(state.summary), state.warning
    with state.lock:
        state.update(event)
    match event:
        case PhaseStarted(phase):
            print_note(f"[{state.elapsed}] {PHASES[phase]}")
        case Preparing():
            _print_activity(state)
        case Ready() | Resolved():
            print_note("; ".join(state.summary[summarized:]))
        case Disturbed():
            print_note(f"[{state.elapsed}] {state.disturbed}")
        case Measuring(trial):
            print_note(f"[{state.elapsed}] {_format_running(trial)}")
        case Finished(_, _, leads, resumed):
            resumed_mark, best_mark = "resumed  " if resumed else "", "  best so far" if leads else ""
            print_note(f"[{state.elapsed}] {resumed_mark}{_format_finished(event)}{best_mark}")
        case Logged():
            print_note(state.logged[-1])
    if state.warning != warned:
        print_note(f"warning: {state.warning}")


def _print_activity(state: _StudyState) -> None:
    """Print the activity and the elapsed time, unless a line about it was printed less than `LINE_SECONDS` ago."""
    with state.lock:
        activity, now = state.activity, time.monotonic()
        if activity and now - state.activity_printed >= LINE_SECONDS:
            state.activity_printed = now
            print_note(f"[{state.elapsed}]   {activity}")


def _format_running(trial: Trial) -> str:
    """Return `trial 4  planner  measuring a plan of ~610.1 MiB`, with the change where a move made the plan."""
    change = f"  {escape_controls(trial.move)}" if trial.move else ""
    return f"trial {trial.number}  {trial.label}  measuring a plan of {_format_bytes(trial)}{change}"


def _format_finished(event: Finished) -> str:
    """Return `trial 4  planner  612.0 MiB  1.043x  ok`."""
    trial = event.trial
    ratio = "" if event.ratio is None else f"  {event.ratio:.3f}x"
    verdict = mark_disturbed(trial_verdict(trial), trial)
    return f"trial {trial.number}  {trial.label}  {_format_bytes(trial)}{ratio}  {verdict}"


def _format_bytes(trial: Trial) -> str:
    if trial.step_charged_bytes is not None:
        return f"{mib(trial.step_charged_bytes)} MiB"
    return f"~{mib(trial.estimate.peak_bytes)} MiB" if trial.estimate else "-"
