import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS, make_plan
from autotune.planners import coordinate_descent as module
from autotune.planners.auto import best_plan
from autotune.planners.candidates import DevicePlanning, find_lowest, find_smallest, propose
from autotune.planners.knobs import Settings
from autotune.planners.space import space_for_device
from autotune.predict.simulate import Estimate, peak_bytes, simulate
from autotune.testing.graphs import random_graph, training_chain
from tests.planners import synthetic

GPT = synthetic.gpt(1, 64, 4, 32, batch=4, vocabulary=64)
RESNET = synthetic.resnet((1, 1), batch=4, side=64)


def auto(graph: TrainGraph, costs: Costs, budget: int, choices: module.Choices | None = None) -> tuple[Settings, Plan]:
    best = best_plan(graph, costs, budget, choices=choices)
    return best.settings, best.plan


def seen(graph: TrainGraph, plan: Plan, costs: Costs) -> Estimate:
    return simulate(graph, lower(graph, plan), costs)


@pytest.mark.parametrize("net", [GPT, RESNET], ids=["gpt", "resnet"])
def test_it_is_no_slower_than_greedy_on_any_order_with_any_update(net: tuple[TrainGraph, Costs]):
    graph, costs = net
    budget = peak_bytes(graph, Plan.traced(graph), costs) * 75 // 100
    settings_, plan = auto(graph, costs, budget)
    assert seen(graph, plan, costs).peak_bytes <= budget
    for update in KINDS["update"]:
        chosen = {"update": {"planner": update}, "recompute": {"planner": "greedy"}}
        theirs = seen(graph, make_plan(graph, chosen, budget, costs), costs)
        if theirs.peak_bytes <= budget:
            assert seen(graph, plan, costs).seconds <= theirs.seconds
    assert settings_["recompute"]["planner"] != "keep"


def test_its_settings_make_the_plan_again():
    graph, costs = RESNET
    budget = peak_bytes(graph, Plan.traced(graph), costs) * 70 // 100
    chosen, plan = auto(graph, costs, budget)
    assert make_plan(graph, chosen, budget, costs) == plan


def with_store(costs: Costs, rate: float) -> Costs:
    return Costs(costs.seconds, costs.scratch_bytes, {"ssd": StoreCost(rate, rate, rate, rate)})


def test_a_fast_store_takes_what_a_slow_one_leaves_to_computing_again():
    graph = training_chain(12, nbytes=100, param_bytes=1)
    unit = Costs.unit(graph)
    budget = peak_bytes(graph, Plan.traced(graph), unit) * 60 // 100
    fast, slow = with_store(unit, 1e6), with_store(unit, 0.01)
    chosen, plan = auto(graph, fast, budget)
    assert plan.offload
    assert seen(graph, plan, fast).seconds == pytest.approx(len(graph.ops), rel=0.01)
    assert make_plan(graph, chosen, budget, fast) == plan
    chosen, plan = auto(graph, slow, budget)
    assert plan.recomputed
    assert not plan.offload
    assert seen(graph, plan, slow).peak_bytes <= budget


def test_weights_leave_where_that_fits_for_nothing_and_computing_again_would_cost():
    graph = training_chain(12, nbytes=2**20, param_bytes=2**20)
    costs = with_store(Costs.unit(graph), 1e12)
    alone = {
        "offload": {"planner": "window", "store": "ssd", "window": 1, "what": "all"},
        "update": {"planner": "at_end"},
    }
    lowest = seen(graph, make_plan(graph, alone, 0, costs), costs)
    activations = {**alone, "offload": {**alone["offload"], "what": "activations"}}
    assert lowest.peak_bytes < seen(graph, make_plan(graph, activations, 0, costs), costs).peak_bytes
    for budget in (lowest.peak_bytes, 0):
        _, plan = auto(graph, costs, budget)
        found = seen(graph, plan, costs)
        assert found.peak_bytes <= lowest.peak_bytes
        assert budget == 0 or found.seconds <= lowest.seconds + 1e-9


def test_weights_leave_also_where_the_order_that_is_best_without_a_store_updates_them_early():
    graph, costs = RESNET[0], with_store(RESNET[1], 1e12)
    alone = {
        "order": {"planner": "list_by_bytes"},
        "offload": {"planner": "window", "store": "ssd", "what": "all", "least_bytes": module.MIN_WEIGHT_BYTES},
        "update": {"planner": "at_end"},
    }
    kept, again = (
        seen(graph, make_plan(graph, alone | {"reorder": {"planner": later}}, 0, costs), costs).peak_bytes
        for later in ("keep", "again")
    )
    assert kept < again
    plans = module.PlanCache(graph, costs, kept)
    choices = {kind: tuple(known) for kind, known in KINDS.items() if kind != "allocator"} | {"recompute": ("greedy",)}
    names = {**module.FIRST_PLANNERS, "order": "list_by_bytes", "reorder": "again"}
    found = module.share_with_store(plans, choices, lambda chosen: module.default_preset(chosen, costs), names)
    assert min(plans.evaluate(made)[1].peak_bytes for made in found) <= kept


