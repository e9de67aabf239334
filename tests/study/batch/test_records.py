"""Records and reports of a search: what the terminal, the page, `resume` and a night make of it."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.api import launch
from autotune.cli.console import print_rows
from autotune.errors import ConfigError, StudyInterruptedError
from autotune.nightly.config import load_nightly_config
from autotune.records.config import Config
from autotune.records.measurement import Outcome
from autotune.records.run_dir import RunDir, remove_empty_run
from autotune.study.batch.description import SIZE_COLUMNS, describe_estimate, describe_search, size_rows
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.batch.records import (
    BatchSearch,
    MeasuredSize,
    SampleRate,
    SideResult,
    StepSize,
    read_batch_search,
    write_batch_search,
)
from autotune.study.recorded_run import RecordedRun
from autotune.workloads.batch_argument import BatchArgument

ESTIMATE = BatchEstimate("w()", "batch", 8, "2GiB", 2**30, 2**28, 60, 2**30, 20, 2**28, normalizes_over_batch=True)


def side(outcome: Outcome, rate: float | None = None, width: float = 0.1) -> SideResult:
    interval = None if rate is None else SampleRate(rate, rate * (1 - width), rate * (1 + width), "range of 3")
    return SideResult(outcome, 2**28, interval)


SEARCH = BatchSearch(
    "throughput", Config(workload="w", objective="throughput", budget="2GiB").model_dump(mode="json"), "batch", StepSize(8),
    floor_bytes=2**28, budget_bytes=2**30, estimate=ESTIMATE,
    measured=(
        MeasuredSize(StepSize(8), side(Outcome.OK, 100.0), side(Outcome.OK, 95.0)),
        MeasuredSize(StepSize(20), side(Outcome.OK, 150.0), side(Outcome.OK, 150.0)),
        MeasuredSize(StepSize(60), side(Outcome.OUT_OF_MEMORY), side(Outcome.OK, 240.0)),
        MeasuredSize(StepSize(64), None, side(Outcome.OUT_OF_MEMORY)),
        MeasuredSize(StepSize(22), side(Outcome.OVER_BUDGET, 400.0)),
    ),
    chosen=StepSize(60), notes=("training dynamics change",),
)  # fmt: skip


def test_the_best_and_the_largest_are_of_sizes_within_the_budget_alone():
    assert (SEARCH.eager_largest, SEARCH.plan_largest) == (StepSize(20), StepSize(60))
    assert SEARCH.eager_best is not None
    assert SEARCH.plan_best is not None
    assert (SEARCH.eager_best.size, SEARCH.plan_best.size) == (StepSize(20), StepSize(60))


def test_a_largest_size_is_settled_once_the_next_one_was_refused():
    """Eager fits at 20, and not at 22: 21 is open. Plans fit at 60, and not at 64; 61 does not either."""
    assert (SEARCH.eager_is_settled, SEARCH.plan_is_settled) == (False, False)
    refused = side(Outcome.OVER_BUDGET)
    settled = SEARCH.add(MeasuredSize(StepSize(21), refused)).add(MeasuredSize(StepSize(61), None, refused))
    assert (settled.eager_is_settled, settled.plan_is_settled) == (True, True)
    assert any("largest plan at least 60, eager at least 20" in line for line in describe_search(SEARCH))
    assert any("largest plan 60, eager 20" in line for line in describe_search(settled))
    assert replace(SEARCH, unit=4).plan_is_settled, "the workload refuses 61, 62 and 63"


def test_a_plan_stays_where_eager_alone_is_measured_later_at_its_size():
    plan = MeasuredSize(StepSize(8), None, side(Outcome.OK, 95.0), 2**27, "bit-equal to eager", "cgroup", 2.0)
    eager = MeasuredSize(StepSize(8), side(Outcome.OK, 100.0), seconds=1.0)
    assert plan.merge(eager) == replace(plan, eager=eager.eager, seconds=3.0)
    assert eager.merge(plan) == replace(plan, eager=eager.eager, seconds=3.0)


def test_an_earlier_size_stays_the_best_within_the_noise():
    noisy = replace(SEARCH, measured=(
        MeasuredSize(StepSize(8), None, side(Outcome.OK, 100.0)), MeasuredSize(StepSize(9), None, side(Outcome.OK, 110.0)),
    ))  # fmt: skip
    assert noisy.plan_best is not None
    assert noisy.plan_best.size == StepSize(8)


def test_a_rate_of_one_block_has_the_noise_expected_of_its_steps():
    """Two steps of a size that is 2 % faster decide nothing; two of a size that is twice as fast do."""
    rates = [SampleRate.from_seconds(8, [seconds, seconds]) for seconds in (1.0, 0.98, 0.5)]
    measured = tuple(
        MeasuredSize(StepSize(batch), None, SideResult(Outcome.OK, 2**28, rate)) for batch, rate in enumerate(rates, 8)
    )
    assert replace(SEARCH, measured=measured[:2]).plan_best == measured[0]
    assert replace(SEARCH, measured=measured).plan_best == measured[2]


def test_the_table_marks_the_bytes_of_a_plan_that_did_not_run():
    plan = SideResult(Outcome.OVER_BUDGET, 2**28)
    estimates = {8: 2**28, 9: 2**27}
    measured = tuple(MeasuredSize(StepSize(batch), None, plan, nbytes) for batch, nbytes in estimates.items())
    rows = size_rows(replace(SEARCH, measured=measured))
    assert [row[SIZE_COLUMNS.index("plan MiB")] for row in rows] == ["~256.0", "256.0"]


def test_a_record_is_read_back_equal_and_a_damaged_one_is_refused(tmp_path: Path):
    write_batch_search(tmp_path, SEARCH)
    assert read_batch_search(tmp_path) == SEARCH
    assert read_batch_search(tmp_path / "none") is None
    RunDir(tmp_path).batch_search.write_text('{"schema": 1, "objective": ')
    with pytest.raises(ConfigError, match="truncated or not JSON; tune under another --name"):
        read_batch_search(tmp_path)


def test_the_terminal_states_both_sides_and_the_consequences():
    text = "\n".join(describe_search(SEARCH))
    assert "batch=60, chosen for throughput" in text
    assert "plan at least 60, eager at least 20" in text
    assert (
        "plan 240.0 samples/s (216.0 to 264.0) at 60; eager at its best 150.0 samples/s (135.0 to 165.0) at 20" in text
    )
    assert "training dynamics change" in text
    out = StringIO()
    print_rows(size_rows(SEARCH), SIZE_COLUMNS, out)
    lines = out.getvalue().splitlines()
    assert len({line.index("samples/s") for line in lines[:1]}) == 1
    assert [line.split()[0] for line in lines[1:]] == ["8", "20", "22", "60", "64"]
    assert lines[4].endswith("CHOSEN")
    assert lines[5].endswith("out of memory")


def test_the_estimate_states_what_it_leaves_out():
    text = "\n".join(describe_estimate(ESTIMATE))
    assert "up to batch=60 (3.0 times eager's)" in text
    assert "without kernels' workspaces" in text
    assert "batch norm" in text
    assert "no batch size fits" in "\n".join(describe_estimate(replace(ESTIMATE, largest=0)))
    refusing = replace(ESTIMATE, refused="batch=61: 61 is no multiple of 4")
    assert "note    the workload refuses batch=61: 61 is no multiple of 4" in describe_estimate(refusing)


def test_the_report_of_a_run_has_the_sizes(tmp_path: Path):
    from autotune.report.html import render_page

    page = render_page(RecordedRun("run", {"budget": "2GiB"}, (), run_dir=tmp_path))
    assert "Batch sizes" not in page
    write_batch_search(tmp_path, SEARCH)
    page = render_page(RecordedRun("run", {"budget": "2GiB"}, (), run_dir=tmp_path))
    assert "<h2>Batch sizes</h2>" in page
    assert "batch=60, chosen for throughput" in page


def test_an_interrupted_search_is_continued_by_resume_with_its_own_config(tmp_path: Path):
    run_dir = tmp_path / "runs" / "first"
    run_dir.mkdir(parents=True)
    with pytest.raises(ConfigError, match="no run is recorded here"):
        launch.load_run_config(run_dir, {})
    write_batch_search(run_dir, replace(SEARCH, chosen=None))
    remove_empty_run(run_dir)
    config = launch.load_run_config(run_dir, {"time": "3m"})
    assert (config.objective, config.budget, config.time, config.workload) == ("throughput", "2GiB", "3m", "w")
    assert config.runs == str(tmp_path / "runs")


def test_a_report_of_an_interrupted_search_says_how_to_go_on(tmp_path: Path):
    write_batch_search(tmp_path, replace(SEARCH, chosen=None))
    with pytest.raises(ConfigError, match=rf"search for a batch size has not ended, .*: autotune resume {tmp_path}$"):
        RecordedRun.load(tmp_path)


def test_open_kernels_are_chosen_at_a_larger_batch_before_the_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = Config(workload="gpt2", objective="batch", kernels="any", runs=str(tmp_path), plans=str(tmp_path))
    estimate = BatchEstimate("gpt2", "batch", 4, "65%", 1000, None, 50, 900, 12, 400, False)
    raced, asked = list[Config](), list[Config]()

    def choose_kernels(config: Config, *arguments: Any) -> Config:
        raced.append(arguments[-1](config))
        return config.model_copy(update={"kernels": "inductor"})

    def choose_size(config: Config, *_: Any) -> Config:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "estimate_batch_size", lambda config, notify: estimate)
    monkeypatch.setattr("autotune.study.captures.choose_capture", choose_kernels)
    monkeypatch.setattr("autotune.study.batch.choice.choose_batch", choose_size)
    with pytest.raises(StudyInterruptedError):
        launch.start_study(config, "one", lambda event: None)
    assert [each.arguments["batch"] for each in raced] == [9]
    assert [(each.kernels, each.arguments) for each in asked] == [("inductor", {})]


def test_an_estimate_for_open_kernels_measures_the_idle_process_of_eager_s(monkeypatch: pytest.MonkeyPatch):
    surveyed: list[Config] = []

    def survey(config: Config, notify: Any) -> SimpleNamespace:
        surveyed.append(config)
        return SimpleNamespace(floor_bytes=5)

    monkeypatch.setattr(launch, "survey", survey)
    monkeypatch.setattr(
        "autotune.study.batch.estimate.estimate_batch", lambda config, floor: floor(BatchArgument("batch", 4))
    )
    config = Config(workload="gpt2", objective="batch", kernels="any", budget="2GiB")
    assert launch.estimate_batch_size(config) == 5
    assert [(each.kernels, each.objective) for each in surveyed] == [("", "batch")]


def test_ctrl_c_in_a_search_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any) -> Config:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotune.study.batch.choice.choose_batch", interrupt)
    config = Config(workload="w", objective="batch")
    with pytest.raises(StudyInterruptedError, match="before a batch size was measured; nothing is kept"):
        launch.choose_batch_size(config, tmp_path, lambda event: None)
    RunDir(tmp_path).batch_search.touch()
    with pytest.raises(StudyInterruptedError, match=f"continue with: autotune resume {tmp_path}") as error:
        launch.choose_batch_size(config, tmp_path, lambda event: None)
    assert error.value.exit_code == 130


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """Signal that does nothing unless the code under test handles it: its default would end the tests."""
    before = signal.signal(request.param, lambda number, frame: None)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_in_a_search_for_the_batch_size_runs_the_cleanup_and_says_how_to_go_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cleaned: list[int] = []
    handler = signal.getsignal(number)

    def search(*_: Any) -> Config:
        RunDir(tmp_path).batch_search.touch()
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)
        raise AssertionError("the search went on")

    monkeypatch.setattr("autotune.study.batch.choice.choose_batch", search)
    with pytest.raises(StudyInterruptedError, match=f"interrupted; continue with: autotune resume {tmp_path}") as error:
        launch.choose_batch_size(Config(workload="w", objective="batch"), tmp_path, lambda event: None)
    assert (error.value.exit_code, cleaned) == (128 + number, [number])
    assert signal.getsignal(number) is handler


def test_a_signal_while_kernels_are_compared_leaves_no_directory(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def compare(config: Config, run_dir: Path, *_: Any) -> Config:
        run_dir.mkdir(parents=True)
        signal.raise_signal(number)
        raise AssertionError("the comparison went on")

    monkeypatch.setattr("autotune.study.captures.choose_capture", compare)
    config = Config(workload="w", kernels="any", runs=str(tmp_path / "runs"))
    with pytest.raises(StudyInterruptedError, match="before kernels were chosen; nothing is kept") as error:
        launch.start_study(config, "one", lambda event: None)
    assert error.value.exit_code == 128 + number
    assert not (tmp_path / "runs" / "one").exists()


@pytest.mark.parametrize("objective", ["batch", "throughput"])
def test_a_nightly_entry_with_an_open_batch_size_is_refused(tmp_path: Path, objective: str):
    path = tmp_path / "night.yaml"
    path.write_text(f"entries:\n  - workload: gpt2\n    objective: {objective}\n")
    with pytest.raises(ConfigError, match=f"{path}:3: .*{objective} chooses the batch size.*the entry's arguments"):
        load_nightly_config(path)


def test_a_dry_run_prints_the_estimate_and_fails_where_no_size_fits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    from autotune.cli import main as cli
    from autotune.cli.commands import dry_run

    answers = [ESTIMATE, ESTIMATE, replace(ESTIMATE, largest=0)]
    monkeypatch.setattr(dry_run, "estimate_batch_size", lambda config, notify: answers.pop(0))
    words = ["tune", "gpt2", "--objective", "batch", "--budget", "2GiB", "--dry-run"]
    codes = []
    outputs = []
    for arguments in (words, [*words, "--json"], words):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        codes.append(ended.value.code or 0)
        outputs.append(capfd.readouterr())
    assert codes == [0, 0, 4]
    assert "plan    up to batch=60" in outputs[0].out
    assert json.loads(outputs[1].out)["largest"] == 60
    assert "no batch size fits 2GiB by estimate" in outputs[2].err


def test_a_plan_for_throughput_needs_measured_seconds():
    with pytest.raises(
        ConfigError, match="throughput needs measured seconds; run tune, or plan with --objective batch"
    ):
        launch.plan_batch_size(Config(workload="w", objective="throughput"))
