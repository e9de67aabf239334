"""Group ops of a captured step into one op each: many small calls that are planned, measured and run as a whole.

A region is a set of ops without draws and writes that no path leaves and enters again. Its values that are read outside
become its outputs; all others live inside of its callable, which frees each at its last use.
"""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.capture.bindings import Bindings
from autotune.capture.program import Call, Meta, Read, View, reads
from autotune.errors import CaptureError
from autotune.ir.graph import Op, Value


@dataclass(frozen=True)
class Grouped:
    """Ops, calls, values and metas after grouping, and the new id of each old value that is still there."""

    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    metas: tuple[Meta | None, ...]
    renumbered: dict[int, int]


class Region:
    """The callable of a region: straight-line code from the tensors that it reads to the tuple of its outputs."""

    def __init__(
        self,
        name: str,
        calls: Sequence[Call],
        inputs: Sequence[int],
        outputs: Sequence[int],
        metas: Sequence[Meta | None],
    ) -> None:
        self.__name__ = name
        self.calls = tuple(calls)
        writer = _Writer(calls, inputs, outputs, Bindings(metas))
        self.source = writer.source
        scope = dict(writer.names)
        exec(compile(self.source, f"<region {name}>", "exec"), scope)
        self._run: Callable[..., tuple[Any, ...]] = scope["region"]

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        return self._run(*tensors)


def group(
    ops: Sequence[Op],
    calls: Sequence[Call],
    values: Sequence[Value],
    metas: Sequence[Meta | None],
    members: dict[str, list[int]],
    *,
    kept: Iterable[int],
    describe: Callable[[Any, list[Meta | None]], str],
) -> Grouped:
    """Replace the ops of each region, given by name, by one; values in `kept` are outputs of the step.

    `describe` gives the text of arguments that a signature covers.
    """
    region_of = {op: name for name, inside in members.items() for op in inside}
    lasting = set(kept)
    made_by = {value: op.id for op in ops for value in op.outputs}
    for op in ops:
        for value in (*op.inputs, *op.writes):
            if value in made_by and region_of.get(made_by[value], op.id) != region_of.get(op.id, made_by[value]):
                lasting.add(value)
    merged: dict[str, tuple[Op, Call]] = {}
    for name, inside in members.items():
        merged[name] = _merge(
            name,
            [ops[op] for op in inside],
            [calls[op] for op in inside],
            metas,
            lasting=lasting,
            describe=describe,
        )
    pairs = []
    for unit in _ordered(ops, region_of):
        pairs.append(merged[unit] if isinstance(unit, str) else (ops[unit], calls[unit]))
    gone = {value for op in region_of for value in ops[op].outputs} - lasting
    left = [value for value in values if value.id not in gone]
    renumbered = {value.id: new for new, value in enumerate(left)}
    return Grouped(
        ops=tuple(_renumber_op(op, position, renumbered) for position, (op, _) in enumerate(pairs)),
        calls=tuple(renumber_call(call, renumbered) for _, call in pairs),
        values=tuple(replace(value, id=new) for new, value in enumerate(left)),
        metas=tuple(metas[value.id] for value in left),
        renumbered=renumbered,
    )


def _merge(
    name: str,
    ops: list[Op],
    calls: list[Call],
    metas: Sequence[Meta | None],
    *,
    lasting: set[int],
    describe: Callable[[Any, list[Meta | None]], str],
) -> tuple[Op, Call]:
    unfit = next((op for op in ops if op.random or op.writes or op.given is not None), None)
    if unfit is not None:
        raise CaptureError(f"the region {name} holds {unfit.name}, which draws or writes; leave it out of the region")
    made = [value for op in ops for value in op.outputs]
    inputs = [v for v in dict.fromkeys(v for op in ops for v in op.inputs) if v not in set(made)]
    outputs = [value for value in made if value in lasting]
    region = Region(name.rpartition(" ")[2], calls, inputs, outputs, metas)
    # regions of one text are one signature: values are numbered by their place in the region
    local = {value: number for number, value in enumerate((*inputs, *made))}
    seen: list[Meta | None] = [metas[value] for value in local]
    parts = [
        (str(call.target), describe(renumber(call.args, local), seen), describe(renumber(call.kwargs, local), seen))
        for call in calls
    ]
    wiring = [tuple(local[v] for v in reads((*call.args, *(part for _, part in call.kwargs)))) for call in calls]
    text = repr((parts, wiring, [local[value] for value in outputs]))
    merged = replace(
        ops[0],
        name=f"{ops[0].layer}.{region.__name__}",
        target=f"autotune.regions.{region.__name__}",  # in the digest, which stored plans name: no folder in it
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        signature=hashlib.sha256(text.encode()).hexdigest()[:24],
        repeatable=all(op.repeatable for op in ops),
        inplace=(),
    )
    return merged, Call(region, tuple(Read(value) for value in inputs), (), tuple(outputs))


