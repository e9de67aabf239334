"""The report: every possible run directory becomes one safe page."""

import itertools
import json
import random
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cli import main as cli
from autotune.errors import ConfigError
from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import Run, layer_numbers, leaves_memory, lower
from autotune.predict.simulate import simulate
from autotune.predict.step_view import StepTimeline
from autotune.records.device import Device
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome, TransferTrace
from autotune.records.run_dir import find_runs_dir
from autotune.records.trial import Trial, TrialKind, append_trial
from autotune.report.decision_savings import evaluate_decisions
from autotune.report.html import render_page, write_report
from autotune.report.summary import list_device_facts, list_run_facts, summarize_run
from autotune.study.recorded_run import RecordedRun
from autotune.testing.graphs import chain, training_chain

MIB = 2**20
FLOOR = 200 * MIB
DEVICE = Device("cpu", "Test <Silicon>", 8 * 2**30, 2, "2.13.0")
SETTINGS = {"order": {"planner": "traced"}, "update": {"planner": "end"}, "recompute": {"planner": "greedy"}}


def training(layers: int = 12) -> tuple[TrainGraph, Costs]:
    graph = training_chain(layers, 20 * MIB, 3 * MIB)
    store = StoreCost(2e9, 2e9, 1e9, 1e9)
    seconds = tuple(0.004 + 0.001 * (op.id % 5) for op in graph.ops)
    return graph, Costs(seconds, tuple(MIB * (op.id % 3) for op in graph.ops), {"ssd": store})


def recomputing(graph: TrainGraph) -> Plan:
    """The first half of the forward ops run again, each just before the first backward op that reads it."""
    order = list(Plan.traced(graph).order)
    forward = [op for op in graph.ops if op.name.startswith("fwd")]
    for op in forward[1 : len(forward) // 2 : 2]:
        reader = next(
            position for position, other in enumerate(order) if graph.ops[other].name == f"dw{int(op.name[3:]) + 1}"
        )
        order.insert(reader, op.id)
    return Plan(tuple(order))


def offloading(graph: TrainGraph) -> Plan:
    """Every forward result that stays away for at least one layer leaves for the SSD."""
    order = Plan.traced(graph).order
    layers = layer_numbers(graph, order)
    swaps = [
        Swap(value, gap)
        for value, happened in enumerate(events(graph, order))
        for gap in range(len(happened) - 1)
        if graph.values[value].name.startswith("h")
        and leaves_memory(layers[happened[gap][0]], layers[happened[gap + 1][0]], 1)
    ]
    return Plan(order, tuple(swaps), 1, "ssd")


def seen(graph: TrainGraph, costs: Costs, plan: Plan | None, outcome: Outcome = Outcome.OK) -> Measurement:
    expected = simulate(graph, lower(graph, plan or Plan.traced(graph)), costs)
    return Measurement(
        outcome,
        peak_bytes=FLOOR + expected.peak_bytes + MIB,
        charged_bytes=FLOOR + expected.peak_bytes + 9 * MIB,
        floor_bytes=FLOOR,
        step_seconds=(expected.seconds * 1.03,) * 10,
        baseline_seconds=(sum(costs.seconds),) * 10,
        max_error=0.0,
        meter="rss",
        device=DEVICE,
    )


def failed(outcome: Outcome, detail: str) -> Measurement:
    return Measurement(outcome, detail=detail, device=DEVICE)


def write_run(run_dir: Path, trials: list[Trial], graph: TrainGraph, costs: Costs, budget: str = "65%") -> Path:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"workload: chain\nbudget: {budget!r}\n")
    (run_dir / "graph.json").write_text(json.dumps(to_json(graph)))
    (run_dir / "costs.json").write_text(json.dumps(to_json(costs)))
    (run_dir / "device.json").write_text(json.dumps(to_json(DEVICE)))
    for trial in trials:
        append_trial(run_dir / "trials.jsonl", trial)
    return run_dir


def trial(number: int, graph: TrainGraph, costs: Costs, plan: Plan | None, measurement: Measurement) -> Trial:
    kind = TrialKind.BASELINE if plan is None else TrialKind.PLANNER if number < 4 else TrialKind.SEARCH
    estimate = simulate(graph, lower(graph, plan), costs) if plan else None
    settings = SETTINGS if plan else {}
    return Trial(number, kind, "chain(layers=12)", graph.digest, settings, plan, estimate, measurement)


