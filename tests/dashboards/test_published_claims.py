from pathlib import Path

from autotune.report.claims import RESULT, Claim, Figure, write
from dashboards.published_claims import claim_ratios, count_by_verdict, load_claims

REPRODUCED = Claim("a net: peak", "a paper", "simulated", "GB", Figure(10.0), Figure(5.0), sense="at most")


def test_claims_are_counted_by_verdict_and_set_beside_each_other(tmp_path: Path) -> None:
    write(tmp_path / "net", [REPRODUCED, Claim("none", "a paper", "", "GB", Figure(1.0), None)])
    results, broken = load_claims(tmp_path)
    assert broken == []
    assert count_by_verdict(results) == {
        "reproduced": 0,
        "ratios reproduced": 0,
        "bound kept": 1,
        "not decided": 0,
        "not reproduced": 0,
        "not comparable": 1,
    }
    assert [(ratio.claim, ratio.ours_over_published) for ratio in claim_ratios(results)] == [("a net: peak", 0.5)]


def test_a_figure_of_nothing_cannot_be_divided_by(tmp_path: Path) -> None:
    write(tmp_path / "net", [Claim("runs", "a paper", "", "", Figure(0.0), Figure(0.0))])
    assert claim_ratios(load_claims(tmp_path)[0]) == []


def test_a_result_whose_verdict_was_typed_is_named_and_the_others_stay(tmp_path: Path) -> None:
    write(tmp_path / "good", [REPRODUCED])
    write(tmp_path / "typed", [REPRODUCED])
    path = tmp_path / "typed" / RESULT
    path.write_text(path.read_text().replace('"bound kept"', '"not reproduced"'))
    results, (broken,) = load_claims(tmp_path)
    assert list(results) == ["good"]
    assert broken.path.name == "typed"
    assert "its figures give" in broken.reason
