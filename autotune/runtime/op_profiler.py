"""Measure what each op takes on this device: seconds, and bytes that it needs beside its outputs.

Ops run one at a time on made-up tensors, never on the user's: a step that does not fit can still be profiled, and
parameters stay untouched. Ops of one signature are measured once.
"""

import contextlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotune.capture.optimizers.optimizer_probe import generators_kept
from autotune.capture.optimizers.whole_update import WholeUpdates
from autotune.capture.program import Meta, Program, Read, View
from autotune.ir.costs import Costs
from autotune.ir.graph import Op
from autotune.runtime.arena import kept_memory
from autotune.runtime.arena.build import library

ROUNDS = 5
PATIENCE_SECONDS = 30.0
"""Rounds after the second are skipped when profiling has taken this long."""
CHECKED = 5
"""Of the costliest ops as many are measured again before a cache, or what was just measured, is believed."""
STALE = 1.5
"""Ops that took so many times what they take now were measured while something else ran."""
ANEW = 2
"""Times that what was measured while something else ran is measured again, at most."""

LATER_STEPS = 7
"""Steps of an optimizer after its first that are rehearsed for its scratch: RAdam takes twice as much from the sixth on."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """One signature's cost."""

    seconds: float
    scratch_bytes: int
    problem: str = ""
    """Why the op cannot run on synthetic tensors, so that its cost is an estimate; empty where it was measured."""


def profile(program: Program, *, cache: Path | None = None) -> Costs:
    """Costs of every op, without stores. `cache` is a JSON file of earlier measurements, by device and signature."""
    ops = program.graph.ops
    kept = "kept memory " if program.device.type == "cpu" and library() is not None else ""
    key = (
        f"{torch.__version__} {kept}{program.device.type} {torch.get_num_threads()} threads {_silicon(program.device)} "
        f"{1 + LATER_STEPS} updates"
    )
    known = _read_cache(cache, key)
    if _is_stale(program, known):
        known = {}
    wanted = {op.signature: op for op in reversed(ops) if op.signature not in known}
    for _ in range(1 + ANEW):
        known |= _measure(program, list(wanted.values()))
        if not _is_stale(program, {signature: known[signature] for signature in wanted}):
            break
    _write_cache(cache, key, known)
    _warn_of_estimates(ops, known)
    return Costs.of(
        program.graph,
        [known[op.signature].seconds for op in ops],
        [known[op.signature].scratch_bytes for op in ops],
    )


def _is_stale(program: Program, known: dict[str, OpCost]) -> bool:
    """Whether ops of this step take much less now than is known; more says nothing, noise only adds."""
    found = {op.signature: op for op in program.graph.ops if _long(known.get(op.signature))}
    costliest = sorted(found.values(), key=lambda op: -known[op.signature].seconds)[:CHECKED]
    if not costliest:
        return False
    again = _seconds_of(program, costliest, rounds=3)
    return statistics.median(known[s].seconds / max(min(taken), 1e-9) for s, taken in again.items()) > STALE


def _long(cost: OpCost | None) -> bool:
    """Whether a few samples of an op can be judged."""
    return cost is not None and not cost.problem and cost.seconds > 1e-3


def _measure(program: Program, ops: list[Op]) -> dict[str, OpCost]:
    """Scratch in one pass that also warms up, then seconds in rounds over all ops, so that noise falls on all alike.

    The cost of an op that raises on synthetic tensors is estimated.
    """
    if not ops:
        return {}
    broken: dict[str, str] = {}
    with _undisturbed(program):
        scratch = _scratch(program, ops, broken)
    samples = _seconds_of(program, [op for op in ops if op.signature not in broken], ROUNDS)
    costs = {s: OpCost(statistics.median(samples[s]), scratch[s]) for s in samples}
    return costs | {s: _estimate(program, op, broken[s]) for op in ops if (s := op.signature) in broken}


def _estimate(program: Program, op: Op, problem: str) -> OpCost:
    """Estimate an op that cannot run: the seconds of a copy of its inputs and outputs, and the bytes of both as scratch."""
    nbytes = sum(program.graph.values[value].nbytes for value in (*op.inputs, *op.outputs))
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=program.device)
    buffer.clone()
    return OpCost(_seconds(program.device, buffer.clone, (), {}), nbytes if op.outputs else 0, problem)


