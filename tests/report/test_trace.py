"""The trace that Perfetto opens: what each thread did when, and the bytes of its counters."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.ir.schedule import lower
from autotune.predict.simulate import simulate
from autotune.predict.step_view import StepTimeline
from autotune.records.measurement import TransferTrace
from autotune.report.trace import COUNTER, build_trace, to_text
from autotune.testing.graphs import plans, training_chain


def costs_of(graph: TrainGraph) -> Costs:
    ops = range(len(graph.ops))
    return Costs(
        tuple(0.001 * (1 + op % 3) for op in ops), tuple(op % 5 for op in ops), {"ssd": StoreCost(2e4, 2e4, 1e4, 1e4)}
    )


def events_of(document: dict[str, Any], phase: str, process: int) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if (event["ph"], event["pid"]) == (phase, process)]


@settings(max_examples=60)
@given(plans())
def test_a_trace_is_ordered_and_its_counters_peak_at_the_estimate(drawn: tuple[TrainGraph, Plan]):
    graph, plan = drawn
    costs = costs_of(graph)
    steps = {"plan": plan, "as traced": Plan.traced(graph)}
    document = json.loads(to_text(build_trace({name: StepTimeline(graph, costs, p) for name, p in steps.items()})))
    stamps = [event["ts"] for event in document["traceEvents"] if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    assert min(stamps, default=0.0) >= 0.0
    for process, step in enumerate(steps.values(), start=1):
        estimate = simulate(graph, lower(graph, step), costs)
        samples = [sum(event["args"].values()) for event in events_of(document, "C", process)]
        assert max(samples, default=0) == estimate.peak_bytes
        bars = events_of(document, "X", process)
        assert sum(event["cat"] in ("forward", "backward", "update", "recompute") for event in bars) == len(step.order)
        last = max(event["ts"] + event["dur"] for event in bars if event["tid"] == 1)
        assert last == pytest.approx(1e6 * estimate.seconds, abs=0.01)


@settings(max_examples=30)
@given(plans())
def test_the_bars_of_a_thread_do_not_overlap(drawn: tuple[TrainGraph, Plan]):
    graph, plan = drawn
    document = build_trace({"plan": StepTimeline(graph, costs_of(graph), plan)})
    for thread in (1, 2, 3):
        bars = [event for event in events_of(document, "X", 1) if event["tid"] == thread]
        for before, after in itertools.pairwise(bars):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002


def test_transfers_have_threads_of_their_own_and_measured_ones_a_process():
    graph = training_chain(6, nbytes=1000, param_bytes=10)
    traced = Plan.traced(graph)
    value = graph.ops[0].outputs[0]
    plan = Plan(traced.order, (Swap(value, 1),), 1, "ssd")
    measured = TransferTrace(0.01, saves=((0.001, 0.002),), loads=((0.005, 0.006),), load_stalls=((0.0055, 0.006),))
    document = build_trace({"plan": StepTimeline(graph, costs_of(graph), plan)}, {"plan": measured})
    moved = [(event["cat"], event["tid"], event["args"]["nbytes"]) for event in events_of(document, "X", 1) if "nbytes" in event.get("args", {})]  # fmt: skip
    assert moved == [("save", 3, 1000), ("load", 2, 1000)]
    assert [(e["name"], e["ts"], e["dur"]) for e in events_of(document, "X", 2)] == [
        ("save", 1000.0, 1000.0), ("load", 5000.0, 1000.0), ("wait for a read", 5500.0, 500.0),
    ]  # fmt: skip
    assert {event["name"] for event in events_of(document, "C", 1)} == {COUNTER}
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert names == ["plan, simulated", "plan, measured transfers"]
