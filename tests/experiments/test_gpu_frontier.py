"""The GPU's frontier: every kind of variant runs, a failure costs one part, and the table says what was measured."""

import fcntl
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.gpu import frontier
from experiments.gpu.summary import write_summary
from tests.support.fake_graphs import FakeRecorder

TINY = {"batch": 2, "tokens": 16, "depth": 1, "width": 32, "vocabulary": 64}


def test_every_variant_is_measured_in_turns_and_a_failed_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "KERNELS", ("",))
    monkeypatch.setattr(frontier, "PEERS", ("checkpoint", "unknown"))
    monkeypatch.setattr(frontier, "ROUNDS", 2)
    monkeypatch.setattr(frontier, "SHARES", (1.0,))
    monkeypatch.setattr(frontier, "WINDOWS", (1, 2))
    saved: list[dict[str, Any]] = []
    session = frontier.Session("gpt2", TINY, torch.device("cpu"), {"ssd": tmp_path})
    frontier.run(session, saved.append, 300.0, FakeRecorder)
    assert len(saved) == 2
    rows = saved[-1]["variants"]
    plans = ["ours aten 1", "ours aten 1 graphs"]
    assert set(rows) == {"eager", "checkpoint", *plans, *(f"ours ssd window {window}" for window in frontier.WINDOWS)}
    assert list(saved[-1]["failures"]) == ["unknown"]
    assert rows["eager"]["time_ratio"] == 1.0
    assert all(row["rounds"] == len(row["round_seconds"]) == 2 for row in rows.values())
    facts = {"device": {"silicon": "made up"}, "torch": "2", "commit": "c", "date": "d"}
    document = {"steps": {"frontier gpt2": {"ok": True, "facts": facts, "data": saved[-1]}}}
    text = write_summary(document, tmp_path / "summary.md")
    assert "| checkpoint |" in text
    assert "In CUDA graphs a step holds" in text
    assert "- unknown: KeyError" in text


def test_no_part_is_prepared_after_the_end() -> None:
    session = frontier.Session("gpt2", TINY, torch.device("cpu"), {})
    session.end = 0.0
    session.prepare("eager", partial(session.add_peer, "eager"))
    assert session.variants == {}
    assert session.failures == {"eager": "not prepared: no time was left"}


def test_a_process_measures_when_no_other_one_prepares(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with frontier.shared_lock(path) as wait_until_alone, path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_UN)
        wait_until_alone()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
