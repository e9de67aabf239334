"""What is told of tuned steps is what the tool itself tells."""

from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from experiments.benchmarks.tuned import __main__ as run


def test_a_ratio_is_the_tools_own_also_where_the_machine_changed_its_pace_in_between() -> None:
    seen = Measurement(Outcome.OK, step_seconds=(1.1, 1.1, 2.2, 2.2), baseline_seconds=(1.0, 1.0, 1.0, 2.0))
    assert run.time_ratio(to_json(seen)) == seen.time_ratio == 1.1


def test_a_plan_without_eager_beside_it_has_no_ratio() -> None:
    assert run.time_ratio(to_json(Measurement(Outcome.OK, step_seconds=(1.0,)))) is None


def test_the_best_plan_has_the_interval_of_its_re_measurements_and_the_kind_of_its_first_trial() -> None:
    interval = {"middle": 0.95, "low": 0.94, "high": 0.97, "samples": 8, "confidence": 0.95}
    document = {
        "best": {"kind": "confirm", "plan": "b"},
        "trials": [
            {"kind": "baseline", "plan": None},
            {"kind": "planner", "plan": "a"},
            {"kind": "move", "plan": "b"},
            {"kind": "confirm", "plan": "b"},
        ],
        "confirmed": [{"verdict": "slower", "time_ratio": None}, {"verdict": "BEST", "time_ratio": interval}],
    }
    assert run.find_origin(document) == "move"
    record = {"best_time_ratio": 0.96, "best_time": run.find_confirmed(document)}
    assert run.format_time(record) == "0.950 (0.940 to 0.970; 95 % of 8)"
    assert run.format_time({"best_time_ratio": 0.96, "best_time": None}) == "0.960x"
