"""`autotune nightly` from its command line, with a real study on a harness that measures what the simulator predicts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest

from autotune.cli import main as cli
from autotune.cli.commands.nightly import NIGHT_VARIABLE, _start_entry
from autotune.fleet.far_end import device_lock
from autotune.ir.plan import Plan
from autotune.measure.device.conditions import MachineConditions, collect_machine_conditions
from autotune.nightly.conditions import collect_conditions
from autotune.nightly.config import load_nightly_config
from autotune.nightly.history import EntryDirectory, NightRecord, NightVerdict
from autotune.nightly.parallel import EntryTime
from autotune.nightly.results import NightResults, worst_error
from autotune.records import plan_file as planfile
from autotune.records.measurement import Measurement
from autotune.study.verdicts.statistics import block_means
from tests.system.test_cli import DEVICE, FakeHarness, FakeTracker, keep_in_memory

Run = Callable[..., tuple[int, str, str]]

NIGHT = """
time: 1h
entries:
  - workload: chain
    budget: 60%
    trials: 4
    planners: {order: [traced], update: [at_end], recompute: [greedy], reorder: [keep]}
"""


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of one entry, on a quiet machine, whose nights begin on other days."""
    days = iter(range(100))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.study.trial_store._storage", keep_in_memory)
    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)  # windows take time of CP-SAT
    monkeypatch.setattr("autotune.measure.harness.Harness", FakeHarness)
    monkeypatch.setattr("autotune.report.mlflow_log.Tracker", Tracker)
    monkeypatch.setattr(Tracker, "tags", [])
    monkeypatch.setattr("autotune.measure.device.conditions.measure_busy_share", lambda: 0.0)
    monkeypatch.setattr("autotune.cli.commands.nightly.name_night", lambda: f"2026-11-2{next(days)}")
    (tmp_path / "night.yaml").write_text(NIGHT)
    return Path("runs/nightly")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """(exit code, standard output, standard error) of a command, run in this process."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


class Slow(FakeHarness):
    """Plans take a fifth longer than they did."""

    def measure(self, plan: Plan, *, budget_bytes: int | None = None, beat: float | None = None) -> Measurement:
        measurement = super().measure(plan, budget_bytes=budget_bytes, beat=beat)
        return replace(measurement, step_seconds=tuple(1.2 * seconds for seconds in measurement.step_seconds))


class Tracker(FakeTracker):
    """Keeps its tags."""

    tags: ClassVar[list[dict[str, str]]] = []

    def tag(self, tags: dict[str, str]) -> None:
        self.tags.append(tags)


def results(home: Path) -> list[Path]:
    return sorted((home / "nights").iterdir())


def test_three_nights_find_keep_and_miss_a_champion(night: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    code, out, err = run("nightly", "night.yaml")
    assert code == 0, err
    assert out.splitlines()[0].split()[:2] == ["entry", "verdict"]
    assert out.splitlines()[1].split()[:2] == ["chain", "new"]
    champion = planfile.read(night / "chain" / "champion.json")
    assert champion.settings["order"]
    assert run("nightly", "night.yaml")[0] == 0
    seeded = (night / "chain" / "2026-11-21_chain" / "trials.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in seeded]
    assert kinds[:3] == ["baseline", "smallest", "seed"]
    assert json.loads(seeded[2])["settings"] == champion.settings
    monkeypatch.setattr("autotune.measure.harness.Harness", Slow)
    code, out, err = run("nightly", "night.yaml", "--json")
    assert code == 3
    assert err.splitlines()[-1].startswith("error: night 2026-11-22: regression of chain (")
    document = json.loads(out)
    assert (document["exit_code"], document["entries"][0]["verdict"]) == (3, "regression")
    assert [tags["autotune.nightly.verdict"] for tags in Tracker.tags] == ["new", "same", "regression"]
    assert [path.name for path in results(night)] == ["2026-11-20", "2026-11-21", "2026-11-22"]
    assert ElementTree.parse(results(night)[-1] / "junit.xml").getroot().get("failures") == "1"


def test_resume_of_a_finished_night_runs_nothing_and_tells_it_again(night: Path, run: Run):
    before = run("nightly", "night.yaml")[1]
    history = (night / "chain" / "history.jsonl").read_bytes()
    code, out, err = run("nightly", "night.yaml", "--resume")
    assert "is complete: every entry has a result; start a new night without --resume" in err
    assert (code, out) == (0, before)
    assert (night / "chain" / "history.jsonl").read_bytes() == history


def test_resume_of_one_entry_keeps_the_results_of_the_others(night: Path, run: Run):
    late = NIGHT.partition("entries:\n")[2].replace("workload: chain", "workload: chain\n    name: late")
    Path("night.yaml").write_text(NIGHT + late)
    table = night / "nights" / "2026-11-19" / "nightly.json"
    for directory in (table.parent, night / "chain"):
        directory.mkdir(parents=True)
    table.write_text("{}")
    EntryDirectory(night / "chain").record(NightRecord("2026-11-19", "chain", NightVerdict.REGRESSION, started=1.0))
    code, _, err = run("nightly", "night.yaml", "--resume", "--only", "chain")
    assert (code, json.loads(table.read_text())["left"]) == (3, ["late"])
    assert "night 2026-11-19: chain has a result" in err
    code, _, err = run("nightly", "night.yaml", "--resume", "--only", "late")
    assert code == 3, err
    verdicts = {entry["entry"]: entry["verdict"] for entry in json.loads(table.read_text())["entries"]}
    assert verdicts == {"chain": "regression", "late": "new"}


def test_resume_of_one_entry_ends_well_although_others_are_left(night: Path, run: Run):
    late = NIGHT.partition("entries:\n")[2].replace("workload: chain", "workload: chain\n    name: late")
    Path("night.yaml").write_text(NIGHT + late)
    table = night / "nights" / "2026-11-19" / "nightly.json"
    table.parent.mkdir(parents=True)
    table.write_text("{}")
    code, _, err = run("nightly", "night.yaml", "--resume", "--only", "chain")
    assert code == 0, err
    assert json.loads(table.read_text())["left"] == ["late"]


def test_the_command_that_goes_on_has_the_options_of_the_night_and_is_quoted():
    results = NightResults("n", "my night.yaml", (), ("chain@pipe",), ("--fleet", "my fleet.yaml", "--on", "pipe"))
    command = "autotune nightly 'my night.yaml' --fleet 'my fleet.yaml' --on pipe --resume"
    assert results.resume_command == command
    assert str(worst_error(results)).endswith(f"go on with: {command}")


def test_the_champion_s_file_leads_to_the_records_of_its_search(night: Path, run: Run):
    assert run("nightly", "night.yaml")[0] == 0
    path = night / "chain" / "champion.json"
    graph, costs = planfile.read_records(path, planfile.read(path))
    assert costs.matches(graph)


def test_resume_without_a_night_is_2_and_a_bad_config_names_its_line(night: Path, run: Run):
    code, out, err = run("nightly", "night.yaml", "--resume")
    assert (code, out) == (2, "")
    assert "no night in runs/nightly/nights/; begin one without --resume" in err
    Path("night.yaml").write_text(NIGHT + "    shaer: 2\n")
    code, out, err = run("nightly", "night.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("error: night.yaml:8: unknown key 'shaer' in entries; ")
    assert not night.exists()


def test_a_sample_is_a_block_of_the_harness():
    from autotune.measure.messages import BLOCK_STEPS

    assert block_means([1.0] * BLOCK_STEPS + [2.0] * BLOCK_STEPS) == [1.0, 2.0]


def test_versions_are_those_that_python_imports_and_a_broken_installation_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for place, version in (("first", "2.0"), ("second", "1.0")):
        (tmp_path / place / f"thing-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: Thing\nVersion: {version}\n"
        (tmp_path / place / f"thing-{version}.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "first" / "broken-1.0.dist-info").mkdir()  # pip was interrupted
    for place in ("second", "first"):
        monkeypatch.syspath_prepend(tmp_path / place)
    assert collect_machine_conditions().environment["thing"] == "2.0"


def test_conditions_hold_what_a_cause_is_told_by():
    machine = replace(collect_machine_conditions(), busy=0.25)
    conditions = collect_conditions(machine, DEVICE, "0123456789abcdef", baseline_seconds=0.5)
    assert {"commit", "uncommitted", "autotune", "graph"} == set(conditions.code)
    assert {"kernel", "python", "driver", "torch", "numpy"} <= set(conditions.environment)
    assert conditions.device == {"silicon": DEVICE.silicon, "memory": str(DEVICE.memory_bytes), "cores": "2"}
    with_threads = replace(DEVICE, environment={"OMP_WAIT_POLICY": "PASSIVE"})
    recorded = collect_conditions(machine, with_threads, "", baseline_seconds=0.5)
    assert recorded.threads == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert (conditions.busy, conditions.baseline_seconds, conditions.code["graph"]) == (0.25, 0.5, "0123456789ab")


@pytest.mark.usefixtures("night")
def test_the_process_of_an_entry_imports_nothing_from_the_current_directory(monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **options: commands.append(command))
    path = Path("night.yaml")
    options = load_nightly_config(path)
    _start_entry(path, options, "2026-11-20", None, None)(options.entries[0], EntryTime(60.0, 60.0))
    assert [command[1:4] for command in commands] == [["-P", "-m", "autotune"]]


@pytest.mark.parametrize("is_in_a_process", [True, False])
def test_an_entry_on_this_machine_beside_those_of_a_fleet_has_the_machine_to_itself(
    night: Path, run: Run, monkeypatch: pytest.MonkeyPatch, is_in_a_process: bool
):
    in_use: list[bool] = []

    def collect() -> MachineConditions:
        in_use.append(device_lock.is_in_use("cpu"))
        return collect_machine_conditions()

    monkeypatch.setattr(device_lock, "LOCK_DIR", Path("locks").resolve())
    monkeypatch.setattr("autotune.fleet.local.collect_machine_conditions", collect)
    monkeypatch.setattr("autotune.cli.commands.nightly.end_with_parent", lambda parent: None)
    if is_in_a_process:
        monkeypatch.setenv(NIGHT_VARIABLE, "2026-11-20 600 600 1")
    code, _, err = run("nightly", "night.yaml", "--only", "chain")
    assert code == 0, err
    assert in_use == [is_in_a_process]
    assert not device_lock.is_in_use("cpu")
