"""Choose the planners and knobs to search on a device."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from importlib.util import find_spec
from typing import Any, cast

from autotune.errors import ConfigError
from autotune.planners import KINDS, Planner
from autotune.planners.knobs import Choice, Knob, KnobValue, Settings

Space = dict[str, dict[str, dict[str, Knob]]]
"""Knobs to search, by planner kind and planner name."""


def default_allocator(device_kind: str) -> str:
    """Return the allocator planner for a device: glibc keeps freed memory, a GPU's caching allocator reuses it."""
    return "system" if device_kind == "cuda" else "arena"


def build_space(kinds: Mapping[str, Mapping[str, type[Planner]]], stores: Collection[str]) -> Space:
    """Return the knobs of these planners, with `store` restricted to the open stores.

    A planner that needs a store is dropped if none of its stores is open.
    """
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
                del knobs["windows"]  # without CP-SAT no window would be solved
            space[kind][name] = knobs
    return space


def space_for_device(
    planners: Mapping[str, Collection[str] | None], device_kind: str, stores: Collection[str]
) -> Space:
    """Return the space of a study: per kind the named planners, or for None the sensible ones on this device.

    Raises:
        ConfigError: All named planners of a kind need a store, and none is open.
    """
    # running in place costs nothing, so `never` is used only if named
    usual = {"allocator": (default_allocator(device_kind),), "inplace": ("greedy",)}
    kinds = {
        kind: {
            name: planner for name, planner in known.items() if name in (planners.get(kind) or usual.get(kind) or known)
        }
        for kind, known in KINDS.items()
    }
    space = build_space(kinds, stores)
    for kind, names in space.items():
        if not names:
            raise ConfigError(f"planners.{kind}: {', '.join(kinds[kind])} needs a store; add --store ssd=DIR")
    return space


def space_without_stores(planners: Mapping[str, Collection[str] | None], device_kind: str) -> Space:
    """Return the space of the named planners where no store is open yet: offload planners that need one are left out."""
    return space_for_device({**planners, "offload": None}, device_kind, {})


def preset_settings(
    kinds: Mapping[str, Mapping[str, type[Planner]]], space: Space, names: Mapping[str, str]
) -> Settings:
    """Return settings of the named planners: each knob's default, or the lowest value where the space excludes it."""
    settings: Settings = {}
    for kind, name in names.items():
        planner = kinds[kind][name]
        defaults = {field.name: field.default for field in fields(cast("Any", planner)) if field.default is not MISSING}
        settings[kind] = {"planner": name}
        for knob, values in space[kind][name].items():
            if not has_no_effect(kind, knob, names, space):
                settings[kind][knob] = defaults[knob] if values.contains(defaults.get(knob)) else _lowest(values)
    return settings


def has_no_effect(kind: str, knob: str, names: Mapping[str, str], space: Space) -> bool:
    """Return true for `recompute.share` without a store: recompute then has to remove all of the excess."""
    return kind == "recompute" and knob == "share" and "store" not in space["offload"][names["offload"]]


def _lowest(knob: Knob) -> KnobValue:
    return knob.options[0] if isinstance(knob, Choice) else knob.low
