"""Group ops of a captured step into regions: many small calls that are planned, measured and run as one op.

A region is a set of ops that neither draw random numbers nor write, and no path leaves the set and enters it again. Values
that are read outside are the region's outputs. All others live inside of its callable, which frees each after its last use.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.capture.bindings import Bindings
from autotune.capture.fx_nodes import target_name
from autotune.capture.program import Call, Meta, Read, View, argument_text, hash_signature, reads
from autotune.capture.source_writer import SourceWriter
from autotune.errors import CaptureError
from autotune.ir.graph import Op, Value


@dataclass(frozen=True)
class GroupedOps:
    """Ops, calls, values and metas after grouping. Positions are ids."""

    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    metas: tuple[Meta | None, ...]
    new_ids: dict[int, int]
    """New id of each old value that still exists."""


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
        self.calls, self.inputs, self.outputs = tuple(calls), tuple(inputs), tuple(outputs)
        described = {*reads([(call.args, [part for _, part in call.kwargs]) for call in calls]), *inputs, *outputs}
        self._arguments = inputs, outputs, [meta if value in described else None for value, meta in enumerate(metas)]
        writer = _RegionWriter(Bindings(metas))
        self.source = writer.source(calls, inputs, outputs)
        scope = dict(writer.names)
        exec(compile(self.source, f"<region {name}>", "exec"), scope)
        self._run: Callable[..., tuple[Any, ...]] = scope["region"]

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        return self._run(*tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what the code is written from: builtin functions in its scope cannot be pickled."""
        return Region, (self.__name__, self.calls, *self._arguments)


def group_regions(
    ops: Sequence[Op],
    calls: Sequence[Call],
    values: Sequence[Value],
    metas: Sequence[Meta | None],
    members: dict[str, list[int]],
    *,
    step_outputs: Iterable[int],
) -> GroupedOps:
    """Replace the ops of each region by one op. `members` lists the ops of each region by its name.

    Raises:
        CaptureError: if an op of a region draws or writes, or a region depends on itself through another op.
    """
    region_of = {op: name for name, inside in members.items() for op in inside}
    lasting = set(step_outputs) | _read_outside(ops, region_of)
    merged = {
        name: _merge(name, [ops[op] for op in inside], [calls[op] for op in inside], metas, lasting=lasting)
        for name, inside in members.items()
    }
    pairs = [
        merged[unit] if isinstance(unit, str) else (ops[unit], calls[unit]) for unit in _order_units(ops, region_of)
    ]
    internal = {value for op in region_of for value in ops[op].outputs} - lasting
    remaining = [value for value in values if value.id not in internal]
    new_ids = {value.id: new for new, value in enumerate(remaining)}
    return GroupedOps(
        ops=tuple(_renumber_op(op, position, new_ids) for position, (op, _) in enumerate(pairs)),
        calls=tuple(renumber_call(call, new_ids) for _, call in pairs),
        values=tuple(replace(value, id=new) for new, value in enumerate(remaining)),
        metas=tuple(metas[value.id] for value in remaining),
        new_ids=new_ids,
    )


def _read_outside(ops: Sequence[Op], region_of: dict[int, str]) -> set[int]:
    """Return the values that an op outside of their producer's region reads or writes."""
    producer = {value: op.id for op in ops for value in op.outputs}
    return {
        value
        for op in ops
        for value in (*op.inputs, *op.writes)
        if value in producer and region_of.get(producer[value], op.id) != region_of.get(op.id, producer[value])
    }


def _merge(
    name: str, ops: list[Op], calls: list[Call], metas: Sequence[Meta | None], *, lasting: set[int]
) -> tuple[Op, Call]:
    """Return one op and one call for the ops of a region; of their outputs those in `lasting` remain."""
    unfit = next((op for op in ops if op.random or op.writes or op.alias_of is not None), None)
    if unfit is not None:
        raise CaptureError(
            f"the region {name} contains {unfit.name}, which draws random numbers or writes; leave that op out of the region"
        )
    produced = [value for op in ops for value in op.outputs]
    inputs = [v for v in dict.fromkeys(v for op in ops for v in op.inputs) if v not in set(produced)]
    outputs = [value for value in produced if value in lasting]
    region = Region(name.rpartition(" ")[2], calls, inputs, outputs, metas)
    merged = replace(
        ops[0],
        name=f"{ops[0].layer}.{region.__name__}",
        target=f"autotune.regions.{region.__name__}",  # in the digest, which stored plans name: no folder in it
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        signature=region_signature(calls, [*inputs, *produced], outputs, metas),
        repeatable=all(op.repeatable for op in ops),
        inplace=(),
    )
    return merged, Call(region, tuple(Read(value) for value in inputs), (), tuple(outputs))