def test_a_budget_that_offload_keeps_only_in_another_order_is_kept(monkeypatch: pytest.MonkeyPatch):
    graph, costs = RESNET[0], with_store(RESNET[1], 1e12)
    weights = {"planner": "window", "store": "ssd", "what": "all", "least_bytes": module.MIN_WEIGHT_BYTES}
    alone = {"offload": weights, "update": {"planner": "at_end"}}
    traced, other = (
        seen(graph, make_plan(graph, alone | {"order": {"planner": order}}, 0, costs), costs).peak_bytes
        for order in ("traced", "list_by_bytes")
    )
    assert other < traced
    monkeypatch.setattr(module, "SWEEPS", 0)  # as where no order is any better without a store
    assert seen(graph, auto(graph, costs, other)[1], costs).peak_bytes <= other


def test_where_the_smallest_plan_is_too_large_it_is_tried_at_once_with_its_weights_offloaded():
    graph = training_chain(12, nbytes=2**20, param_bytes=2**20)
    costs = with_store(Costs.unit(graph), 1e12)
    planners = {"order": ["traced"], "update": ["at_end"], "recompute": ["keep"], "reorder": ["keep"]}
    planning = DevicePlanning(graph, costs, space_for_device(planners, "cpu", costs.stores))
    smallest, lowest = planning.find_smallest(), find_lowest(planning, 0, seconds=0.0)
    assert (smallest.settings["offload"]["what"], lowest.settings["offload"]["what"]) == ("activations", "all")
    assert lowest.estimate.peak_bytes < smallest.estimate.peak_bytes


def test_the_smallest_plan_has_the_updates_that_are_best_after_recomputation():
    """As traced, activations are the peak wherever updates run; recomputed, gradients that wait for updates are."""
    graph = training_chain(30, nbytes=10, param_bytes=5)
    costs = Costs.unit(graph)
    planners = {"order": ["traced"], "recompute": ["keep", "greedy"], "reorder": ["keep"]}
    smallest = find_smallest(graph, costs, space_for_device(planners, "cpu", {}))
    greedy = {"recompute": {"planner": "greedy"}}
    late, early = (
        seen(graph, make_plan(graph, {**greedy, "update": {"planner": update}}, 0, costs), costs).peak_bytes
        for update in ("at_end", "with_gradient")
    )
    assert smallest.estimate.peak_bytes == early < late


def test_without_a_store_none_is_asked_for():
    graph = training_chain(4)
    chosen, plan = auto(graph, Costs.unit(graph), 0)
    assert chosen["offload"] == {"planner": "keep"}
    assert not plan.offload


def test_it_chooses_only_what_it_may():
    graph, costs = RESNET
    chosen, _ = auto(graph, costs, 0, {"order": ["traced"], "recompute": ["keep", "segments"]})
    assert chosen["order"] == {"planner": "traced"}
    assert chosen["recompute"]["planner"] in ("keep", "segments")
    assert set(chosen) == {"order", "recompute"}


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_any_plan_is_valid_the_same_again_and_within_what_the_kinds_reach_alone(rng: random.Random):
    graph = random_graph(rng, 9)
    costs = Costs(tuple(rng.choice([0.0, 1.0, 3.0]) for _ in graph.ops), tuple(rng.choice([0, 9]) for _ in graph.ops))
    budget = rng.randint(0, peak_bytes(graph, Plan.traced(graph), costs))
    chosen, plan = auto(graph, costs, budget)
    check(graph, plan)
    assert auto(graph, costs, budget) == (chosen, plan)
    traced = seen(graph, Plan.traced(graph), costs)
    mine = seen(graph, plan, costs)
    over = [max(0, one.peak_bytes - budget) for one in (mine, traced)]
    assert (over[0], mine.seconds) <= (over[1], traced.seconds)


@pytest.mark.parametrize("accept_first", [False, True])
def test_a_choice_of_planners_holds_also_for_the_first_plan_that_fits(accept_first: bool):
    graph = training_chain(8)
    best = best_plan(graph, Costs.unit(graph), 2**40, choices={"update": ("at_end",)}, accept_first=accept_first)
    assert best.settings["update"]["planner"] == "at_end"


