from pathlib import Path

from autotune.report.claims import RESULT, Claim, Figure, write
from dashboards.reproductions import beside, claims, counted

HELD = Claim("a net: peak", "a paper", "simulated", "GB", Figure(10.0), Figure(5.0), sense="at most")


def test_claims_are_counted_by_verdict_and_set_beside_each_other(tmp_path: Path) -> None:
    write(tmp_path / "net", [HELD, Claim("none", "a paper", "", "GB", Figure(1.0), None)])
    found, broken = claims(tmp_path)
    assert broken == []
    assert counted(found) == {"reproduced": 1, "ratios reproduced": 0, "not reproduced": 0, "not comparable": 1}
    assert [(one.claim, one.ours_over_published) for one in beside(found)] == [("a net: peak", 0.5)]


def test_a_figure_of_nothing_cannot_be_divided_by(tmp_path: Path) -> None:
    write(tmp_path / "net", [Claim("runs", "a paper", "", "", Figure(0.0), Figure(0.0))])
    assert beside(claims(tmp_path)[0]) == []


def test_a_result_whose_verdict_was_typed_is_named_and_the_others_stay(tmp_path: Path) -> None:
    write(tmp_path / "good", [HELD])
    write(tmp_path / "typed", [HELD])
    path = tmp_path / "typed" / RESULT
    path.write_text(path.read_text().replace('"reproduced"', '"not reproduced"'))
    found, (broken,) = claims(tmp_path)
    assert list(found) == ["good"]
    assert broken.path.name == "typed"
    assert "its figures say" in broken.why
