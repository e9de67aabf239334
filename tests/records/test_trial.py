import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.ir.plan import Plan, Swap
from autotune.predict.simulate import Estimate
from autotune.records import json_codec
from autotune.records import trial as trials
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind

FULL = Trial(
    number=1,
    kind=TrialKind.SEARCH,
    workload="resnet18",
    graph_digest="abc",
    settings={"order": {"planner": "traced"}, "offload": {"planner": "window", "window": 2, "share": 0.5}},
    plan=Plan((0, 1, 0), (Swap(0, 1),), 2, "ssd"),
    estimate=Estimate(20, "op1", 16, 3.0, 1.0, 0, 0.0, 20, 2.0),
    measurement=Measurement(Outcome.OK, peak_bytes=1020, floor_bytes=1000, step_seconds=(2.0, 4.0)),
)
numbers = st.floats(allow_nan=False)
counts = st.integers(0, 2**62)
any_trial = st.builds(
    Trial,
    settings=st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers() | numbers | st.text(), max_size=3)),
    plan=st.none() | st.builds(Plan, order=st.lists(counts).map(tuple)),
    estimate=st.none() | st.builds(Estimate, seconds=numbers, recompute_seconds=numbers, stall_seconds=numbers,
                                   lower_bound_seconds=numbers),
    measurement=st.none() | st.builds(Measurement, step_seconds=st.lists(numbers).map(tuple), detail=st.text()),
    started=numbers,
)  # fmt: skip


def test_what_was_appended_is_loaded_in_order_of_number(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    baseline = Trial(0, TrialKind.BASELINE, "resnet18", "abc")
    trials.append_trial(path, FULL)
    trials.append_trial(path, baseline)
    assert trials.load_trials(path) == [baseline, FULL]


def test_the_last_line_of_a_number_counts(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    trials.append_trial(path, dataclasses.replace(FULL, measurement=None))
    trials.append_trial(path, FULL)
    assert trials.load_trials(path) == [FULL]


def test_a_run_that_never_began_has_no_trials(tmp_path: Path):
    assert trials.load_trials(tmp_path / "trials.jsonl") == []


def test_a_kill_at_any_byte_of_a_write_loses_that_trial_alone_and_the_run_goes_on(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    first, second, third = (dataclasses.replace(FULL, number=number) for number in range(3))
    trials.append_trial(path, first)
    before = path.stat().st_size
    trials.append_trial(path, second)
    whole = path.read_bytes()
    for end in (*range(before, len(whole), 9), len(whole) - 1):
        path.write_bytes(whole[:end])
        assert trials.load_trials(path) == [first]
        trials.append_trial(path, third)
        assert trials.load_trials(path) == [first, third]
        assert path.read_bytes().startswith(whole[:before])


def test_an_append_reads_no_more_than_the_end_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trials.jsonl"
    trials.append_trial(path, FULL)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"torn": "' + b"x" * 100)
    monkeypatch.setattr(json_codec, "BLOCK_BYTES", 16)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read completely"))
        trials.append_trial(path, FULL)
    assert path.read_bytes() == 2 * whole


def test_a_kill_in_the_very_first_line_leaves_an_empty_run(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    path.write_bytes(b'{"number": 0, "ki')
    assert trials.load_trials(path) == []
    trials.append_trial(path, FULL)
    assert trials.load_trials(path) == [FULL]


def test_loading_changes_nothing_on_disk(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    trials.append_trial(path, FULL)
    torn = path.read_bytes() + b'{"torn'
    path.write_bytes(torn)
    trials.load_trials(path)
    assert path.read_bytes() == torn


def test_a_damaged_line_is_named_and_not_passed_over(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    trials.append_trial(path, FULL)
    path.write_bytes(b"{broken\n" + path.read_bytes())
    with pytest.raises(ConfigError, match=r"trials.jsonl:1: not JSON"):
        trials.load_trials(path)
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1] + b'{"number": 1}\n')
    with pytest.raises(ConfigError, match=r"trials.jsonl:2: kind: missing"):
        trials.load_trials(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_trial)
def test_any_trial_comes_back_equal_from_one_line(tmp_path: Path, made: Trial):
    path = tmp_path / "trials.jsonl"
    path.unlink(missing_ok=True)
    trials.append_trial(path, made)
    assert path.read_bytes().count(b"\n") == 1
    assert trials.load_trials(path) == [made]


def test_a_frame_has_one_row_a_trial_with_units_in_its_columns():
    table = trials.to_frame([Trial(0, TrialKind.BASELINE, "resnet18", "abc"), FULL])
    assert list(table["number"]) == [0, 1]
    row = table.iloc[1]
    assert (row["offload"], row["offload.window"], row["order"]) == ("window", 2, "traced")
    assert (row["estimate.peak_bytes"], row["peak_bytes"], row["step_seconds"]) == (20, 1020, 3.0)
    assert row["outcome"] == "ok"
    assert math.isnan(table.iloc[0]["peak_bytes"])


def test_a_line_is_plain_json(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    trials.append_trial(path, FULL)
    assert json.loads(path.read_text())["plan"]["order"] == [0, 1, 0]
