"""`autotune measure`: a plan and the baseline for real, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from autotune import planfile
from autotune.commands.session import answering, harness, print_json, say
from autotune.config import load_config
from autotune.errors import AutotuneError, ConfigError, InfeasibleError, NumericsError, PlanError, StoreError
from autotune.measurement import Measurement, Outcome
from autotune.plan import check
from autotune.planfile import NOT_VERIFIED, PlanFile
from autotune.records import to_json

if TYPE_CHECKING:
    from autotune.harness.run import Harness, Prepared, Surveyed


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
            from autotune.console import compare

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


def match_plan(path: Path, file: PlanFile, surveyed: "Surveyed | Prepared") -> None:
    """PlanError that names what differs, unless the plan was made for this graph on this kind of device."""
    graph, device = surveyed.graph, surveyed.device
    if file.device is not None and file.device.kind != device.kind:
        raise PlanError(
            f"{path}: made on {file.device.kind}, this is {device.kind}; tune here: autotune tune {file.workload}"
        )
    if file.graph_digest != graph.digest:
        ops = len(set(file.plan.order))
        what = (
            f"a graph of {ops} ops, this one has {len(graph.ops)}"
            if ops != len(graph.ops)
            else f"the same {ops} ops on other shapes, types or wiring"
        )
        raise PlanError(
            f"{path}: made for {what} (digest {file.graph_digest[:8]}, {graph.name} has {graph.digest[:8]}); "
            f"give the arguments that it was made with, or tune anew"
        )
    check(graph, file.plan)
    if file.device is not None and file.device.silicon != device.silicon:
        say(f"note: made on {file.device.silicon}, measured on {device.silicon}")


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