def full_run(run_dir: Path) -> Path:
    """A baseline charged more than the budget, a recompute plan, a slower and smaller offload plan, and one trial of every failure."""
    graph, costs = training()
    again, away_plan = recomputing(graph), offloading(graph)
    check(graph, again)
    check(graph, away_plan)
    slow = seen(graph, costs, away_plan)
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None)),
        trial(1, graph, costs, away_plan, replace(slow, step_seconds=(sum(costs.seconds) * 1.01,) * 10)),
        trial(2, graph, costs, again, seen(graph, costs, again)),
        trial(3, graph, costs, Plan.traced(graph), failed(Outcome.OVER_BUDGET, "the simulator predicts 300 MiB")),
    ]
    for number, outcome in enumerate((o for o in Outcome if o not in (Outcome.OK, Outcome.OVER_BUDGET)), 4):
        detail = f"<script>alert('{outcome}')</script> & \"quotes\"\n" + "line\n" * 300
        trials.append(trial(number, graph, costs, again, failed(outcome, detail)))
    return write_run(run_dir, trials, graph, costs)


def test_the_fastest_plan_that_fits_makes_the_headline(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    assert "<h1>The step fits in" in html
    assert "for 1 % more time (+1 % to +1 %, range of 5), not re-measured</h1>" in html
    assert "plain PyTorch is over the budget" in html


@pytest.mark.parametrize(("verified", "shown"), [("", "not verified"), ("bit-equal to eager", "bit-equal to eager")])
def test_the_page_names_how_the_best_plans_results_were_compared(tmp_path: Path, verified: str, shown: str) -> None:
    graph, costs = training()
    plan = recomputing(graph)
    measured = replace(seen(graph, costs, plan), verified=verified)
    trials = [trial(0, graph, costs, None, seen(graph, costs, None)), trial(1, graph, costs, plan, measured)]
    page = write_report(write_run(tmp_path / "run", trials, graph, costs, "90%")).read_text()
    assert f"<dt>results of the best plan</dt><dd>{shown}</dd>" in page


def test_what_was_measured_afresh_is_told_with_plain_eager_first_and_a_verdict_each(tmp_path: Path) -> None:
    graph, costs = training()
    again, away_plan = recomputing(graph), offloading(graph)
    measured = seen(graph, costs, again)
    slower = replace(seen(graph, costs, away_plan), step_seconds=tuple(1.05 * one for one in measured.step_seconds))
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None)),
        trial(1, graph, costs, again, measured),
        trial(2, graph, costs, away_plan, slower),
    ]
    page = write_report(write_run(tmp_path / "before", trials, graph, costs, "90%")).read_text()
    assert "Re-measured plans" not in page
    fresh = [replace(trial, kind=TrialKind.CONFIRM, number=trial.number + 2) for trial in trials[1:]]
    page = write_report(write_run(tmp_path / "after", trials + fresh, graph, costs, "90%")).read_text()
    section = page.partition("Re-measured plans")[2].partition("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in section.split("<tr")[2:]]
    assert [(row[0], row[-1]) for row in rows] == [("eager", "baseline"), ("3", "BEST"), ("4", "safe fallback, slower")]
    assert rows[2][7] == "+5.0 % [+5.0 %, +5.0 %]"


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first


def test_the_page_is_small_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    assert len(html) < 2**20
    for name in ("src=", "@import", "<link", "<script", "<?xml"):
        assert name not in html
    addresses = {word.split('"')[1] for word in html.split() if "http" in word}
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


@pytest.mark.slow
def test_the_page_of_2800_ops_and_1500_trials_is_small_too() -> None:
    """The size of a ResNet-152 step with offload, and more trials than a night measures."""
    graph, costs = training(700)
    plan = offloading(graph)
    estimate = simulate(graph, lower(graph, plan), costs)
    bars = tuple((0.01 * step, 0.01 * step + 0.004) for step in range(3000))
    lanes = TransferTrace(40.0, bars, tuple((start + 0.005, end + 0.005) for start, end in bars), bars[::3], bars[1::3])
    base = trial(0, graph, costs, None, seen(graph, costs, None))
    searched = replace(base, number=1, kind=TrialKind.SEARCH, settings=SETTINGS, plan=plan, estimate=estimate)
    good = replace(seen(graph, costs, plan), lanes=lanes, transfer_bytes=2**30)
    rng = random.Random(0)
    trials, traced = [base], Plan.traced(graph)
    for number in range(1, 1500):
        if number % 3:
            trials.append(replace(searched, number=number, measurement=good))
            continue
        failure = failed(rng.choice(list(Outcome)[2:]), "".join(rng.choices("abcdefgh \n", k=4000)))
        trials.append(replace(searched, number=number, plan=traced, measurement=failure))
    assert len(graph.ops) == 2801
    page = render_page(RecordedRun("large", {"budget": "95%"}, tuple(trials), graph, costs, DEVICE))
    assert len(page.encode()) < 2**20
    for words in ("measured", "in transit", "offloaded", "trials are omitted here; trials.jsonl has all"):
        assert words in page


def test_hostile_details_are_escaped(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    assert "alert(&#39;crashed&#39;)" in html
    assert "Test &lt;Silicon&gt;" in html
    assert "Test <Silicon>" not in html


def test_an_offload_plan_gets_its_lanes_and_a_recompute_plan_none(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    assert "Compute and transfers" in html
    graph, costs = training()
    again = recomputing(graph)
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None)),
        trial(1, graph, costs, again, seen(graph, costs, again)),
    ]
    html = write_report(write_run(tmp_path / "other", trials, graph, costs)).read_text()
    assert "Compute and transfers" not in html


