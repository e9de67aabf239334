"""Choose the planners and knobs that are searched on a device."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from importlib.util import find_spec
from typing import Any, cast

from autotune.errors import ConfigError
from autotune.planners import KINDS, Planner
from autotune.planners.knobs import Choice, Knob, KnobValue, Settings

Space = dict[str, dict[str, dict[str, Knob]]]
"""Per kind of planner and per planner's name its knobs."""


def usual_allocator(device_kind: str) -> str:
    """The one right answer on each device: glibc keeps what plans free, a GPU's caching allocator does not."""
    return "system" if device_kind == "cuda" else "arena"


def search_space(kinds: Mapping[str, Mapping[str, type[Planner]]], stores: Collection[str]) -> Space:
    """What may be searched when these stores are open; a planner that needs a store falls away without one."""
    space: Space = {}
    for kind, planners in kinds.items():
        space[kind] = {}
        for name, planner in planners.items():
            knobs = dict(planner.knobs)
            if isinstance(store := knobs.get("store"), Choice):
                open_stores = tuple(option for option in store.options if option in stores)
                if not open_stores:
                    continue
                knobs["store"] = Choice(open_stores)
            if "windows" in knobs and find_spec("ortools") is None:
                del knobs["windows"]  # none would be solved
            space[kind][name] = knobs
    return space


def chosen_space(planners: Mapping[str, Collection[str] | None], device_kind: str, stores: Collection[str]) -> Space:
    """What may be searched on a device: of each kind the planners so named, or for None those that can be right there."""
    # nothing is lost by running in place
    usual = {"allocator": (usual_allocator(device_kind),), "inplace": ("greedy",)}
    kinds = {
        kind: {name: known[name] for name in known if name in (planners.get(kind) or usual.get(kind) or known)}
        for kind, known in KINDS.items()
    }
    space = search_space(kinds, stores)
    for kind, names in space.items():
        if not names:
            raise ConfigError(f"planners.{kind}: {', '.join(kinds[kind])} needs a store; add --store ssd=DIR")
    return space


def preset(kinds: Mapping[str, Mapping[str, type[Planner]]], space: Space, names: Mapping[str, str]) -> Settings:
    """Settings of the planners so named, each knob at its planner's own default, or the nearest that is searched."""
    settings: Settings = {}
    for kind, name in names.items():
        planner = kinds[kind][name]
        own = {field.name: field.default for field in fields(cast("Any", planner)) if field.default is not MISSING}
        settings[kind] = {"planner": name}
        for knob, values in space[kind][name].items():
            if not _idle(kind, knob, names, space):
                settings[kind][knob] = own[knob] if values.holds(own.get(knob)) else _lowest(values)
    return settings


def _idle(kind: str, knob: str, names: Mapping[str, str], space: Space) -> bool:
    """A share of the work is no choice where no store takes the rest: less than all of it is over the budget."""
    return kind == "recompute" and knob == "share" and "store" not in space["offload"][names["offload"]]


def _lowest(knob: Knob) -> KnobValue:
    return knob.options[0] if isinstance(knob, Choice) else knob.low