def region_signature(
    calls: Sequence[Call], values: Sequence[int], outputs: Sequence[int], metas: Sequence[Meta | None]
) -> str:
    """Return the signature of a region. Values are numbered by their place in it, so equal regions have equal signatures."""
    local = {value: number for number, value in enumerate(values)}
    local_metas = [metas[value] for value in local]
    parts = [
        (
            target_name(call.target),  # the text of a function has its address, which differs between processes
            argument_text(renumber(call.args, local), local_metas),
            argument_text(renumber(call.kwargs, local), local_metas),
        )
        for call in calls
    ]
    wiring = [tuple(local[v] for v in reads((*call.args, *(part for _, part in call.kwargs)))) for call in calls]
    return hash_signature((parts, wiring, [local[value] for value in outputs]))


def _order_units(ops: Sequence[Op], region_of: dict[int, str]) -> list[int | str]:
    """Order ops and regions by their dependencies, and independent ones as traced."""
    unit_of: list[int | str] = [region_of.get(op.id, op.id) for op in ops]
    first: dict[int | str, int] = {}
    for op in ops:
        first.setdefault(unit_of[op.id], op.id)
    before = _dependencies(ops, unit_of)
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
        raise CaptureError(f"the region {stuck} depends on itself through an op outside of it; make the region smaller")
    return order


def _dependencies(ops: Sequence[Op], unit_of: list[int | str]) -> dict[int | str, set[int | str]]:
    """Return what each unit waits for: producers, readers before a writer, the last random op and assertion."""
    before: dict[int | str, set[int | str]] = {unit: set() for unit in unit_of}
    readers: dict[int, list[int]] = {}
    producer: dict[int, int] = {}
    last_random: int | None = None
    last_assertion: int | None = None
    for op in ops:
        sources = [producer[value] for value in (*op.inputs, *op.writes) if value in producer]
        sources += [reader for value in op.writes for reader in readers.get(value, ())]
        if op.random:
            sources += [] if last_random is None else [last_random]
            last_random = op.id
        # an op of a region without a result works in place, and raises nothing
        raises = op.only_raises and isinstance(unit_of[op.id], int)
        if last_assertion is not None and (op.writes or raises):
            sources.append(last_assertion)
        last_assertion = op.id if raises else last_assertion
        before[unit_of[op.id]].update(unit_of[other] for other in sources)
        before[unit_of[op.id]].discard(unit_of[op.id])
        for value in op.inputs:
            readers.setdefault(value, []).append(op.id)
        producer |= dict.fromkeys((*op.outputs, *op.writes), op.id)
    return before


def renumber(argument: Any, ids: dict[int, int]) -> Any:
    """Return an argument with the new ids of its values."""
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
    """Return a call with the new ids of its values."""
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
        alias_of=None if op.alias_of is None else ids[op.alias_of],
    )


class _RegionWriter(SourceWriter):
    """Source of a region as a function. A view is computed once, and a variable is deleted after its last use."""

    def __init__(self, bindings: Bindings) -> None:
        super().__init__(bindings)
        self._views: dict[str, str] = {}
        self._lines: list[_Line] = []
        self._variables_read: list[str] = []

    def source(self, calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int]) -> str:
        """Return the function `region(inputs)` that runs the calls and returns the tuple of the outputs."""
        for call in calls:
            self._variables_read = []
            text, variables = self.statement(call)
            self._lines.append(_Line(text, variables, self._variables_read))
        parameters = [f"v{value}" for value in inputs]
        results = [f"v{value}" for value in outputs]
        last_use = {name: index for index, line in enumerate(self._lines) for name in line.variables}
        body = []
        for index, line in enumerate(self._lines):
            unused = {name for name in line.variables if last_use[name] == index}.difference(parameters, results)
            body.append(f" {line.text}" + (f"; del {', '.join(sorted(unused))}" if unused else ""))
        returned = "".join(f"{name}, " for name in results)
        return "\n".join([f"def region({', '.join(parameters)}):", *body, f" return ({returned})"]) + "\n"

    def variable(self, value: int) -> str:
        """Return the variable of a value, and record that the current line reads it."""
        name = super().variable(value)
        self._variables_read.append(name)
        return name

    def view(self, view: View) -> str:
        """Return the variable of a view; the first reader adds a line that computes it."""
        outer, self._variables_read = self._variables_read, []
        text = super().view(view)
        name = self._views.get(text)
        if name is None:
            name = self._views[text] = f"w{len(self._views)}"
            self._lines.append(_Line(f"{name} = {text}", [name], self._variables_read))
        self._variables_read = [*outer, name]
        return name


@dataclass(frozen=True, slots=True)
class _Line:
    """One statement of a region."""

    text: str
    assigned: list[str]
    read: list[str]

    @property
    def variables(self) -> set[str]:
        """Variables that the statement assigns or reads."""
        return {*self.assigned, *self.read}