@pytest.mark.parametrize("store", ["ssd", "host", "ramdisk"])
@pytest.mark.parametrize("seen_at_work", [True, False])
def test_only_a_drive_wears_and_only_what_a_store_was_seen_to_do_can_be_hidden(
    tmp_path: Path, store: str, seen_at_work: bool
) -> None:
    graph, costs = training()
    costs = replace(costs, stores={store: costs.stores["ssd"]})
    plan = replace(offloading(graph), store=store)
    lanes = TransferTrace(0.1, ((0.0, 0.02),), ((0.05, 0.07),)) if seen_at_work else TransferTrace(0.1)
    measured = replace(seen(graph, costs, plan), lanes=lanes, transfer_bytes=2**30)
    trials = [trial(0, graph, costs, None, seen(graph, costs, None)), trial(1, graph, costs, plan, measured)]
    html = write_report(write_run(tmp_path / "run", trials, graph, costs, "90%")).read_text()
    assert ("of the transfer time hidden" in html) is seen_at_work
    assert ("written to the drive" in html) is (store == "ssd")


def test_both_plans_are_stacked_by_role_under_one_budget(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    memory = next(svg for svg in html.split("<svg ")[1:] if 'aria-label="Memory during' in svg)
    roles = (
        "parameters",
        "optimizer state",
        "buffers and batch",
        "gradients",
        "activations",
        "in transit",
        "workspaces",
    )
    for words in (*roles, "as traced", "plan 1: "):
        assert f">{words}" in memory
    assert memory.count(">budget, ") == 1


def test_what_a_plan_decides_stands_with_what_it_saves_and_costs(tmp_path: Path) -> None:
    records = RecordedRun.load(full_run(tmp_path / "run"))
    assert records.chosen is not None
    whole = evaluate_decisions(records.chosen)[0]
    row = next(line for line in render_page(records).splitlines() if f'"kind">{whole.kind}<' in line)
    cells = re.findall(r'class="n">([^<]*)<', row)
    assert cells[0] == f"{whole.saved_bytes / MIB:.1f}"
    assert cells[1] == (f"{1e3 * whole.seconds:.1f}" if whole.seconds else "-")
    assert cells[2] == f"{whole.moved_bytes / MIB:.1f}"
    assert whole.saved_bytes > 0


def test_every_failure_has_its_reason_beside_it_and_what_was_said_at_length_stands_once(tmp_path: Path) -> None:
    graph, costs = training(3)
    plan = Plan.traced(graph)
    long = "the worker died\n" + "\n".join(f"frame {number}" for number in range(300)) + "\nMemoryError: <here>"
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None)),
        *(trial(number, graph, costs, plan, failed(Outcome.CRASHED, long)) for number in (1, 2)),
        trial(3, graph, costs, plan, failed(Outcome.TIMEOUT, "no step in 60 s")),
    ]
    html = write_report(write_run(tmp_path / "run", trials, graph, costs)).read_text()
    assert html.count('<td class="reason">the worker died</td>') == 2
    assert html.count('<td class="reason">no step in 60 s</td>') == 1
    assert html.count("MemoryError: &lt;here&gt;") == 1
    assert "trials 1, 2: crashed" in html


