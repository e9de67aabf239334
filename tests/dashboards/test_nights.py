from pathlib import Path

from dashboards.nights import HEAD, history, latest, points, regressions, rows
from tests.dashboards import made


def test_regressions_are_told_with_their_causes_the_last_first(tmp_path: Path) -> None:
    histories = {"chain": history(made.nights(tmp_path)), "none": []}
    (red,) = regressions(histories)
    assert (red.night, red.causes) == ("n4", ("environment",))
    assert latest(histories) == [red]


def test_rows_have_every_column_the_last_night_first(tmp_path: Path) -> None:
    told = rows(history(made.nights(tmp_path)))
    assert [row[0] for row in told] == ["n4", "n3", "n2", "n1", "n0"]
    first = dict(zip(HEAD, told[0], strict=True))
    assert first["verdict"] == "regression"
    assert first["cause"] == "environment"
    assert first["beside its record"] == "+25.0 % [+20.0 %, +30.0 %]"


def test_a_night_is_drawn_at_the_median_of_its_turns(tmp_path: Path) -> None:
    found = points({"chain": history(made.nights(tmp_path))})
    assert [point.ratio for point in found] == [0.96] * 4 + [1.2]
    assert found[0].charged_mib == 800_000 / 2**20
