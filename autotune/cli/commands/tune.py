"""`autotune tune` and `autotune resume`: search, write the records, print the table."""

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.commands.session import Interrupted, answering, harness, print_json, run_dir, say
from autotune.errors import ConfigError, LockedError
from autotune.records.json_codec import to_json
from autotune.records.plan_file import NOT_VERIFIED
from autotune.records.run_dir import locked
from autotune.study.verdicts import confirm

if TYPE_CHECKING:
    from autotune.records.config import Config
    from autotune.study.events import Event
    from autotune.study.outcome import Result


def run(config: "Config", *, name: str | None, json: bool) -> None:
    """Tune in a run directory of its own; one that holds no trial in the end is taken away again."""
    if config.seed_from is not None:
        from autotune.study import seeds

        seeds.read(Path(config.seed_from), Path(config.runs))  # refused before anything is measured
    where = run_dir(config, name)
    fresh = not where.exists()
    try:
        _tune(config, where, json=json)
    finally:
        if fresh and where.exists():
            _take_away(where)


def _take_away(where: Path) -> None:
    """Remove a run that holds no trial; one that another process works in by now stays."""
    with contextlib.suppress(LockedError, OSError), locked(where):
        if not (where / "trials.jsonl").exists():
            shutil.rmtree(where, ignore_errors=True)
            where.parent.rmdir()  # refused where other runs lie there


def go_on(where: Path, changes: dict[str, Any], *, json: bool) -> None:
    """Tune on with the config that the run recorded, where the run lies now."""
    from autotune.records.config import load_config
    from autotune.records.run_dir import runs_of

    if not (where / "config.yaml").exists():
        raise ConfigError(f"{where}: no run is recorded here; give a directory that autotune tune made")
    _tune(load_config(str(where / "config.yaml"), overrides=changes | {"runs": runs_of(where)}), where, json=json)


def _tune(config: "Config", where: Path, *, json: bool) -> None:
    from autotune.cli.console import print_table
    from autotune.report.tables import FRESH_COLUMNS, fresh_rows, rows

    with answering() as out:
        result = _searched(config, where)
        if json:
            print_json(document(result), out)
        else:
            print_table(rows(result.trials, result.best), out)
            if result.confirmed:
                out.write("\nmeasured afresh, in turns with plain eager:\n")
                print_table(fresh_rows(result.confirmed, result.baseline), out, FRESH_COLUMNS)
            if result.best is not None and result.best.measurement is not None:
                out.write(f"results {result.best.measurement.verified or NOT_VERIFIED}\n")
            out.write(f"plan    {result.plan_path or 'none yet'}\nreport  {result.report_path or 'none'}\n")
    if result.interrupted:
        raise _interrupted(where, result.interrupted)


def _interrupted(where: Path, signal: int) -> Interrupted:
    return Interrupted(f"interrupted; go on with: autotune resume {where}", signal)


def _searched(config: "Config", where: Path) -> "Result":
    from autotune.cli.live import watching
    from autotune.report.html import write_report
    from autotune.report.mlflow_log import Tracker
    from autotune.study import session as study

    tracker, signal = Tracker(config, where), 0

    def tell(event: "Event") -> None:
        show(event)
        tracker(event)

    try:
        with watching(config) as show, harness(config, where / "logs") as runner:
            result = study.tune(config, runner, where, progress=tell, write_report=write_report)
        signal = result.interrupted
    except SystemExit as stopped:
        signal = int(stopped.code or 130) - 128
        if (where / "trials.jsonl").exists():
            raise _interrupted(where, signal) from None
        raise Interrupted(f"{where}: interrupted before the baseline was measured; nothing is kept", signal) from None
    finally:
        if logged := tracker.finish(interrupted=signal):
            say(f"mlflow  {logged}")
    return result


def document(result: "Result") -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "baseline": to_json(result.baseline),
        "best": to_json(result.best) if result.best else None,
        "confirmed": confirm.document(result.confirmed),
        "trials": [to_json(trial) for trial in result.trials],
        "plan_path": str(result.plan_path) if result.plan_path else None,
        "report_path": str(result.report_path) if result.report_path else None,
    }
