"""`autotune trace`: write the steps of a run or of a plan as a Chrome trace."""

from pathlib import Path

from autotune.cli.output import answer_stream, print_json
from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.predict.step_view import StepTimeline
from autotune.records import plan_file as planfile
from autotune.records.measurement import Measurement, TransferTrace
from autotune.records.run_dir import RunDir, find_latest_run, write_text
from autotune.report.trace import build_trace, to_text
from autotune.study.recorded_run import RecordedRun
from autotune.units import fmt_bytes

VIEWERS = "open it at https://ui.perfetto.dev, or in chrome://tracing"


def run(source: Path | None, *, out: Path | None, json: bool) -> None:
    """Write the trace of a run's best plan, or of a plan file, and print its path; ConfigError where no graph is recorded."""
    source = source or find_latest_run(Path("runs"))
    with answer_stream() as answer:
        if source.is_dir():
            steps, transfers = _read_run(source)
            out = out or RunDir(source).trace
        else:
            steps, transfers = _read_plan(source)
            out = out or source.with_suffix(".trace.json")
        document = build_trace(steps, transfers)
        try:
            write_text(out, to_text(document))
        except OSError as error:
            raise ConfigError(f"{out}: cannot write the trace ({error.strerror}); name another file with -o") from None
        peaks = {name: step.peak_bytes for name, step in steps.items()}
        if json:
            print_json({"trace_path": str(out), "events": len(document["traceEvents"]), "peak_bytes": peaks}, answer)
            return
        answer.writelines(f"{name:<12} {fmt_bytes(nbytes)} at its peak\n" for name, nbytes in peaks.items())
        answer.write(f"{'trace':<12} {out}: {VIEWERS}\n")


Steps = dict[str, StepTimeline]
Transfers = dict[str, TransferTrace]


def _read_run(run_dir: Path) -> tuple[Steps, Transfers]:
    """Return the best plan's step, the traced step, and the plan's measured transfers."""
    records = RecordedRun.load(run_dir)
    if records.traced is None:
        raise ConfigError(f"{run_dir}: no graph.json and costs.json; go on with autotune resume {run_dir}")
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
