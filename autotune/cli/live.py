"""A study as it goes on: a live panel on a terminal, one plain line an event elsewhere; both on standard error."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autotune.records.config import Config
from autotune.records.trial import Trial
from autotune.report.tables import verdict
from autotune.study.events import Event, Finished, Measuring, Phase, Progress, Ready, Resolved
from autotune.units import fmt_bytes, fmt_seconds, mib

if TYPE_CHECKING:
    from rich.console import RenderableType

PHASES = {
    "prepare": "capturing the step, profiling its ops, running the baseline: a minute or two",
    "baseline": "baseline: plain PyTorch eager",
    "smallest": "smallest plan",
    "seeds": "settings that served elsewhere",
    "planners": "the planners' own answers for the budget",
    "search": "search",
    "confirm": "the best plans afresh, in turns, in fresh processes",
}
DISTURBED = 1.5
"""Ops that take so many times the plain step together were profiled beside other work."""


@contextlib.contextmanager
def watching(config: Config) -> Iterator[Progress]:
    """A listener for a study that shows what it hears."""
    state = _State(config)
    if not sys.stderr.isatty():
        yield lambda event: _plain(state, event)
        return
    from rich.console import Console
    from rich.live import Live

    # once a second: the screen must not take the cores from what is being measured
    with Live(
        console=Console(stderr=True, highlight=False), refresh_per_second=1, transient=True, get_renderable=state.panel
    ):
        yield state.hear


class _State:
    """What was heard so far."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.began = time.monotonic()
        self.phase = ""
        self.about: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.best: Finished | None = None
        self.last: Finished | None = None
        self.running: Trial | None = None
        self.warning = ""

    def hear(self, event: Event) -> None:
        match event:
            case Phase(name):
                self.phase = name
            case Ready(graph, _, device):
                self.about.append(f"{graph.name}, {len(graph.ops)} ops")
                self.about.append(f"{device.silicon}, {device.cores} cores, {fmt_bytes(device.memory_bytes)}")
            case Resolved(budget_bytes, floor_bytes, ratio):
                left = f"{fmt_bytes(budget_bytes)} for the step" if budget_bytes > 0 else "nothing for the step"
                self.about.append(f"budget {self.config.budget}: {left}, floor {fmt_bytes(floor_bytes)}")
                if ratio is not None and ratio > DISTURBED:
                    self.warning = (
                        f"the profile's ops take {ratio:.1f} times the plain step together: the machine was busy, and predicted "
                        "times are off; tune under another --name when it is idle"
                    )
            case Measuring(trial):
                self.running = trial
            case Finished(trial):
                self.running = None
                self.outcomes[verdict(trial)] += 1
                self.last = event
                if event.leads:
                    self.best = event

    @property
    def used(self) -> str:
        """The search has the config's time; what is measured in any case may take longer."""
        seconds = time.monotonic() - self.began
        limit = self.config.time_seconds
        return (f"{seconds:.0f} s" if seconds < 120 else fmt_seconds(seconds)) + (
            f" of {self.config.time}" if seconds <= limit else ""
        )

    def panel(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        count = sum(self.outcomes.values())
        of = f" of {self.config.trials}" if self.config.trials and count <= self.config.trials else ""
        lines: list[Any] = [Text("  ".join([str(self.config.ref), *self.about]), style="bold", overflow="fold")]
        phase = PHASES.get(self.phase, self.phase or "starting")
        lines.append(Text(f"  {phase}; {count}{of} trials; {self.used}"))
        if self.warning:
            lines.append(Text(f"  {self.warning}", style="yellow"))
        if self.running is not None:
            lines.append(Text(f"  now    {_measuring(self.running)}"))
        if self.best is not None:
            lines.append(Text(f"  best   {_told(self.best)}", style="green"))
        if self.last is not None:
            lines.append(Text(f"  last   {_told(self.last)}"))
        if self.outcomes:
            lines.append(Text("  " + "  ".join(f"{name} {n}" for name, n in self.outcomes.most_common()), style="dim"))
        return Group(*lines)


def _plain(state: _State, event: Event) -> None:
    before = len(state.about)
    state.hear(event)
    match event:
        case Phase(name):
            _line(f"[{state.used}] {PHASES.get(name, name)}")
        case Ready() | Resolved():
            _line("; ".join(state.about[before:]))
            if state.warning:
                _line(f"warning: {state.warning}")
        case Measuring(trial):
            _line(f"[{state.used}] {_measuring(trial)}")
        case Finished(_, _, leads, resumed):
            _line(f"[{state.used}] {'kept  ' if resumed else ''}{_told(event)}{'  best so far' if leads else ''}")


def _measuring(trial: Trial) -> str:
    """`trial 4  planner  measuring a plan of ~610.1 MiB`."""
    return f"trial {trial.number}  {trial.kind}  measuring a plan of {_bytes(trial)}"


def _told(event: Finished) -> str:
    """`trial 4  planner  612.0 MiB  1.043x  ok`."""
    trial = event.trial
    ratio = "" if event.ratio is None else f"  {event.ratio:.3f}x"
    return f"trial {trial.number}  {trial.kind}  {_bytes(trial)}{ratio}  {verdict(trial)}"


def _bytes(trial: Trial) -> str:
    seen = trial.measurement.step_charged_bytes if trial.measurement else None
    if seen is not None:
        return f"{mib(seen)} MiB"
    return f"~{mib(trial.estimate.peak_bytes)} MiB" if trial.estimate else "-"


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
