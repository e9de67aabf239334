"""What is shown of a study while it goes on."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from autotune.cli import progress_panel
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.predict.simulate import simulate
from autotune.records.config import Config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.events import (
    Disturbed,
    Finished,
    Logged,
    Measuring,
    PhaseStarted,
    Preparing,
    Ready,
    Resolved,
    StudyPhase,
)
from autotune.testing.fake_runner import DEVICE
from autotune.testing.graphs import training_chain
from tests.support.waiting import wait_for

GRAPH = training_chain(4, nbytes=2**20)
PLAN = Plan.traced(GRAPH)
EXPECTED = simulate(GRAPH, lower(GRAPH, PLAN), Costs.unit(GRAPH))
RUNNING = Trial(1, TrialKind.SMALLEST, "net", GRAPH.digest, {}, plan=PLAN, estimate=EXPECTED)
SEEN = Measurement(Outcome.OK, peak_bytes=2**23, charged_bytes=2**23, floor_bytes=2**22)
EVENTS = [
    PhaseStarted(StudyPhase.SMALLEST),
    Measuring(RUNNING),
    Finished(replace(RUNNING, measurement=SEEN), 1.25, leads=True, resumed=False),
]
CONFIG = Config(workload="resnet18")
READY = Ready(GRAPH, Costs.unit(GRAPH), DEVICE)


@pytest.mark.parametrize("is_dumb_terminal", [False, True])
def test_elsewhere_than_on_a_terminal_that_shows_panels_a_plan_has_a_line_before_it_runs_and_one_after(
    is_dumb_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    if is_dumb_terminal:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "dumb")
    with progress_panel.show_progress(CONFIG) as progress:
        for event in EVENTS:
            progress(event)
    phase, before, after = capsys.readouterr().err.splitlines()
    assert phase.endswith("] smallest plan")
    assert before.endswith(f"trial 1  smallest  measuring a plan of ~{EXPECTED.peak_bytes / 2**20:.1f} MiB")
    assert after.endswith("trial 1  smallest  4.0 MiB  1.250x  ok  best so far")


def test_the_first_phase_has_a_line_with_its_counts_at_most_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now = 0.0
    monkeypatch.setattr(progress_panel, "time", SimpleNamespace(monotonic=lambda: now))
    with progress_panel.show_progress(CONFIG) as progress:
        for number in range(25):
            now = float(number)
            progress(Preparing(f"profiling ops: {number} of 25"))
    assert [line.partition("profiling ops: ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "0 of 25", "10 of 25", "20 of 25",
    ]  # fmt: skip


def test_a_silent_capture_has_a_line_with_the_elapsed_time_until_the_phase_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress_panel, "LINE_SECONDS", 0.01)
    lines: list[str] = []

    def has_three_lines() -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return len(lines) >= 3

    with progress_panel.show_progress(CONFIG) as progress:
        progress(Preparing("capturing the step"))
        wait_for(has_three_lines)  # the listener is not called again
        progress(READY)
    after = capsys.readouterr().err.partition(" ops; ")[2]
    assert all(re.fullmatch(r"\[\d+ s of 10m\]   capturing the step", line) for line in lines)
    assert "capturing" not in after


def test_a_terminal_shows_how_far_the_profile_is():
    state = progress_panel._StudyState(CONFIG)
    state.update(Preparing("profiling ops: 7 of 25"))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(state.render())
    assert "now    profiling ops: 7 of 25" in captured.get()


def test_a_terminal_shows_what_runs_until_it_has_run():
    state = progress_panel._StudyState(CONFIG)
    shown = []
    for event in EVENTS:
        state.update(event)
        console = Console(width=120)
        with console.capture() as captured:
            console.print(state.render())
        shown.append("now    trial 1  smallest  measuring" in captured.get())
    assert shown == [False, True, False]


def test_the_comparison_of_kernels_is_not_told_as_part_of_the_time_limit(capsys: pytest.CaptureFixture[str]):
    config = CONFIG.model_copy(update={"kernels": "any", "time": "4m"})
    with progress_panel.show_progress(config) as progress:
        for event in (Logged("aten: 0.918 of eager's time", "kernels"), PhaseStarted(StudyPhase.PREPARE)):
            progress(event)
        progress(Measuring(RUNNING))
    lines = capsys.readouterr().err.splitlines()
    assert "of 4m" not in lines[0]
    assert lines[-1].startswith("[0 s of 4m]")


def test_the_preparation_of_a_device_in_the_place_of_a_lost_one_is_not_shown_after_its_trial():
    state = progress_panel._StudyState(CONFIG)
    for event in (READY, EVENTS[1], Preparing("comparing the captured step with eager"), EVENTS[2]):
        state.update(event)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(state.render())
    assert "comparing the captured step" not in captured.get()


def test_a_disturbed_measurement_is_told_when_it_is_repeated_and_marked_when_it_stays_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    seen = replace(SEEN, disturbed="busy")
    with progress_panel.show_progress(CONFIG) as progress:
        for event in (
            Measuring(RUNNING),
            Disturbed("busy"),
            Finished(replace(RUNNING, measurement=seen), 1.2, False, False),
        ):
            progress(event)
    _, again, after, warning = capsys.readouterr().err.splitlines()
    assert again.endswith("] disturbed: busy; measuring again")
    assert after.endswith("1.200x  ok, disturbed")
    assert warning.startswith("warning: other work disturbs the measurements: end it, and tune under another --name")
    assert warning.endswith("OMP_WAIT_POLICY=PASSIVE stops torch's idle threads from spinning")


def test_a_warning_outlives_the_panel_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_panel.show_progress(CONFIG) as progress:
        progress(Resolved(2**30, 2**28, 3.0))
    last = capsys.readouterr().err.splitlines()[-1]
    assert "warning: the profiled ops together take 3.0 times the eager step" in last


def test_the_warning_of_a_busy_machine_advises_no_variable_that_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    state = progress_panel._StudyState(CONFIG)
    state.update(Finished(replace(RUNNING, measurement=replace(SEEN, disturbed="busy")), 1.2, False, False))
    assert state.warning == "other work disturbs the measurements: end it, and tune under another --name"


def test_after_a_disturbed_baseline_no_other_name_is_advised_as_its_study_can_go_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    state = progress_panel._StudyState(CONFIG)
    baseline = replace(RUNNING, plan=None, measurement=replace(SEEN, disturbed="busy"))
    state.update(Finished(baseline, None, False, False))
    assert state.warning == "other work disturbs the measurements: end it"


def test_a_disturbed_trial_of_an_earlier_session_is_no_reason_to_warn():
    state = progress_panel._StudyState(CONFIG)
    state.update(Finished(replace(RUNNING, measurement=replace(SEEN, disturbed="busy")), 1.2, False, resumed=True))
    assert not state.warning


@pytest.mark.parametrize("ratio", [1.2, 3.0, None])
def test_a_profile_of_a_busy_machine_is_told_with_what_to_do(ratio: float | None, capsys: pytest.CaptureFixture[str]):
    event = Resolved(2**30, 2**28, ratio)
    with progress_panel.show_progress(CONFIG) as progress:
        progress(event)
    warned = "warning: the profiled ops together take 3.0 times the eager step" in capsys.readouterr().err
    state = progress_panel._StudyState(CONFIG)
    state.update(event)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(state.render())
    assert warned == ("under another --name" in " ".join(captured.get().split())) == (ratio == 3.0)


@pytest.mark.parametrize(
    ("budget", "ratio", "text"),
    [
        ("65%", 1.0, "budget 65% of eager's peak of 314.1 MiB: 204.2 MiB"),
        ("65%", None, "budget 65% of the captured step's predicted peak of 314.1 MiB: 204.2 MiB"),
        ("step:205MiB", 1.0, "budget step:205MiB: 204.2 MiB"),
    ],
)
def test_a_budget_in_percent_is_shown_beside_the_peak_that_it_is_a_share_of(
    budget: str, ratio: float | None, text: str, capsys: pytest.CaptureFixture[str]
):
    with progress_panel.show_progress(CONFIG.model_copy(update={"budget": budget})) as progress:
        progress(Resolved(int(0.65 * 314.1 * 2**20), 2**28, ratio))
    assert capsys.readouterr().err.startswith(f"{text} for the step; the process holds 256.0 MiB without it")
