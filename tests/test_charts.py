"""Pictures: what can be compared in them, and how much they weigh."""

import re

from autotune.report.charts import Panel, lanes, memory

MIB = 2**20
COLOURS = {"parameters": "#0072b2", "activations": "#009e73"}


def panel(title: str, *totals: float) -> Panel:
    """Half of every total is of each role; a step of as many seconds as there are totals, the last twice."""
    half = [0.5 * MIB * total for total in (*totals, totals[-1])]
    return Panel(title, range(len(half)), {"parameters": half, "activations": half})


def shapes(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """Corners of every area of a colour, in the picture's points: y grows downwards."""
    paths = re.findall(r'<path d="([^"]*)"[^>]*?(?:fill: (#\w+))', svg, re.IGNORECASE)
    return [corners(path) for path, fill in paths if fill.lower() == colour]


def corners(path: str) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for command, numbers in re.findall(r"([MLHV])([-\d. ]+)", path):
        x, y = found[-1] if found else (0.0, 0.0)
        given = [float(number) for number in numbers.split()]
        found.append((given[0], y) if command == "H" else (x, given[0]) if command == "V" else (given[0], given[1]))
    return found


def height(corners: list[tuple[float, float]]) -> float:
    rows = [y for _, y in corners]
    return max(rows) - min(rows)


def test_two_plans_are_drawn_to_one_scale_of_bytes_and_of_seconds():
    svg = memory([panel("as traced: 80 MiB", 80, 80), panel("plan 4: 40 MiB", 40, 40, 40, 40)], COLOURS, 60 * MIB)
    above, below = (one for one in shapes(svg, COLOURS["parameters"]) if height(one) > 15)
    assert abs(height(above) / height(below) - 2) < 0.01
    widths = [max(x for x, _ in one) - min(x for x, _ in one) for one in (above, below)]
    assert abs(widths[1] / widths[0] - 2) < 0.01
    assert "as traced: 80 MiB" in svg
    assert "plan 4: 40 MiB" in svg
    assert svg.count(">budget, 60.0 MiB<") == svg.count(">parameters<") == 1


def test_a_step_of_20000_slices_weighs_little_and_keeps_its_peak():
    totals = [100 + 30 * (at % 7) / 7 + 50 * at / 20000 for at in range(20000)]
    totals[12345] = 400.0
    svg = memory([panel("as traced", *totals)], COLOURS, None)
    peaked = memory([panel("as traced", 400.0)], COLOURS, None)
    tallest = max(height(one) for one in shapes(svg, COLOURS["parameters"]))
    assert abs(tallest / max(height(one) for one in shapes(peaked, COLOURS["parameters"])) - 1) < 0.01
    slow = [100 + 0.0005 * at for at in range(20000)]
    assert len(memory([panel("as traced", *slow)], COLOURS, None)) < 30_000


def test_bars_that_no_pixel_parts_are_one_and_their_ends_stay():
    many = [(at * 1e-4, at * 1e-4 + 5e-5, "load") for at in range(10_000)]
    svg = lanes({"simulated": {"load": many}}, {"load": "#0072b2"})
    (bar,) = (one for one in shapes(svg, "#0072b2") if height(one) > 10)
    whole = lanes({"simulated": {"load": [(0.0, many[-1][1], "load")]}}, {"load": "#0072b2"})
    (same,) = (one for one in shapes(whole, "#0072b2") if height(one) > 10)
    assert {x for x, _ in bar} == {x for x, _ in same}


def test_a_picture_stands_in_a_page_beside_others_and_alone():
    svg = memory([panel("as traced", 80)], COLOURS, None)
    assert svg.startswith(
        '<svg role="img" aria-label="Memory through one step, stacked by role" font-family="sans-serif"'
    )
    assert "<?xml" not in svg
    assert '<g id="' not in svg
