"""Measure the cost of each op on this device: seconds, and scratch bytes besides its outputs.

Ops run one at a time on synthetic tensors, never on the user's. A step that does not fit in memory can therefore be
profiled, and parameters stay untouched. Ops with equal signatures are measured once.
"""

import contextlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune.capture.optimizers.trial_state import preserve_generators
from autotune.capture.program import Meta, Program, Read, View
from autotune.ir.costs import Costs
from autotune.ir.graph import Op
from autotune.records.run_dir import write_json
from autotune.records.speed_environment import speed_variables
from autotune.runtime.arena import kept_memory
from autotune.runtime.arena.build import library
from autotune.runtime.gpu.event_timing import describe_kernels, kernel_seconds
from autotune.runtime.gpu.index_values import spread_indices

ROUNDS = 5
"""Number of samples of each op."""
MAX_SECONDS = 30.0
"""Duration of profiling after which rounds beyond the second are skipped."""
CHECKED_OPS = 5
"""Number of the costliest ops that are re-measured to validate cached or new costs."""
STALE_RATIO = 1.5
"""Ratio of an earlier to a re-measured time above which the earlier one was taken on a busy machine."""
LISTEN_EVERY = 20
"""Number of timed ops between two reports of their number, which take time themselves."""
MAX_REPEATS = 2
"""Maximum number of repeated measurements after one on a busy machine."""

