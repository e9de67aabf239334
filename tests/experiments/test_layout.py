"""The script runs on a small model and a folder like minimalloc's, and tells what it found."""

import json
import sys
from pathlib import Path

import pytest

from experiments.benchmarks.layout import __main__ as run


def test_an_instances_capacity_is_in_its_files_name(tmp_path):
    (tmp_path / "A.12.csv").write_text("id,lower,upper,size\n0,0,4,7\n1,2,5,5\n")
    ((name, buffers, capacity),) = run.read_instances(tmp_path)
    assert (name, len(buffers), capacity) == ("A", 2, 12)
    row = run.time_layout("minimalloc", name, buffers, capacity, work=10**7, repeats=2)
    assert (row.layout_bytes, row.max_live_bytes, row.gap) == (12, 12, 0.0)


def test_instances_stay_in_the_results_of_a_call_without_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "A.9.csv").write_text("id,lower,upper,size\n0,0,5,6\n1,6,7,4\n2,6,9,5\n3,7,10,1\n")
    command = [run.__file__, "--models", "--anyway", "--out", str(tmp_path / "out")]
    documents = []
    for arguments in ([*command, "--minimalloc", str(tmp_path)], command):
        monkeypatch.setattr(sys, "argv", arguments)
        run.main()
        documents.append(json.loads((tmp_path / "out/results.json").read_text()))
    assert [row["layout_bytes"] for row in documents[0]["rows"]] == [9]
    assert documents[0]["rows"] == documents[1]["rows"]
    assert documents[0]["origins"]["minimalloc"] == documents[1]["origins"]["minimalloc"]
    assert str(tmp_path) not in (tmp_path / "out/summary.md").read_text()