def _warn_of_estimates(ops: Sequence[Op], known: dict[str, OpCost]) -> None:
    broken = {op.signature: op for op in ops if known[op.signature].problem}
    if not broken:
        return
    first = next(iter(broken.values()))
    others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    warnings.warn(
        f"{first.name} ({first.target}){others} cannot run on synthetic tensors: {known[first.signature].problem}; its "
        "cost is estimated from its bytes, so compare a plan's predicted step with a measured one",
        stacklevel=3,
    )


def _seconds_of(program: Program, ops: list[Op], rounds: int) -> dict[str, list[float]]:
    """By signature, a sample from every round; the last rounds are left out where they take too long."""
    samples: dict[str, list[float]] = {op.signature: [] for op in ops}
    begin = time.perf_counter()
    with _undisturbed(program):
        for done in range(rounds):
            if done >= 2 and time.perf_counter() - begin > PATIENCE_SECONDS:
                break
            for op in ops:
                samples[op.signature].append(_seconds_once(program, op))
    return samples


def _seconds_once(program: Program, op: Op) -> float:
    """On a CPU in memory that has its pages, as in an arena: with those of fresh memory MobileNetV2's ops took twice as
    long as in its step.
    """
    if program.device.type != "cpu":
        return _seconds(program.device, *_ready(program, op))
    with kept_memory():
        target, args, kwargs = _ready(program, op)
        target(*args, **kwargs)
        taken = _seconds(program.device, target, args, kwargs)
        del args, kwargs
    return taken


@contextlib.contextmanager
def _undisturbed(program: Program) -> Iterator[None]:
    """No gradients, and the user's random numbers as if nothing had been drawn."""
    generators = [program.device.index or 0] if program.device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), generators_kept(()), torch.no_grad():
        yield


def _ready(program: Program, op: Op) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The op's target with made-up arguments of the right shapes, dtypes and strides."""
    call = program.calls[op.id]
    made: dict[int, torch.Tensor] = {}
    if _is_update(program, op):
        return _rehearsal(program, call.args[1], _real(program, made, call.args[2]), call.args[3])
    kwargs = {key: _real(program, made, part) for key, part in call.kwargs}
    return call.target, _real(program, made, call.args), kwargs


def _real(program: Program, made: dict[int, torch.Tensor], argument: Any) -> Any:
    """An argument with made-up tensors for the values in it; `made` are those of this call so far."""
    # no closure that calls itself: its cycle would keep every tensor until the next garbage collection
    match argument:
        case Read(value):
            if value not in made:
                made[value] = _made_up(program.metas[value], program.graph.values[value].nbytes)
            return made[value]
        case View(target, args, kwargs):
            return target(*_real(program, made, args), **{key: _real(program, made, part) for key, part in kwargs})
        case tuple():
            return tuple(_real(program, made, part) for part in argument)
        case list():
            return [_real(program, made, part) for part in argument]
        case _:
            return argument


def _is_update(program: Program, op: Op) -> bool:
    return program.updates is not None and program.updates.kept(program.calls[op.id].target) is not None


