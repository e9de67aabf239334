"""What is told of tuned steps is what the tool itself tells."""

from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from experiments.benchmarks.tuned import __main__ as run


def test_a_ratio_is_the_tools_own_also_where_the_machine_changed_its_pace_in_between() -> None:
    seen = Measurement(Outcome.OK, step_seconds=(1.1, 1.1, 2.2, 2.2), baseline_seconds=(1.0, 1.0, 1.0, 2.0))
    assert run.time_ratio(to_json(seen)) == seen.time_ratio == 1.1


def test_a_plan_without_eager_beside_it_has_no_ratio() -> None:
    assert run.time_ratio(to_json(Measurement(Outcome.OK, step_seconds=(1.0,)))) is None