def test_a_plan_that_is_stopped_for_being_slow_or_is_known_already_is_no_failure(tmp_path: Path) -> None:
    graph, costs = training(3)
    plan = Plan.traced(graph)
    known = replace(trial(2, graph, costs, plan, failed(Outcome.CRASHED, "died")), kind=TrialKind.REPEAT)
    trials = [
        trial(0, graph, costs, None, replace(seen(graph, costs, None), disturbed="others used the CPUs")),
        trial(1, graph, costs, plan, failed(Outcome.STOPPED_EARLY, "1.5 times the leader's time")),
        known,
    ]
    run_dir = write_run(tmp_path / "run", trials, graph, costs)
    assert 'class="failed"' not in write_report(run_dir).read_text()
    append_trial(run_dir / "trials.jsonl", trial(3, graph, costs, plan, failed(Outcome.CRASHED, "died")))
    assert write_report(run_dir).read_text().count('class="failed"') == 1


def test_a_plan_above_eagers_peak_raises_it(tmp_path: Path) -> None:
    graph, costs = training()
    plan = recomputing(graph)
    small = seen(graph, costs, plan)
    eager = replace(seen(graph, costs, None), peak_bytes=FLOOR + 100 * MIB)
    large = replace(small, peak_bytes=FLOOR + 104 * MIB, charged_bytes=FLOOR + 105 * MIB)
    trials = [trial(0, graph, costs, None, eager), trial(1, graph, costs, plan, large)]
    page = write_report(write_run(tmp_path / "run", trials, graph, costs, "110%")).read_text()
    assert "raises the step&#39;s peak from 100.0 MiB to 104.0 MiB, 4 % more" in page


def test_a_value_is_in_transit_until_it_is_written_and_until_it_is_read() -> None:
    graph = training_chain(4)
    walk = StepTimeline(graph, Costs.unit(graph), Plan(Plan.traced(graph).order))
    assert not any(walk.bytes_by_role["in transit"])
    costs = replace(Costs.unit(graph), stores={"ssd": StoreCost(1e9, 1e9, 1e9, 1e9)})
    walk = StepTimeline(graph, costs, Plan(Plan.traced(graph).order, (Swap(graph.ops[0].outputs[0], 1),), 1, "ssd"))
    moving = [
        graph.ops[span.moment.instruction.op].name
        for span, nbytes in zip(walk.spans, walk.bytes_by_role["in transit"], strict=True)
        if nbytes == 10 and isinstance(span.moment.instruction, Run)
    ]
    assert moving == ["fwd2", "dx2", "dw2", "dx1"]


def test_a_workers_terminal_escapes_are_symbols_in_the_page(tmp_path: Path) -> None:
    records = RecordedRun.load(full_run(tmp_path / "run"))
    failed = Measurement(Outcome.CRASHED, "boom \x1b]0;pwn\x07\x1b[2J\x7f at\tline 3\nsecond")
    page = render_page(
        replace(
            records,
            trials=(*records.trials, Trial(900, TrialKind.SEARCH, "w", "d", {}, Plan((0,)), measurement=failed)),
        )
    )
    assert "boom \u241b]0;pwn\u2407\u241b[2J\u2421 at\tline 3\nsecond" in page
    assert not set(page) & {chr(code) for code in range(32) if chr(code) not in "\t\n"}


def test_every_box_that_scrolls_takes_the_keyboards_focus_and_the_page_has_a_dark_scheme(tmp_path: Path) -> None:
    page = render_page(RecordedRun.load(full_run(tmp_path / "run")))
    boxes = re.findall(r'<div class="wide"[^>]*>|<pre[^>]*>', page)
    assert len(boxes) > 4
    assert all('tabindex="0"' in box for box in boxes)
    assert "@media (prefers-color-scheme: dark)" in page


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_opens_from_disk_and_no_screen_is_too_narrow(tmp_path: Path) -> None:
    page = write_report(full_run(tmp_path / "run"))
    script = (
        "<script>document.title = document.documentElement.scrollWidth <= innerWidth ? 'fits' : 'too wide'</script>"
    )
    page.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    for width in (500, 1400):  # a headless window is no narrower than 500
        browser = ["chromium", "--headless", "--no-sandbox", f"--window-size={width},900", "--dump-dom", page.as_uri()]
        process = subprocess.run(browser, capture_output=True, text=True, timeout=60, check=True)
        assert "<title>fits</title>" in process.stdout


