"""`autotune tune` and `autotune resume`: run a study, and print its table and the paths of its files."""

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from autotune.api.launch import choose_batch_size, load_run_config, run_study, start_study
from autotune.cli.output import answer_stream, print_json
from autotune.cli.progress_panel import show_progress
from autotune.errors import StudyInterruptedError
from autotune.records.json_codec import to_json
from autotune.records.plan_file import NOT_VERIFIED
from autotune.records.run_dir import RunDir, resume_command, with_name
from autotune.records.speed_environment import advise_passive_waiting
from autotune.records.trial import TrialKind

if TYPE_CHECKING:
    from autotune.records.config import Config
    from autotune.study.outcome import StudyResult

SLOW_RATIO = 1.3
"""Ratio of the plan's step time to plain PyTorch's above which `tune` names what may give a faster plan."""


def run(config: "Config", *, name: str | None, json: bool) -> None:
    """Tune a workload in a run directory, and print the result."""
    with answer_stream() as out:
        with show_progress(config) as progress:
            result = start_study(config, name, progress)
        _print_result(result, config, out, json=json)


def resume(run_dir: Path, limits: dict[str, Any], *, json: bool) -> None:
    """Continue a recorded run within new `limits`, and print the result."""
    run_dir = with_name(run_dir)
    config = load_run_config(run_dir, limits, from_command_line=True)
    with answer_stream() as out:
        with show_progress(config) as progress:
            result = run_study(choose_batch_size(config, run_dir, progress), run_dir, progress)
        _print_result(result, config, out, json=json)


def _print_result(result: "StudyResult", config: "Config", out: IO[str], *, json: bool) -> None:
    command = "autotune resume" if result.run_dir is None else resume_command(result.run_dir)
    if not json:
        _print_tables(result, out)
        if (search := result.batch_search) is not None:
            from autotune.study.batch.description import describe_search

            out.writelines(f"{line}\n" for line in describe_search(search))
        from autotune.study.outcome import describe_disturbance
        from autotune.study.verdicts.confirm import ConfirmationStatus

        if disturbed := describe_disturbance(result.trials):
            out.write(f"busy    other work disturbed {disturbed}; tune under another --name on an idle machine\n")
            if advice := advise_passive_waiting():
                out.write(f"        beside other work {advice}\n")
        if result.ended:
            out.write(f"search  ended: {result.ended}\n")
        unconfirmed = all(plan.status is ConfirmationStatus.FAILED for plan in result.confirmed)
        if result.best is not None and unconfirmed and not disturbed:  # a disturbed study is not worth going on with
            out.write(
                "note    the search ended before its plan was re-measured beside plain eager; "
                f"go on with: {command} --time 5m\n"
            )
        if advice := _advise_on_slow_plan(result, config):
            out.write(f"note    {advice}\n")
        if result.best is not None and result.best.measurement is not None:
            if (file := result.plan) is not None:
                out.write(f"kernels {file.plan.capture_name}\n")
            out.write(f"results {result.best.measurement.verified or NOT_VERIFIED}\n")
        if result.front_plans and result.run_dir is not None:
            count, folder = len(result.front), RunDir(result.run_dir).front
            more = f"no point is certain yet; {command} --time 10m adds runs"
            out.write(f"front   {f'{count} plans in {folder}' if count else more}\n")
        out.write(f"plan    {result.plan_path or 'none yet'}\nreport  {result.report_path or 'none'}\n")
    else:
        print_json(_document(result), out)
    if result.interrupted:
        raise StudyInterruptedError(f"interrupted; continue with: {command}", result.interrupted)


def _advise_on_slow_plan(result: "StudyResult", config: "Config") -> str:
    """Return what may give a faster plan where the best one is slow; empty for others, a front or a batch size."""
    best = None if result.best is None else result.best.measurement
    if best is None or best.time_ratio is None or result.front_plans or result.batch_search is not None:
        return ""
    ratio = best.time_ratio if result.time_ratio is None else result.time_ratio.middle
    if ratio <= SLOW_RATIO:
        return ""
    options = ["a larger budget"]
    if not config.stores:
        options.append(f"--store {'host' if config.device == 'cuda' else 'ssd'}=DIR")
    if not config.exact and config.kernels != "any":
        options.append("--kernels any")
    return (
        f"the plan is {100 * (ratio - 1):.0f} % slower than plain PyTorch; more --time may give a faster one, or "
        f"{' or '.join(options)} under another --name"
    )


def _print_tables(result: "StudyResult", out: IO[str]) -> None:
    from autotune.cli.console import print_table
    from autotune.report.tables import CONFIRMED_COLUMNS, FRONT_COLUMNS, confirmed_rows, front_rows, trial_rows

    if (search := result.batch_search) is not None:
        from autotune.cli.console import print_rows
        from autotune.study.batch.description import SIZE_COLUMNS, size_rows

        print_rows(size_rows(search), SIZE_COLUMNS, out)
        out.write("\n")
    confirmed = confirmed_rows(result.confirmed, result.baseline)
    shown = [
        trial
        for trial in result.trials
        if trial.kind is not TrialKind.REPEAT and (trial.measurement is None or trial.was_run)
    ]
    print_table(trial_rows(shown, result.best), out)
    if hidden := len(result.trials) - len(shown):
        count = f"{hidden} of {len(result.trials)} trials"
        out.write(f"{count} are not shown: their plans were measured before, or exceed the budget by estimate\n")
    if result.front_plans:
        out.write("\nPareto front, re-measured in new processes, interleaved with plain eager:\n")
        print_table(front_rows(result.front_plans, result.baseline), out, FRONT_COLUMNS)
    elif confirmed:
        out.write("\nre-measured, interleaved with plain eager:\n")
        print_table(confirmed, out, CONFIRMED_COLUMNS)


def _document(result: "StudyResult") -> dict[str, Any]:
    """Return the document that `--json` prints."""
    from autotune.study.front.front_files import list_front
    from autotune.study.outcome import describe_disturbance
    from autotune.study.verdicts.confirm import to_table
    from autotune.study.verdicts.ranking import eager_step_bytes

    confirmed, eager = to_table(result.confirmed), result.baseline.measurement
    search = result.batch_search
    return {
        **({} if search is None else {"batch_sizes": to_json(search)}),
        "baseline": to_json(result.baseline),
        "best": to_json(result.best) if result.best else None,
        "confirmed": confirmed,
        "front": list_front(result.front_plans, eager_step_bytes(eager)),
        "trials": [to_json(trial) for trial in result.trials],
        "disturbed": describe_disturbance(result.trials),
        "ended": result.ended,
        "plan_path": str(result.plan_path) if result.plan_path else None,
        "report_path": str(result.report_path) if result.report_path else None,
    }
