"""Turn a captured program into one whose fusible ops are compiled regions."""

import contextlib
import logging
import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.capture.optimizers.loop_ops import apply_loop
from autotune.capture.optimizers.loop_updates import LoopUpdates
from autotune.capture.program import Call, Meta, Program, Read, hash_signature, reads
from autotune.capture.regions import GroupedOps, Region, group_regions, region_signature, renumber
from autotune.capture.rewrites.batch_norm import REMADE_BY
from autotune.errors import CaptureError, PlanError
from autotune.ir.allocation import allocated_bytes
from autotune.ir.graph import Op, Phase, TrainGraph, Value
from autotune.ir.plan import REBUILD_PRICE
from autotune.kernels.compile_pool import Listen, compile_in_pool
from autotune.kernels.compiled_region import CompiledRegion, storage_bytes
from autotune.kernels.fusible import find_fusible
from autotune.kernels.grouping import group_ops
from autotune.kernels.matmul_sums import NAME as ADDMM
from autotune.kernels.matmul_sums import as_addmm, find_sums
from autotune.kernels.overwriting import find_overwritable
from autotune.kernels.part_inputs import read_parts
from autotune.kernels.saving import rebuilding_ops, rebuilt_values

_log = logging.getLogger(__name__)

SHARED_WITHIN = 24
"""Number of later ops within which a value that was rebuilt for one op is reused by another."""


def fuse(program: Program, rebuild_price: float = REBUILD_PRICE) -> Program:
    """Return a program that computes the same step, with its fusible ops in regions.

    At a low price, forward values that are cheap to compute are not saved for the backward pass. The regions that read them
    there rebuild them. Results differ from the captured step's by rounding. Nothing is compiled yet; see `compile_regions`.
    At the default price and above, the ops of recurrent layers are fused, too; below, each layer stays one op.

    Args:
        program: A captured step.
        rebuild_price: Bytes that may be saved in addition, for each byte that a rebuilding op reads or writes. At 0 the
            fewest bytes are saved; at 4 hardly anything is rebuilt, and planners decide what is recomputed.

    Raises:
        PlanError: The price is negative, or no finite number.

    Examples:
        >>> import torch
        >>> from autotune.capture.tracer import capture
        >>> from autotune.workloads.workload import Workload
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Tanh())
        >>> step = capture(Workload(model, lambda model, x: model(x).sin().sum(), None, torch.ones(2, 4)))
        >>> fused = fuse(step)
        >>> len(fused.graph.ops) < len(step.graph.ops)
        True
    """
    if not 0 <= rebuild_price < math.inf:
        raise PlanError(f"the rebuild_price of the regions is {rebuild_price}; give a number from 0 on")
    # values rebuilt across the steps of a recurrent layer would make a kernel of each step
    opened = program.opened if rebuild_price >= REBUILD_PRICE else None
    program = opened or program
    graph = program.graph
    fusible = find_fusible(program)
    expansion = _Expansion(program)
    groups = group_ops(graph, fusible)
    group_of = {op: number for number, group in enumerate(groups) for op in group}
    rebuilt = rebuilt_values(graph, fusible, rebuild_price)
    begun: set[int] = set()
    for op in graph.ops:
        number = group_of.get(op.id)
        if op.phase is Phase.FORWARD:
            expansion.add(op.id, number)
        elif number is None:
            expansion.rebuild_for(op.id, rebuilt)
            expansion.add(op.id, None)
        else:
            if number not in begun:
                expansion.begin_group(number, groups[number], rebuilt)
                begun.add(number)
            expansion.add(op.id, number)
    # elsewhere a step whose regions run op by op has eager's bits, so sums stay as they are
    return expansion.program(fold_sums=opened is not None)


def with_kernels(program: Program, kernels: str, rebuild_price: float = REBUILD_PRICE) -> Program:
    """Return a program with the kernels of a plan: `inductor`, or empty for the program as captured.

    `rebuild_price` is that of `fuse`.
    """
    if kernels and isinstance(program.updates, LoopUpdates):  # the loop's ops read values by id
        return apply_loop(with_kernels(program.updates.base, kernels, rebuild_price), program.updates.loop)
    return fuse(program, rebuild_price) if kernels == "inductor" else program