def _ordered(ops: Sequence[Op], region_of: dict[int, str]) -> list[int | str]:
    """Order ops and regions as they depend on each other, and otherwise as traced."""
    unit_of: list[int | str] = [region_of.get(op.id, op.id) for op in ops]
    first: dict[int | str, int] = {}
    for op in ops:
        first.setdefault(unit_of[op.id], op.id)
    before: dict[int | str, set[int | str]] = {unit: set() for unit in first}
    readers: dict[int, list[int]] = {}
    maker: dict[int, int] = {}
    drawn: int | None = None
    for op in ops:
        found = [maker[value] for value in (*op.inputs, *op.writes) if value in maker]
        found += [reader for value in op.writes for reader in readers.get(value, ())]
        if op.random:
            found += [] if drawn is None else [drawn]
            drawn = op.id
        before[unit_of[op.id]].update(unit_of[other] for other in found)
        before[unit_of[op.id]].discard(unit_of[op.id])
        for value in op.inputs:
            readers.setdefault(value, []).append(op.id)
        maker |= dict.fromkeys((*op.outputs, *op.writes), op.id)
    after: dict[int | str, list[int | str]] = {unit: [] for unit in first}
    for unit, others in before.items():
        for other in others:
            after[other].append(unit)
    waiting = {unit: len(others) for unit, others in before.items()}
    by_first = {position: unit for unit, position in first.items()}
    ready = [first[unit] for unit, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[int | str] = []
    while ready:
        unit = by_first[heapq.heappop(ready)]
        order.append(unit)
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, first[other])
    if len(order) != len(first):
        stuck = next(unit for unit in first if isinstance(unit, str) and waiting[unit])
        raise CaptureError(f"the region {stuck} depends on itself through an op outside of it; make it smaller")
    return order


def renumber(argument: Any, ids: dict[int, int]) -> Any:
    """Return an argument with the values' new ids."""
    match argument:
        case Read(value):
            return Read(ids[value])
        case View(target, args, kwargs):
            return View(target, renumber(args, ids), renumber(kwargs, ids))
        case tuple():
            return tuple(renumber(part, ids) for part in argument)
        case list():
            return [renumber(part, ids) for part in argument]
        case _:
            return argument


def renumber_call(call: Call, ids: dict[int, int]) -> Call:
    """Return a call with the values' new ids."""
    outputs = call.outputs
    if isinstance(outputs, int):
        outputs = ids[outputs]
    elif outputs is not None:
        outputs = tuple(None if value is None else ids[value] for value in outputs)
    return replace(call, args=renumber(call.args, ids), kwargs=renumber(call.kwargs, ids), outputs=outputs)


def _renumber_op(op: Op, position: int, ids: dict[int, int]) -> Op:
    return replace(
        op,
        id=position,
        inputs=tuple(ids[value] for value in op.inputs),
        outputs=tuple(ids[value] for value in op.outputs),
        writes=tuple(ids[value] for value in op.writes),
        inplace=tuple(ids[value] for value in op.inplace),
        given=None if op.given is None else ids[op.given],
    )


class _Writer:
    """Writes a region's source; everything that it names is in `names`. A view is made once."""

    def __init__(
        self, calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int], bindings: Bindings
    ) -> None:
        self._bindings = bindings
        self.names: dict[str, Any] = {}
        self._constants: dict[int, str] = {}
        self._views: dict[str, str] = {}
        self._lines: list[tuple[str, list[str], list[str]]] = []  # text, names made, names read
        self._read: list[str] = []
        for call in calls:
            self._write(call)
        results = [f"v{value}" for value in outputs]
        given = {f"v{value}" for value in inputs}
        last = {name: index for index, (_, made, read) in enumerate(self._lines) for name in (*made, *read)}
        body = []
        for index, (text, made, read) in enumerate(self._lines):
            dead = sorted(n for n in {*made, *read} if last[n] == index and n not in given and n not in results)
            body.append(f" {text}" + (f"; del {', '.join(dead)}" if dead else ""))
        parameters = ", ".join(f"v{value}" for value in inputs)
        returned = "".join(f"{name}, " for name in results)
        self.source = "\n".join([f"def region({parameters}):", *body, f" return ({returned})"]) + "\n"

    def _write(self, call: Call) -> None:
        self._read = []
        arguments = [self._text(part) for part in call.args]
        arguments += [f"{key}={self._text(part)}" for key, part in call.kwargs]
        target = self._bindings.of(call.target, call.args, call.kwargs)
        text = f"{self._constant(target)}({', '.join(arguments)})"
        read = self._read
        match call.outputs:
            case None:
                self._lines.append((text, [], read))
            case int(value):
                self._lines.append((f"v{value} = {text}", [f"v{value}"], read))
            case parts:
                made = [f"v{value}" if value is not None else f"_{index}" for index, value in enumerate(parts)]
                self._lines.append((f"{', '.join(made)}, = {text}", made, read))

    def _text(self, argument: Any) -> str:
        match argument:
            case Read(value):
                self._read.append(f"v{value}")
                return f"v{value}"
            case View(target, args, kwargs):
                return self._view(target, args, kwargs)
            case tuple() | list():
                inside = "".join(self._text(part) + ", " for part in argument)
                return f"({inside})" if isinstance(argument, tuple) else f"[{inside}]"
            case None | bool() | int() | str():
                return repr(argument)
            case _:
                return self._constant(argument)

    def _view(self, target: Any, args: Any, kwargs: Any) -> str:
        outer, self._read = self._read, []
        parts = [self._text(part) for part in args] + [f"{key}={self._text(part)}" for key, part in kwargs]
        text = f"{self._constant(self._bindings.of(target, args, kwargs))}({', '.join(parts)})"
        name = self._views.get(text)
        if name is None:
            name = self._views[text] = f"w{len(self._views)}"
            self._lines.append((f"{name} = {text}", [name], self._read))
        self._read = [*outer, name]
        return name

    def _constant(self, thing: Any) -> str:
        if id(thing) not in self._constants:
            name = f"c{len(self._constants)}"
            self._constants[id(thing)] = name
            self.names[name] = thing
        return self._constants[id(thing)]
