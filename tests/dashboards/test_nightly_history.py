from pathlib import Path

from dashboards.charts import nightly_chart
from dashboards.nightly_history import (
    HEAD,
    build_overview,
    history_rows,
    latest_nights,
    list_regressions,
    load_history,
    name_entries,
    night_points,
)
from tests.dashboards import sample_runs


def test_regressions_are_told_with_their_causes_the_last_first(tmp_path: Path) -> None:
    histories = {"chain": load_history(sample_runs.nights(tmp_path)), "none": []}
    (red,) = list_regressions(histories)
    assert (red.night, red.causes) == ("n4", ("environment",))
    assert latest_nights(histories) == [red]


def test_rows_have_every_column_the_last_night_first(tmp_path: Path) -> None:
    table = history_rows(load_history(sample_runs.nights(tmp_path)))
    assert [row[0] for row in table] == ["n4", "n3", "n2", "n1", "n0"]
    first = dict(zip(HEAD, table[0], strict=True))
    assert first["verdict"] == "regression"
    assert first["cause"] == "environment"
    assert first["vs. record"] == "+25.0 % [+20.0 %, +30.0 %]"


def test_a_night_is_drawn_at_the_median_of_its_turns(tmp_path: Path) -> None:
    points = night_points({"chain": load_history(sample_runs.nights(tmp_path))})
    assert [point.time for point in points] == [0.96] * 4 + [1.2]
    assert points[0].charged_mib == 800_000 / 2**20


def test_the_overview_has_a_row_for_each_entry_and_the_last_night_first(tmp_path: Path) -> None:
    nights = load_history(sample_runs.nights(tmp_path))
    head, rows = build_overview({"chain": nights, "late": nights[-1:]})
    assert head == ["entry", "n4", "n3", "n2", "n1", "n0"]
    assert rows[0][:2] == ["chain", "regression 1.20x"]
    assert rows[1] == ["late", "regression 1.20x", "", "", "", ""]


def test_nights_in_which_eager_does_not_fit_have_seconds_and_are_drawn_apart_from_ratios(tmp_path: Path) -> None:
    ratios = load_history(sample_runs.nights(tmp_path))
    seconds = load_history(sample_runs.nights(tmp_path, "large", has_eager=False))
    assert build_overview({"large": seconds})[1][0][1] == "regression 1.20 s"
    points = night_points({"one": [*ratios, *seconds]})
    chart = nightly_chart(points).to_dict()
    assert chart["layer"][1]["encoding"]["y"]["title"] == "step time, s"
    (drawn,) = chart["datasets"].values()
    assert [point["entry"] for point in drawn] == ["large"] * 5
    assert nightly_chart(points[:5]).to_dict()["layer"][1]["encoding"]["y"]["title"] == "step time / eager step time"


def test_entries_of_one_name_in_two_directories_are_named_by_their_paths(tmp_path: Path) -> None:
    first, second = sample_runs.nights(tmp_path), sample_runs.nights(tmp_path / "benchmark")
    other = sample_runs.nights(tmp_path, "other")
    names = name_entries([first, second, other], tmp_path)
    assert names == {"nightly/chain": first, "benchmark/nightly/chain": second, "other": other}
    assert {night.entry for night in load_history(second, "benchmark/nightly/chain")} == {"benchmark/nightly/chain"}
