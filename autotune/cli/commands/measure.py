"""`autotune measure`: a plan and the baseline for real, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.commands.session import answering, harness, print_json, say
from autotune.errors import AutotuneError, ConfigError, InfeasibleError, NumericsError, PlanError, StoreError
from autotune.records import plan_file as planfile
from autotune.records.config import load_config
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import NOT_VERIFIED, PlanFile, match_plan

if TYPE_CHECKING:
    from autotune.measure.harness import Harness
    from autotune.measure.survey import Surveyed


def run(path: Path, arguments: dict[str, str], stores: dict[str, str], limit: str | None, *, json: bool) -> None:
    """Measure, tell, and end with the exit code that the outcome calls for."""
    file = planfile.read(path)
    if file.plan.offload and file.plan.store not in stores:
        raise StoreError(f"{path}: the plan offloads to {file.plan.store}; add --store {file.plan.store}=DIR")
    typed = load_config(file.workload.reference, arguments=arguments).arguments
    config = load_config(
        file.workload.reference,
        overrides={
            "arguments": file.workload.arguments | typed,
            "device": file.device.kind if file.device else None,
            "stores": stores or None,
            "limit": limit,
            "memory_format": file.plan.memory_format or None,
        },
    )
    with answering() as out:
        say(f"measuring {config.ref}: the baseline, then the plan")
        with harness(config) as runner:
            match_plan(path, file, _surveyed(path, file, runner))
            baseline = runner.baseline()
            seen = runner.measure(file.plan, budget_bytes=file.budget_bytes)
        if json:
            print_json({"measurement": to_json(seen), "baseline": to_json(baseline)}, out)
        else:
            from autotune.cli.console import compare

            lines = [*compare(file.estimate, seen, baseline), f"results: {seen.verified or NOT_VERIFIED}"]
            out.write("\n".join(lines) + "\n")
    if (error := failure(path, seen)) is not None:
        raise error


def _surveyed(path: Path, file: PlanFile, runner: "Harness") -> "Surveyed":
    """The graph and device here; a device that is not here is the plan's fault."""
    try:
        return runner.survey()
    except ConfigError as error:
        if file.device is None or file.device.kind == "cpu":
            raise
        raise PlanError(f"{path}: made on {file.device.kind}: {error}") from error


def failure(path: Path, seen: Measurement) -> AutotuneError | None:
    """The error that an outcome is to a script."""
    what = f"{path}: {seen.outcome.value.replace('_', ' ')}: {seen.detail}"
    match seen.outcome:
        case Outcome.OK | Outcome.STOPPED_EARLY:
            return None
        case Outcome.OVER_BUDGET | Outcome.OUT_OF_MEMORY:
            return InfeasibleError(f"{what}; make a plan for this machine with autotune tune")
        case Outcome.WRONG_RESULT:
            return NumericsError(what)
        case Outcome.DISK_FULL:
            return StoreError(f"{what}; free space there, or name another directory with --store")
        case Outcome.TIMEOUT | Outcome.CRASHED:
            return AutotuneError(what)