def _rehearsal(
    program: Program, updated: Any, gradient: Any, shared: Any
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return an update of a stand-in for the parameter, or of one for each, with state that exists already."""
    updates = program.updates
    assert updates is not None
    if isinstance(updates, WholeUpdates):
        step = updates.rehearsal([program.tensors[read.value] for read in updated], gradient, shared)
        step()
        return step, (), {}
    parameter = program.tensors[updated.value]
    stand_in = torch.nn.Parameter(torch.full_like(parameter, 0.5, requires_grad=False))
    state: dict[Any, Any] = {stand_in: {}}
    updates.rehearse(parameter, stand_in, gradient, state)
    return updates.rehearse, (parameter, stand_in, gradient, state), {}


def _made_up(meta: Meta | None, nbytes: int) -> torch.Tensor:
    """A tensor of the given look; numbers between 0.1 and 1, which no kernel stumbles over, index 0, and True, so that
    assertions hold."""
    assert meta is not None
    storage = torch.empty(nbytes // meta.dtype.itemsize, dtype=meta.dtype, device=meta.device)
    if meta.dtype.is_floating_point:
        storage.uniform_(0.1, 1.0)
    elif meta.dtype == torch.bool:
        storage.fill_(True)
    else:
        storage.zero_()
    return storage.as_strided(meta.shape, meta.stride)


def _seconds(device: torch.device, target: Callable[..., Any], args: Any, kwargs: Any) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    target(*args, **kwargs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _scratch(program: Program, ops: list[Op], broken: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    if program.device.type == "cuda":
        for op in ops:
            with _noted(op, broken):
                found[op.signature] = _scratch_cuda(program, op)
        return found
    for start in range(0, len(ops), 100):  # the profiler keeps every event of a session in memory
        found |= _scratch_cpu(program, ops[start : start + 100], broken)
    return found


@contextlib.contextmanager
def _noted(op: Op, broken: dict[str, str]) -> Iterator[None]:
    """Note why an op cannot run, instead of an exception of another library that names neither op nor model."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - kernels raise whatever they like on numbers that they did not expect
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        broken[op.signature] = f"{type(error).__name__}: {reason}"


def _scratch_cpu(program: Program, ops: list[Op], broken: dict[str, str]) -> dict[str, int]:
    """From the allocator's own events, as the profiler records them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        for op in ops:
            with _noted(op, broken):
                target, args, kwargs = _ready(program, op)
                with torch.profiler.record_function(f"autotune {op.id}"):
                    for _ in range(_repetitions(program, op)):
                        result = target(*args, **kwargs)
                del result
            target = args = kwargs = None  # type: ignore[assignment]
    windows, changes = allocations(recorded)
    scratch: dict[str, int] = {}
    for op in ops:
        if op.signature in broken:
            continue
        begin, end = windows[f"autotune {op.id}"]
        live = highest = 0
        for at, nbytes in changes:
            if begin <= at <= end:
                live += nbytes
                highest = max(highest, live)
        scratch[op.signature] = max(0, highest - _planned_bytes(program, op))
    return scratch


def _repetitions(program: Program, op: Op) -> int:
    """Return how often an op runs for its scratch: an optimizer's later steps may take more than its second."""
    return LATER_STEPS if _is_update(program, op) else 1


def allocations(recorded: torch.profiler.profile) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """Of a memory profile: (begin, end) of each range by name, and (when, bytes) of every allocation and release, in ns."""
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    windows = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name().startswith("autotune ")}
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return windows, changes


def _scratch_cuda(program: Program, op: Op) -> int:
    target, args, kwargs = _ready(program, op)
    target(*args, **kwargs)  # libraries take their workspaces at first use
    torch.cuda.synchronize(program.device)
    before = torch.cuda.memory_allocated(program.device)
    torch.cuda.reset_peak_memory_stats(program.device)
    for _ in range(_repetitions(program, op)):
        result = target(*args, **kwargs)
    torch.cuda.synchronize(program.device)
    del result
    return max(0, int(torch.cuda.max_memory_allocated(program.device)) - before - _planned_bytes(program, op))


def _planned_bytes(program: Program, op: Op) -> int:
    """Bytes of the op's outputs as the graph has them; what a kernel makes beyond that counts as its scratch."""
    return sum(program.graph.values[value].nbytes for value in op.outputs)


def _silicon(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with Path("/proc/cpuinfo").open() as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _read_cache(path: Path | None, key: str) -> dict[str, OpCost]:
    try:
        rows = _rows(path).get(key, {})
        return {signature: OpCost(float(seconds), int(scratch)) for signature, (seconds, scratch) in rows.items()}
    except (ValueError, TypeError, AttributeError):
        return {}  # a damaged cache is measured anew


def _rows(path: Path | None) -> dict[str, Any]:
    """What is in the cache, by device; nothing where there is none that can be read."""
    try:
        document = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _write_cache(path: Path | None, key: str, costs: dict[str, OpCost]) -> None:
    """Whole or not at all: without a cache the next profile takes longer, and that is all."""
    if path is None:
        return
    rows = {signature: [cost.seconds, cost.scratch_bytes] for signature, cost in costs.items() if not cost.problem}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(json.dumps(_rows(path) | {key: rows}))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
