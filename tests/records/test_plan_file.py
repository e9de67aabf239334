import dataclasses
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import ConfigError, PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph_summary import summarize_graph
from autotune.ir.plan import Plan, Swap
from autotune.predict.simulate import Estimate
from autotune.records import plan_file as planfile
from autotune.records.device import Device
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile
from autotune.records.run_dir import RunDir
from autotune.report.plan_text import describe_plan
from autotune.testing.graphs import training_chain
from autotune.workloads.reference import WorkloadRef

FILE = PlanFile(
    workload=WorkloadRef("resnet18", {"batch": 10, "dropout": 0.1, "sizes": [1, 2]}),
    graph_digest="abc",
    budget="65%",
    budget_bytes=1000,
    floor_bytes=300,
    settings={"order": {"planner": "traced"}},
    plan=Plan((0, 1, 0), (Swap(0, 1),), 2, "ssd"),
    estimate=Estimate(20, "op1", 16, 3.0, 1.0, 0, 0.0, 20, 2.0),
    device=Device("cpu", "chip", 2**34, 2, "2.13.0"),
    measurement=Measurement(Outcome.OK, peak_bytes=1020, step_seconds=(2.0, 4.0)),
    summary=summarize_graph(training_chain(2)),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plans" / "best.json"
    planfile.write(path, FILE)
    return path


def test_a_run_is_referred_to_from_where_a_link_leads(tmp_path: Path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "plans").symlink_to(tmp_path / "elsewhere" / "deep")
    place = planfile.refer_to_run(tmp_path / "runs" / "first", tmp_path / "plans")
    assert (tmp_path / "plans" / place).samefile(tmp_path / "runs" / "first")


def edited(path: Path, change: dict[str, Any]) -> Path:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | change))
    return path


def test_a_plan_file_comes_back_equal(path: Path):
    assert planfile.read(path) == FILE
    assert [entry.name for entry in path.parent.iterdir()] == ["best.json"]


def test_a_plan_of_a_version_without_the_gate_is_read_as_not_verified(path: Path):
    document = json.loads(path.read_text())
    del document["verified"], document["measurement"]["verified"]
    path.write_text(json.dumps(document))
    assert planfile.read(path).verified == "not verified"
    assert "results    not verified" in describe_plan(planfile.read(path))


def test_a_plan_is_described_with_how_its_results_were_compared():
    file = dataclasses.replace(FILE, verified="bit-equal to eager; compared at batch 4")
    assert "results    bit-equal to eager; compared at batch 4" in describe_plan(file)


def test_a_workload_is_named_with_its_arguments():
    assert str(FILE.workload) == "resnet18(batch=10, dropout=0.1, sizes=[1, 2])"


def test_a_file_truncated_anywhere_is_refused_in_one_line(path: Path):
    whole = path.read_text().rstrip()
    for end in (*range(0, len(whole), 17), len(whole) - 1):
        path.write_text(whole[:end])
        with pytest.raises(ConfigError, match=r"best.json: not a plan file: truncated or not JSON"):
            planfile.read(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"PK\x03\x04", b"\x80\x04\x95pickle"])
def test_a_file_that_is_no_text_is_refused(path: Path, content: bytes):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a plan file"):
        planfile.read(path)


@pytest.mark.parametrize("document", ["[]", "3", "null", '"plan"', "{}"])
def test_json_that_is_no_plan_is_refused(path: Path, document: str):
    path.write_text(document)
    with pytest.raises(ConfigError, match=r"best.json: plan schema"):
        planfile.read(path)


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_a_plan_of_another_schema_says_which_one_is_read(path: Path, schema: object):
    with pytest.raises(ConfigError, match=r"this version reads 1; make one with autotune tune"):
        planfile.read(edited(path, {"schema": schema}))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"budget_bytes": "1000"}, "budget_bytes"),
        ({"plan": {"order": [0, "x"]}}, r"plan\.order\.1"),
        ({"plan": {"order": [0], "offload": [{"value": 1}]}}, r"plan\.offload\.0\.gap: missing"),
        ({"measurement": {"outcome": "great"}}, r"measurement\.outcome"),
        ({"device": "laptop"}, "device"),
        ({"notes": "mine"}, "notes: unknown key"),
        ({"settings": {"order": "traced"}}, r"settings\.order"),
    ],
)
def test_a_hand_edited_plan_is_refused_at_the_place_that_is_wrong(path: Path, change: dict[str, Any], place: str):
    with pytest.raises(ConfigError, match=f"best.json: {place}"):
        planfile.read(edited(path, change))