def overwrite(call: Call, value: int) -> Call:
    """Return the call of a region that writes an output over a value, one of those in the op's `inplace`."""
    region: Any = call.target
    return replace(call, target=region.over(call.args.index(Read(value))))


def list_regions(program: Program) -> list[CompiledRegion]:
    """Return the compiled regions of a program, one for each kernel."""
    targets = [call.target for call in program.calls]
    return list({target.signature: target for target in targets if isinstance(target, CompiledRegion)}.values())


def compile_regions(program: Program, listen: Listen | None = None) -> None:
    """Load the kernels of a program's regions into this process; compile those that no process of this machine did.

    `listen` is called with the number of compiled regions and of all to compile.

    Raises:
        CaptureError: Inductor cannot compile a region.
        ConfigError: No C++ compiler works, or the directory of compiled kernels cannot be used.
    """
    load_kernels(list_regions(program), listen)


def load_variants(targets: Iterable[object], listen: Listen | None = None) -> None:
    """Load the kernels of those targets that are regions which write over an input.

    One that cannot be compiled runs the region without overwriting, and copies the output over the input. A warning
    states how many do so, unless `listen` is passed.
    """
    variants = [target for target in targets if isinstance(target, CompiledRegion) and target.overwritten is not None]
    unique = list({variant.signature: variant for variant in variants if not variant.is_loaded}.values())
    missing = [variant for variant in unique if variant.device.type == "cpu" and not variant.load_cached()]
    with contextlib.suppress(CaptureError):  # a compiler under a memory limit may be killed; `compile` tries once more
        compile_in_pool(missing, listen)
    problems = []
    for variant in unique:
        try:
            variant.compile()
        except CaptureError as error:
            problems.append(str(error))
    if problems and listen is None:  # a training loop; else a study, which measures the copies
        _log.warning(
            "autotune: %d regions copy an output over their input, through a second buffer of its bytes: %s",
            len(problems), problems[0],
        )  # fmt: skip


def load_kernels(regions: Sequence[CompiledRegion], listen: Listen | None = None) -> None:
    """Load the kernels of regions into this process, as `compile_regions` does."""
    missing = [region for region in regions if not region.is_loaded]
    compile_in_pool([region for region in missing if region.device.type == "cpu" and not region.load_cached()], listen)
    for region in missing:
        region.compile()


