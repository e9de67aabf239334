"""The GPU's frontier: every kind of variant runs, a failure costs one part, and the table says what was measured."""

import fcntl
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.gpu import frontier
from experiments.gpu.summary import write_summary
from tests.support.fake_graphs import FakeRecorder

TINY = {"batch": 2, "tokens": 16, "depth": 1, "width": 32, "vocabulary": 64}
FACTS = {"device": {"silicon": "made up"}, "torch": "2", "commit": "c", "date": "d"}


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
    assert all(row["rounds"] == 2 for row in rows.values())
    measured = [block["variant"] for block in saved[-1]["blocks"]]
    assert all(measured.count(name) == 2 for name in rows if name != "eager")
    document = {"steps": {"frontier gpt2": {"ok": True, "facts": FACTS, "data": saved[-1]}}}
    text = write_summary(document, tmp_path / "summary.md")
    assert "| checkpoint |" in text
    assert "In CUDA graphs a step holds" in text
    assert "- unknown: KeyError" in text


def session_with(*names: str, ran: list[str] | None = None) -> frontier.Session:
    """Return a session of made-up variants whose steps add their names to a list."""
    session = frontier.Session("gpt2", TINY, torch.device("cpu"), {})
    ran = [] if ran is None else ran
    for name in names:
        session.variants[name] = frontier.Variant(partial(ran.append, name), lambda: [torch.zeros(1)], lambda: None)
    return session


def test_each_round_has_another_order_with_eager_beside_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "ROUNDS", 2)
    ran: list[str] = []
    saved: list[dict[str, Any]] = []
    session_with("eager", *"abcde", ran=ran).measure(saved.append, 300.0)
    blocks = saved[-1]["blocks"]
    steps = [block["variant"] for block in blocks for _ in range(1 + frontier.STEPS)]
    assert ran[-len(steps) :] == steps
    rounds = [[block["variant"] for block in blocks if block["round"] == number] for number in range(2)]
    assert rounds[0] != rounds[1]
    for order in rounds:
        assert sorted(name for name in order if name != "eager") == list("abcde")
        assert order[0] == order[-1] == "eager"
        assert all("eager" in order[at - 1 : at + 2] for at in range(1, len(order) - 1))


def test_a_machine_that_slows_down_steadily_favours_no_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = itertools.count(100)  # the tenth variant would seem a tenth slower beside the first block of its round
    monkeypatch.setattr(frontier, "time_block", lambda variant, device: next(pace) / 100)
    saved: list[dict[str, Any]] = []
    session_with("eager", *"abcdefghij").measure(saved.append, 300.0)
    rows = saved[-1]["variants"]
    assert all(row["rounds"] == frontier.ROUNDS for row in rows.values())
    assert all(abs(row["time_ratio"] - 1) < 0.006 for row in rows.values())


def test_without_eager_variants_are_timed_but_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "ROUNDS", 1)
    saved: list[dict[str, Any]] = []
    session_with("a", "b").measure(saved.append, 300.0)
    assert {block["variant"] for block in saved[-1]["blocks"]} == {"a", "b"}
    assert all("seconds" in row and "time_ratio" not in row for row in saved[-1]["variants"].values())


def test_a_frontier_that_failed_after_some_rounds_has_a_table_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "ROUNDS", 1)
    saved: list[dict[str, Any]] = []
    session_with("eager", "a").measure(saved.append, 300.0)
    steps = {
        "tests": {"ok": False, "facts": FACTS, "error": "RuntimeError: no kernel image"},
        "frontier gpt2": {"ok": False, "facts": FACTS, "data": {"exit": 124, **saved[-1]}},
    }
    text = write_summary({"steps": steps}, tmp_path / "summary.md")
    assert "| a |" in text
    assert "The command failed with exit code 124." in text


def test_older_results_without_blocks_have_the_committed_tables(tmp_path: Path) -> None:
    results = Path(frontier.__file__).parent / "results"
    document = json.loads((results / "gpu.json").read_text())
    assert write_summary(document, tmp_path / "summary.md") == (results / "summary.md").read_text()


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
