"""Results hold machine, commit, graphs, date and command, for each part that another call measured, and are of today's graphs."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import listing
from experiments.common.result_file import (
    NOT_RECORDED,
    ORIGINS,
    capture_digests,
    find_results,
    find_tables_alone,
    join_digests,
    missing_facts,
    read_origins,
    refuse_other_graph,
    write_result,
)
from tests.experiments.older_results import LACKING, NOT_CAPTURED, OF_ANOTHER_GRAPH, TABLES_ALONE
from tests.experiments.recorded_graphs import (
    RecordedGraph,
    capture_workload,
    find_workload,
    list_digests,
    recorded_graphs,
)
from tests.workloads.zoo.tiny import TINY

ROOT = Path(__file__).parents[2] / "experiments"
QUICK = "benchmarks/rebuild_price/results/gpt2.json"
"""Result whose graph is captured by default; all captures together take minutes."""
FACTS = {"machine": {"silicon": "a chip"}, "commit": "c0ffee", "date": "2026-11-24", "command": "python -m x"}
ORIGIN = {**FACTS, "graphs": {"gpt2": "08ff"}}
FEWEST_DIGITS = 12
"""Digits of the shortest digest in a result: the records of nights have the first ones alone."""


@functools.cache
def read_results() -> dict[str, Any]:
    return {str(path.relative_to(ROOT)): json.loads(path.read_text()) for path in find_results(ROOT)}


GRAPHS = list(recorded_graphs(read_results()))
PLACE = re.compile(r"/(?:data|home|media|mnt|root|srv|Users|work)/")
"""A path that means nothing on another machine."""


def minor_versions(file: str) -> set[str]:
    """Return the minor versions of torch that a result names, which choose the ops of its graphs."""
    document = read_results()[file]
    parts = [document, *document.get(ORIGINS, {}).values()]
    devices = [facts.get(name) for facts in parts for name in ("machine", "device")]
    versions = [device["torch"] for device in devices if isinstance(device, dict) and "torch" in device]
    return {".".join(version.split(".")[:2]) for version in versions}


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(graph, id=f"{graph.file}-{graph.name}", marks=[] if graph.file == QUICK else [pytest.mark.long])
        for graph in GRAPHS
        if graph.recapture
    ],
)
def test_a_result_is_of_the_graph_that_is_captured_today(graph: RecordedGraph):
    if others := minor_versions(graph.file) - {".".join(torch.__version__.split(".")[:2])}:
        pytest.skip(f"captured with torch {', '.join(others)}, and torch {torch.__version__} is installed")
    assert graph.recapture
    is_same = graph.recapture().startswith(graph.digest)
    assert is_same == ((graph.file, graph.name) not in OF_ANOTHER_GRAPH), (
        "captured as another graph: run its command again"
        if not is_same
        else "is of today's graph: remove it from the list"
    )


def test_every_recorded_graph_is_captured_again_but_for_listed_ones():
    assert {(graph.file, graph.name) for graph in GRAPHS if graph.recapture is None} == NOT_CAPTURED, (
        "a new result has `model` and `arguments`, or recorded_graphs.py finds them; a graph that is captured leaves the list"
    )
    assert [(graph.file, graph.name) for graph in GRAPHS if len(graph.digest) < FEWEST_DIGITS] == []
    assert {(graph.file, graph.name) for graph in GRAPHS} >= OF_ANOTHER_GRAPH
    # a graph with compiled regions stands beside the one that it is made from
    assert {graph.file for graph in GRAPHS} == {file for file, result in read_results().items() if list_digests(result)}


@pytest.mark.parametrize(
    "folder",
    [
        "benchmarks/tuned", "benchmarks/landscape", "benchmarks/nights", "benchmarks/repeated_tunes",
        "benchmarks/transfer", "benchmarks/trial_cost", "benchmarks/frontier", "benchmarks/variable_length",
        "claims/dtr", "claims/echo", "claims/monet", "claims/sublinear",
    ],
)  # fmt: skip
def test_the_graphs_of_configs_claims_and_records_without_arguments_are_captured_again(folder: str):
    results = {file: result for file, result in read_results().items() if file.startswith(f"{folder}/")}
    captured = {graph.file for graph in GRAPHS if graph.recapture and graph.file in results}
    assert captured
    assert captured >= {file for file, result in results.items() if "graphs" in result}


@pytest.mark.parametrize(
    ("file", "document", "name", "workload"),
    [
        ("tuned/results/gpt2-ssd.json", {}, "gpt2", ("gpt2", {"batch": 8, "dropout": 0.1})),
        ("tuned/results/gains/lstm-kernels.json", {}, "lstm", ("lstm", {"batch": 32})),
        ("nights/results/nights.json", {}, "mobilenet_v2", ("mobilenet_v2", {"batch": 8, "size": 224})),
        ("nights/results/nights.json", {"command": "nights --config x.yaml"}, "lstm", None),
        ("landscape/results/gains/bert.json", {}, "bert(batch=4)", ("bert", {"batch": 4})),
        ("guards/results/results.json", {"models": {"lstm": {"arguments": {"batch": 8}}}}, "lstm", ("lstm", {"batch": 8})),
        ("offload/results/results.json", {"models": {"resnet18": {}}}, "resnet18", ("resnet18", {"batch": 10})),
        ("new/results/results.json", {}, "package.module:make {'batch': 2}", ("package.module:make", {"batch": 2})),
        ("new/results/results.json", {"model": "gpt2", "arguments": {"batch": 1}}, "any", ("gpt2", {"batch": 1})),
        ("new/results/results.json", {}, "gpt2", None),
        ("offload/results/results.json", {}, "a model that is gone", None),
    ],
)  # fmt: skip
def test_a_workload_is_found_by_the_record_the_name_or_the_command(
    file: str, document: dict[str, Any], name: str, workload: tuple[str, dict[str, Any]] | None
):
    assert find_workload(f"benchmarks/{file}", document, name) == workload


def test_a_graph_of_a_new_result_that_names_no_workload_is_not_captured_again():
    (graph,) = recorded_graphs({"benchmarks/new/results/results.json": {"graphs": {"net": "08ff"}}})
    assert (graph.name, graph.digest, graph.recapture) == ("net", "08ff", None)


def test_graphs_of_all_parts_are_found_and_a_part_without_any_adds_none():
    origins = {"simulated": {"graphs": {"resnet50": "08ff"}}, "measured": {"graphs": NOT_RECORDED}}
    graphs = recorded_graphs({"claims/monet/results/result.json": {ORIGINS: origins}})
    assert [(graph.name, graph.digest) for graph in graphs] == [("resnet50", "08ff")]


def test_results_hold_all_facts_but_for_listed_older_ones():
    lacking = {name: missing for name, document in read_results().items() if (missing := missing_facts(document))}
    assert lacking == LACKING, "a new result is written by write_result; a result that is complete leaves the list"


def test_tables_lie_beside_a_result_with_their_facts_but_for_listed_older_ones():
    assert {str(path.relative_to(ROOT)) for path in find_tables_alone(ROOT)} == TABLES_ALONE, (
        "a new table lies beside a result with its facts; a table that has one leaves the list"
    )


def test_a_table_beside_a_result_is_not_alone(tmp_path: Path):
    for name in ("a/results/points.csv", "a/results/result.json", "b/results/points.csv", "b/points.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert list(find_tables_alone(tmp_path)) == [tmp_path / "b/results/points.csv"]


def test_a_result_without_a_fact_is_not_written(tmp_path: Path):
    path = tmp_path / "results" / "result.json"
    with pytest.raises(ValueError, match=r"result\.json: the result lacks commit"):
        write_result(path, {name: fact for name, fact in FACTS.items() if name != "commit"}, {})
    assert not path.exists()


def test_a_written_result_has_its_graphs_and_lacks_nothing(tmp_path: Path):
    path = tmp_path / "results" / "result.json"
    graphs = capture_digests({"small": ("lstm", TINY["lstm"])})
    write_result(path, FACTS | {"ratio": 0.9}, graphs)
    document = json.loads(path.read_text())
    assert document["graphs"] == {"small": capture_workload("lstm", json.dumps(TINY["lstm"]))}
    assert (document["ratio"], missing_facts(document)) == (0.9, ())
    assert list(find_results(tmp_path)) == [path]


def test_plans_beside_a_result_are_no_result(tmp_path: Path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.plans.json").write_text("{}")
    assert list(find_results(tmp_path)) == []


def test_the_facts_at_the_top_of_an_older_result_are_those_of_all_its_parts():
    origins = read_origins({**FACTS, "graphs": {"gpt2": "08ff"}}, {"gpt2, windows": "gpt2", "lstm, windows": "lstm"})
    assert origins == {"gpt2, windows": ORIGIN, "lstm, windows": {**FACTS, "graphs": NOT_RECORDED}}


def test_a_part_keeps_its_own_facts_beside_those_of_a_later_call():
    later = {**FACTS, "commit": "later", "graphs": {"gpt2": "08ff"}, ORIGINS: {"gpt2": ORIGIN}}
    assert read_origins(later, {"gpt2": "gpt2"}) == {"gpt2": ORIGIN}


def test_an_older_result_lacks_what_one_of_its_parts_lacks_after_another_was_added():
    origins = read_origins({"device": {"silicon": "x"}, "commands": ["y"]}, {"gpt2": "gpt2"})
    assert missing_facts({**ORIGIN, ORIGINS: origins | {"lstm": ORIGIN}}) == ("commit", "graphs", "date")
    assert join_digests(origins | {"lstm": {**FACTS, "graphs": {"lstm": "81d4"}}}) == {"lstm": "81d4"}


def test_a_stored_part_of_another_graph_is_refused_with_file_digests_and_next_step():
    origins = {"gpt2, windows": ORIGIN, "gpt2, media": {**FACTS, "graphs": NOT_RECORDED}}
    for graphs in ({"gpt2": "08ff"}, {"lstm": "81d4"}, {}):
        refuse_other_graph(Path("x.json"), origins, graphs, "take --fresh")
    message = "x.json: gpt2, windows is of the graph 08ff of gpt2, which is captured as 1b3e now; take --fresh"
    with pytest.raises(SystemExit) as ended:
        refuse_other_graph(Path("x.json"), origins, {"gpt2": "1b3e"}, "take --fresh")
    assert ended.value.code == message


def test_the_list_shows_the_call_that_wrote_a_result_last_whatever_its_parts_lack(tmp_path: Path):
    path = tmp_path / "result.json"
    older = dict.fromkeys(ORIGIN, NOT_RECORDED)
    path.write_text(json.dumps({**ORIGIN, "commit": "last", ORIGINS: {"gpt2": ORIGIN, "lstm": older}}))
    assert listing.read_facts(path)["commit"] == "last"
    path.write_text(json.dumps({ORIGINS: {"simulated": ORIGIN, "measured": {**ORIGIN, "date": "2026-11-01"}}}))
    assert listing.read_facts(path)["date"] == "2026-11-24"


def test_no_result_names_a_place_of_the_machine_that_measured_it() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in find_results(ROOT)}
    assert texts
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if PLACE.search(text)] == []
