"""The main module of a study of a running training process: `python -m autotune.api.tune_live PARENT RUN DIGEST`.

The config comes as JSON on standard input. The last line on standard output is a JSON document: the path of the plan, or an
error. The process ends when the training process does.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.api.launch import run_study
from autotune.errors import AutotuneError, BaselineChangedError, OutOfTimeError, PlanError, StudyInterruptedError
from autotune.measure.parent import end_with_parent
from autotune.records.config import Config
from autotune.records.run_dir import RunDir
from autotune.study.events import Event, Ready

if TYPE_CHECKING:
    from autotune.study.outcome import StudyResult

_LONGER = 4
"""Time of a second session where the first one's was over before a plan was measured, as a multiple of the first."""


def main() -> None:
    """Run the study, and print where its plan lies."""
    parent, run_dir, digest = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    end_with_parent(parent)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print what they like
    try:
        document: dict[str, Any] = {"plan": str(_tune(run_dir, digest))}
    except AutotuneError as error:
        document = {"class": type(error).__name__, "message": " ".join(str(error).split())}
    except Exception as error:
        document = {"class": type(error).__name__, "message": f"internal error: {type(error).__name__}: {error}"}
        raise
    finally:
        print(json.dumps(document), file=answer, flush=True)


def _tune(run_dir: Path, digest: str) -> Path:
    config = Config.model_validate_json(sys.stdin.read())

    def refuse_other_graph(event: Event) -> None:
        if isinstance(event, Ready) and event.graph.digest != digest:
            raise PlanError(
                "the copy of the step in the measuring processes is another graph "
                f"({event.graph.digest[:8]}, here {digest[:8]}): the step depends on something that is not copied, such as a "
                "hook on a parameter or a global setting; write a factory, run: autotune tune file.py:factory, "
                "and pass plan='plans/NAME.json'"
            )

    run = partial(run_study, run_dir=run_dir, progress=refuse_other_graph)
    try:
        result = _run_anew_if_changed(run, config, run_dir)
    except (
        OutOfTimeError
    ):  # capture and baseline took it all; they are recorded, and another session goes on from there
        longer = config.model_copy(update={"time": f"{_LONGER * config.time_seconds:g}s"})
        try:
            result = run(longer)
        except OutOfTimeError:
            raise OutOfTimeError(
                f"{run_dir}: no plan was measured in {longer.time}; raise AutoPlan(time=...)"
            ) from None
    if result.interrupted:
        raise StudyInterruptedError(f"{run_dir}: interrupted", result.interrupted)
    if result.plan_path is None:
        raise OutOfTimeError(f"{run_dir}: the search ended without a plan; raise AutoPlan's time")
    return result.plan_path


def _run_anew_if_changed(run: Callable[[Config], "StudyResult"], config: Config, run_dir: Path) -> "StudyResult":
    """Run a study; where eager's fit in memory has changed, put the earlier trials aside and begin again."""
    try:
        return run(config)
    except BaselineChangedError as error:
        trials = RunDir(run_dir).trials
        trials.replace(trials.with_suffix(".before"))
        RunDir(run_dir).optuna.unlink(missing_ok=True)
        print(f"{error}: begun again, the earlier trials are in {trials.with_suffix('.before').name}", file=sys.stderr)
        return run(config)


if __name__ == "__main__":
    main()
