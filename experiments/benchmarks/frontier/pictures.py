"""Pictures of the frontier: time over peak of every variant, for one model and for all."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.benchmarks.frontier.records import VariantPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "eager": ("plain PyTorch", "*", "black"),
    "checkpoint": ("checkpoint", "s", "tab:blue"),
    "selective": ("selective checkpoint", "D", "tab:cyan"),
    "aot_eager": ("memory budget, aot_eager", "^", "tab:green"),
    "inductor": ("memory budget, inductor", "v", "tab:purple"),
    "ours": ("autotune", "o", "tab:red"),
}
"""Label, marker and colour by the first word of a variant's name."""
COLUMNS = 4


def draw_model(path: Path, model: str, points: Sequence[VariantPoint]) -> None:
    """Draw one model's variants."""
    figure, axes = _open_figure(1, 1, (7.0, 4.5))
    _draw(axes[0], model, points)
    axes[0].set_xlabel("peak of the step over plain PyTorch's")
    axes[0].set_ylabel("time over plain PyTorch's")
    axes[0].legend(fontsize=8)
    _save(figure, path)


def draw_overview(path: Path, points_by_model: Mapping[str, Sequence[VariantPoint]]) -> None:
    """Draw all models, each in its own panel, with one legend."""
    columns = min(COLUMNS, len(points_by_model))
    rows = math.ceil(len(points_by_model) / columns)
    figure, axes = _open_figure(rows, columns, (3.0 * columns, 2.6 * rows + 0.6))
    for panel, (model, points) in zip(axes, points_by_model.items(), strict=False):
        _draw(panel, model, points)
    for panel in axes[len(points_by_model) :]:
        panel.set_axis_off()
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.supxlabel("peak of the step over plain PyTorch's", fontsize=10)
    figure.supylabel("time over plain PyTorch's", fontsize=10)
    figure.legend(list(handles.values()), list(handles), loc="upper center", ncols=len(handles), fontsize=8)
    _save(figure, path, top=1 - 0.3 / (2.6 * rows + 0.6))


def _open_figure(rows: int, columns: int, size: tuple[float, float]):  # type: ignore[no-untyped-def]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    return figure, list(axes.flat)


def _draw(axes: "Axes", title: str, points: Sequence[VariantPoint]) -> None:
    eager = next(point.peak_bytes for point in points if point.kind == "eager")
    for word, (label, marker, color) in STYLES.items():
        drawn = [point for point in points if point.variant.split()[0] == word and point.right and point.ratio]
        drawn.sort(key=lambda point: point.peak_bytes)
        if word == "ours":
            drawn = _lower_left(drawn)
        if drawn:
            axes.plot(
                [point.peak_bytes / eager for point in drawn], [point.ratio.middle for point in drawn if point.ratio],
                linestyle="-" if word == "ours" else "", marker=marker, markersize=4, color=color, label=label,
            )  # fmt: skip
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def _lower_left(points: Sequence[VariantPoint]) -> list[VariantPoint]:
    """Return the points, in order of bytes, of which no smaller one is as fast."""
    kept: list[VariantPoint] = []
    for point in points:
        if not kept or (point.ratio and kept[-1].ratio and point.ratio.middle < kept[-1].ratio.middle):
            kept.append(point)
    return kept


def _save(figure, path: Path, *, top: float = 1.0) -> None:  # type: ignore[no-untyped-def]
    from matplotlib import pyplot

    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
