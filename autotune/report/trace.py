"""Write simulated steps as a Chrome trace, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Offload, Prefetch, Run
from autotune.predict.step_view import BarKind, Engine, StepTimeline
from autotune.records import plan_file as planfile
from autotune.records.measurement import Measurement, Span, TransferTrace
from autotune.records.run_dir import resume_command
from autotune.study.recorded_run import RecordedRun

Event = dict[str, Any]

MICROSECONDS = 1e6
"""Microseconds of a second: the unit of a trace's times."""
THREADS: Mapping[Engine, int] = {engine: number for number, engine in enumerate(Engine, start=1)}
"""Thread of each engine in the trace."""
Steps = Mapping[str, StepTimeline]
"""Simulated steps by name."""
Transfers = Mapping[str, TransferTrace]
"""Measured transfers by the name of their step."""
COUNTER = "memory by use, bytes"
"""Name of the counter track; the series of one sample add up to the live bytes of the instruction."""


def build_trace(steps: Steps, transfers: Transfers | None = None) -> Event:
    """Return the trace document of some steps, each as a process under its name.

    Threads hold the ops, the loads and the saves, and a counter holds the live bytes by use. `transfers` are measured
    transfers and waits, each as a process too. Events are ordered by their start.

    >>> from autotune.ir.costs import Costs
    >>> from autotune.ir.plan import Plan
    >>> from autotune.testing.graphs import chain
    >>> document = build_trace({"traced": StepTimeline(chain(2), Costs.unit(chain(2)), Plan((0, 1)))})
    >>> [(event["name"], event["ts"], event["dur"]) for event in document["traceEvents"] if event["ph"] == "X"]
    [('op0', 0.0, 1000000.0), ('op1', 1000000.0, 1000000.0)]
    """
    names: list[Event] = []
    events: list[Event] = []
    for process, (name, timeline) in enumerate(steps.items(), start=1):
        names += _name_process(process, f"{name}, simulated")
        events += _bars(process, timeline)
        events += _memory(process, timeline)
    for process, (name, measured) in enumerate((transfers or {}).items(), start=1 + len(steps)):
        names += _name_process(process, f"{name}, measured transfers")
        events += _measured(process, measured)
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def read_steps(source: Path) -> tuple[Steps, Transfers]:
    """Return the step of a run's best plan or of a plan file, the traced step, and the plan's measured transfers.

    Raises ConfigError where no graph and costs are recorded.
    """
    return _read_run(source) if source.is_dir() else _read_plan(source)


def to_text(document: Event) -> str:
    """Return a trace document as JSON without spaces."""
    return json.dumps(document, separators=(",", ":")) + "\n"


