"""Charts: scales that can be compared, and small files."""

import re
from dataclasses import replace

from autotune.records.trial import Trial, TrialKind
from autotune.report.charts import MemoryPanel, PointKind, TrialPoint, draw_frontier, draw_memory, draw_transfers
from autotune.report.run_charts import trial_points
from autotune.study.recorded_run import RecordedRun
from tests.study.test_confirm import measured, trial

MIB = 2**20
COLOURS = {"parameters": "#0072b2", "activations": "#009e73"}


def panel(title: str, *totals: float) -> MemoryPanel:
    """Return a step with one total per second, the last one twice, split evenly between two roles."""
    half = [0.5 * MIB * total for total in (*totals, totals[-1])]
    return MemoryPanel(title, range(len(half)), {"parameters": half, "activations": half})


def shapes(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """Return the corners of every area of a colour, in points; y grows downwards."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*?(?:fill: (#\w+))', svg, re.IGNORECASE)
    return [corners(path) for path, fill in paths if fill.lower() == colour]


def corners(path: str) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for command, numbers in re.findall(r"([MLHV])([-\d. ]+)", path):
        x, y = points[-1] if points else (0.0, 0.0)
        values = [float(number) for number in numbers.split()]
        points.append(
            (values[0], y) if command == "H" else (x, values[0]) if command == "V" else (values[0], values[1])
        )
    return points


def height(corners: list[tuple[float, float]]) -> float:
    rows = [y for _, y in corners]
    return max(rows) - min(rows)


def test_two_plans_are_drawn_to_one_scale_of_bytes_and_of_seconds():
    svg = draw_memory([panel("as traced: 80 MiB", 80, 80), panel("plan 4: 40 MiB", 40, 40, 40, 40)], COLOURS, 60 * MIB)
    above, below = (area for area in shapes(svg, COLOURS["parameters"]) if height(area) > 15)
    assert abs(height(above) / height(below) - 2) < 0.01
    widths = [max(x for x, _ in area) - min(x for x, _ in area) for area in (above, below)]
    assert abs(widths[1] / widths[0] - 2) < 0.01
    assert "as traced: 80 MiB" in svg
    assert "plan 4: 40 MiB" in svg
    assert svg.count(">budget, 60.0 MiB<") == svg.count(">parameters<") == 1


def test_a_step_of_20000_slices_weighs_little_and_keeps_its_peak():
    totals = [100 + 30 * (step % 7) / 7 + 50 * step / 20000 for step in range(20000)]
    totals[12345] = 400.0
    svg = draw_memory([panel("as traced", *totals)], COLOURS, None)
    peaked = draw_memory([panel("as traced", 400.0)], COLOURS, None)
    tallest = max(height(area) for area in shapes(svg, COLOURS["parameters"]))
    assert abs(tallest / max(height(area) for area in shapes(peaked, COLOURS["parameters"])) - 1) < 0.01
    slow = [100 + 0.0005 * step for step in range(20000)]
    assert len(draw_memory([panel("as traced", *slow)], COLOURS, None)) < 30_000


def test_bars_that_no_pixel_parts_are_one_and_their_ends_stay():
    many = [(step * 1e-4, step * 1e-4 + 5e-5, "load") for step in range(10_000)]
    svg = draw_transfers({"simulated": {"load": many}}, {"load": "#0072b2"})
    (bar,) = (area for area in shapes(svg, "#0072b2") if height(area) > 10)
    whole = draw_transfers({"simulated": {"load": [(0.0, many[-1][1], "load")]}}, {"load": "#0072b2"})
    (whole_bar,) = (area for area in shapes(whole, "#0072b2") if height(area) > 10)
    assert {x for x, _ in bar} == {x for x, _ in whole_bar}


def test_a_picture_stands_in_a_page_beside_others_and_alone():
    svg = draw_memory([panel("as traced", 80)], COLOURS, None)
    assert svg.startswith(
        '<svg role="img" aria-label="Memory during one step, stacked by role" font-family="sans-serif"'
    )
    assert "<?xml" not in svg
    assert '<g id="' not in svg


def test_a_step_shows_its_measured_peak_and_where_its_phases_begin():
    plain = panel("as traced", 80, 40)
    svg = draw_memory(
        [replace(plain, measured_bytes=82 * MIB, phases=((0.0, "forward"), (1.0, "backward")))], COLOURS, None
    )
    for word in ("measured peak", "forward", "backward"):
        assert f">{word}<" in svg
        assert f">{word}<" not in draw_memory([plain], COLOURS, None)


def test_a_re_measured_plan_has_an_error_bar():
    point = TrialPoint(3, 100 * MIB, 1.0, PointKind.BEST)
    svg = draw_frontier([replace(point, interval=(0.9, 1.2))], budget_bytes=None, cost_label="ratio")
    bars = [svg.count("<path") - draw_frontier([point], budget_bytes=None, cost_label="ratio").count("<path")]
    assert bars[0] >= 1


def test_points_of_almost_equal_bytes_have_an_axis_of_plain_and_different_numbers():
    points = [TrialPoint(n, 218.6 * MIB + n, 1.0 + n / 10, PointKind.WITHIN_BUDGET) for n in range(4)]
    svg = draw_frontier(points, budget_bytes=218.6 * MIB + 5, cost_label="ratio")
    ticks = [float(text) for text in re.findall(r">(\d+\.?\d*)</text>", svg)]
    mebibytes = [tick for tick in ticks if tick > 100]
    assert len(mebibytes) == len(set(mebibytes)) >= 3
    assert max(mebibytes) - min(mebibytes) > 2
    assert "+2" not in svg


def test_colours_of_text_and_grid_follow_the_page():
    svg = draw_memory([panel("as traced", 80)], COLOURS, None)
    assert "currentColor" in svg
    assert "var(--grid, #e7e9ec)" in svg
    assert svg.count("#1b1f24") == 1


def test_the_point_of_a_re_measured_plan_is_the_middle_of_its_interval():
    baseline = Trial(0, TrialKind.BASELINE, "w", "d", measurement=measured(1.0))
    rounds = [trial(number, measured(ratio), 1, TrialKind.CONFIRM) for number, ratio in ((2, 0.95), (3, 1.01))]
    run = RecordedRun("run", {"budget": "step:1000B"}, (baseline, trial(1, measured(0.9), 1), *rounds))
    (point,) = (point for point in trial_points(run) if point.interval is not None)
    (confirmed,) = run.confirmed
    assert confirmed.ratio is not None
    assert (point.number, point.cost) == (3, confirmed.ratio.middle)
    assert 0.97 < point.cost < 0.99
