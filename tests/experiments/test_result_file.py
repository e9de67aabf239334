"""Results hold machine, commit, graphs, date and command, and are of the graphs that are captured today."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.capture.tracer import capture
from autotune.workloads.factory import load_workload
from autotune.workloads.memory_format import in_format
from autotune.workloads.workload import Workload
from experiments.benchmarks.frontier.models import workload_reference
from experiments.benchmarks.variable_length import __main__ as variable_length
from experiments.common.result_file import capture_digests, find_results, missing_facts, write_result
from tests.experiments.older_results import LACKING, OF_ANOTHER_GRAPH
from tests.workloads.zoo.tiny import TINY

ROOT = Path(__file__).parents[2] / "experiments"
QUICK = "benchmarks/rebuild_price/results/gpt2.json"
"""Result whose graph is captured by default; all captures together take minutes."""
FACTS = {"machine": {"silicon": "a chip"}, "commit": "c0ffee", "date": "2026-11-24", "command": "python -m x"}


def read_results() -> dict[str, Any]:
    return {str(path.relative_to(ROOT)): json.loads(path.read_text()) for path in find_results(ROOT)}


def recorded_graphs() -> Iterator[tuple[str, str, dict[str, Any], str, str]]:
    """Yield file, workload, arguments, memory format and digest of every recorded graph that can be captured again."""
    for name, document in read_results().items():
        if "arguments" in document and isinstance(document.get("model"), str):
            digests = dict(document.get("graphs", {}))
            if "digest" in document.get("graph", {}):
                digests["graph"] = document["graph"]["digest"]
            if "ours aten" in document.get("captures", {}):
                digests["graph"] = document["captures"]["ours aten"]["digest"]
            formats = {
                digest: "channels_last" if "channels_last" in key else document.get("memory_format", "")
                for key, digest in digests.items()
                if "inductor" not in key
            }
            for digest, memory_format in formats.items():
                yield name, document["model"], document["arguments"], memory_format, digest
        elif name.startswith("benchmarks/no_fit"):
            yield name, "resnet18", {"batch": 10, "size": 224}, "", document["best"]["graph_digest"]
        elif name.startswith("benchmarks/variable_length"):
            yield name, "variable_length", document["sizes"], "", document["plan"]["graph"]


@functools.cache
def todays_digest(model: str, arguments: str, memory_format: str) -> str:
    with in_format(make_workload(model, json.loads(arguments)), memory_format) as workload:
        return capture(workload, model).graph.digest


def make_workload(model: str, arguments: dict[str, Any]) -> Workload:
    if model == "variable_length":
        return variable_length.make_workload(arguments)
    return load_workload(workload_reference(model), arguments)


def minor_versions(file: str) -> set[str]:
    """Return the minor versions of torch that a result names, which choose the ops of its graphs."""
    document = json.loads((ROOT / file).read_text())
    devices = [document.get(name) for name in ("machine", "device")]
    versions = [device["torch"] for device in devices if isinstance(device, dict) and "torch" in device]
    return {".".join(version.split(".")[:2]) for version in versions}


@pytest.mark.parametrize(
    ("file", "model", "arguments", "memory_format", "digest"),
    [
        pytest.param(
            *row,
            id="-".join(filter(None, (row[0], row[1], row[3]))),
            marks=[] if row[0] == QUICK else [pytest.mark.long],
        )
        for row in recorded_graphs()
    ],
)
def test_a_result_is_of_the_graph_that_is_captured_today(
    file: str, model: str, arguments: dict[str, Any], memory_format: str, digest: str
):
    if others := minor_versions(file) - {".".join(torch.__version__.split(".")[:2])}:
        pytest.skip(f"captured with torch {', '.join(others)}, and torch {torch.__version__} is installed")
    is_same = todays_digest(model, json.dumps(arguments), memory_format) == digest
    assert is_same == (file not in OF_ANOTHER_GRAPH), (
        "captured as another graph: run its command again"
        if not is_same
        else "is of today's graph: remove it from the list"
    )


def test_results_hold_all_facts_but_for_listed_older_ones():
    lacking = {name: missing for name, document in read_results().items() if (missing := missing_facts(document))}
    assert lacking == LACKING, "a new result is written by write_result; a result that is complete leaves the list"


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
    assert document["graphs"] == {"small": todays_digest("lstm", json.dumps(TINY["lstm"]), "")}
    assert (document["ratio"], missing_facts(document)) == (0.9, ())
    assert list(find_results(tmp_path)) == [path]


def test_plans_beside_a_result_are_no_result(tmp_path: Path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.plans.json").write_text("{}")
    assert list(find_results(tmp_path)) == []
