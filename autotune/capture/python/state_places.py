"""Define the parts of the Python state that a step reads and changes."""

import contextlib
import gc
import inspect
import itertools
import pickle
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

MISSING = object()
"""Value of an attribute that does not exist."""
MOST_NOTED_BYTES = 1 << 24
"""Largest array whose content is noted, and most bytes noted within containers: a step must not copy a data set."""
MOST_NOTED_DEPTH = 6
"""Maximum nesting depth at which a container's content is noted; 0 is the outermost container."""
_NOTE_BYTES = 512
"""Approximate bytes of a note, besides the content."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, types.MappingProxyType)
_NOTED = (list, tuple, dict, set, deque)
"""Containers whose content may change, and tuples, which may contain such."""


@dataclass(slots=True)
class Place:
    """A part of the Python state: an attribute, an item of a dictionary, or a cell of a closure."""

    owner: Any
    key: str
    kind: str
    """`attribute`, `item`, `cell`, `entry` of a module's table, or `method`: an attribute of the object itself that hides a method."""
    name: str
    """Expression in the user's code."""
    line: str
    """The user's line that reads or changes it first; empty if only libraries do."""

    def read(self) -> Any:
        """Return the present value; `MISSING` if there is none."""
        match self.kind:
            case "attribute":
                return getattr(self.owner, self.key, MISSING)
            case "item" | "entry":
                return self.owner.get(self.key, MISSING)
            case "method":
                return instance_dict(self.owner).get(self.key, MISSING)
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING


@dataclass(slots=True)
class Change:
    """A part of the state that the step changes."""

    place: Place
    before: Any
    after: Any
    container: Any
    """Container whose content changed; None for an attribute."""
    is_read: bool
    """A step that follows would read the change."""

    def restore(self) -> None:
        """Undo the change."""
        self._assign(self.before)

    def apply(self) -> None:
        """Make the change again."""
        self._assign(self.after)

    def _assign(self, value: Any) -> None:
        if self.container is not None:
            fill(self.container, value)
        else:
            assign(self.place, value)


@dataclass
class StateReads:
    """Result of one run."""

    reads: dict[tuple[int, str], tuple[Place, Any]] = field(default_factory=dict)
    """Places with the value that the step read, without those that it assigned before."""
    changes: list[Change] = field(default_factory=list)
    draws: str = ""
    """Generator of random numbers outside of torch that the step draws from, with the line; empty if none."""
    forwards: dict[type, Any] = field(default_factory=dict)
    """`forward` of each class of modules."""

    caches: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Functions with `functools.cache` that the step may call, with the number of their misses."""

    def restore_changes(self) -> None:
        """Restore what another run of the step changed, and empty what it cached."""
        for change in self.changes:
            change.restore()
        self.clear_caches()

    def ignore_stand_ins(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        """Clear `is_read` of a change that only replaces a module's tensor by its stand-in, as `+=` and `.to(device)` do.

        `stand_ins` maps the id of each real tensor to its stand-in in the recorded run.
        """
        for change in self.changes:
            is_assigned = id(change.before) in stand_ins and stand_ins[id(change.before)] is change.after
            if is_assigned and module_table(change.place.owner, change.place.key) is not None:
                change.is_read = False

    def clear_caches(self) -> None:
        """Empty each cache that the step filled, because it holds fake tensors."""
        for function, misses in self.caches.values():
            if function.cache_info().misses > misses:
                function.cache_clear()
                self.caches[id(function)] = function, 0

    def find_unreported_writes(self) -> dict[tuple[int, str], tuple[Place, Any]]:
        """Return the globals and variables of closures, which report no writes, that have another value than the one read."""
        return {
            key: (place, before)
            for key, (place, before) in self.reads.items()
            if place.kind in ("cell", "item") and not is_same(before, place.read())
        }


def plain_content(container: Any) -> Any:
    """Return a copy of a container's content, whatever methods its class has of its own, or of an array."""
    if isinstance(container, np.ndarray):
        return container.copy()
    if isinstance(container, dict):
        return dict(dict.items(container))
    if isinstance(container, types.MappingProxyType):
        return dict(container)
    kinds: tuple[Any, ...] = (list, tuple, deque)
    kind = next((kind for kind in kinds if isinstance(container, kind)), None)
    return set(container) if kind is None else list(kind.__iter__(container))


