"""Tables of the frontier, and the figures that targets are set for."""

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.measure.interleaving import EAGER
from experiments.benchmarks.frontier.pictures import draw_model, draw_overview
from experiments.benchmarks.frontier.records import (
    GLIBC,
    NEARLY_EAGER,
    Pair,
    build_points,
    compare,
    compare_lowest,
    describe_method,
    faster_eager,
    find_unmatched,
    format_of,
    glibc_charge,
    gradient_error,
    is_wrong,
    peak_near_eager_time,
    runs_in_more_formats,
    time_ratio,
)
from experiments.common.facts import format_interval, format_origin, judge_at_most
from experiments.common.result_file import PLANS
from experiments.common.turns import shorten_reason

MEAN, WORST, LOWEST, AT_NEARLY_EAGER = 0.90, 1.02, 0.60, 0.60
"""Targets: geometric mean and worst of our time over a peer's at its bytes; our lowest peak over the peers' lowest; our peak
over eager's at 1.03 times eager's time."""
MIB = 2**20
TRIED = "tiny-"
"""Prefix of the folders that `--tiny` writes to."""


def summarize(out: Path) -> str:
    """Write `summary.md` and the pictures from the records in a directory, and return the targets as text."""
    records = read_records(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text(format_summary(records), encoding="utf-8")
    points = {name: build_points(record) for name, record in records.items()}
    timed = {name: found for name, found in points.items() if any(point.ratio for point in found)}
    for name, found in timed.items():
        draw_model(out / f"{name}.png", name, found)
    return describe_targets(compare_all(records), records)


def compare_all(records: Mapping[str, dict[str, Any]]) -> list[Pair]:
    """Return the pairs of all models."""
    return [pair for name, record in records.items() for pair in compare(name, record)]


def format_summary(records: Mapping[str, dict[str, Any]]) -> str:
    """Format the page of the records of one machine."""
    pairs = compare_all(records)
    tables = [_model_table(name, record) for name, record in records.items()]
    return "\n".join(
        [f"{describe_targets(pairs, records)}\n", _overview_table(pairs, records), _pair_table(pairs), *tables]
    )


def draw_machines(results: Path) -> None:
    """Write one picture of all models, from the folders of all machines in `results`."""
    points = {
        f"{name}, {shorten(record['machine']['silicon'])}": build_points(record)
        for name, record in read_machines(results).items()
        if record["sessions"]
    }
    if points:
        draw_overview(results / "overview.png", points)


def shorten(processor: str) -> str:
    """Return a processor's name without trade marks.

    >>> shorten("Intel(R) Xeon(R) Processor")
    'Intel Xeon'
    """
    return re.sub(r"\(R\)|\(TM\)| Processor", "", processor)


def geometric_mean(pairs: Iterable[Pair]) -> float | None:
    """Return the geometric mean of our time over the peers'; None without pairs."""
    ratios = [pair.ratio.middle for pair in pairs]
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None


def describe_targets(pairs: list[Pair], records: Mapping[str, dict[str, Any]]) -> str:
    """Return a line for each target, with its figure and whether it is met."""
    lines = []
    mean = geometric_mean(pairs)
    if mean is not None:
        worst = max(pairs, key=lambda pair: pair.ratio.middle)
        verdicts = [judge_at_most(pair.ratio, WORST) for pair in pairs]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("kept", "missed", "not decided"))
        lines.append(
            f"Within the bytes of eager or of a peer, both with tcmalloc, our time over theirs: geometric mean of {len(pairs)}"
            f" medians {mean:.3f} (target {MEAN:.2f}, {_verdict(mean <= MEAN)}), worst {worst.ratio.middle:.3f} beside {worst.peer} on"
            f" {worst.model} (target {WORST:.2f} for each, by the intervals: {counts})."
        )
    if one_sided := [name for name, record in records.items() if runs_in_more_formats(record)]:
        lines.append(
            f"Plans also run in channels_last and the peers do not: {', '.join(one_sided)}. The mean of these is"
            f" {_number(geometric_mean(pair for pair in pairs if pair.model in one_sided))}."
        )
    unmatched: dict[str, list[str]] = {}
    for name, record in records.items():
        for peer, reason in find_unmatched(record).items():
            unmatched.setdefault(shorten_reason(reason), []).append(f"{peer} on {name}")
    lines += [f"Not in that mean ({reason}): {', '.join(peers)}." for reason, peers in unmatched.items()]
    for name, record in records.items():
        if lowest := compare_lowest(record):
            ours, bound = lowest
            verdict = "met" if ours <= LOWEST else "proved impossible on these graphs" if bound > LOWEST else "missed"
            lines.append(
                f"{name}: our lowest peak is {ours:.3f} of the lowest of any peer (target {LOWEST:.2f}, {verdict}; bound {bound:.3f})."
            )
    for name, record in records.items():
        if record["sessions"]:
            near = peak_near_eager_time(record)
            text = "no plan takes at most" if near is None else f"our peak is {near:.3f} of eager's at no more than"
            met = near is not None and near <= AT_NEARLY_EAGER
            where = " in channels_last" if format_of(faster_eager(record)) else ""
            lines.append(
                f"{name}: {text} {NEARLY_EAGER} times the time of eager{where} (target {AT_NEARLY_EAGER:.2f}, {_verdict(met)})."
            )
    return "\n".join(f"- {line}" for line in lines) or "Nothing is measured yet."