@dataclass
class _Expansion:
    """A program's ops in traced order, with the ops that rebuild values added before their readers."""

    source: Program
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    values: list[Value] = field(init=False)
    metas: list[Meta | None] = field(init=False)
    members: dict[str, list[int]] = field(default_factory=dict)
    _copies: dict[int | None, dict[int, int]] = field(default_factory=dict)  # by group; None for ops outside of groups
    _rebuilt_at: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values, self.metas = list(self.source.graph.values), list(self.source.metas)

    def add(self, op_id: int, group: int | None) -> None:
        """Add an op of the program; it reads the rebuilt values of its group."""
        self._append(op_id, self._copies.get(group, {}), f"group {group}" if group is not None else None, {})

    def begin_group(self, group: int, members: Sequence[int], rebuilt: frozenset[int]) -> None:
        """Add the ops that rebuild values inside of a group."""
        inputs = [value for op in members for value in self.source.graph.ops[op].inputs]
        self._copies[group] = self._rebuild(inputs, rebuilt, f"group {group}")

    def rebuild_for(self, op_id: int, rebuilt: frozenset[int]) -> None:
        """Add a region that rebuilds the inputs of an op that is in no group, unless they were rebuilt shortly before."""
        copies = self._copies.setdefault(None, {})
        for value in [value for value in copies if len(self.ops) - self._rebuilt_at[value] > SHARED_WITHIN]:
            del copies[value]
        missing = [value for value in self.source.graph.ops[op_id].inputs if value in rebuilt and value not in copies]
        if not missing:
            return
        fresh = self._rebuild(missing, rebuilt, f"rebuild {len(self.ops)}")
        for value in missing:
            copies[value] = fresh[value]
            self._rebuilt_at[value] = len(self.ops)

    def program(self, *, fold_sums: bool) -> Program:
        """Return the program with its regions merged. `fold_sums` makes one op of a matrix product and its addition."""
        members = {name: ops for name, ops in self.members.items() if len(ops) > 1 or name.startswith("rebuild")}
        inside = {op for ops in members.values() for op in ops}
        produced_inside = {value for op in inside for value in self.ops[op].outputs}
        ops = [
            replace(op, alias_of=None) if op.id in inside or op.alias_of in produced_inside else op for op in self.ops
        ]
        names = {name: f"{name} fused" for name in members}
        if fold_sums:
            excluded = inside | {op.id for op in ops if op.alias_of is not None}
            for product, addition in find_sums(ops, self.calls, self.metas, excluded, set(reads(self.source.results))):
                members[f"sum {addition}"], names[f"sum {addition}"] = [product, addition], f"sum {addition} {ADDMM}"
        grouped = group_regions(
            ops, self.calls, self.values, self.metas, {names[name]: list(ids) for name, ids in members.items()},
            step_outputs=tuple(reads(self.source.results)),
        )  # fmt: skip
        return _with_compiled_regions(self.source, grouped, self.metas)

    def _rebuild(self, inputs: Sequence[int], rebuilt: frozenset[int], region: str) -> dict[int, int]:
        """Add ops that rebuild values, as a part of a region; return the new value of each rebuilt one."""
        copies: dict[int, int] = {}
        for op_id in rebuilding_ops(self.source.graph, rebuilt, inputs):
            fresh = {}
            for value in self.source.graph.ops[op_id].outputs:
                fresh[value] = len(self.values)
                original = self.values[value]
                self.values.append(replace(original, id=fresh[value], name=f"{original.name}.rebuilt"))
                self.metas.append(self.metas[value])
            self._append(op_id, copies, region, fresh)
            copies |= {value: copy for value, copy in fresh.items() if value in rebuilt}
        return copies

    def _append(self, op_id: int, copies: dict[int, int], region: str | None, fresh: dict[int, int]) -> None:
        op, call = self.source.graph.ops[op_id], self.source.calls[op_id]
        position = len(self.ops)
        if region is not None:
            self.members.setdefault(region, []).append(position)
        self.ops.append(
            replace(
                op,
                id=position,
                inputs=tuple(copies.get(value, value) for value in op.inputs),
                outputs=tuple(fresh.get(value, value) for value in op.outputs),
                inplace=tuple(copies.get(value, value) for value in op.inplace),
                phase=Phase.BACKWARD if fresh else op.phase,
                alias_of=None if fresh else op.alias_of,
            )
        )
        self.calls.append(_substitute(call, copies, fresh))


def _substitute(call: Call, copies: dict[int, int], fresh: dict[int, int]) -> Call:
    outputs = call.outputs
    if isinstance(outputs, int):
        outputs = fresh.get(outputs, outputs)
    elif outputs is not None:
        outputs = tuple(None if value is None else fresh.get(value, value) for value in outputs)
    return replace(
        call, args=_replace_reads(call.args, copies), kwargs=_replace_reads(call.kwargs, copies), outputs=outputs
    )


def _replace_reads(argument: Any, copies: dict[int, int]) -> Any:
    return renumber(argument, _Identity(copies)) if copies else argument


class _Identity(dict[int, int]):
    """New ids of values; others keep theirs."""

    def __missing__(self, value: int) -> int:
        return value


