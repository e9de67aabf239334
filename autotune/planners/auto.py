"""One planner for a budget: it chooses planners of every kind together, by what the simulator says of their plans."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS, build, foreseen
from autotune.planners.knobs import Choice, KnobValue, Settings
from autotune.predict.simulate import Estimate, peak_bytes, simulate

FIRST = {
    "order": "traced",
    "update": "with_gradient",
    "recompute": "greedy",
    "reorder": "keep",
    "inplace": "greedy",
    "offload": "keep",
}
"""What is tried before anything else: it needs no store and seconds at most."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the bytes over the budget that are computed again where a store takes the rest; then halfway to either side."""
FEW_SHARES = (0.0, 0.5)
"""The same where weights leave under other planners of updates or orders than serve the plan without a store."""
WINDOWS = (1, 2, 4, 8)
WORTH_MOVING = 2**16
"""Bytes of a weight, at least: the many vectors of norms and biases would cost a transfer each and free next to nothing."""
SWEEPS = 3

Choices = Mapping[str, Sequence[str]]
"""Per kind the names that may be chosen."""
Named = Callable[[Mapping[str, str]], Settings]
"""Settings of planners chosen by name."""


@dataclass(slots=True)
class Plans:
    """Plans made for one budget, by settings; those that begin with the same planners share their work."""

    graph: TrainGraph
    costs: Costs
    budget_bytes: int
    stages: dict[str, Plan] = field(default_factory=dict)
    known: dict[str, tuple[Plan, Estimate]] = field(default_factory=dict)
    grain_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.grain_bytes = max(1, peak_bytes(self.graph, Plan.traced(self.graph), self.costs) // 500)

    def make(self, settings: Settings) -> tuple[Plan, Estimate]:
        """As `make_plan`, with what the simulator says of it."""
        if (key := repr(settings)) not in self.known:
            plan, planners = Plan.traced(self.graph), build(settings)
            so_far = repr(planners["inplace"])  # which others look ahead to
            for kind, planner in planners.items():
                so_far += repr(planner)
                if so_far not in self.stages:
                    costs = foreseen(kind, planners["inplace"], self.graph, plan, self.costs)
                    self.stages[so_far] = planner.plan(self.graph, plan, self.budget_bytes, costs)
                plan = self.stages[so_far]
            check(self.graph, plan)
            self.known[key] = plan, simulate(self.graph, lower(self.graph, plan), self.costs, self.budget_bytes)
        return self.known[key]

    def rank(self, settings: Settings) -> tuple[int, float, int]:
        """What fits before what does not, the fast before the slow, the small before the large.

        Of those that do not fit the smallest, to a part in 500 of the traced step: a few KiB are not worth twice the time.
        """
        estimate = self.make(settings)[1]
        over = max(0, estimate.peak_bytes - self.budget_bytes)
        return -(-over // self.grain_bytes), estimate.seconds, estimate.peak_bytes


def auto(
    graph: TrainGraph, costs: Costs, budget_bytes: int, choices: Choices | None = None, named: Named | None = None
) -> tuple[Settings, Plan]:
    """The fastest plan within the budget that was found, and the settings that make it again; else the smallest one."""
    choices = choices or {kind: tuple(planners) for kind, planners in KINDS.items() if kind != "allocator"}
    plans = Plans(graph, costs, budget_bytes)
    best = min(leaders(plans, choices, named or (lambda names: _named(names, costs))), key=plans.rank)
    return best, plans.make(best)[0]


def leaders(plans: Plans, choices: Choices, named: Named) -> Iterator[Settings]:
    """The best settings so far, after every try: whoever has no more time takes the last.

    One kind after the other takes what serves the plan best with the others as they stand, until none changes. With a
    store, the bytes over the budget are then shared between it and computing again: what the bandwidth hides goes to the
    store for nothing, and the simulator shows where that ends.
    """
    choices = {kind: [name for name in known if _open(kind, name, plans.costs)] for kind, known in choices.items()}
    names = tried_first(choices)
    best = named(names)
    yield best
    for _ in range(SWEEPS):
        before = dict(names)
        for kind, known in choices.items():
            for name in known:
                made = named(names | {kind: name})
                best = min(best, made, key=plans.rank)
                yield best
            names[kind] = str(best[kind]["planner"])
        if names == before:
            break
    for made in _shared(plans, choices, named, names):
        best = min(best, made, key=plans.rank)
        yield best
    if plans.rank(best)[0] and "store" in best.get("offload", {}) and "share" in best.get("recompute", {}):
        # an order that gained nothing without a store may leave longer gaps
        for name in choices.get("order", ()):
            moved = {**best, "order": named(names | {"order": name})["order"]}
            best = min((best, *(_turned(moved, "recompute", share=share) for share in FEW_SHARES)), key=plans.rank)
            yield best


def tried_first(choices: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The planners that are tried first, of those to choose from."""
    return {kind: FIRST[kind] if FIRST.get(kind) in known else next(iter(known)) for kind, known in choices.items()}


def _shared(plans: Plans, choices: Choices, named: Named, names: Mapping[str, str]) -> Iterator[Settings]:
    """The best share of each pair of planners that split the bytes over the budget, from store first to store last."""
    for offload in choices.get("offload", ()):
        for recompute in choices.get("recompute", ()):
            if "store" not in KINDS["offload"][offload].knobs or "share" not in KINDS["recompute"][recompute].knobs:
                continue
            whole = named({**names, "offload": offload, "recompute": recompute})
            for store in sorted(plans.costs.stores):
                stored = _turned(whole, "offload", store=store)
                yield from _split(plans, stored, SHARES)
                if "what" not in stored["offload"]:
                    continue
                # a weight that is updated early has no gap behind that, and stands to the end; a later order does that too
                first = {kind: name for kind, name in tried_first(choices).items() if kind == "reorder"}
                for moved in ({}, first) if first.items() - names.items() else ({},):
                    for update in choices.get("update", (None,)):
                        chosen = moved if update is None else moved | {"update": update}
                        begun = named({**names, "offload": offload, "recompute": recompute, **chosen})
                        weights = _turned(begun, "offload", store=store, what="all", least_bytes=WORTH_MOVING)
                        yield from _split(plans, weights, FEW_SHARES if chosen.items() - names.items() else SHARES)


def _split(plans: Plans, begun: Settings, shares: Sequence[float]) -> Iterator[Settings]:
    """The best of these shares, halfway to either side, and every window."""
    found = [_turned(begun, "recompute", share=share) for share in shares]
    best = min(found, key=plans.rank)
    middle = float(best["recompute"]["share"])
    beside = [_turned(begun, "recompute", share=share) for share in (middle - 0.125, middle + 0.125)]
    found = [best, *(made for made in beside if 0 < float(made["recompute"]["share"]) < 1)]
    best = min(found, key=plans.rank)
    wider = [_turned(best, "offload", window=window) for window in WINDOWS if "window" in best["offload"]]
    yield min((best, *wider), key=plans.rank)


def _turned(settings: Settings, kind: str, **knobs: KnobValue) -> Settings:
    return {**settings, kind: {**settings[kind], **knobs}}


def _open(kind: str, name: str, costs: Costs) -> bool:
    """Whether a planner finds the store that it needs."""
    store = KINDS[kind][name].knobs.get("store")
    return not isinstance(store, Choice) or not costs.stores.keys().isdisjoint(store.options)


def _named(names: Mapping[str, str], costs: Costs) -> Settings:
    """Each planner's knobs as they come, with a store that is open."""
    settings: Settings = {}
    for kind, name in names.items():
        settings[kind] = {"planner": name, **asdict(cast("Any", KINDS[kind][name]()))}
        if isinstance(store := KINDS[kind][name].knobs.get("store"), Choice):
            settings[kind]["store"] = next(option for option in store.options if option in costs.stores)
    return settings
