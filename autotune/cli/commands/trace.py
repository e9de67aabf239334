"""`autotune trace`: write the steps of a run or of a plan as a Chrome trace."""

from pathlib import Path

from autotune.cli.output import answer_stream, print_json
from autotune.errors import ConfigError
from autotune.records.run_dir import RunDir, find_latest_run, write_text
from autotune.report.trace import build_trace, read_steps, to_text
from autotune.units import fmt_bytes

VIEWERS = "open it at https://ui.perfetto.dev, or in chrome://tracing"


def run(source: Path | None, *, out: Path | None, json: bool) -> None:
    """Write the trace of a run's best plan, or of a plan file, and print its path; ConfigError where no graph is recorded."""
    source = source or find_latest_run(Path("runs"))
    with answer_stream() as answer:
        steps, transfers = read_steps(source)
        out = out or (RunDir(source).trace if source.is_dir() else source.with_suffix(".trace.json"))
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