def test_pictures_stand_alone_and_are_the_pages_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, out = full_run(tmp_path / "run"), tmp_path / "docs"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(run), "--pictures", str(out)])
    assert not ended.value.code
    drawn = [out / name for name in ("frontier.svg", "memory.svg", "lanes.svg")]
    assert capfd.readouterr().out.split() == [str(run / "report.html"), *map(str, drawn)]
    for picture in drawn:
        assert ET.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert picture.read_text() in (run / "report.html").read_text()


def test_pictures_in_the_place_of_a_file_are_a_usage_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, place = full_run(tmp_path / "run"), tmp_path / "a file"
    place.touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(run), "--pictures", str(place)])
    assert ended.value.code == 2
    assert capfd.readouterr().err == f"error: {place}: File exists; name a directory\n"


def test_a_run_belongs_to_the_nearest_directory_that_logs_and_else_to_the_one_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = tmp_path / "runs" / "nightly" / "entry" / "one"
    night.mkdir(parents=True)
    assert find_runs_dir(night) == str(night.parent)
    (tmp_path / "runs" / "mlflow.lock").touch()
    assert find_runs_dir(night) == find_runs_dir(tmp_path / "runs" / "first") == str(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert find_runs_dir(Path("runs/first")) == "runs"
    monkeypatch.chdir(night)
    assert find_runs_dir(Path()) == str(tmp_path / "runs")


def test_a_run_without_trials_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], *training())
    assert "No plan tried yet" in write_report(run).read_text()


def test_a_run_that_ended_before_its_capture_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("workload: chain\nbudget: 65%\n")
    assert "No plan tried yet" in write_report(tmp_path).read_text()


def test_a_baseline_that_does_not_fit_leaves_ratios_out(tmp_path: Path) -> None:
    graph, costs = training()
    again = recomputing(graph)
    alone = replace(seen(graph, costs, again), baseline_seconds=())
    trials = [
        trial(0, graph, costs, None, failed(Outcome.OUT_OF_MEMORY, "DefaultCPUAllocator: can't allocate memory")),
        trial(1, graph, costs, again, alone),
    ]
    html = write_report(write_run(tmp_path / "run", trials, graph, costs, "520MiB")).read_text()
    assert "<h1>Fits in 520.0 MiB, where plain PyTorch does not fit</h1>" in html
    assert "step time, ms" in html


def test_when_nothing_fits_the_lowest_trial_is_named(tmp_path: Path) -> None:
    graph, costs = training()
    again = recomputing(graph)
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None)),
        trial(1, graph, costs, again, seen(graph, costs, again, Outcome.OVER_BUDGET)),
    ]
    html = write_report(write_run(tmp_path / "run", trials, graph, costs, "5%")).read_text()
    assert "<h1>No plan that was tried fits 5%</h1>" in html
    assert "Plan 1 came lowest" in html


@pytest.mark.parametrize(("outcome", "words"), [(Outcome.CRASHED, "crashed"), (Outcome.WRONG_RESULT, "wrong result")])
def test_when_every_plan_fails_the_page_says_so_and_blames_no_budget(
    tmp_path: Path, outcome: Outcome, words: str
) -> None:
    graph, costs = training()
    again = recomputing(graph)
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None)),
        trial(1, graph, costs, again, failed(outcome, "segmentation fault\nand a trace")),
    ]
    html = write_report(write_run(tmp_path / "run", trials, graph, costs, "90%")).read_text()
    assert f"<h1>No plan ran to its end: {words}</h1>" in html
    assert "the last one: segmentation fault. Nothing is known of the budget" in html
    assert "Raise the budget" not in html