LATER_STEPS = 7
"""Optimizer steps after the first that are rehearsed for scratch bytes: RAdam needs twice as many from the sixth on."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """Measured cost of an op signature."""

    seconds: float
    scratch_bytes: int
    problem: str = ""
    """Reason why the op cannot run on synthetic tensors, so that its cost is an estimate; empty if it was measured."""


def ignore_count(done: int, total: int) -> None:
    """Ignore the number of profiled ops."""
    del done, total


def profile(program: Program, *, cache: Path | None = None, listen: Callable[[int, int], None] = ignore_count) -> Costs:
    """Measure the costs of all ops of a program, without stores.

    Args:
        program: The captured step; its tensors are not read or changed.
        cache: JSON file of earlier measurements, by device and op signature; it is updated. Without one all ops are
            measured. An unreadable cache is ignored and replaced.
        listen: called with the number of profiled ops and of all ops to profile, at most a few times per second.

    Returns:
        Seconds and scratch bytes of each op, by op id. A warning names ops that could only be estimated.

    Examples:
        >>> from autotune.capture.tracer import capture
        >>> from autotune.workloads.workload import Workload
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> workload = Workload(model, lambda model, batch: model(batch).sum(), optimizer, torch.ones(3, 4))
        >>> program = capture(workload)
        >>> costs = profile(program)
        >>> len(costs.seconds) == len(costs.scratch_bytes) == len(program.graph.ops)
        True
    """
    ops = program.graph.ops
    kept = "kept memory " if program.device.type == "cpu" and library() is not None else ""
    key = (
        f"{torch.__version__} {kept}{program.device.type} {torch.get_num_threads()} threads {_device_name(program.device)} "
        f"{1 + LATER_STEPS} updates"
    )
    key = " ".join([key, *(f"{name}={value}" for name, value in speed_variables().items())])
    costs = _read_cache(cache, key)
    if _is_stale(program, costs):
        costs = {}
    missing = {op.signature: op for op in reversed(ops) if op.signature not in costs}
    for _ in range(1 + MAX_REPEATS):
        costs |= _measure(program, list(missing.values()), listen)
        if not _is_stale(program, {signature: costs[signature] for signature in missing}):
            break
    _write_cache(cache, key, costs)
    _warn_of_estimates(ops, costs)
    return Costs.from_measurements(
        program.graph,
        [costs[op.signature].seconds * program.share_of_steps(op) for op in ops],
        [costs[op.signature].scratch_bytes for op in ops],
        program.device.type,
    )


def _is_stale(program: Program, costs: dict[str, OpCost]) -> bool:
    """Return True if ops of this step are much faster now than in `costs`. Slower ones prove nothing: noise adds time."""
    reliable = {op.signature: op for op in program.graph.ops if _is_reliable(costs.get(op.signature))}
    costliest = sorted(reliable.values(), key=lambda op: -costs[op.signature].seconds)[:CHECKED_OPS]
    if not costliest:
        return False
    samples = _time_rounds(program, costliest, rounds=3)
    ratios = [costs[signature].seconds / max(min(seconds), 1e-9) for signature, seconds in samples.items()]
    return statistics.median(ratios) > STALE_RATIO


def _is_reliable(cost: OpCost | None) -> bool:
    """Return True if the cost is long enough for a comparison by a few samples."""
    return cost is not None and not cost.problem and cost.seconds > 1e-3


def _measure(program: Program, ops: list[Op], listen: Callable[[int, int], None]) -> dict[str, OpCost]:
    """Measure scratch in one pass, which also warms up, then seconds in rounds over all ops, which spread noise evenly.

    The cost of an op that raises on synthetic tensors is estimated.
    """
    if not ops:
        return {}
    problems: dict[str, str] = {}
    with _isolated(program):
        scratch = _measure_scratch(program, ops, problems)
    samples = _time_rounds(program, [op for op in ops if op.signature not in problems], ROUNDS, listen)
    costs = {s: OpCost(statistics.median(samples[s]), scratch[s]) for s in samples}
    return costs | {s: _estimate(program, op, problems[s]) for op in ops if (s := op.signature) in problems}


def _estimate(program: Program, op: Op, problem: str) -> OpCost:
    """Estimate an op that cannot run: the time to copy its inputs and outputs, and the bytes of both as scratch."""
    nbytes = sum(program.graph.values[value].nbytes for value in (*op.inputs, *op.outputs))
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=program.device)
    buffer.clone()
    return OpCost(_time_call(program.device, buffer.clone, (), {}), nbytes if op.outputs else 0, problem)


def _warn_of_estimates(ops: Sequence[Op], costs: dict[str, OpCost]) -> None:
    estimated = {op.signature: op for op in ops if costs[op.signature].problem}
    if not estimated:
        return
    first = next(iter(estimated.values()))
    rest = f" and {len(estimated) - 1} more" if len(estimated) > 1 else ""
    warnings.warn(
        f"{first.name} ({first.target}){rest} cannot run on synthetic tensors: {costs[first.signature].problem}; its "
        "cost is estimated from its bytes, so compare a plan's predicted step with a measured one",
        stacklevel=3,
    )


def _time_rounds(
    program: Program, ops: list[Op], rounds: int, listen: Callable[[int, int], None] = ignore_count
) -> dict[str, list[float]]:
    """Time all ops once per round; return the samples in seconds by signature. Late rounds are skipped if time runs out."""
    samples: dict[str, list[float]] = {op.signature: [] for op in ops}
    begin = time.perf_counter()
    with _isolated(program):
        for done in range(rounds):
            if done >= 2 and time.perf_counter() - begin > MAX_SECONDS:
                break
            for number, op in enumerate(ops):
                if number % LISTEN_EVERY == 0:
                    listen((done * len(ops) + number) // rounds, len(ops))
                samples[op.signature].append(_time_op(program, op))
    return samples


def _time_op(program: Program, op: Op) -> float:
    """Time one op, on a CPU in memory with mapped pages, as in an arena.

    With page faults of new memory MobileNetV2's ops took twice as long as in its step.
    """
    if program.device.type != "cpu":
        return _time_call(program.device, *_synthesize_call(program, op))
    with kept_memory():
        target, args, kwargs = _synthesize_call(program, op)
        target(*args, **kwargs)
        seconds = _time_call(program.device, target, args, kwargs)
        del args, kwargs
    return seconds


@contextlib.contextmanager
def _isolated(program: Program) -> Iterator[None]:
    """Disable gradients, and preserve the state of the user's random generators."""
    generators = [program.device.index or 0] if program.device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), preserve_generators(()), torch.no_grad():
        yield