@pytest.mark.parametrize("order", [[0, 1, 999], [0, 1, -1], [1, 0]])
def test_a_plan_that_is_none_of_its_graph_is_refused_before_anything_is_drawn_of_it(path: Path, order: list[int]):
    graph = training_chain(2)
    records = RunDir(path.parent)
    records.graph.write_text(json.dumps(to_json(graph)))
    records.costs.write_text(json.dumps(to_json(Costs.unit(graph))))
    plan = {**to_json(Plan.traced(graph)), "order": order}
    file = planfile.read(edited(path, {"graph_digest": graph.digest, "plan": plan}))
    with pytest.raises(PlanError, match=r"best\.json: .*; make the plan again with autotune tune"):
        planfile.read_records(path, file)


def test_a_plan_whose_offload_has_no_room_between_the_layers_is_one_of_another_graph():
    graph = training_chain(8)
    first = graph.ops[0].outputs[0]  # read again at the end of the backward pass
    plan = dataclasses.replace(Plan.traced(graph), offload=(Swap(first, 1),), store="ssd")
    file = dataclasses.replace(FILE, graph_digest=graph.digest, plan=plan)
    surveyed: Any = SimpleNamespace(graph=graph, device=FILE.device)
    planfile.match_plan(Path("p.json"), file, surveyed)
    surveyed.graph = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, layer="") for op in graph.ops))
    assert surveyed.graph.digest == graph.digest
    with pytest.raises(PlanError, match=r"p\.json: made for another graph, whose layers differ: .*; tune again"):
        planfile.match_plan(Path("p.json"), file, surveyed)


def test_a_damaged_graph_is_no_record(path: Path):
    graph = to_json(training_chain(2))
    RunDir(path.parent).graph.write_text(json.dumps({**graph, "inputs": [10**6]}))
    assert planfile.find_records(path, planfile.read(path)) == (None, None)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_plan_that_is_not_there_says_how_to_make_one(path: Path, name: str):
    with pytest.raises(ConfigError, match=r"cannot read the plan .*make one with autotune tune"):
        planfile.read(path.parent / name)


def test_a_run_in_the_place_of_a_plan_names_its_plan(tmp_path: Path):
    planfile.write(RunDir(tmp_path).plan, FILE)
    with pytest.raises(ConfigError, match=r"a run, not a plan file; name its plan: .*plan\.json"):
        planfile.read(tmp_path)


@pytest.mark.parametrize(("owner", "step"), [(os, "fsync"), (Path, "replace")])
def test_a_full_disk_leaves_the_old_plan_and_no_draft(
    path: Path, owner: Any, step: str, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(ConfigError, match=r"best.json: cannot write the plan .No space left on device."):
        planfile.write(path, dataclasses.replace(FILE, budget="1GiB"))
    monkeypatch.undo()
    assert planfile.read(path) == FILE
    assert [entry.name for entry in path.parent.iterdir()] == ["best.json"]


def test_a_plan_that_cannot_be_placed_is_refused_in_one_line(path: Path):
    with pytest.raises(ConfigError, match="cannot write the plan"):
        planfile.write(path / "below_a_file.json", FILE)
    with pytest.raises(ConfigError, match="cannot write the plan"):
        planfile.write(path.parent, FILE)
    assert planfile.read(path) == FILE
