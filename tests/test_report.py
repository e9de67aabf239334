"""The report: every run directory that a study can leave behind becomes one safe page."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.costs import Costs, StoreCost
from autotune.errors import ConfigError
from autotune.graph import TrainGraph
from autotune.measurement import Device, Measurement, Outcome
from autotune.plan import Plan, Swap, check, events
from autotune.records import to_json
from autotune.report import write_report
from autotune.schedule import away, layer_runs, lower
from autotune.simulate import simulate
from autotune.trial import Trial, append
from autotune.walk import Walk
from tests.graphs import chain, training_chain

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
        reader = next(at for at, other in enumerate(order) if graph.ops[other].name == f"dw{int(op.name[3:]) + 1}")
        order.insert(reader, op.id)
    return Plan(tuple(order))


def offloading(graph: TrainGraph) -> Plan:
    """Every forward result that stays away for at least one layer leaves for the SSD."""
    order = Plan.traced(graph).order
    layers = layer_runs(graph, order)
    swaps = [
        Swap(value, gap)
        for value, happened in enumerate(events(graph, order))
        for gap in range(len(happened) - 1)
        if graph.values[value].name.startswith("h") and away(layers[happened[gap][0]], layers[happened[gap + 1][0]], 1)
    ]
    return Plan(order, tuple(swaps), 1, "ssd")


def seen(graph: TrainGraph, costs: Costs, plan: Plan | None, outcome: Outcome = Outcome.OK) -> Measurement:
    expected = simulate(graph, lower(graph, plan or Plan.traced(graph)), costs)
    return Measurement(
        outcome,
        peak_bytes=FLOOR + expected.peak_bytes + MIB,
        charged_bytes=FLOOR + expected.peak_bytes + 9 * MIB,
        floor_bytes=FLOOR,
        step_seconds=(expected.seconds * 1.03,) * 5,
        baseline_seconds=(sum(costs.seconds),) * 5,
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
        append(run_dir / "trials.jsonl", trial)
    return run_dir


def trial(number: int, graph: TrainGraph, costs: Costs, plan: Plan | None, measurement: Measurement) -> Trial:
    kind = "baseline" if plan is None else "planner" if number < 4 else "search"
    estimate = simulate(graph, lower(graph, plan), costs) if plan else None
    settings = SETTINGS if plan else {}
    return Trial(number, kind, "chain(layers=12)", graph.digest, settings, plan, estimate, measurement)


def full_run(run_dir: Path) -> Path:
    """Baseline over budget, a recompute plan, a slower and smaller offload plan, and one trial of every failure."""
    graph, costs = training()
    again, away_plan = recomputing(graph), offloading(graph)
    check(graph, again)
    check(graph, away_plan)
    slow = seen(graph, costs, away_plan)
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None, Outcome.OVER_BUDGET)),
        trial(1, graph, costs, away_plan, replace(slow, step_seconds=(sum(costs.seconds) * 1.01,) * 5)),
        trial(2, graph, costs, again, seen(graph, costs, again)),
        trial(3, graph, costs, Plan.traced(graph), failed(Outcome.OVER_BUDGET, "the simulator predicts 300 MiB")),
    ]
    for number, outcome in enumerate(
        (o for o in Outcome if o not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.NOISY)), 4
    ):
        detail = f"<script>alert('{outcome}')</script> & \"quotes\"\n" + "line\n" * 300
        trials.append(trial(number, graph, costs, again, failed(outcome, detail)))
    return write_run(run_dir, trials, graph, costs)


def test_the_fastest_plan_that_fits_makes_the_headline(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    assert "<h1>The step fits in" in html
    assert "for 1 % more time</h1>" in html
    assert "plain PyTorch is over the budget" in html


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
    assert "Measured afresh" not in page
    fresh = [replace(one, kind="confirm", number=one.number + 2) for one in trials[1:]]
    page = write_report(write_run(tmp_path / "after", trials + fresh, graph, costs, "90%")).read_text()
    section = page.partition("Measured afresh")[2].partition("</table>")[0]
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


def test_hostile_details_are_escaped(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    assert "alert(&#39;crashed&#39;)" in html
    assert "Test &lt;Silicon&gt;" in html
    assert "Test <Silicon>" not in html


def test_an_offload_plan_gets_its_lanes_and_a_recompute_plan_none(tmp_path: Path) -> None:
    html = write_report(full_run(tmp_path / "run")).read_text()
    assert "Computing and moving" in html
    graph, costs = training()
    again = recomputing(graph)
    trials = [
        trial(0, graph, costs, None, seen(graph, costs, None)),
        trial(1, graph, costs, again, seen(graph, costs, again)),
    ]
    html = write_report(write_run(tmp_path / "other", trials, graph, costs)).read_text()
    assert "Computing and moving" not in html


def test_a_run_without_trials_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], *training())
    assert "Nothing was tried yet" in write_report(run).read_text()


def test_a_run_that_ended_before_its_capture_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("workload: chain\nbudget: 65%\n")
    assert "Nothing was tried yet" in write_report(tmp_path).read_text()


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
        trial(0, graph, costs, None, seen(graph, costs, None, Outcome.OVER_BUDGET)),
        trial(1, graph, costs, again, seen(graph, costs, again, Outcome.OVER_BUDGET)),
    ]
    html = write_report(write_run(tmp_path / "run", trials, graph, costs, "5%")).read_text()
    assert "<h1>No plan that was tried fits 5%</h1>" in html
    assert "Plan 1 came lowest" in html


def test_a_directory_without_a_run_is_refused_and_left_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is recorded here"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_roles_and_layers_of_the_peak_add_up_to_the_simulated_bytes() -> None:
    graph, costs = training(5)
    for plan in (Plan.traced(graph), recomputing(graph), offloading(graph)):
        walk = Walk(graph, costs, plan)
        totals = [sum(column) for column in zip(*walk.by_role.values(), strict=True)]
        assert totals == walk.band[1]
        assert sum(walk.at_peak().values()) == walk.peak_bytes == simulate(graph, lower(graph, plan), costs).peak_bytes


def test_a_chain_of_three_shows_two_values_at_its_peak() -> None:
    graph = chain(3)
    assert Walk(graph, Costs.unit(graph), Plan.traced(graph)).at_peak() == {"op0": 10, "op1": 10}


def test_the_store_lane_holds_one_bar_a_transfer_and_compute_never_overlaps_itself() -> None:
    graph, costs = training(6)
    plan = offloading(graph)
    tracks = Walk(graph, costs, plan).tracks()
    moved = sum(graph.values[swap.value].nbytes for swap in plan.offload)
    for lane in ("write", "read"):
        assert 0.999999 * moved / 2e9 <= sum(end - start for start, end, _ in tracks[lane]) <= 1.000001 * moved / 1e9
    bars = tracks["compute"]
    assert all(one[1] <= two[0] + 1e-9 for one, two in itertools.pairwise(bars))
