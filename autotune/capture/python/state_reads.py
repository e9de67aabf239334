"""Record the Python state that a step reads and changes while its Python runs once.

Attribute reads are recorded by a `__getattribute__` on the classes of the objects that the step meets; globals and
closures by a profile function, from the code of each function that starts. Reads of one object by C code are not recorded.
"""

import cProfile
import functools
import gc
import inspect
import random
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.capture.python.code_facts import (
    augmented_reads,
    global_chains,
    is_library,
    is_recordable,
    is_state,
    only_stored_cells,
    stored_globals,
    user_line,
)
from autotune.capture.python.functions import (
    FUNCTIONS,
    METHODS,
    Functions,
    Unreported,
    cached_properties,
    free_names,
    original_method,
    stateful_defaults,
    wrapped_functions,
)
from autotune.capture.python.state_places import (
    CONTAINERS,
    MISSING,
    NotedContainers,
    Place,
    StateReads,
    assign,
    collect_changes,
    instance_dict,
    is_same,
    module_table,
    plain_content,
)
from autotune.capture.python.unrecorded import Draws


class Recorder:
    """Recorder of one run of a step: use `recording` around the run."""

    def __init__(self, roots: dict[str, Any]) -> None:
        """`roots` has the objects that the step starts from, by the user's names."""
        self.result = StateReads()
        self._names: dict[int, str] = {}
        self._keep: list[Any] = []  # ids stay unique while the objects live
        self._patched: dict[type, dict[str, Any]] = {}
        self._functions = Functions()
        self._unreported = Unreported()
        self._writes: dict[tuple[int, str], tuple[Place, Any]] = {}
        self._containers = NotedContainers()
        self._tables: dict[int, Any] = {}  # owners of dictionaries that the step reads, by the ids of these
        self._augmented: set[tuple[int, str]] = set()
        self._draws = Draws()
        self._active = False
        self._roots = roots

    @contextmanager
    def recording(self) -> Iterator[StateReads]:
        """Record while the block runs; afterwards restore everything that the step changed."""
        self._draws, self._thread = Draws(), threading.get_ident()
        frozen = gc.get_freeze_count()
        gc.freeze()  # objects made by the step are those that the collector lists afterwards
        profile = sys.getprofile()
        try:
            try:
                for name, root in self._roots.items():  # this patches classes already
                    self._meet(root, name)
                self._active = True
                sys.setprofile(self._on_event)
                yield self.result
            finally:
                self._active = False
                sys.setprofile(profile if callable(profile) else None)  # Python cannot set one that is written in C
                self._unpatch()
                fresh = set(map(id, gc.get_objects()))
                self._note_unreported()
                self._drop(fresh)
                self._writes = self.result.find_unreported_writes() | self._writes
                self.result.changes += collect_changes(self._writes, self._read_places()) + self._containers.changes()
                self.result.draws = self._draws.restore()
                self._restore()
        finally:
            if isinstance(profile, cProfile.Profile):
                profile.enable()
            gc.unfreeze()
            if frozen:
                gc.freeze()

    def _meet(self, value: Any, name: str, depth: int = 0) -> None:
        """Prepare to record the reads of an object that the step can reach under this name."""
        if id(value) in self._names or isinstance(value, (str, int, float, bool, type(None), torch.Tensor)):
            return
        if isinstance(value, CONTAINERS):
            if depth < 6:
                self._names[id(value)] = name
                self._keep.append(value)
                content = plain_content(value)
                for key, part in content.items() if isinstance(content, dict) else enumerate(content):
                    self._meet(part, f"{name}[{key!r}]", depth + 1)
            return
        self._names[id(value)] = name
        self._keep.append(value)
        if isinstance(value, nn.Module):
            for path, module in value.named_modules(prefix=name):
                self._names.setdefault(id(module), path)
                self._patch(type(module))
                self.result.forwards.setdefault(type(module), type(module).forward)
        if isinstance(value, partial):
            self._meet(value.func, name, depth + 1)
            for key in ("args", "keywords"):
                self._record(Place(value, key, "attribute", f"{name}.{key}", ""), getattr(value, key))
        elif isinstance(value, types.MethodType):
            self._meet(value.__func__, name)
            self._meet(value.__self__, name.rpartition(".")[0] or name)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.result.caches[id(value)] = value, value.cache_info().misses
            self._meet_function(value)
        elif isinstance(value, FUNCTIONS):
            self._meet_function(value)
        elif isinstance(value, (type, types.ModuleType)):
            self._meet_parts(self._unreported.add_scope(value))
        elif type(value) is types.SimpleNamespace:
            self._unreported.add_namespace(value, name)
            for key, part in vars(value).items():
                self._meet(part, f"{name}.{key}")
                self._containers.note(Place(value, key, "attribute", f"{name}.{key}", ""), part)
        elif isinstance(value, (random.Random, np.random.RandomState, np.random.Generator)):
            self._draws.add(value, name)
        elif is_recordable(type(value)):
            self._patch(type(value))

    def _patch(self, kind: type) -> None:
        if kind in self._patched or not is_recordable(kind):
            return
        for member in vars(kind).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
            if isinstance(function, types.FunctionType):
                self._meet_function(function)
            elif isinstance(member, functools._lru_cache_wrapper):
                self._meet(member, member.__name__)
        computed = cached_properties(kind)
        self._meet_parts(self._unreported.add_scope(kind))
        read, write = (original_method(kind, name) for name in ("__getattribute__", "__setattr__"))
        recorder = self

        def getattribute(self: Any, name: str) -> Any:
            if name in computed and recorder._is_active() and name not in instance_dict(self):
                recorder._on_write(self, name)  # it assigns in functools' code
            try:
                value = read(self, name)
            except AttributeError:
                if recorder._is_active():
                    recorder._on_fallback(self, name)
                raise
            if recorder._is_active() and is_state(name, sys._getframe(1)):
                recorder._on_read(self, name, value)
            return value

        def setattr_(self: Any, name: str, value: Any) -> None:
            if recorder._is_active():
                recorder._on_write(self, name)
            write(self, name, value)

        getattribute.recorder = setattr_.recorder = self  # type: ignore[attr-defined]
        saved = {name: kind.__dict__.get(name, MISSING) for name in ("__getattribute__", "__setattr__")}
        try:
            kind.__getattribute__ = getattribute  # type: ignore[method-assign,assignment]
            kind.__setattr__ = setattr_  # type: ignore[method-assign,assignment]
        except TypeError:  # a class of C
            return
        self._patched[kind] = saved

    def _is_active(self) -> bool:
        """Return whether what runs now is the step: other threads may use the same objects."""
        return self._active and threading.get_ident() == self._thread

    def _unpatch(self) -> None:
        for kind, saved in self._patched.items():
            for name, member in saved.items():
                if member is MISSING:
                    delattr(kind, name)
                else:
                    setattr(kind, name, member)

    def _on_read(self, owner: Any, key: str, value: Any) -> None:
        place = (id(owner), key)
        if place in self.result.reads or place in self._writes:
            if place in self._augmented and not self._is_augmented(sys._getframe(2), key):
                self._augmented.discard(place)
            return
        is_shared = type(owner).__module__ == "multiprocessing.sharedctypes"  # C code reads its value
        if isinstance(inspect.getattr_static(type(owner), key, None), property) and not is_shared:
            self._meet(value, f"{self._name(owner)}.{key}")  # the property's own reads are recorded
            return
        if isinstance(value, METHODS) and key not in instance_dict(owner):
            self._meet_function(value)
            if instance_dict(owner):  # an object may get a method of its own later
                name, line = f"{self._name(owner)}.{key}", user_line(sys._getframe(2))
                self._record(Place(owner, key, "method", name, line), MISSING)
            return
        frame = sys._getframe(2)
        if self._is_augmented(frame, key):
            self._augmented.add(place)
        self._record(Place(owner, key, "attribute", f"{self._name(owner)}.{key}", user_line(frame)), value)

    def _on_fallback(self, owner: Any, key: str) -> None:
        """Record a read that ends in a class's `__getattr__`, such as that of a module's layers and parameters."""
        if key.startswith("__"):
            return
        place = (id(owner), key)
        if place in self.result.reads or place in self._writes:
            return
        if (table := module_table(owner, key)) is not None:
            self._tables[id(table)] = owner
            name, line = f"{self._name(owner)}.{key}", user_line(sys._getframe(2))
            self._record(Place(table, key, "entry", name, line), table[key])
            return
        self._active = False
        try:
            value = getattr(owner, key, MISSING)
        except Exception:  # noqa: BLE001 - the user's `__getattr__` may raise anything, as in the step itself
            return
        finally:
            self._active = True
        read = Place(owner, key, "attribute", f"{self._name(owner)}.{key}", user_line(sys._getframe(2)))
        if is_recordable(type(value)):
            self._meet(value, read.name)  # it may be another object each time; its reads are recorded
        else:
            self._record(read, value)

    def _on_write(self, owner: Any, key: str) -> None:
        place = (id(owner), key)
        if place in self._writes or key.startswith("__"):
            return
        attributes = instance_dict(owner)
        before = attributes.get(key, MISSING)
        if isinstance(owner, nn.Module):
            tables = [attributes.get(table, {}) for table in ("_parameters", "_buffers", "_modules")]
            before = next((table[key] for table in tables if key in table), before)
        elif isinstance(inspect.getattr_static(type(owner), key, None), types.MemberDescriptorType):  # of `__slots__`
            self._active = False
            before = getattr(owner, key, MISSING)
            self._active = True
        self._keep.append(owner)
        name = f"{self._name(owner)}.{key}"
        self._writes[place] = Place(owner, key, "attribute", name, user_line(sys._getframe(2))), before

    def _record(self, place: Place, value: Any) -> None:
        self.result.reads[id(place.owner), place.key] = place, value
        self._keep.append(place.owner)
        self._meet(value, place.name)
        self._containers.note(place, value)

    def _name(self, owner: Any) -> str:
        return self._names.get(id(owner)) or f"{type(owner).__name__} object"

    def _meet_function(self, value: Any) -> None:
        """Remember a function, and those that it wraps: the user's function below a library's decorator."""
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            self._functions.add(function)
        for inner in wrapped_functions(function):
            self._meet(inner, inner.__name__)

    def _meet_parts(self, parts: list[tuple[Any, str, Any]]) -> None:
        """Meet parts of classes and modules, and note the content of their containers."""
        for owner, key, part in parts:
            name = f"{owner.__name__}.{key}"
            self._meet(part, name)
            self._containers.note(Place(owner, key, "attribute", name, ""), part)

    def _is_augmented(self, frame: Any, key: str) -> bool:
        """Return whether a read is that of `x.key += ...`, whose result goes nowhere but into the attribute."""
        return (frame.f_lasti, key) in augmented_reads(frame.f_code)

    def _on_event(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and self._functions.is_new(frame):
            self._on_function(frame, frame.f_code)
        elif event == "c_call":
            self._draws.note_call(argument, frame)

    def _on_function(self, frame: Any, code: types.CodeType) -> None:
        """Record the globals and the closure of a function that starts."""
        free = free_names(code)
        functions = self._functions.find(frame) if free or code in self._functions else []
        for function in functions:
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                if name in free:
                    self._record_cell(cell, name, frame)
            for key in stateful_defaults(function):
                place = Place(function, key, "attribute", f"the defaults of {code.co_name}", user_line(frame))
                self._record(place, getattr(function, key))
        self._meet_parts(self._unreported.add_imports(code, frame.f_globals))
        for name in stored_globals(code):
            place = Place(frame.f_globals, name, "item", name, user_line(frame))
            self._writes.setdefault((id(frame.f_globals), name), (place, place.read()))
        for name, chain in global_chains(code):
            if name in frame.f_globals:
                self._record_chain(frame.f_globals, name, chain, frame)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name)
            if isinstance(value, type) and is_recordable(value):
                self._record_class(value, code.co_names, frame)
            elif value is not None and is_recordable(type(value)):
                self._patch(type(value))

    def _record_cell(self, cell: Any, name: str, frame: Any) -> None:
        key, is_read = (id(cell), name), name not in only_stored_cells(frame.f_code)
        if key not in (self.result.reads if is_read else self._writes):
            place = Place(cell, name, "cell", name, user_line(frame))
            if is_read:
                self._record(place, place.read())
            else:
                self._writes[key] = place, place.read()

    def _record_chain(self, scope: dict[str, Any], name: str, chain: tuple[str, ...], frame: Any) -> None:
        """Record a global, and the attributes that the code reads of it where it is a module or a class."""
        value = scope[name]
        if (id(scope), name) not in self.result.reads:
            self._record(Place(scope, name, "item", name, user_line(frame)), value)
        for key in chain:
            if isinstance(value, types.ModuleType) and not is_library(value.__name__):
                if key not in vars(value):
                    return
                if (id(vars(value)), key) not in self.result.reads:
                    self._record(Place(vars(value), key, "item", f"{name}.{key}", user_line(frame)), vars(value)[key])
                value = vars(value)[key]
            elif isinstance(value, type) and is_recordable(value):
                self._record_class(value, (key,), frame)
                value = getattr(value, key, None)
            else:
                if isinstance(value, types.FunctionType) and key in vars(value):
                    self._tables[id(vars(value))] = value
                    self._record(Place(vars(value), key, "item", f"{name}.{key}", user_line(frame)), vars(value)[key])
                return

    def _record_class(self, kind: type, names: tuple[str, ...], frame: Any) -> None:
        for key in names:
            value = next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), MISSING)
            is_member = isinstance(value, (*METHODS, property, classmethod, staticmethod)) or hasattr(value, "__get__")
            if value is not MISSING and not is_member and (id(kind), key) not in self.result.reads:
                self._record(Place(kind, key, "attribute", f"{kind.__name__}.{key}", user_line(frame)), value)

    def _note_unreported(self) -> None:
        """Record the attributes of objects that report no reads."""
        for place, before, after in self._unreported.find_reads(self._functions):
            keys = (id(place.owner), place.key), (id(instance_dict(place.owner)), place.key)
            key = next((key for key in keys if key in self.result.reads), keys[0])
            self.result.reads.setdefault(key, (place, before))
            if not is_same(before, after):
                self._writes[key] = place, before

    def _read_places(self) -> set[tuple[int, str]]:
        """Return the places that the step reads, an entry of a module's table also as an attribute of the module."""
        entries = {(id(self._tables[table]), key) for table, key in self.result.reads if table in self._tables}
        return {*self.result.reads, *entries}

    def _drop(self, fresh: set[int]) -> None:
        """Drop what concerns objects that the step makes itself."""
        # a dictionary that an object keeps is listed as new once it gets its first object
        fresh = fresh - {table for table, owner in self._tables.items() if id(owner) not in fresh}
        for table in (self.result.reads, self._writes):
            for place in [place for place in table if place[0] in fresh]:
                del table[place]
        self._containers.drop(fresh)
        for place in self._augmented:
            self.result.reads.pop(place, None)

    def _restore(self) -> None:
        self.result.clear_caches()
        for place, before in self._writes.values():
            assign(place, before)
        for change in self._containers.changes():
            change.restore()