def test_a_directory_without_a_run_is_refused_and_left_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is recorded here"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_roles_and_layers_of_the_peak_add_up_to_the_simulated_bytes() -> None:
    graph, costs = training(5)
    for plan in (Plan.traced(graph), recomputing(graph), offloading(graph)):
        walk = StepTimeline(graph, costs, plan)
        totals = [sum(column) for column in zip(*walk.bytes_by_role.values(), strict=True)]
        assert totals == walk.highest_bytes[1]
        assert (
            sum(walk.bytes_at_peak().values())
            == walk.peak_bytes
            == simulate(graph, lower(graph, plan), costs).peak_bytes
        )


def test_a_chain_of_three_shows_two_values_at_its_peak() -> None:
    graph = chain(3)
    assert StepTimeline(graph, Costs.unit(graph), Plan.traced(graph)).bytes_at_peak() == {"op0": 10, "op1": 10}


def test_the_store_lane_holds_one_bar_a_transfer_and_compute_never_overlaps_itself() -> None:
    graph, costs = training(6)
    plan = offloading(graph)
    tracks = StepTimeline(graph, costs, plan).engine_bars()
    moved = sum(graph.values[swap.value].nbytes for swap in plan.offload)
    for lane in ("save", "load"):
        assert 0.999999 * moved / 2e9 <= sum(end - start for start, end, _ in tracks[lane]) <= 1.000001 * moved / 1e9
    bars = tracks["execute"]
    assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(bars))


def test_a_gain_within_the_noise_of_the_re_measurement_is_not_stated(tmp_path: Path) -> None:
    graph, costs = training()
    plan = recomputing(graph)
    lucky = seen(graph, costs, plan)
    eager = (sum(costs.seconds),) * 12
    lucky = replace(lucky, step_seconds=tuple(0.8 * seconds for seconds in eager), baseline_seconds=eager)
    blocks = (0.67, 0.9, 0.92, 0.95, 1.0, 1.07)
    noisy = replace(lucky, step_seconds=tuple(ratio * eager[0] for ratio in blocks for _ in range(2)))
    trials = [trial(0, graph, costs, None, seen(graph, costs, None)), trial(1, graph, costs, plan, lucky)]
    again = replace(trial(2, graph, costs, plan, noisy), kind=TrialKind.CONFIRM)
    searched = RecordedRun.load(write_run(tmp_path / "searched", trials, graph, costs, "90%"))
    confirmed = RecordedRun.load(write_run(tmp_path / "confirmed", [*trials, again], graph, costs, "90%"))
    assert summarize_run(searched)[0].endswith("and saves 20 % of the time, not re-measured")
    assert summarize_run(confirmed)[0].endswith("and may take -33 % to +7 % more time")
    assert dict(list_run_facts(searched))["time over eager's"].endswith(", not re-measured")
    facts = dict(list_run_facts(confirmed))
    assert facts["time over eager's"] == "-6.5 % (-33.0 % to +7.0 %, 95 % of 6)"
    assert facts["machine"] == DEVICE.silicon


def test_plain_eager_within_the_budgets_tolerance_fits_the_budget_too(tmp_path: Path) -> None:
    graph, costs = training()
    eager, plan = seen(graph, costs, None), recomputing(graph)
    trials = [trial(0, graph, costs, None, eager), trial(1, graph, costs, plan, seen(graph, costs, plan))]
    budget = f"step:{int((eager.step_charged_bytes or 0) / 1.003)}B"
    records = RecordedRun.load(write_run(tmp_path / "run", trials, graph, costs, budget))
    assert summarize_run(records)[1].endswith("plain PyTorch fits the budget too.")


def test_the_page_names_the_device_of_the_best_plan_and_not_that_of_the_last_session(tmp_path: Path) -> None:
    records = RecordedRun.load(full_run(tmp_path / "run"))
    later = replace(records, device=replace(DEVICE, silicon="Another", torch="2.14.0"))
    assert dict(list_run_facts(later))["machine"] == DEVICE.silicon
    assert dict(list_device_facts(later))["software"] == "torch 2.13.0"


def test_a_run_of_the_baseline_alone_says_how_to_go_on_instead_of_that_nothing_fits(tmp_path: Path) -> None:
    graph, costs = training()
    run = write_run(tmp_path / "run", [trial(0, graph, costs, None, seen(graph, costs, None))], graph, costs, "5%")
    assert summarize_run(RecordedRun.load(run)) == (
        "Nothing but the baseline ran yet", f"Go on with autotune resume {run}",
    )  # fmt: skip
