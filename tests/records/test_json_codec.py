import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Op, Phase, TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.records.device import Device
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.testing.graphs import graphs, training_chain


def again(record: Any) -> Any:
    return from_json(type(record), json.loads(json.dumps(to_json(record))), where="text")


@pytest.mark.parametrize(
    "record",
    [
        Plan((0, 1, 0), (Swap(2, 1),), 3, "ssd"),
        Costs((0.5,), (7,), {"ssd": StoreCost(1.0, 2.0, 3.0, 4.0, 5, holds_memory=True, contention=1.5)}),
        Device("cpu", "chip", 1, 2, "2.13"),
        Measurement(
            Outcome.STOPPED_EARLY, "why", step_seconds=(1.0, math.inf), device=Device("cpu", "chip", 1, 2, "2.13")
        ),
        training_chain(3),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_comes_back_from_json_equal(record: Any):
    assert again(record) == record


@given(graphs())
def test_any_graph_comes_back_with_its_digest(graph: TrainGraph):
    assert again(graph) == graph
    assert again(graph).digest == graph.digest


def test_field_names_are_the_types_own_and_enums_their_values():
    assert to_json(Plan((1,), (Swap(2, 3),))) == {
        "order": [1], "offload": [{"value": 2, "gap": 3, "late": 0, "early": 0}], "window": 1, "store": "", "allocator": "system",
        "inplace": [], "memory_format": "", "kernels": "", "rebuild_price": 4.0, "threads": 0,
    }  # fmt: skip
    assert to_json(Measurement(Outcome.DISK_FULL))["outcome"] == "disk_full"


def test_a_renamed_field_keeps_its_key_in_files():
    document = to_json(Op(1, "op", "t", (), (2,), Phase.FORWARD, "", alias_of=3))
    assert document["given"] == 3
    assert "alias_of" not in document
    assert from_json(Op, document, where="here").alias_of == 3
    with pytest.raises(ConfigError, match="alias_of: unknown key"):
        from_json(Op, document | {"alias_of": 3}, where="here")


@given(st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False) | st.text())))
def test_settings_keep_the_types_of_their_knobs(settings: dict[str, dict[str, Any]]):
    back = again(Trial(0, TrialKind.SEARCH, "w", "d", settings)).settings
    assert repr(back) == repr(settings)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"order": [0], "widow": 2}, "widow: unknown key; if a newer autotune wrote it, upgrade autotune"),
        ({"order": [0], "offload": [{"value": 1, "gap": 1, "gab": 2}]}, "offload.0.gab: unknown key"),
        ({}, "order: missing"),
        ({"order": [0, "1"]}, "order.1: Input should be a valid integer (got '1')"),
        ({"order": [0, True]}, "order.1: "),
        ({"order": [0, 1.5]}, "order.1: "),
        ({"order": "01"}, "order: "),
        ({"order": [0], "window": None}, "window: "),
        ([0, 1], "Input should be an object"),
        (None, "Input should be an object"),
    ],
)
def test_bad_data_is_refused_by_file_and_name(document: Any, words: str):
    with pytest.raises(ConfigError, match=f"^plan.json: {re.escape(words)}"):
        from_json(Plan, document, where="plan.json")


def test_an_unknown_outcome_is_refused():
    with pytest.raises(ConfigError, match="t:1: outcome: "):
        from_json(Measurement, {"outcome": "fine"}, where="t:1")


def test_a_record_that_breaks_its_own_rules_is_refused():
    document = to_json(training_chain(2))
    document["ops"][0]["inputs"] = [99]
    with pytest.raises(Exception, match="fwd0 names value 99"):
        from_json(TrainGraph, document, where="graph.json")


def test_what_a_child_wrote_in_no_encoding_is_still_read():
    assert again(Measurement(Outcome.CRASHED, detail="a\udcffb")).detail == "a?b"