def _synthesize_call(program: Program, op: Op) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the op's target with synthetic arguments of the right shapes, dtypes and strides."""
    call = program.calls[op.id]
    tensors: dict[int, torch.Tensor] = {}
    if program.updates is not None:
        synthesize = partial(_synthesize, program, tensors)
        trial = program.updates.rehearse_call(call.target, call.args, synthesize, program.tensors)
        if trial is not None:
            return trial, (), {}
    kwargs = {key: _synthesize(program, tensors, part) for key, part in call.kwargs}
    args = _synthesize(program, tensors, call.args)
    if program.device.type == "cuda":
        spread_indices(call.target, args)
    return call.target, args, kwargs


def _synthesize(program: Program, tensors: dict[int, torch.Tensor], argument: Any) -> Any:
    """Return an argument with synthetic tensors for its values; `tensors` holds those of this call, by value."""
    # a recursive closure would be a cycle, which keeps all tensors until the next garbage collection
    match argument:
        case Read(value):
            if value not in tensors:
                tensors[value] = _synthetic_tensor(program.metas[value], program.graph.values[value].nbytes)
            return tensors[value]
        case View(target, args, kwargs):
            return target(
                *_synthesize(program, tensors, args),
                **{key: _synthesize(program, tensors, part) for key, part in kwargs},
            )
        case tuple():
            return tuple(_synthesize(program, tensors, part) for part in argument)
        case list():
            return [_synthesize(program, tensors, part) for part in argument]
        case _:
            return argument


def _is_update(program: Program, op: Op) -> bool:
    call = program.calls[op.id]
    return program.updates is not None and bool(program.updates.gradient_uses(call.target, call.args))


def _synthetic_tensor(meta: Meta | None, nbytes: int) -> torch.Tensor:
    """Return a tensor with this layout, with values that are valid for every kernel.

    Floats lie between 0.1 and 1, integers are 0 to be valid indices, and bools are True so that assertions hold. On a GPU
    `spread_indices` gives indices other values.
    """
    assert meta is not None
    storage = torch.empty(nbytes // meta.dtype.itemsize, dtype=meta.dtype, device=meta.device)
    if meta.dtype.is_floating_point and meta.dtype.itemsize == 1:  # torch draws no numbers of eight bits
        storage.copy_(torch.empty(len(storage), device=meta.device).uniform_(0.1, 1.0))
    elif meta.dtype.is_floating_point:
        storage.uniform_(0.1, 1.0)
    elif meta.dtype == torch.bool:
        storage.fill_(True)
    else:
        storage.zero_()
    return storage.as_strided(meta.shape, meta.stride)


def _time_call(device: torch.device, target: Callable[..., Any], args: Any, kwargs: Any) -> float:
    if device.type == "cuda":
        return kernel_seconds(partial(target, *args, **kwargs), device)
    start = time.perf_counter()
    target(*args, **kwargs)
    return time.perf_counter() - start


def _measure_scratch(program: Program, ops: list[Op], problems: dict[str, str]) -> dict[str, int]:
    """Return the scratch bytes of each op by signature; add the reason for each that cannot run to `problems`."""
    scratch: dict[str, int] = {}
    if program.device.type == "cuda":
        for op in ops:
            with _record_problem(op, problems):
                scratch[op.signature] = _scratch_cuda(program, op)
        return scratch
    if torch._C._autograd._profiler_enabled():
        problems |= {op.signature: "torch.profiler, which measures bytes, is in use around the step" for op in ops}
        return scratch
    for start in range(0, len(ops), 100):  # the profiler keeps every event of a session in memory
        scratch |= _scratch_cpu(program, ops[start : start + 100], problems)
    return scratch


@contextlib.contextmanager
def _record_problem(op: Op, problems: dict[str, str]) -> Iterator[None]:
    """Record why an op cannot run; the exception of another library would name neither op nor model."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - kernels may raise anything on unexpected numbers
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        problems[op.signature] = f"{type(error).__name__}: {reason}"


def _scratch_cpu(program: Program, ops: list[Op], problems: dict[str, str]) -> dict[str, int]:
    """Compute scratch bytes from the allocator's events, which the profiler records."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # a first profile would print lines of its starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        for op in ops:
            with _record_problem(op, problems):
                target, args, kwargs = _synthesize_call(program, op)
                with torch.profiler.record_function(f"autotune {op.id}"):
                    for _ in range(_repetitions(program, op)):
                        result = target(*args, **kwargs)
                del result
            target = args = kwargs = None  # type: ignore[assignment]
    windows, changes = read_allocations(recorded)
    scratch: dict[str, int] = {}
    for op in ops:
        if op.signature in problems:
            continue
        begin, end = windows[f"autotune {op.id}"]
        live = peak = 0
        for time_ns, nbytes in changes:
            if begin <= time_ns <= end:
                live += nbytes
                peak = max(peak, live)
        scratch[op.signature] = max(0, peak - _planned_bytes(program, op))
    return scratch


def _repetitions(program: Program, op: Op) -> int:
    """Return the number of runs per scratch measurement; later steps of an optimizer may need more than its second."""
    return LATER_STEPS if _is_update(program, op) else 1


def read_allocations(recorded: torch.profiler.profile) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """Read a memory profile, with all times in ns.

    Returns:
        First (begin, end) of each range whose name starts with "autotune ", by name. Then (time, bytes) of each allocation
        and release in order; the bytes of a release are negative.
    """
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    windows = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name().startswith("autotune ")}
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return windows, changes


