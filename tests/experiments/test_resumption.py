"""Continued results: facts of every session, and refusals of results that do not belong together."""

import json
import subprocess
from pathlib import Path

import pytest

from experiments.common.facts import format_origin
from experiments.common.repository import name_commit
from experiments.common.resumption import note_session, resume_results

MACHINE = {"kind": "cpu", "silicon": "a chip", "cores": 2, "torch": "2", "processors": 2, "memory_bytes": 100}


def facts(commit: str, silicon: str = "a chip") -> dict[str, object]:
    machine = {**MACHINE, "silicon": silicon}
    return {"machine": machine, "commit": commit, "date": "d", "command": "c", "load_before": 0.0}


def test_results_keep_the_facts_of_their_first_session_and_name_the_later_ones(tmp_path: Path):
    path = tmp_path / "results.json"
    first = resume_results(path, facts("one"), {"runs": []})
    note_session(first, facts("one"))
    path.write_text(json.dumps(first | {"runs": [1]}))
    second = resume_results(path, facts("two"), {"runs": []})
    assert (second["runs"], second["commit"]) == ([1], "one")
    assert "Continued" not in format_origin(second), "nothing was measured in it"
    for commit in ("two", "two", "three", "one"):
        note_session(second, facts(commit))
    assert [session["commit"] for session in second["continued"]] == ["two", "three"]
    assert format_origin(second).endswith("Continued at commit two, three.")
    assert resume_results(path, facts("two"), {"runs": []}, fresh=True) == facts("two") | {"runs": []}


def test_results_of_another_machine_or_of_another_recording_are_not_continued(tmp_path: Path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(resume_results(path, facts("one"), {"recording": "abc", "runs": []})))
    with pytest.raises(SystemExit, match=r"results.json is of another machine: choose another --out"):
        resume_results(path, facts("one", "another chip"), {"recording": "abc"})
    resume_results(path, facts("one", "another chip"), {"recording": "abc"}, is_timed=False)
    with pytest.raises(SystemExit, match=r"its recording is abc, not def; run the command with --fresh"):
        resume_results(path, facts("one"), {"recording": "def"})


def test_a_commit_whose_code_was_changed_says_so_and_one_whose_results_were_changed_does_not(tmp_path: Path):
    for name in ("autotune/x.py", "experiments/benchmarks/a/results/b.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    assert name_commit(tmp_path) == "unknown"
    author = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "x"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    commit = name_commit(tmp_path)
    (tmp_path / "experiments/benchmarks/a/results/b.json").write_text("2")
    assert name_commit(tmp_path) == commit
    (tmp_path / "autotune/x.py").write_text("2")
    assert name_commit(tmp_path) == f"{commit}+changes"
