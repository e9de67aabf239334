"""A night's config: what it may say, and where it is wrong."""

import inspect
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.nightly.config import load_nightly_config
from autotune.records.config import Config, dump_config, load_config

COMMITTED = Path(__file__).parents[2] / "configs" / "nightly.yaml"


def test_every_entry_of_the_project_names_a_workload_that_takes_its_arguments():
    from autotune.workloads.zoo import ZOO

    night = load_nightly_config(COMMITTED)
    assert len(night.entries) >= 2
    for entry in night.entries:
        inspect.signature(ZOO[entry.workload]).bind(**entry.arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "entries:\n  - workload: a\n    bugdet: 65%\n",
            "night.yaml:3: unknown key 'bugdet' in entries; did you mean 'budget'?",
        ),
        (
            "entries:\n  - workload: a\n  - workload: b\n    planners:\n      ordre: [traced]\n",
            "night.yaml:5: unknown key 'ordre' in planners; known: order, ",
        ),
        (
            "entries:\n  - workload: a\n    planners: {order: [tarced]}\n",
            "night.yaml:3: entries.0.planners.order: no planner 'tarced'",
        ),
        (
            "entries:\n  - workload: a\n    objective: pareto\n",
            "night.yaml:3: entries.0.objective: 'pareto' searches many plans, and an entry of a night keeps one champion; "
            "write time here, or search the front with autotune tune --objective pareto",
        ),
        ("entires: []\n", "night.yaml:1: unknown key 'entires'; known: entries, time, directory, slower, gain"),
        ("entries: []\n", "night.yaml:1: entries: list should have at least 1 item"),
        ("entries:\n  - budget: 65%\n", "night.yaml:2: no workload in entries; write a zoo name"),
        ("time: long\nentries:\n  - workload: a\n", "night.yaml:1: time: cannot read 'long' as a time"),
        ("entries:\n  - workload: a\n    budget: 9\n", "night.yaml:3: entries.0.budget: cannot read '9' as a budget"),
        ("entries:\n  - workload: a\n    share: 0\n", "night.yaml:3: entries.0.share: input should be greater than 0"),
        ("slower: 3%\nentries:\n  - workload: a\n", "night.yaml:1: slower: input should be a valid number (got '3%')"),
        ("entries:\n  - workload: a\n  - workload: a\n", "night.yaml:3: two entries are called 'a'"),
        (
            "entries:\n  - workload: a\n    name: ../b\n",
            "night.yaml:3: name '../b' is a path or reserved; give a plain name",
        ),
        (
            "entries:\n  - workload: a\n    name: nights\n",
            "night.yaml:3: name 'nights' is a path or reserved; give a plain name",
        ),
    ],
)
def test_a_fault_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str):
    monkeypatch.chdir(tmp_path)
    Path("night.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_nightly_config(Path("night.yaml"))
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_a_search_of_an_entry_is_a_tune_config_that_can_be_read_back(tmp_path: Path):
    entry = load_nightly_config(COMMITTED).entries[0]
    config = entry.search_config(90.4, Path("there"), Path("champion.json"))
    assert type(config) is Config
    assert (config.time_seconds, config.plans, config.seed_from) == (90, "there", "champion.json")
    assert (config.workload, config.arguments, config.budget) == (entry.workload, entry.arguments, entry.budget)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "config.yaml")) == config


def test_an_entry_is_called_by_its_name_or_its_workload(tmp_path: Path):
    path = tmp_path / "night.yaml"
    path.write_text("entries:\n  - workload: my/file.py:make\n  - {workload: gpt2, name: small}\n")
    assert [entry.key for entry in load_nightly_config(path).entries] == ["my-file-py-make", "small"]


def test_the_seed_of_a_search_follows_from_the_entrys_and_the_name_of_the_night():
    entry = load_nightly_config(COMMITTED).entries[0]

    def seed(of_entry: int, night: str) -> int:
        changed = entry.model_copy(update={"seed": of_entry})
        return changed.search_config(90.0, Path("there"), night=night).seed

    first, second = "2026-11-20_020000", "2026-11-21_020000"
    assert seed(0, first) == seed(0, first), "a night that is resumed"
    assert len({seed(0, first), seed(1, first), seed(0, second)}) == 3
    assert seed(2**31 - 1, first) < 2**31