@pytest.mark.parametrize("accept_first", [False, True])
def test_no_search_goes_on_after_its_time(accept_first: bool, monkeypatch: pytest.MonkeyPatch):
    planned: list[Settings] = []
    evaluate = module.PlanCache.evaluate

    def count(cache: module.PlanCache, chosen: Settings) -> tuple[Plan, Estimate]:
        planned.append(chosen)
        return evaluate(cache, chosen)

    monkeypatch.setattr(module.PlanCache, "evaluate", count)
    graph = training_chain(12)
    best_plan(graph, Costs.unit(graph), 0, seconds=-1.0, accept_first=accept_first)
    assert len({repr(chosen) for chosen in planned}) == 1


def test_a_search_that_its_time_ends_before_a_plan_fits_may_return_the_smallest_plan():
    graph = training_chain(30)
    costs = Costs.unit(graph)
    choices = {"recompute": ("keep", "segments")}
    first, smallest = (
        best_plan(graph, costs, 0, choices=choices, seconds=-1.0, or_smallest=or_smallest)
        for or_smallest in (False, True)
    )
    assert (first.settings["recompute"]["planner"], smallest.settings["recompute"]["planner"]) == ("keep", "segments")
    assert smallest.estimate.peak_bytes < first.estimate.peak_bytes


def test_proposals_end_with_the_evaluation_in_which_their_time_is_over(monkeypatch: pytest.MonkeyPatch):
    planned: set[str] = set()
    evaluate = module.PlanCache.evaluate

    def count(cache: module.PlanCache, chosen: Settings) -> tuple[Plan, Estimate]:
        planned.add(repr(chosen))
        return evaluate(cache, chosen)

    monkeypatch.setattr(module.PlanCache, "evaluate", count)
    for name in ("candidates", "coordinate_descent"):  # each evaluation takes a second
        monkeypatch.setattr(f"autotune.planners.{name}.time", SimpleNamespace(monotonic=lambda: float(len(planned))))
    graph = training_chain(12)
    costs = with_store(Costs.unit(graph), 1.0)
    quick = {"order": ["traced"], "recompute": ["greedy"], "reorder": ["keep"], "offload": ["keep", "window"]}
    space = space_for_device(quick, "cpu", costs.stores)
    list(propose(graph, costs, space, 0))
    total = len(planned)
    assert total > 15
    for seconds in range(0, total, 4):
        planned.clear()
        assert list(propose(graph, costs, space, 0, seconds))
        assert len(planned) <= seconds + 1


@pytest.mark.parametrize("accept_first", [False, True])
@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"offload": ("window",)}, "offload: window needs a store, and none is open; use --store ssd=DIR"),
        ({"update": ("later",)}, "planners later of 'update' cannot be chosen; known update: at_end, with_gradient"),
        ({"update": ()}, "planners none of 'update' cannot be chosen"),
        ({"updates": ("at_end",)}, "of 'updates' cannot be chosen; known kinds: "),
    ],
)
def test_choices_that_leave_no_planner_are_refused_by_name(
    choices: dict[str, tuple[str, ...]], message: str, accept_first: bool
):
    graph = training_chain(8)
    with pytest.raises(ConfigError) as caught:
        best_plan(graph, Costs.unit(graph), 0, choices=choices, accept_first=accept_first)
    assert message in str(caught.value)


@pytest.mark.parametrize("accept_first", [False, True])
def test_on_a_gpu_updates_wait_for_each_other_where_the_budget_has_room_for_their_gradients(accept_first: bool) -> None:
    """Updates that follow each other run in one call there; on a CPU nothing is gained, so gradients end early."""
    graph = training_chain(8, nbytes=1, param_bytes=10)
    on_gpu = replace(Costs.unit(graph), device_kind="cuda")
    plain = {"order": ("traced",), "reorder": ("keep",), "recompute": ("greedy",)}
    early = best_plan(graph, on_gpu, 2**40, choices={**plain, "update": ("with_gradient",)}).estimate.peak_bytes

    def choice(costs: Costs, budget_bytes: int) -> tuple[object, bool]:
        choices = {**plain, "update": ("at_end", "with_gradient")}
        best = best_plan(graph, costs, budget_bytes, choices=choices, accept_first=accept_first)
        return best.settings["update"]["planner"], best.estimate.peak_bytes <= budget_bytes

    assert choice(on_gpu, 2**40) == ("at_end", True)
    assert choice(Costs.unit(graph), 2**40) == ("with_gradient", True)
    assert choice(on_gpu, early) == ("with_gradient", True)