def fill(container: Any, content: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = content
        return
    kinds: tuple[Any, ...] = (dict, list, deque, set)
    kind = next(kind for kind in kinds if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, content)


def instance_dict(owner: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found


def is_same(before: Any, after: Any) -> bool:
    """Return whether two values are the same object, or equal and simple; containers are compared by their parts."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, np.ndarray):
        form = before.shape == after.shape and before.dtype == after.dtype
        return bool(form and before.tobytes() == after.tobytes())
    if isinstance(before, (dict, types.MappingProxyType)):
        return list(before) == list(after) and all(is_same(before[key], after[key]) for key in before)
    if isinstance(before, (list, tuple, deque)):
        return len(before) == len(after) and all(map(is_same, before, after))
    if isinstance(before, (str, int, float, complex, bytes, set, frozenset, range, slice, torch.Size, np.generic)):
        return bool(before == after)
    return False


def changed_content(before: Any, after: Any) -> list[Any] | None:
    """Return the keys or positions whose content differs; None where that cannot be told."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [key for key in {**before, **after} if key not in before or not is_same(before[key], after.get(key))]
    if isinstance(before, (list, deque)) and isinstance(after, (list, tuple, deque)):
        common = min(len(before), len(after))
        differing = [i for i in range(common) if not is_same(before[i], after[i])]
        return [*differing, *range(common, max(len(before), len(after)))]
    return None


_LATER_LENGTHS = 1024, 2000
"""Lengths of a growing list at the end of two further traces. Periods such as 64 or 100 divide one of them."""


def grown_contents(before: Any, after: Any) -> list[Any]:
    """Return what a list, or a dict with integer keys, contains many steps later: the step after that ends with each of `_LATER_LENGTHS`."""
    growth = len(after) - len(before)
    if not isinstance(after, (list, deque, dict)) or growth <= 0:
        return []
    numbers = [key for key in after if type(key) is int and key not in before]
    if isinstance(after, dict) and len(numbers) < growth:
        return []
    added = [after[key] for key in numbers] if isinstance(after, dict) else list(after)[-growth:]
    missing = [length - growth - len(after) for length in _LATER_LENGTHS]
    grown = [list(itertools.islice(itertools.cycle(added), count)) for count in missing if count > 0]
    if isinstance(after, dict):
        return [{**after, **dict(enumerate(parts, max(numbers) + 1))} for parts in grown]
    return [[*after, *parts] for parts in grown]


@contextlib.contextmanager
def fill_temporarily(container: Any, content: Any) -> Iterator[None]:
    """Give a list, set, dict or deque another content, and restore it afterwards; methods of a subclass are not called."""
    kind: Any = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))
    before = [*kind.items(container)] if isinstance(container, dict) else [*kind.__iter__(container)]

    def fill(parts: Any) -> None:
        kind.clear(container)
        (kind.extend if isinstance(container, (list, deque)) else kind.update)(container, parts)

    try:
        fill(content)
        yield
    finally:
        fill(before)


def is_small_array(value: Any, place: Place) -> bool:
    """Return whether a value is an array that the user's code reads, and small enough to note its content."""
    return isinstance(value, np.ndarray) and bool(place.line) and value.nbytes <= MOST_NOTED_BYTES


