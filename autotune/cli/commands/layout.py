"""`autotune layout`: lay the buffers of a CSV, or of a plan, out in as few bytes as possible."""

from pathlib import Path

from autotune.cli.output import answer_stream, print_json
from autotune.errors import InfeasibleError
from autotune.records.run_dir import check_file_place
from autotune.study.offline.file_layout import FileLayout, lay_out_file
from autotune.units import fmt_seconds, parse_bytes


def run(file: Path, *, capacity: str | None, alignment: int, effort: int, out: Path | None, json: bool) -> None:
    """Lay buffers out, print the layout's size, and write it to `out` if that is a path.

    Raises InfeasibleError where no layout within the capacity was computed.
    """
    limit = None if capacity is None else parse_bytes(f"{capacity}B" if capacity.isdecimal() else capacity)
    check_file_place(out)
    with answer_stream() as answer:
        result = lay_out_file(file, limit, alignment=alignment, effort=effort)
        layout = result.layout
        if out is not None:
            result.write(out)
        if json:
            print_json(
                {
                    "buffers": len(result.buffers), "max_live_bytes": layout.max_live, "layout_bytes": layout.bytes,
                    "lower_bound_bytes": result.lower_bound_bytes, "gap": layout.gap, "capacity_bytes": limit,
                    "seconds": result.seconds, "offsets": dict(zip(result.names, layout.offsets, strict=True)),
                },
                answer,
            )  # fmt: skip
        else:
            answer.write("\n".join(_describe(result, limit, out)) + "\n")
    if limit is not None and layout.bytes > limit:
        bound = result.lower_bound_bytes
        reason = f"none exists below {bound}" if bound > limit else "the search ended; raise --effort to search longer"
        raise InfeasibleError(f"{file} needs {layout.bytes} bytes, the capacity is {limit}: {reason}")


def _describe(result: FileLayout, limit: int | None, out: Path | None) -> list[str]:
    layout, bound = result.layout, result.lower_bound_bytes
    proof = "proved optimal" if layout.bytes == bound else f"none exists below {bound}"
    lines = [
        f"buffers    {len(result.buffers)}, at most {layout.max_live} bytes live at once",
        f"layout     {layout.bytes} bytes, {100 * layout.gap:.2f} % above that; {proof}",
        f"search     {fmt_seconds(result.seconds)}",
    ]
    lines += [] if limit is None else [f"capacity   {limit} bytes: {'met' if layout.bytes <= limit else 'exceeded'}"]
    return lines + ([] if out is None else [f"offsets    {out}"])
