import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners import KINDS, build_planners, default_settings, make_plan
from autotune.planners.knobs import Choice, Float, Int
from autotune.planners.offload.window import OffloadWindow
from autotune.planners.order.list_by_bytes import ListByBytes
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, random_graph, training_chain

SSD = {"ssd": StoreCost(50.0, 25.0, 20.0, 10.0)}


def test_the_defaults_are_the_users_own_step():
    graph = training_chain(4)
    assert make_plan(graph, {}, 0, Costs.unit(graph)) == Plan.traced(graph)
    assert make_plan(graph, default_settings(), 0, Costs.unit(graph)) == Plan.traced(graph)


def test_the_defaults_name_every_kind_in_the_order_in_which_they_decide():
    assert list(default_settings()) == ["order", "update", "recompute", "reorder", "inplace", "offload", "allocator"]
    assert build_planners(default_settings()) == build_planners({})


def test_settings_turn_the_knobs_and_what_they_leave_out_stays():
    found = build_planners({"offload": {"planner": "window", "window": 3}, "order": {"planner": "list_by_bytes"}})
    assert found["order"] == ListByBytes()
    assert found["offload"] == OffloadWindow(window=3, store="ssd", share=1.0)


def test_a_whole_number_is_a_real_one_too():
    assert build_planners({"offload": {"planner": "window", "share": 1}})["offload"] == OffloadWindow(share=1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ofload": {"planner": "keep"}}, "no kind of planner is called 'ofload'; known: order, update, recompute, reorder, inplace, offload"),
        ({"order": {"planner": "shortest"}}, "unknown order planner 'shortest'; known: traced, list_by_bytes, depth_first"),
        ({"order": {}}, "order names no planner; add planner: one of traced, list_by_bytes"),
        ({"offload": {"planner": "window", "widow": 2}}, "offload planner window has no knob 'widow'; known: window, store, share"),
        ({"update": {"planner": "at_end", "share": 0.5}}, "update planner at_end has no knob 'share'; known: none"),
        ({"offload": {"planner": "window", "window": 0}}, "offload.window is 0; it must be a whole number from 1 to 8"),
        ({"offload": {"planner": "window", "window": 2.0}}, "offload.window is 2.0; it must be a whole number"),
        ({"offload": {"planner": "window", "window": True}}, "offload.window is True; it must be a whole number"),
        ({"offload": {"planner": "window", "share": 1.01}}, "offload.share is 1.01; it must be a number from 0.0 to 1.0"),
        ({"offload": {"planner": "window", "store": "tape"}}, "offload.store is 'tape'; it must be one of ssd, ramdisk"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_built_are_refused_with_what_is_known(settings: Any, words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_planners(settings)


def with_a_wide_head(layers: int) -> TrainGraph:
    """A training chain of which the loss's gradient overwrites its logits, three times as large as an activation."""
    built = Builder("wide head")
    built.value("x", 100, Role.BATCH)
    for i in range(layers):
        built.op(f"fwd{i}", [f"h{i - 1}" if i else "x"], [(f"h{i}", 100)])
    built.op("head", [f"h{layers - 1}"], [("logits", 300)])
    back = {"phase": Phase.BACKWARD, "role": Role.GRAD}
    built.op("dloss", ["logits"], [("dlogits", 300)], inplace=["logits"], **back)
    built.op("dhead", ["dlogits"], [(f"g{layers - 1}", 100)], **back)
    for i in reversed(range(1, layers)):
        built.op(f"dx{i}", [f"g{i}", f"h{i - 1}"], [(f"g{i - 1}", 100)], **back)
    return built.graph("g0")


@pytest.mark.parametrize("recompute", ["greedy", "blocks", "segments"])
def test_nothing_is_computed_again_where_what_is_made_in_place_suffices(recompute: str):
    graph = with_a_wide_head(8)
    costs = Costs.unit(graph)
    enough = peak_bytes(graph, make_plan(graph, {"inplace": {"planner": "greedy"}}, 0, costs), costs)
    assert enough < peak_bytes(graph, Plan.traced(graph), costs)
    plan = make_plan(graph, {"recompute": {"planner": recompute}}, enough, costs)
    assert plan.recomputed == 0
    assert peak_bytes(graph, plan, costs) == enough
    apart = {"recompute": {"planner": recompute}, "inplace": {"planner": "never"}}
    assert make_plan(graph, apart, enough, costs).recomputed > 0


def test_a_store_that_was_not_given_is_refused_with_the_cure():
    graph = training_chain(4)
    with pytest.raises(ConfigError, match=r"offload needs the store 'ssd'; open stores: none\. Add --store ssd=DIR"):
        make_plan(graph, {"offload": {"planner": "window"}}, 0, Costs.unit(graph))


def test_all_kinds_together_fit_a_chain_into_half_of_what_may_leave():
    graph = training_chain(12, nbytes=100, param_bytes=10)
    costs = Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops), SSD)
    traced = peak_bytes(graph, Plan.traced(graph), costs)
    budget = graph.static_bytes + (traced - graph.static_bytes) // 2
    best = {
        "order": {"planner": "list_by_bytes"},
        "update": {"planner": "with_gradient"},
        "offload": {"planner": "window"},
    }
    assert peak_bytes(graph, make_plan(graph, best, budget, costs), costs) <= budget


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_any_settings_make_a_valid_plan(rng: random.Random):
    graph = random_graph(rng)
    costs = Costs((1.0,) * len(graph.ops), (3,) * len(graph.ops), SSD)
    chosen: dict[str, Any] = {}
    for kind, planners in KINDS.items():
        name = rng.choice(sorted(planners))
        chosen[kind] = {"planner": name}
        for knob, what in planners[name].knobs.items():
            match what:
                case Int(low, high):
                    chosen[kind][knob] = rng.randint(low, high)
                case Float(low, high):
                    chosen[kind][knob] = rng.uniform(low, high)
                case Choice(options):
                    chosen[kind][knob] = options[0]
    check(graph, make_plan(graph, chosen, rng.randint(0, 200), costs))