def readme_rows(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the rows of README's table: times at the peers' bytes, the worst of them, lowest peaks, and peaks at eager's time."""
    pairs = compare_all(records)
    worst = max(pairs, key=lambda pair: pair.ratio.middle)
    lowest = [found[0] for record in records.values() if (found := compare_lowest(record))]
    timed = {name: peak_near_eager_time(record) for name, record in records.items() if record["sessions"]}
    near = [peak for peak in timed.values() if peak is not None]
    slower = [name for name, peak in timed.items() if peak is None]
    no_plan = f"; no plan is as fast on {', '.join(slower)}" if slower else ""
    compared = len({pair.model for pair in pairs})
    one_sided = {name for name, record in records.items() if runs_in_more_formats(record)}
    of_these = [pair for pair in pairs if pair.model in one_sided]
    one_sided_mean = ""
    if of_these:
        networks = f"{len(one_sided)} network{'s' * (len(one_sided) != 1)}"
        one_sided_mean = f" ({geometric_mean(of_these):.2f} on {networks} where plans alone ran in channels_last)"
    peaks = f"{min(near):.2f} to {max(near):.2f} of its peak" if near else "none"
    return [
        f"| our fastest plan beside each method that needs as much memory or more: mean of {len(pairs)} comparisons on {compared} models "
        f"| {geometric_mean(pairs):.2f} of its time{one_sided_mean} |",
        f"| the slowest of these comparisons: beside {describe_method(worst.peer)}, on {worst.model} | {worst.ratio.middle:.2f} of its time |",
        f"| our lowest peak | {min(lowest):.2f} to {max(lowest):.2f} of the lowest of all methods |",
        f"| our lowest peak at no more than {NEARLY_EAGER} of plain PyTorch's time | {peaks}{no_plan} |",
    ]


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a directory by model."""
    paths = [path for path in sorted(folder.glob("*.json")) if not path.name.endswith(PLANS)]
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def read_machines(results: Path) -> dict[str, dict[str, Any]]:
    """Return one record for each model from the folders of all machines.

    Of several records of a model, one with times comes before one without, and a later one before an earlier one.
    """
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted(path for path in results.iterdir() if path.is_dir() and not path.name.startswith(TRIED)):
        for name, record in read_records(folder).items():
            found[name] = max(found.get(name, record), record, key=lambda one: (bool(one["sessions"]), one["date"]))
    return dict(sorted(found.items()))


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def _overview_table(pairs: list[Pair], records: Mapping[str, dict[str, Any]]) -> str:
    rows = []
    for name, record in records.items():
        pairs_of_model = [pair for pair in pairs if pair.model == name]
        worst = max(pairs_of_model, key=lambda pair: pair.ratio.middle, default=None)
        lowest, near = compare_lowest(record), peak_near_eager_time(record)
        cells = [
            name,
            str(len(pairs_of_model)),
            _number(geometric_mean(pairs_of_model)),
            f"{worst.ratio.middle:.3f} ({worst.peer})" if worst else "",
            *(_number(figure) for figure in (lowest or (None, None))),
            _number(near),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    head = [
        "| model | peers | time at their bytes: mean | worst | lowest peak | proved bound | peak at 1.03x time |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    return "\n".join([*head, *rows, ""])


def _pair_table(pairs: list[Pair]) -> str:
    rows = []
    for pair in pairs:
        glibc = format_interval(pair.ratio_glibc) if pair.ratio_glibc else "not timed"
        rows.append(f"| {pair.model} | {pair.peer} | {pair.ours} | {format_interval(pair.ratio)} | {glibc} |")
    head = [
        "| model | peer | our fastest plan within its bytes | our time over the peer's with tcmalloc | with glibc's malloc |",
        "|---|---|---|--:|--:|",
    ]
    remark = (
        "Without a number of blocks: timed in two sessions, each beside eager, and the farthest ends of both intervals."
    )
    return "\n".join([*head, *rows, "", *([remark, ""] if any(_is_of_two_sessions(pair) for pair in pairs) else [])])


def _is_of_two_sessions(pair: Pair) -> bool:
    return pair.ratio_glibc is not None and not pair.ratio_glibc.samples


def _model_table(name: str, record: dict[str, Any]) -> str:
    eager = record["peers"].get(EAGER, {}).get("step_peak_bytes", 0)
    rows = []
    for variant, measured in {**record["peers"], **record["plans"]}.items():
        peak, is_peer = measured.get("step_peak_bytes"), variant in record["peers"]
        cells = [
            f"{variant}{' (wrong gradients)' if is_peer and is_wrong(record, variant) and peak else ''}",
            f"{peak / MIB:.1f}" if peak else "",
            f"{peak / eager:.3f}" if peak and eager else "",
            _prediction_error(measured),
            shorten_reason(measured["failed"]) if "failed" in measured else _time(record, variant),
            _mib(glibc_charge(record, variant)) if is_peer else "",
            _time(record, f"{variant}{GLIBC}") if is_peer and "failed" not in measured else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    table = [
        "| variant | peak MiB | of eager's | error of the prediction | time over eager's | with glibc's malloc: charged MiB | time |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *rows,
    ]
    return "\n".join(
        [f"## {name}", "", f"![{name}]({name}.png)", "", *table, "", *_remarks(record), "", *_origin(record), ""]
    )


def _remarks(record: dict[str, Any]) -> list[str]:
    remarks = [
        f"- {capture}: {described.get('gate') or described.get('failed')}"
        for capture, described in record["captures"].items()
    ]
    if any("inductor" in name and "rebuild_price" not in capture for name, capture in record["captures"].items()):
        remarks.append("- recorded when regions had a rebuild price of 0.05 by default")
    if "rounding" in record:
        remarks.append(
            f"- one ulp in every parameter changes eager's gradients by {gradient_error(record['rounding']):.1e}"
        )
    return remarks + [f"- dropped: {session['dropped']}" for session in record["sessions"] if "dropped" in session]


def _origin(record: dict[str, Any]) -> list[str]:
    """Return the origin of the file, and of its parts where they are of other commits."""
    parts = {"peers' bytes": record["peers"].values(), "plans": record["plans"].values(), "seconds": record["sessions"]}
    others = [
        f"{part} of commit {commit}"
        for part, measured in parts.items()
        for commit in dict.fromkeys(one["commit"] for one in measured if "commit" in one)
        if commit != record["commit"]
    ]
    return [f"{format_origin(record)} {'; '.join(others)}".strip()]


def _time(record: dict[str, Any], variant: str) -> str:
    """Return a variant's time over eager's, or the reason why it has none."""
    ratio = time_ratio(record, variant)
    failures = (session["failed"].get(variant) for session in record["sessions"])
    return format_interval(ratio) if ratio else next(filter(None, failures), "not timed")


def _prediction_error(measured: dict[str, Any]) -> str:
    peak, estimate = measured.get("step_peak_bytes"), measured.get("estimate", {}).get("peak_bytes")
    return f"{100 * (estimate / peak - 1):+.2f} %" if estimate and peak else ""


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def _number(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3f}"
