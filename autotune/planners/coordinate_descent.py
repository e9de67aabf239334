"""Search planner settings by coordinate descent: one planner kind after another, ranked by the simulator.

`descend` yields the best settings after each step, so a caller with a deadline keeps the last ones. A step of
several evaluations ends early after the time limit of its `PlanCache`.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS, anticipate_inplace, build_planners
from autotune.planners.knobs import Choice, KnobValue, Settings
from autotune.planners.recompute.greedy import Results, new_results, share_results
from autotune.predict.simulate import Estimate, peak_bytes, simulate

FIRST_PLANNERS = {
    "order": "traced",
    "update": "with_gradient",
    "recompute": "greedy",
    "reorder": "keep",
    "inplace": "greedy",
    "offload": "keep",
}
"""Planner of each kind in the first plan: it needs no store and at most seconds of planning."""
EARLY_SLOWDOWN = 1.06
"""Time of a GPU's step with early updates over one with updates at the end, which follow each other and run in one call.

It is that of GPT-2 in float32 on an H200, whose step in bfloat16 doubles (`experiments.gpu.frontier`). The simulator adds
the times of single updates for both.
"""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the excess bytes to recompute when a store takes the rest; the best one is then refined on either side."""
FEW_SHARES = (0.0, 0.5)
"""Shorter list of shares, for weight offload with other update planners or orders than the plan without a store."""
WINDOWS = (1, 2, 4, 8)
"""Offload windows to compare, in layers."""
MIN_WEIGHT_BYTES = 2**16
"""Minimum size of an offloaded weight in bytes. Norms and biases cost a transfer each and free next to nothing."""
SWEEPS = 3
"""Maximum number of passes over all kinds."""

Choices = Mapping[str, Sequence[str]]
"""Planner names allowed, per kind."""
Preset = Callable[[Mapping[str, str]], Settings]
"""Function from planner names by kind to full settings."""


