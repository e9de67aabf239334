"""Describe estimated and measured batch sizes as text, for the terminal and for the HTML report."""

from autotune.records.budget import Budget
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.batch.records import BatchSearch, MeasuredSize, SideResult
from autotune.units import fmt_bytes, fmt_seconds, mib

SIZE_COLUMNS = ("size", "samples", "eager MiB", "eager samples/s", "plan MiB", "plan samples/s", "verdict")
"""Columns of the table of measured batch sizes."""


def describe_estimate(estimate: BatchEstimate) -> list[str]:
    """Return lines that state the largest batch sizes by estimate, and what the estimate leaves out."""
    floor = "" if estimate.floor_bytes is None else f" above an idle process of {fmt_bytes(estimate.floor_bytes)}"
    gain = f" ({estimate.largest / estimate.eager_largest:.1f} times eager's)" if estimate.eager_largest else ""
    name = estimate.argument
    lines = [
        f"budget  {estimate.budget}: {fmt_bytes(max(estimate.budget_bytes, 0))} for the step{floor}",
        f"plan    up to {name}={estimate.largest}{gain}" if estimate.largest else "plan    no batch size fits",
        f"eager   up to {name}={estimate.eager_largest}" if estimate.eager_largest else "eager   no batch size fits",
        f"own     {name}={estimate.size} needs {fmt_bytes(estimate.eager_bytes)} in eager",
        f"basis   live tensors of {estimate.captures} captured sizes, without kernels' workspaces and stores; estimated in "
        f"{fmt_seconds(estimate.seconds)}; leave --dry-run out to measure",
    ]
    if estimate.normalizes_over_batch:
        lines.append("note    batch norm: its statistics, and so the training, depend on the batch size")
    if estimate.refused:
        lines.append(f"note    the workload refuses {estimate.refused}")
    return lines


def describe_search(search: BatchSearch) -> list[str]:
    """Return lines that state the chosen batch size beside plain eager's, as measured under the limit."""
    lines: list[str] = []
    if search.chosen is not None:
        lines.append(f"size    {search.argument}={search.chosen}, chosen for {search.objective}")
    sides = (
        ("plan", search.plan_largest, search.plan_is_settled),
        ("eager", search.eager_largest, search.eager_is_settled),
    )
    largest = [
        f"{name} {'' if is_settled else 'at least '}{size.batch}"
        for name, size, is_settled in sides
        if size is not None
    ]
    if largest:
        is_of_process = Budget.parse(search.budget).is_of_process
        limit = (
            f"{fmt_bytes(search.limit_bytes)} of the process"
            if is_of_process
            else f"{fmt_bytes(search.budget_bytes)} of the step"
        )
        lines.append(f"largest {', '.join(largest)}: measured within {limit}")
    rates = [
        f"{name} {side.rate} at {measured.size}"
        for name, measured, side in _best_sides(search)
        if side is not None and side.rate is not None
    ]
    if rates:
        lines.append(f"rate    {'; '.join(rates)}")
    return [*lines, *(f"note    {note}" for note in search.notes)]


def size_rows(search: BatchSearch) -> list[tuple[str, ...]]:
    """Return a row under `SIZE_COLUMNS` for each measured size, the smallest first; bytes exclude the idle process.

    The bytes of a plan that did not run are its estimated peak, marked with `~`.
    """
    ordered = sorted(search.measured, key=lambda each: (each.size.accumulate, each.size.batch))
    return [_row(search, each) for each in ordered]


def _best_sides(search: BatchSearch) -> list[tuple[str, MeasuredSize, SideResult | None]]:
    plan = search.find(search.chosen) if search.chosen is not None else None
    eager = search.eager_best
    sides = [] if plan is None else [("plan", plan, plan.plan)]
    return sides if eager is None else [*sides, ("eager at its best", eager, eager.eager)]


def _row(search: BatchSearch, measured: MeasuredSize) -> tuple[str, ...]:
    verdict = "CHOSEN" if measured.size == search.chosen else _verdict(measured)
    mark = "~" if measured.has_estimated_charge else ""
    sides = (*_side_cells(measured.eager), *_side_cells(measured.plan, mark))
    return str(measured.size), str(measured.size.samples), *sides, verdict


def _side_cells(side: SideResult | None, mark: str = "") -> tuple[str, str]:
    if side is None:
        return "-", "-"
    rate = "-" if side.rate is None or not side.fits else f"{side.rate.middle:.1f}"
    return f"{mark}{mib(side.charged_bytes)}", rate


def _verdict(measured: MeasuredSize) -> str:
    side = measured.plan or measured.eager
    assert side is not None
    text = side.outcome.value.replace("_", " ")
    return f"{text}, disturbed" if side.disturbed else text
