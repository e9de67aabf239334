"""`autotune measure`: measure a plan on this machine, interleaved with the baseline."""

from collections.abc import Mapping
from pathlib import Path

from autotune.api.launch import measure_plan
from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import AutotuneError, InfeasibleError, NumericsError, StoreError, WorkerError
from autotune.records.device import Device
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import NOT_VERIFIED
from autotune.records.speed_environment import list_changes
from autotune.records.yaml_file import scalar
from autotune.report.plan_text import compare_measurement


def run(
    path: Path,
    arguments: dict[str, str],
    stores: dict[str, str],
    limit: str | None,
    *,
    allow_reference: bool,
    json: bool,
) -> None:
    """Measure a plan and print the measurement; then raise the error that belongs to its outcome, if there is one."""
    values = {key: scalar(text, f"--set {key}") for key, text in arguments.items()}
    with answer_stream() as out:
        pair = measure_plan(
            path, arguments=values, stores=stores, limit=limit, notify=print_note, allow_reference=allow_reference,
            from_command_line=True,
        )  # fmt: skip
        measurement, baseline = pair.measurement, pair.baseline
        if json:
            changes = list_changes(_environment(pair.file.device), _environment(measurement.device))
            document = {"measurement": to_json(measurement), "baseline": to_json(baseline)}
            print_json({**document, "environment_changes": changes}, out)
        else:
            lines = compare_measurement(pair.file.estimate, measurement, baseline)
            out.write("\n".join([*lines, f"results: {measurement.verified or NOT_VERIFIED}"]) + "\n")
    if (error := outcome_error(path, measurement)) is not None:
        raise error


def _environment(device: Device | None) -> Mapping[str, str]:
    return device.environment if device is not None else {}


def outcome_error(path: Path, measurement: Measurement) -> AutotuneError | None:
    """Return the error, and with it the exit code, that belongs to the outcome of a measurement; None for success."""
    reason = f"{path}: {measurement.outcome.value.replace('_', ' ')}: {measurement.detail}"
    if measurement.was_killed:
        return WorkerError(f"{reason}; run the command again")
    match measurement.outcome:
        case Outcome.OK | Outcome.STOPPED_EARLY:
            return None
        case Outcome.OVER_BUDGET | Outcome.OUT_OF_MEMORY:
            return InfeasibleError(f"{reason}; make a plan for this machine with autotune tune")
        case Outcome.WRONG_RESULT:
            return NumericsError(f"{reason}; tune again, and report the plan if it repeats")
        case Outcome.DISK_FULL:
            return StoreError(f"{reason}; free space there, or name another directory with --store")
        case Outcome.TIMEOUT | Outcome.CRASHED:
            return AutotuneError(f"{reason}; run the command again, or measure another plan")