def _scratch_cuda(program: Program, op: Op) -> int:
    target, args, kwargs = _synthesize_call(program, op)
    target(*args, **kwargs)  # libraries allocate their workspaces at first use
    torch.cuda.synchronize(program.device)
    before = torch.cuda.memory_allocated(program.device)
    torch.cuda.reset_peak_memory_stats(program.device)
    for _ in range(_repetitions(program, op)):
        result = target(*args, **kwargs)
    torch.cuda.synchronize(program.device)
    del result
    return max(0, int(torch.cuda.max_memory_allocated(program.device)) - before - _planned_bytes(program, op))


def _planned_bytes(program: Program, op: Op) -> int:
    """Return the bytes of the op's outputs in the graph; further bytes of a kernel count as scratch."""
    return sum(program.graph.values[value].nbytes for value in op.outputs)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {describe_kernels()}"
    mkldnn: Any = torch.backends.mkldnn
    precisions = (mkldnn.matmul.fp32_precision, mkldnn.conv.fp32_precision, mkldnn.rnn.fp32_precision)
    kernels = f"mkldnn {mkldnn.enabled} float32 {' '.join(precisions)}"
    with Path("/proc/cpuinfo").open() as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name} {kernels}"


def _read_cache(path: Path | None, key: str) -> dict[str, OpCost]:
    try:
        rows = _rows(path).get(key, {})
        return {signature: OpCost(float(seconds), int(scratch)) for signature, (seconds, scratch) in rows.items()}
    except (ValueError, TypeError, AttributeError):
        return {}  # a damaged cache is re-measured


def _rows(path: Path | None) -> dict[str, Any]:
    """Return the cached rows by device; empty if the cache cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _write_cache(path: Path | None, key: str, costs: dict[str, OpCost]) -> None:
    """Write the cache atomically. A failure is ignored: without a cache the next profile only takes longer."""
    if path is None:
        return
    rows = {signature: [cost.seconds, cost.scratch_bytes] for signature, cost in costs.items() if not cost.problem}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _rows(path) | {key: rows})