@dataclass(slots=True)
class PlanCache:
    """Plans of one budget, keyed by settings. Settings with the same leading planners share those planners' work."""

    graph: TrainGraph
    costs: Costs
    budget_bytes: int
    until: float = math.inf
    """Time of the monotonic clock after which `lowest_of` evaluates no other settings."""
    stages: dict[str, Plan] = field(default_factory=dict)
    """Intermediate plans, by the planners applied so far."""
    results: dict[str, tuple[Plan, Estimate]] = field(default_factory=dict)
    evictions: Results = field(default_factory=new_results)
    """Greedy results, which other recompute planners need again."""
    grain_bytes: int = field(init=False)
    """Resolution of `rank` in bytes: the 500th part of the traced peak."""

    def __post_init__(self) -> None:
        self.grain_bytes = max(1, peak_bytes(self.graph, Plan.traced(self.graph), self.costs) // 500)

    def evaluate(self, settings: Settings) -> tuple[Plan, Estimate]:
        """Return the plan that `make_plan` makes of these settings, and its estimate."""
        if (key := repr(settings)) not in self.results:
            plan, planners = Plan.traced(self.graph), build_planners(settings)
            stage = repr(planners["inplace"])  # earlier kinds anticipate its savings, so it is part of every key
            for kind, planner in planners.items():
                stage += repr(planner)
                if stage not in self.stages:
                    costs = anticipate_inplace(kind, planners["inplace"], self.graph, plan, self.costs)
                    with share_results(self.evictions):
                        self.stages[stage] = planner.plan(self.graph, plan, self.budget_bytes, costs)
                plan = self.stages[stage]
            check(self.graph, plan)
            self.results[key] = plan, simulate(self.graph, lower(self.graph, plan), self.costs, self.budget_bytes)
        return self.results[key]

    def rank(self, settings: Settings) -> tuple[int, float, int]:
        """Return a sort key: excess over the budget, then seconds, then peak bytes; lower is better.

        The excess is counted in grains of a 500th of the traced peak. A few KiB do not justify twice the time. On a GPU
        early updates count as slower.
        """
        estimate = self.evaluate(settings)[1]
        excess = max(0, estimate.peak_bytes - self.budget_bytes)
        is_early = settings.get("update", {}).get("planner") == "with_gradient"
        seconds = estimate.seconds * (EARLY_SLOWDOWN if is_early and self.costs.device_kind == "cuda" else 1.0)
        return -(-excess // self.grain_bytes), seconds, estimate.peak_bytes

    def lowest_of(self, first: Settings, alternatives: Iterable[Settings]) -> Settings:
        """Return the settings with the lowest rank, or after `until` the best so far. The first ones win a tie."""
        best, best_rank = first, self.rank(first)
        for settings in alternatives:
            if time.monotonic() > self.until:
                break
            if (rank := self.rank(settings)) < best_rank:
                best, best_rank = settings, rank
        return best


def descend(cache: PlanCache, choices: Choices, preset: Preset) -> Iterator[Settings]:
    """Yield the best settings so far after every step; the last ones are the result.

    Each kind in turn takes the planner that serves the current plan best, until no kind changes. With a store, the
    excess bytes are then shared between offload and recompute: offload is free up to the store's bandwidth, and the
    simulator shows where that ends.
    """
    choices = {
        kind: [name for name in names if _store_is_open(kind, name, cache.costs)] for kind, names in choices.items()
    }
    chosen = first_planners(choices)
    best = preset(chosen)
    if cache.costs.device_kind == "cuda" and "update" in choices:
        # early updates are slower there, and late ones need memory
        best = cache.lowest_of(best, (preset(chosen | {"update": name}) for name in choices["update"]))
        chosen["update"] = str(best["update"]["planner"])
    yield best
    for _ in range(SWEEPS):
        before = dict(chosen)
        for kind, names in choices.items():
            for name in names:
                best = min(best, preset(chosen | {kind: name}), key=cache.rank)
                yield best
            chosen[kind] = str(best[kind]["planner"])
        if chosen == before:
            break
    for settings in share_with_store(cache, choices, preset, chosen):
        best = min(best, settings, key=cache.rank)
        yield best
    if cache.rank(best)[0] and "store" in best.get("offload", {}) and "share" in best.get("recompute", {}):
        # an order without gain so far may leave longer gaps for offload
        for name in choices.get("order", ()):
            reordered = {**best, "order": preset(chosen | {"order": name})["order"]}
            variants = (_with_knobs(reordered, "recompute", share=share) for share in FEW_SHARES)
            best = cache.lowest_of(best, variants)
            yield best


def first_planners(choices: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the planner of each kind to start with, restricted to the allowed names."""
    return {
        kind: FIRST_PLANNERS[kind] if FIRST_PLANNERS.get(kind) in names else next(iter(names))
        for kind, names in choices.items()
    }


def share_with_store(
    cache: PlanCache, choices: Choices, preset: Preset, chosen: Mapping[str, str]
) -> Iterator[Settings]:
    """Yield the best share of each pair of offload and recompute planners that can divide the excess bytes."""
    for offload in choices.get("offload", ()):
        for recompute in choices.get("recompute", ()):
            if "store" not in KINDS["offload"][offload].knobs or "share" not in KINDS["recompute"][recompute].knobs:
                continue
            pair = {**chosen, "offload": offload, "recompute": recompute}
            for store in sorted(cache.costs.stores):
                stored = _with_knobs(preset(pair), "offload", store=store)
                yield from _best_share(cache, stored, SHARES)
                if "what" not in stored["offload"]:
                    continue
                # an early update leaves no gap after it, so its weight stays to the end; reordering has the same effect
                first = {kind: name for kind, name in first_planners(choices).items() if kind == "reorder"}
                for reorder in ({}, first) if first.items() - chosen.items() else ({},):
                    for update in choices.get("update", (None,)):
                        names = reorder if update is None else reorder | {"update": update}
                        weights = _with_knobs(
                            preset({**pair, **names}), "offload", store=store, what="all", least_bytes=MIN_WEIGHT_BYTES
                        )
                        changed = names.items() - chosen.items()
                        yield from _best_share(cache, weights, FEW_SHARES if changed else SHARES)


def _best_share(cache: PlanCache, settings: Settings, shares: Sequence[float]) -> Iterator[Settings]:
    """Yield the best of these shares, of its two neighbours, and then of every window."""
    first, *alternatives = (_with_knobs(settings, "recompute", share=share) for share in shares)
    best = cache.lowest_of(first, alternatives)
    middle = float(best["recompute"]["share"])
    neighbours = [share for share in (middle - 0.125, middle + 0.125) if 0 < share < 1]
    best = cache.lowest_of(best, (_with_knobs(settings, "recompute", share=share) for share in neighbours))
    wider = [_with_knobs(best, "offload", window=window) for window in WINDOWS if "window" in best["offload"]]
    yield cache.lowest_of(best, wider)


def _with_knobs(settings: Settings, kind: str, **knobs: KnobValue) -> Settings:
    return {**settings, kind: {**settings[kind], **knobs}}


def _store_is_open(kind: str, name: str, costs: Costs) -> bool:
    """Return true if the planner needs no store, or one of its stores is open."""
    store = KINDS[kind][name].knobs.get("store")
    return not isinstance(store, Choice) or not costs.stores.keys().isdisjoint(store.options)


def default_preset(names: Mapping[str, str], costs: Costs) -> Settings:
    """Return settings of the named planners with default knobs and the first open store."""
    settings: Settings = {}
    for kind, name in names.items():
        settings[kind] = {"planner": name, **asdict(cast("Any", KINDS[kind][name]()))}
        if isinstance(store := KINDS[kind][name].knobs.get("store"), Choice):
            settings[kind]["store"] = next(option for option in store.options if option in costs.stores)
    return settings