def _with_compiled_regions(source: Program, grouped: GroupedOps, metas: Sequence[Meta | None]) -> Program:
    """Return a program of grouped ops; `metas` describes the values inside of regions."""
    ids = grouped.new_ids
    produced = {value for op in grouped.ops for value in op.outputs}
    static = {value.id for value in grouped.values if value.id not in produced}
    results = renumber(source.results, ids)
    values = list(grouped.values)
    fused = _find_fused(grouped, metas)
    pairs = []
    for op, call in zip(grouped.ops, grouped.calls, strict=True):
        if (reading := fused.get(op.id)) is not None:
            outputs = _describe(grouped.metas, op.outputs)
            # capture counts a loss that ATen reduces in place with all its terms; a region allocates the result only
            for value, meta in zip(op.outputs, outputs, strict=True):
                values[value] = replace(values[value], nbytes=allocated_bytes(storage_bytes(meta), meta.device.type))
            compiled, kernel = _with_kernel(op, call, reading, outputs, static)
            sizes = {values[value].nbytes for value in op.outputs}
            inplace = tuple(value for value in compiled.inplace if values[value].nbytes in sizes)
            pairs.append((replace(compiled, inplace=inplace), kernel))
        elif isinstance(call.target, Region) and op.target == f"autotune.regions.{ADDMM}":
            pairs.append(as_addmm(op, call.target, grouped, static))
        else:
            pairs.append((op, call))
    ops, calls = zip(*pairs, strict=True)
    graph = TrainGraph(
        name=source.graph.name,
        ops=ops,
        values=tuple(values),
        inputs=tuple(value.id for value in grouped.values if value.id not in produced),
        outputs=tuple(ids[value] for value in source.graph.outputs),
    )
    return replace(
        source,
        graph=graph,
        calls=calls,
        metas=grouped.metas,
        tensors={ids[value]: tensor for value, tensor in source.tensors.items()},
        batch=tuple(ids[value] for value in source.batch),
        free=tuple((ids[value], read) for value, read in source.free),
        tangent=None if source.tangent is None else ids[source.tangent],
        results=results,
        gradients=tuple(ids[value] for value in source.gradients),
        opened=None,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """A region and what it reads."""

    region: Region
    arguments: tuple[Any, ...]
    """Argument that the step passes for each of the region\'s inputs."""
    metas: Sequence[Meta | None]
    """Descriptions of the values inside of the region."""
    signature: str

    @property
    def kernel_signature(self) -> str:
        """Signature of the region's kernel: with the constants of its functions, which are in no argument."""
        remade = [getattr(call.target, REMADE_BY, None) for call in self.region.calls]
        constants = [arguments for _, arguments in filter(None, remade)]
        return hash_signature((self.signature, constants)) if constants else self.signature


def _find_fused(grouped: GroupedOps, metas: Sequence[Meta | None]) -> dict[int, _Reading]:
    """Return the regions to compile, by op; those read parts of values that share a kernel with others then."""
    whole: dict[int, _Reading] = {}
    parts: dict[int, _Reading] = {}
    sharing: dict[str, set[str]] = {}
    for op, call in zip(grouped.ops, grouped.calls, strict=True):
        if not isinstance(call.target, Region) or op.target != "autotune.regions.fused":
            continue
        whole[op.id] = _Reading(call.target, call.args, metas, op.signature)
        region, arguments, inside = read_parts(call.target, call.args, metas)
        if region is not call.target:
            values = [*region.inputs, *(value for each in region.calls for value in _outputs(each))]
            signature = region_signature(region.calls, values, region.outputs, inside)
            parts[op.id] = _Reading(region, arguments, inside, signature)
            sharing.setdefault(parts[op.id].kernel_signature, set()).add(op.signature)
    return whole | {op: reading for op, reading in parts.items() if len(sharing[reading.kernel_signature]) > 1}


def _with_kernel(op: Op, call: Call, reading: _Reading, outputs: Sequence[Meta], static: Set[int]) -> tuple[Op, Call]:
    """Return the op and the call of a region with its compiled kernel."""
    region, metas = reading.region, reading.metas
    inside = find_overwritable(region.calls, region.inputs, region.outputs, metas)
    in_parts = {value for argument in reading.arguments if not isinstance(argument, Read) for value in reads(argument)}
    inplace = tuple(
        argument.value
        for argument, inner in zip(reading.arguments, region.inputs, strict=True)
        if isinstance(argument, Read) and inner in inside and argument.value not in static | in_parts
    )
    compiled = CompiledRegion(region, reading.kernel_signature, _describe(metas, region.inputs), outputs)
    name, target = f"{op.layer}.fused{op.id}", "autotune.kernels.fused"
    return (
        replace(op, name=name, target=target, signature=reading.signature, inplace=inplace),
        replace(call, target=compiled, args=reading.arguments),
    )


def _outputs(call: Call) -> list[int]:
    outputs = call.outputs if isinstance(call.outputs, tuple) else (call.outputs,)
    return [value for value in outputs if value is not None]


def _describe(metas: Sequence[Meta | None], values: Sequence[int]) -> list[Meta]:
    described = [metas[value] for value in values]
    return [meta for meta in described if meta is not None]  # only updates read optimizer state, which has none
