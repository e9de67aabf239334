"""Compare the config that a run recorded with the config of a command that continues the run."""

from collections.abc import Collection, Mapping
from typing import Any

from autotune.records.config import Config

FREE_KEYS = frozenset(
    (
        "time",
        "trials",
        "tracking_uri",
        "optuna_storage",
        "runs",
        "plans",
        "seed_from",
        "patience",
        "sampler",
        "priors",
        "moves",
        "fleet",
        "on",
        "parallel",
    )
)
"""Keys of a config that may differ where a run is continued: limits, places of files, devices, and the choice of trials."""
_FIRST_KEYS = ("objective", "budget", "loop")
"""Keys that are compared first: defaults of other keys depend on them."""


def find_difference(requested: Config, recorded: Mapping[str, Any], *, free: Collection[str] = ()) -> str:
    """Return the first key whose recorded and requested values forbid continuing a run; empty if no key does.

    A key that an earlier version did not record has its default.

    Args:
        requested: Config of the command.
        recorded: Config of the run, as a document.
        free: Keys that may differ beside `FREE_KEYS`.

    >>> first = Config(workload="resnet18")
    >>> find_difference(first.model_copy(update={"samples": 20, "time": "1h"}), first.model_dump(mode="json"))
    'samples'
    """
    defaults = Config.model_validate({"workload": recorded["workload"]}).model_dump(mode="json")
    before, now = {**defaults, **recorded}, requested.model_dump(mode="json")
    keys = (*_FIRST_KEYS, *sorted(before.keys() | now.keys()))
    compared = (key for key in keys if key not in FREE_KEYS and key not in free)
    return next((key for key in compared if before.get(key) != now.get(key)), "")


def keep_stores(requested: Config, recorded: Config) -> Config:
    """Return a requested config with the stores that the run has already: its plans may use them.

    >>> first = Config(workload="resnet18", stores={"ssd": "/disk"})
    >>> keep_stores(Config(workload="resnet18"), first).stores
    {'ssd': '/disk'}
    """
    return requested.model_copy(update={"stores": {**recorded.stores, **requested.stores}})