def _name_process(process: int, name: str) -> Iterator[Event]:
    """Yield the metadata events that name a process and its threads, and order them."""
    metadata = {"ph": "M", "pid": process}
    yield {**metadata, "name": "process_name", "args": {"name": name}}
    yield {**metadata, "name": "process_sort_index", "args": {"sort_index": process}}
    for engine, thread in THREADS.items():
        yield {**metadata, "tid": thread, "name": "thread_name", "args": {"name": str(engine)}}
        yield {**metadata, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _bars(process: int, timeline: StepTimeline) -> Iterator[Event]:
    """Yield ops and waits of the computing thread, and the transfers of both directions."""
    graph, costs = timeline.graph, timeline.costs
    ran: set[int] = set()
    for span in timeline.spans:
        wait = span.start_seconds, span.ready_seconds
        match span.moment.instruction:
            case Run(number):
                op = graph.ops[number]
                kind = BarKind.RECOMPUTE if number in ran else op.phase
                ran.add(number)
                yield from _bar(process, Engine.EXECUTE, BarKind.WAITING, wait, f"wait for a read of {op.name}")
                yield from _bar(
                    process, Engine.EXECUTE, kind, (span.ready_seconds, span.end_seconds), op.name,
                    target=op.target, layer=op.layer, live_bytes=span.moment.during_bytes,
                    scratch_bytes=costs.scratch_bytes[number],
                )  # fmt: skip
            case Free(value):
                wait = span.start_seconds, span.end_seconds
                name = f"wait for the write of {graph.values[value].name}"
                yield from _bar(process, Engine.EXECUTE, BarKind.WAITING, wait, name)
            case Offload(value) | Prefetch(value) as instruction if span.transfer:
                engine, verb = (
                    (Engine.SAVE, BarKind.SAVE) if isinstance(instruction, Offload) else (Engine.LOAD, BarKind.LOAD)
                )
                moved = graph.values[value]
                yield from _bar(process, engine, verb, span.transfer, f"{verb} {moved.name}", nbytes=moved.nbytes)


def _memory(process: int, timeline: StepTimeline) -> Iterator[Event]:
    """Yield the live bytes by use: one sample for each instruction that changes them, and one for the step's end."""
    uses = timeline.bytes_by_use(range(len(timeline.spans)))
    present = {use: series for use, series in uses.items() if any(series)}
    last: dict[str, int] = {}
    for position, span in enumerate(timeline.spans):
        sample = {use: series[position] for use, series in present.items()}
        if sample and sample != last:
            yield _sample(process, span.start_seconds, sample)
        last = sample
    if last:
        # a counter's track ends at its last sample
        yield _sample(process, timeline.seconds, last)


def _measured(process: int, transfers: TransferTrace) -> Iterator[Event]:
    """Yield measured transfers, and the waits for them on the computing thread."""
    groups: tuple[tuple[Engine, BarKind, str, tuple[Span, ...]], ...] = (
        (Engine.SAVE, BarKind.SAVE, "save", transfers.saves),
        (Engine.LOAD, BarKind.LOAD, "load", transfers.loads),
        (Engine.EXECUTE, BarKind.WAITING, "wait for a write", transfers.save_stalls),
        (Engine.EXECUTE, BarKind.WAITING, "wait for a read", transfers.load_stalls),
    )
    for engine, kind, name, spans in groups:
        for span in spans:
            yield from _bar(process, engine, kind, span, name)


def _bar(process: int, engine: Engine, kind: str, span: Span, name: str, **facts: Any) -> Iterator[Event]:
    """Yield one complete event; nothing for a bar without length, unless it is an op."""
    start, end = _stamp(span[0]), _stamp(span[1])
    if end > start or facts:
        arguments = {"args": facts} if facts else {}
        yield {
            "ph": "X", "pid": process, "tid": THREADS[engine], "ts": start, "dur": round(max(end - start, 0.0), 3),
            "name": name, "cat": str(kind), **arguments,
        }  # fmt: skip


def _sample(process: int, seconds: float, sample: Mapping[str, int]) -> Event:
    return {"ph": "C", "pid": process, "ts": _stamp(seconds), "name": COUNTER, "args": dict(sample)}


def _stamp(seconds: float) -> float:
    """Return microseconds, rounded to nanoseconds."""
    return round(seconds * MICROSECONDS, 3)


def _read_run(run_dir: Path) -> tuple[Steps, Transfers]:
    """Return the best plan's step, the traced step, and the plan's measured transfers."""
    records = RecordedRun.load(run_dir)
    if records.traced is None:
        raise ConfigError(f"{run_dir}: no graph.json and costs.json; go on with {resume_command(run_dir)}")
    if records.best is None or records.chosen is None:
        return {"as traced": records.traced}, {}
    name = f"plan {records.best.number}"
    return {name: records.chosen, "as traced": records.traced}, _find_transfers(name, records.best.measurement)


def _read_plan(path: Path) -> tuple[Steps, Transfers]:
    """Return the step of a plan file, the traced step, and the plan's measured transfers."""
    file = planfile.read(path)
    graph, costs = planfile.read_records(path, file)
    steps = {"plan": StepTimeline(graph, costs, file.plan), "as traced": StepTimeline(graph, costs, Plan.traced(graph))}
    return steps, _find_transfers("plan", file.measurement)


def _find_transfers(name: str, measurement: Measurement | None) -> Transfers:
    return {name: measurement.lanes} if measurement is not None and measurement.lanes is not None else {}