class NotedContainers:
    """Containers that a step reads, and those within them, each with its content before the step."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Place, Any, Any]] = {}
        self._untracked: set[int] = set()
        self._bytes = 0  # of notes within other containers

    def note(self, place: Place, value: Any, depth: int = 0) -> None:
        """Note the content of a container and of those within it, up to the limits, to detect changes.

        Arrays are noted only where the user's code reads them. `depth` is the number of containers around `value`.
        """
        is_array = isinstance(value, np.ndarray)
        if id(value) in self._noted or not (is_small_array(value, place) if is_array else isinstance(value, _NOTED)):
            return
        if depth and not isinstance(value, tuple):
            size = _NOTE_BYTES + (value.nbytes if is_array else sys.getsizeof(value))
            if self._bytes + size > MOST_NOTED_BYTES:
                return
            self._bytes += size
        content = plain_content(value)
        if not isinstance(value, tuple):
            self._noted[id(value)] = place, value, content
            if not gc.is_tracked(value):
                self._untracked.add(id(value))
        if depth == MOST_NOTED_DEPTH or isinstance(value, (set, np.ndarray)):
            return
        owner, kinds = place.owner if isinstance(value, tuple) else value, (*_NOTED, np.ndarray)
        for key, part in content.items() if isinstance(content, dict) else enumerate(content):
            if isinstance(part, kinds):
                self.note(replace(place, owner=owner, name=f"{place.name}[{key!r}]"), part, depth + 1)

    def drop(self, fresh: set[int]) -> None:
        """Drop the containers that the step makes itself, and those of objects that it makes; `fresh` has their ids."""
        # the collector lists an older dictionary of plain values as new once the step adds an object to it
        dropped = fresh - self._untracked
        for number, (place, _, _) in list(self._noted.items()):  # a container precedes those within it
            if {number, id(place.owner)} & dropped:
                dropped.add(number)
                del self._noted[number]

    def changes(self) -> list[Change]:
        """Return the containers whose content differs now."""
        changes = []
        for place, value, before in self._noted.values():
            after = plain_content(value)
            if not is_same(before, after):
                changes.append(Change(place, before, after, container=value, is_read=True))
        return changes


def collect_changes(writes: Mapping[tuple[int, str], tuple[Place, Any]], read: Set[tuple[int, str]]) -> list[Change]:
    """Return what differs now from the values before; `read` has the places of `writes` that a following step reads."""
    changes = []
    for key, (place, before) in writes.items():
        after = place.read()
        if not is_same(before, after):
            changes.append(Change(place, before, after, container=None, is_read=key in read))
    return changes


def module_table(owner: Any, key: str) -> dict[str, Any] | None:
    """Return the table of a module that has a parameter, a buffer or a layer of this name; None if there is none."""
    attributes = instance_dict(owner) if isinstance(owner, nn.Module) else {}
    tables: list[dict[str, Any]] = [attributes.get(table, {}) for table in ("_parameters", "_buffers", "_modules")]
    return next((table for table in tables if key in table), None)


def generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def numpy_state() -> Any:
    """Return the state of numpy's global generator."""
    return np.random.get_state()


def is_same_state(before: Any, after: Any) -> bool:
    """Return whether two states of a generator are equal."""
    return pickle.dumps(before) == pickle.dumps(after)


def assign(place: Place, value: Any) -> None:
    """Restore an attribute, an item or a cell as it was, without the checks of `nn.Module`."""
    owner, key = place.owner, place.key
    if isinstance(owner, (type, types.ModuleType)):
        if value is MISSING:
            delattr(owner, key)
        else:
            setattr(owner, key, value)
        return
    if place.kind == "cell":
        if value is MISSING:
            del owner.cell_contents
        else:
            owner.cell_contents = value
        return
    if place.kind in ("item", "entry"):
        if value is MISSING:
            owner.pop(key, None)
        else:
            owner[key] = value
        return
    attributes = instance_dict(owner)
    if (table := module_table(owner, key)) is not None:
        if value is MISSING:
            del table[key]
        else:
            table[key] = value
        return
    if value is not MISSING:
        object.__setattr__(owner, key, value)
    elif isinstance(inspect.getattr_static(type(owner), key, None), types.MemberDescriptorType):  # of `__slots__`
        with contextlib.suppress(AttributeError):
            object.__delattr__(owner, key)
    elif key in attributes:
        del attributes[key]
