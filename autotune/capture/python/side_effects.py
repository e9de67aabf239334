"""Find the Python objects that a traced step changes. A captured step does not repeat such changes.

A change that the step itself reads alters the next step, so it is refused, and the error names a fix. Any other
change, such as a counter for a log, is reported once.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch import fx

from autotune.capture.python.guards import Sources
from autotune.capture.python.refusals import describe_change, suggest_fix
from autotune.capture.python.state_places import changed_content, fill_temporarily, grown_contents, is_same
from autotune.errors import CaptureError
from autotune.workloads.factory import innermost_user_line


class SideEffectWarning(UserWarning):
    """Warning of a change of a Python object that a captured step does not repeat."""


CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True, slots=True)
class SideEffect:
    """Assignment to one object, or a change of one container."""

    source: str
    """Dynamo's expression for the object or the container."""
    after: Any
    """Content after the step, with zeros for tensors; `UNKNOWN` where it cannot be built."""
    line: str
    """File, number and text of the line, if it is in the user's code; empty for a library's."""
    container: bool = False

    @property
    def is_on_loss_function(self) -> bool:
        """True if the object belongs to the loss function, as the `self` of a method does."""
        return "['self'].loss_fn" in self.source


UNKNOWN = object()
"""Content that cannot be built outside of the trace."""


@contextmanager
def record_side_effects() -> Iterator[tuple[list[SideEffect], list[str]]]:
    """Collect the side effects that Dynamo finds while it traces, and the sources of the tensors that get a hook."""
    from torch._dynamo.output_graph import OutputGraph

    recorded: list[SideEffect] = []
    hooked: list[str] = []
    original = OutputGraph.compile_subgraph

    def record(graph: Any, *args: Any, **kwargs: Any) -> Any:
        recorded[:] = _side_effects(graph.side_effects)
        hooks = graph.side_effects.tensor_hooks.values()
        hooked[:] = [tensor.source.name for tensor, *_ in hooks if tensor.source is not None]
        return original(graph, *args, **kwargs)

    with mock.patch.object(OutputGraph, "compile_subgraph", record):
        yield recorded, hooked


def _side_effects(effects: Any) -> Iterator[SideEffect]:
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
    from torch._dynamo.variables.sets import SetVariable

    zeros: dict[fx.Node, torch.Tensor] = {}
    listed = effects._get_modified_vars()
    ids = set(map(id, listed))
    # Dynamo lists neither sets nor the content of an `OrderedDict`, a `defaultdict` and the like
    unlisted = [changed for changed in effects.mutation_user_stacks if id(changed) not in ids]
    for changed in (*listed, *unlisted):
        if not isinstance(changed.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            continue
        source = changed.source.name if changed.source is not None else ""
        stacks = effects.mutation_user_stacks.get(changed, [])
        for name, content in effects.store_attr_mutations.get(changed, {}).items():
            yield SideEffect(_member(source, name), _content(content, zeros), _line(stacks, name))
        if source.endswith(("['_buffers']", "._buffers")):
            for key in _changed_keys(changed):
                content = _items_by_key(changed)[key]
                if _is_written_in_place(content, f"{source}[{key!r}]"):
                    continue
                yield SideEffect(f"{source}[{key!r}]", _content(content, zeros), _line(stacks, str(key)))
        elif isinstance(changed.mutation_type, ValueMutationExisting) or isinstance(changed, SetVariable):
            if not source or _is_restored(changed, source):
                continue
            yield SideEffect(source, _content(changed, zeros), _line(stacks, ""), container=True)


_SOURCE = "autotune_source"
"""Key in the meta of an input of Dynamo's graph: its source, which Dynamo removes before it lists side effects again."""


_IN_PLACE = re.compile(r".*[^_]_|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)_?")
"""Names of functions that return their first argument, which they change in place."""


def _is_written_in_place(content: Any, source: str) -> bool:
    """Return whether what is assigned is the buffer itself, which ops such as `+=` wrote and returned."""
    try:
        node = content.as_proxy().node
    except Exception:  # noqa: BLE001 - Dynamo has dozens of kinds of variables, of which few are tensors
        return False
    while isinstance(node, fx.Node) and node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        node = node.kwargs.get("out") or (node.args[0] if _IN_PLACE.fullmatch(name) else None)
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    if (argument := node.meta.get("grapharg")) is not None and argument.source is not None:
        node.meta[_SOURCE] = argument.source.name
    return bool(node.meta.get(_SOURCE) == source)


def _line(stacks: Sequence[Any], name: str) -> str:
    """Return the user's line that changes `name`; Dynamo keeps one list of lines for all attributes of an object."""
    lines = [innermost_user_line(_assignment(stack)) for stack in stacks]
    return next(
        (line for line in lines if name and re.search(rf"\b{re.escape(name)}\b", line)), lines[-1] if lines else ""
    )


def _assignment(stack: Any) -> list[Any]:
    """Return the frame that assigns; a method of `nn.Module` does so one frame below it."""
    frames = [frame for frame in stack if frame.name not in ("__setattr__", "register_buffer")]
    return frames[-1:]


def _member(source: str, name: str) -> str:
    """Return the expression for an attribute; that of a global is its source."""
    return source if source.endswith(f"[{name!r}]") else f"{source}.{name}"


def _items_by_key(changed: Any) -> dict[Any, Any]:
    items = getattr(changed, "items", None)
    return {key.vt.as_python_constant(): content for key, content in items.items()} if isinstance(items, dict) else {}


def _changed_keys(changed: Any) -> list[Any]:
    """Return the keys of a dictionary that the step assigns."""
    before = getattr(changed, "original_items", None)
    if not isinstance(before, dict) or not isinstance(getattr(changed, "items", None), dict):
        return []
    return [key.vt.as_python_constant() for key, content in changed.items.items() if content is not before.get(key)]


def _is_restored(changed: Any, source: str) -> bool:
    """Return whether each key of a dictionary has its object again, as of `_parameters` after `functional_call`."""
    before = getattr(changed, "original_items", None)
    if not isinstance(before, dict) or not isinstance(getattr(changed, "items", None), dict):
        return False
    contents = _items_by_key(changed)
    keys: list[Any] = [getattr(key, "vt", key) for key in before]
    if [key.as_python_constant() for key in keys] != list(contents):
        return False
    return all(
        content.source is not None and content.source.name == f"{source}[{key!r}]" for key, content in contents.items()
    )


def _content(variable: Any, zeros: dict[fx.Node, torch.Tensor]) -> Any:
    """Return a variable of Dynamo's as a Python object, with zeros for tensors; `UNKNOWN` where it has no content.

    `zeros` gets those of each tensor, which a long list may contain many times.
    """
    try:
        if variable.is_python_constant():
            return variable.as_python_constant()
        if variable.is_tensor():
            node = variable.as_proxy().node
            if node not in zeros:
                example = node.meta["example_value"]
                zeros[node] = torch.zeros(example.shape, dtype=example.dtype, device=example.device)
            return zeros[node]
        if isinstance(variable.items, dict):
            return {key: _content(content, zeros) for key, content in _items_by_key(variable).items()}
        return variable.python_type()(_content(item, zeros) for item in variable.items)
    except Exception:  # noqa: BLE001 - Dynamo has dozens of kinds of variables, of which some have no content
        return UNKNOWN


class TracedReads(Protocol):
    """Part of a `PythonTrace` that shows whether the step reads a source."""

    @property
    def side_effects(self) -> tuple[SideEffect, ...]: ...

    @property
    def inputs(self) -> frozenset[str]: ...

    @property
    def read(self) -> frozenset[str]: ...

    @property
    def conditions(self) -> frozenset[str]: ...

    @property
    def constants(self) -> frozenset[str]: ...

    @property
    def branches(self) -> bool: ...

    @property
    def text(self) -> str: ...

    @property
    def ops(self) -> list[tuple[Any, ...]]: ...

    @property
    def sources(self) -> Sources: ...


Trace = TypeVar("Trace", bound=TracedReads)
Retrace = Callable[[frozenset[str]], TracedReads]
"""Function that traces the step again, with these numbers as symbols."""


def refuse_read_side_effects(traced: TracedReads, retrace: Retrace) -> tuple[SideEffect, ...]:
    """Refuse a side effect that the next step would read; return the others.

    Raises:
        CaptureError: names the object, the user's line and a fix.
    """
    unread = []
    for effect in traced.side_effects:
        if _is_as_before(effect, traced):
            continue
        if _is_read(effect, traced, retrace):
            raise CaptureError(_refusal(effect, traced.sources))
        unread.append(effect)
    _refuse_read_attributes([effect for effect in unread if effect.line], traced, retrace)
    return tuple(unread)


def _refuse_read_attributes(effects: list[SideEffect], traced: TracedReads, retrace: Retrace) -> None:
    """Refuse an attribute that the step makes and the next one reads; Dynamo sets no guard on a lookup that fails."""
    made = [each for each in effects if not each.container and not traced.sources.exists(each.source)]
    made = [effect for effect in made if not _contains_unknown(effect.after)]
    if not made:
        return
    with ExitStack() as stack:
        for effect in made:
            stack.enter_context(traced.sources.assigned(effect.source, effect.after))
        if retrace(frozenset()).text != traced.text:
            raise CaptureError(_refusal(made[0], traced.sources))


def _is_read(effect: SideEffect, traced: TracedReads, retrace: Retrace) -> bool:
    name = effect.source
    if effect.container:
        return _is_read_container(effect, traced, retrace)
    if name in traced.inputs:
        # a buffer is part of the model's state, whoever reads it
        return name in traced.read or "_buffers" in name
    if name not in traced.conditions:
        return False
    if type(effect.after) not in (int, float) or not traced.sources.exists(name):
        return True
    # `self.calls += 1` reads what it assigns: with a symbol in its place a use by anything else shows
    with traced.sources.assigned(name, effect.after + 7):
        again = retrace(frozenset((name,)))
    return name in again.read or name in again.constants or again.branches


def is_count(effect: SideEffect, traced: TracedReads) -> bool:
    """Return whether an effect that the step does not read advances a number, as a count of calls.

    The step reads the number before, and as it is unread, for its own update alone. Caches of libraries are no such
    numbers: those are assigned without being read, decide a branch, or replace None.
    """
    is_number = not effect.container and type(effect.after) in (int, float) and effect.source in traced.conditions
    if not is_number or not traced.sources.exists(effect.source):
        return False
    before = traced.sources.value(effect.source)
    return type(before) in (int, float) and bool(before != effect.after)


def changed_sources(effects: Iterable[SideEffect], sources: Sources) -> tuple[frozenset[str], frozenset[str]]:
    """Return the sources whose guards an unread change invalidates: with all their parts, and without them.

    Of a container, only the keys that the step changes lose the guards on their content.
    """
    whole: set[str] = set()
    alone: set[str] = set()
    for effect in effects:
        before = sources.value(effect.source) if effect.container and sources.exists(effect.source) else None
        keys = changed_content(before, effect.after) if effect.container else None
        if keys is None:
            whole.add(effect.source)
        else:
            alone.add(effect.source)
            whole.update(f"{effect.source}[{key!r}]" for key in keys)
    return frozenset(whole), frozenset(alone)


def settle(traced: Trace, retrace: Callable[[], Trace]) -> Trace:
    """Assign what only the first step assigns, as `config.problem_type` of `transformers`; return the trace that follows.

    Nothing is changed where the first step runs other ops than the next one, or where the next one assigns something else.
    """
    after = {
        effect.source: effect.after
        for effect in traced.side_effects
        if not effect.container and type(effect.after) in (bool, str) and effect.source in traced.conditions
        if traced.sources.exists(effect.source)
    }
    if not after:
        return traced
    before = {source: traced.sources.value(source) for source in after}
    settled = False
    try:
        for source, value in after.items():
            traced.sources.assign(source, value)
        again = retrace()
        assigned = [effect for effect in again.side_effects if effect.source in after]
        settled = again.ops == traced.ops and all(effect.after == after[effect.source] for effect in assigned)
    finally:
        for source, value in before.items() if not settled else ():
            traced.sources.assign(source, value)
    return again if settled else traced


def _is_read_container(effect: SideEffect, traced: TracedReads, retrace: Retrace) -> bool:
    """Return whether the step runs differently on the content that it leaves in the container, at once or much later."""
    if any(source.startswith(f"{effect.source}[") for source in traced.read):
        return True
    container = traced.sources.value(effect.source)
    if not isinstance(container, CONTAINERS) or _contains_unknown(effect.after):
        return True
    numbers = _changed_numbers(container, effect.after)
    for content in (effect.after, *grown_contents(container, effect.after)):
        with fill_temporarily(container, content):
            if retrace(frozenset()).text != traced.text:
                return True
    if not numbers:
        return False
    later = effect.after.copy()
    for key, number in numbers.items():
        later[key] = number + 7
    symbols = frozenset(source for key in numbers for source in _item_sources(effect.source, container, key))
    # as for attributes: a symbol in place of each number reveals every use except the number's own update
    with fill_temporarily(container, later):
        again = retrace(symbols)
    return bool(symbols & again.read) or again.branches


def _item_sources(source: str, container: Any, key: int | str) -> tuple[str, ...]:
    """Return Dynamo's expressions for an item: one for plain containers, another one for subclasses."""
    if not isinstance(container, dict):
        return f"{source}[{key!r}]", f"list.__getitem__({source}, {key!r})"
    position = f"list(dict.keys({source}))[{[*container].index(key)}]" if key in container else repr(key)
    return f"{source}[{key!r}]", f"dict.__getitem__({source}, {position})"


def _changed_numbers(before: Any, after: Any) -> dict[int | str, int | float]:
    """Return the numbers that the step changes in a container, by key or position, without those that it appends."""
    content = after if isinstance(after, dict) else dict(zip(range(len(before)), after, strict=False))
    changed = changed_content(before, after) or []
    return {key: content[key] for key in changed if type(key) in (int, str) and type(content.get(key)) in (int, float)}


def _is_as_before(effect: SideEffect, traced: TracedReads) -> bool:
    """Return whether the step ends with what it began with, as a flag that it sets and resets.

    An attribute is guarded as well: where another value precedes the step, the step is captured again.
    """
    if not traced.sources.exists(effect.source):
        return False
    before = traced.sources.value(effect.source)
    if not effect.container:
        is_plain = type(effect.after) in (bool, int, str)
        return is_plain and effect.source in traced.conditions and is_same(before, effect.after)
    return (not effect.after and not before) or is_same(before, effect.after)


def _refusal(effect: SideEffect, sources: Sources) -> str:
    name = sources.spell(effect.source)
    fix = (
        "keep its content in a buffer and change that in place" if effect.container else suggest_fix(name, effect.after)
    )
    return describe_change(name, effect.line, fix)


def _contains_unknown(content: Any) -> bool:
    if isinstance(content, dict):
        return any(map(_contains_unknown, content.values()))
    if isinstance(content, (list, tuple, set, deque)):
        return any(map(_contains_unknown, content))
    return content is UNKNOWN
