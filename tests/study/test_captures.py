"""Choice of kernels and memory format: the combination whose plan was fastest within the budget is tuned."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from autotune.api.launch import load_run_config
from autotune.errors import AutotuneError, CaptureError, ConfigError, NumericsError, PlanError, StoreError
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.planners.auto import best_plan
from autotune.records.config import Config, dump_config
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir
from autotune.study.batch.records import BatchSearch, StepSize, write_batch_search
from autotune.study.captures import (
    PRICES,
    CaptureRunner,
    MeasuredCapture,
    choose_capture,
    measure_undisturbed,
    plan_within_budget,
    select_capture,
)
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.graphs import training_chain
from tests.study.remembered import remembered

GRAPH = training_chain(8, nbytes=100_000, param_bytes=5_000)
CONFIG = Config(workload="w", budget="70%", kernels="any")
SPEED = {("", ""): 1.0, ("inductor", ""): 0.9, ("", "channels_last"): 0.8, ("inductor", "channels_last"): 0.7}


@pytest.fixture(scope="module", autouse=True)
def planned_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.study.captures.best_plan", remembered(best_plan))
        yield


@dataclass
class Runners:
    """Runners of all combinations, with the time of each; the plans that they measured, and the baselines they were handed."""

    speed: dict[tuple[str, str], float] = field(default_factory=lambda: dict(SPEED))
    speed_of_price: dict[float, float] = field(default_factory=dict)
    graphs: dict[float, TrainGraph] = field(default_factory=dict)
    outcome_of: Callable[[Plan], Outcome] = lambda plan: Outcome.OK
    disturbed: Callable[[int], bool] = lambda number: False
    refused: tuple[tuple[str, str], ...] = ()
    differing: tuple[tuple[str, str], ...] = ()
    opened: list[tuple[str, str]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    eager_fits: bool = True
    reused: int = 0
    own_threads: int = 1
    speed_of_threads: dict[int, float] = field(default_factory=dict)

    @contextmanager
    def open(self, config: Config) -> Iterator[CaptureRunner]:
        combination = (config.kernels, config.memory_format)
        self.opened.append(combination)
        if combination in self.refused:
            raise ConfigError("no choice of a memory format; leave --memory-format out")
        if combination in self.differing:
            raise NumericsError("output differs; see the log")
        runners = self

        class Runner(FakeRunner):
            def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
                runners.plans.append(plan)
                result = super().measure(plan, budget_bytes=budget_bytes, beat=beat)
                return result if runners.eager_fits else replace(result, baseline_seconds=())

            def prepare(self) -> PreparedWorkload:
                prepared = super().prepare()
                environment = {"torch threads": str(runners.own_threads)}
                return replace(prepared, device=replace(prepared.device, environment=environment))

            def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
                runners.reused += 1

        yield Runner(
            graph=self.graphs.get(config.rebuild_price, GRAPH) if config.kernels else GRAPH,
            slowdown_of=lambda plan: (
                self.speed[combination]
                * self.speed_of_price.get(plan.rebuild_price, 1.0)
                * self.speed_of_threads.get(plan.threads, 1.0)
            ),
            outcome_of=self.outcome_of,
            disturbed=self.disturbed,
        )


def choose(runners: Runners, tmp_path: Path, config: Config = CONFIG) -> tuple[str, str]:
    chosen = choose_capture(config, tmp_path / "run", runners.open, lambda text: None)
    return chosen.kernels, chosen.memory_format


def test_the_fastest_combination_is_tuned_and_every_measurement_is_recorded(tmp_path: Path):
    runners = Runners()
    assert choose(runners, tmp_path) == ("inductor", "channels_last")
    assert runners.opened == [*SPEED, *[("inductor", "channels_last")] * len(PRICES)]
    assert runners.reused == len(runners.opened) - 1, "the baseline is measured once"
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert [(each["kernels"], each["memory_format"]) for each in recorded] == runners.opened
    assert [(plan.kernels, plan.memory_format) for plan in runners.plans] == list(SPEED)
    assert min(recorded[: len(SPEED)], key=lambda each: each["time_ratio"]) == recorded[len(SPEED) - 1]


def test_seconds_decide_where_eager_does_not_fit(tmp_path: Path):
    runners = Runners(eager_fits=False)
    lines: list[str] = []
    chosen = choose_capture(CONFIG, tmp_path / "run", runners.open, lines.append)
    assert (chosen.kernels, chosen.memory_format) == ("inductor", "channels_last")
    assert lines[0].endswith("; eager does not fit")


def test_seconds_are_not_compared_with_ratios():
    """Eager fits in one memory format only."""
    ratio = MeasuredCapture("", "", "ok", 0.97, step_seconds=0.3)
    seconds = MeasuredCapture("", "channels_last", "ok", None, step_seconds=0.4)
    assert select_capture([ratio, seconds]) is ratio
    faster = replace(ratio, time_ratio=0.3)
    assert select_capture([seconds, faster]) is seconds


def test_a_combination_whose_planning_time_ends_before_a_plan_fits_gets_the_smallest_plan(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("autotune.study.captures.PLANNING_SECONDS", -1.0)
    planners = {"recompute": ["keep", "segments"], "reorder": ["keep"], "order": ["traced"]}
    config = Config.model_validate({"workload": "w", "budget": "10%", "planners": planners})
    runner = FakeRunner(graph=training_chain(30))
    best, _ = plan_within_budget(config, runner.prepare(), runner.baseline())
    assert best.settings["recompute"]["planner"] == "segments"


def test_combinations_may_be_compared_on_another_config(tmp_path: Path):
    """Such as a larger batch: only the choice is taken over."""
    seen: list[str] = []

    @contextmanager
    def open_runner(config: Config) -> Iterator[CaptureRunner]:
        seen.append(config.workload)
        with Runners().open(config) as runner:
            yield runner

    chosen = choose_capture(
        CONFIG,
        tmp_path / "run",
        open_runner,
        lambda text: None,
        lambda config: config.model_copy(update={"workload": "v"}),
    )
    assert set(seen) == {"v"}
    assert (chosen.workload, chosen.kernels) == ("w", "inductor")


def test_an_interrupted_search_for_the_batch_size_keeps_its_kernels(tmp_path: Path):
    """`tune --name` again, with kernels any: other kernels would be another search."""
    (run_dir := tmp_path / "run").mkdir()
    config = CONFIG.model_copy(update={"objective": "batch"})
    chosen = config.model_copy(update={"kernels": "inductor", "memory_format": "channels_last", "rebuild_price": 0.5})
    search = BatchSearch("batch", chosen.model_dump(mode="json"), "batch", StepSize(8))
    write_batch_search(run_dir, search)
    RunDir(run_dir).captures.write_text("[]")
    runners = Runners()
    assert choose_capture(config, run_dir, runners.open, lambda text: None) == chosen
    assert runners.opened == []


def with_signatures(price: float) -> TrainGraph:
    """Return a graph of the same bytes and seconds with another digest."""
    return replace(GRAPH, ops=tuple(replace(op, signature=f"{price}") for op in GRAPH.ops))


def test_other_rebuild_prices_are_measured_where_compiled_regions_lead(tmp_path: Path):
    runners = Runners(
        speed_of_price={0.05: 0.8, 0.5: 0.999}, graphs={price: with_signatures(price) for price in PRICES}
    )
    chosen = choose_capture(CONFIG, tmp_path / "run", runners.open, lambda text: None)
    assert (chosen.kernels, chosen.memory_format, chosen.rebuild_price) == ("inductor", "channels_last", 0.05)
    assert [plan.rebuild_price for plan in runners.plans[len(SPEED) :]] == list(PRICES)
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert [each["rebuild_price"] for each in recorded[len(SPEED) :]] == list(PRICES)


def test_a_price_whose_graph_was_measured_or_whose_plan_is_slower_by_estimate_is_not_measured(tmp_path: Path):
    runners = Runners(graphs={0.05: training_chain(12, nbytes=70_000, param_bytes=5_000)})
    assert choose(runners, tmp_path) == ("inductor", "channels_last")
    assert len(runners.plans) == len(SPEED)
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert [each["detail"].partition(" ")[0] for each in recorded[len(SPEED) :]] == ["the", "estimated", "the"]


def test_a_price_is_not_raced_where_eager_s_kernels_lead_or_the_user_names_one(tmp_path: Path):
    eager = Runners(speed=dict.fromkeys(SPEED, 1.2) | {("", ""): 1.0})
    assert choose(eager, tmp_path) == ("", "")
    assert eager.opened == list(SPEED)
    named = Runners()
    config = CONFIG.model_copy(update={"rebuild_price": 0.5})
    chosen = choose_capture(config, tmp_path / "named", named.open, lambda text: None)
    assert (chosen.kernels, chosen.rebuild_price) == ("inductor", 0.5)
    assert named.opened == list(SPEED)
    assert {plan.rebuild_price for plan in named.plans if plan.kernels} == {0.5}


@pytest.mark.parametrize(
    ("speed", "measured", "chosen"),
    [
        ({4: 0.9, 2: 0.8, 1: 0.95}, [4, 2, 1], 2),
        ({4: 1.1, 2: 0.5}, [4], 0),  # fewer still are not tried
        ({4: 0.999}, [4], 0),  # within the noise
    ],
)
def test_fewer_threads_are_measured_as_long_as_they_are_faster(
    tmp_path: Path, speed: dict[int, float], measured: list[int], chosen: int
):
    runners = Runners(own_threads=8, speed_of_threads=speed)
    config = choose_capture(CONFIG, tmp_path / "run", runners.open, lambda text: None)
    assert (config.kernels, config.memory_format, config.threads) == ("inductor", "channels_last", chosen)
    assert [plan.threads for plan in runners.plans if plan.threads] == measured
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert [each["threads"] for each in recorded[-len(measured) :]] == measured


def test_threads_that_the_user_names_are_those_of_every_combination(tmp_path: Path):
    runners = Runners(own_threads=8, speed_of_threads={4: 0.5})
    config = CONFIG.model_copy(update={"threads": 3})
    assert choose_capture(config, tmp_path / "run", runners.open, lambda text: None).threads == 3
    assert {plan.threads for plan in runners.plans} == {3}


def test_a_plan_that_fails_or_exceeds_the_budget_does_not_win(tmp_path: Path):
    runners = Runners(outcome_of=lambda plan: Outcome.WRONG_RESULT if plan.kernels else Outcome.OK)
    assert choose(runners, tmp_path) == ("", "channels_last")


def test_eager_s_kernels_stay_where_no_other_ones_are_faster_beyond_the_noise(tmp_path: Path):
    runners = Runners(speed=dict.fromkeys(SPEED, 0.999) | {("", ""): 1.0})
    assert choose(runners, tmp_path) == ("", "")


def test_a_disturbed_measurement_is_repeated_once(tmp_path: Path):
    runners = Runners(disturbed=lambda number: number == 1)
    assert choose(runners, tmp_path) == ("inductor", "channels_last")
    assert len(runners.plans) == 2 * len(set(runners.opened))
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert recorded[0]["time_ratio"] == pytest.approx(1.0, rel=0.3), "not the doubled time of the first measurement"


def test_a_disturbed_measurement_is_worth_more_than_a_killed_repeat_and_a_killed_one_less_than_any():
    disturbed = Measurement(Outcome.OK, step_seconds=(1.0, 1.0), baseline_seconds=(1.0, 1.0), disturbed="busy")
    killed = Measurement(Outcome.CRASHED, "killed by SIGKILL")
    fits = replace(disturbed, disturbed="")

    class Runs:
        def __init__(self, *results: Measurement) -> None:
            self.results = list(results)

        def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
            return self.results.pop(0)

    def result(*results: Measurement) -> Measurement:
        return measure_undisturbed(cast("Any", Runs(*results)), Plan(()), 1)

    assert result(disturbed, killed) == disturbed
    assert result(disturbed, fits) == fits
    assert result(killed, disturbed) == disturbed
    assert result(fits) == fits


def test_a_model_without_another_format_is_tuned_in_its_own(tmp_path: Path):
    runners = Runners(refused=(("", "channels_last"), ("inductor", "channels_last")))
    assert choose(runners, tmp_path) == ("inductor", "")
    assert ("inductor", "channels_last") not in runners.opened, "a format that was refused is not tried again"
    every = json.loads(RunDir(tmp_path / "run").captures.read_text())
    (recorded,) = (each for each in every if each["memory_format"] == "channels_last")
    assert (recorded["outcome"], recorded["time_ratio"]) == ("refused", None)
    assert recorded["detail"] == "no choice of a memory format", "the user named no format that could be left out"


def test_kernels_whose_results_differ_are_a_wrong_result_and_no_crash(tmp_path: Path):
    assert choose(Runners(differing=(("inductor", ""),)), tmp_path) == ("inductor", "channels_last")
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())[1]
    assert (recorded["outcome"], recorded["detail"]) == ("wrong_result", "output differs")


def test_a_format_that_the_user_names_is_kept(tmp_path: Path):
    runners = Runners()
    assert choose(runners, tmp_path, CONFIG.model_copy(update={"memory_format": "channels_last"})) == (
        "inductor",
        "channels_last",
    )
    assert {memory_format for _, memory_format in runners.opened} == {"channels_last"}


def test_eager_s_kernels_must_work(tmp_path: Path):
    with pytest.raises(ConfigError, match="no choice"):
        choose(Runners(refused=(("", ""),)), tmp_path)


def test_kernels_that_are_named_are_not_measured(tmp_path: Path):
    runners = Runners()
    assert choose(runners, tmp_path, Config(workload="w", kernels="inductor")) == ("inductor", "")
    assert not runners.opened


def test_a_run_that_has_a_config_keeps_its_choice(tmp_path: Path):
    files = RunDir(tmp_path / "run")
    files.path.mkdir()
    earlier = CONFIG.model_copy(update={"kernels": "inductor", "rebuild_price": 0.5})
    files.config.write_text(dump_config(earlier))
    runners = Runners()
    with pytest.raises(ConfigError, match="a study for kernels inductor, not any; tune under another --name"):
        choose_capture(CONFIG, files.path, runners.open, lambda text: None)
    files.captures.write_text("[]")
    assert choose_capture(CONFIG, files.path, runners.open, lambda text: None) == earlier
    assert load_run_config(files.path, {}).rebuild_price == 0.5
    assert not runners.opened


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 4}, "threads 2, not 4"),
        ({"memory_format": "channels_last"}, "memory_format none, not channels_last"),
        ({"rebuild_price": 0.05}, "rebuild_price 0.5, not 0.05"),
    ],
)
def test_a_value_that_the_user_names_is_not_replaced_by_the_recorded_choice(
    tmp_path: Path, change: dict[str, Any], message: str
):
    files = RunDir(tmp_path / "run")
    files.path.mkdir()
    earlier = CONFIG.model_copy(update={"kernels": "inductor", "threads": 2, "rebuild_price": 0.5})
    files.config.write_text(dump_config(earlier))
    files.captures.write_text("[]")
    with pytest.raises(ConfigError, match=f"contains a study for {message}; tune under another --name"):
        choose(Runners(), tmp_path, CONFIG.model_copy(update=change))
    assert choose(Runners(), tmp_path, CONFIG.model_copy(update={"threads": 2})) == ("inductor", "")


def test_aten_is_a_name_for_the_default():
    assert Config.model_validate({"workload": "w", "kernels": "aten"}).kernels == ""


@pytest.mark.parametrize("kind", [CaptureError, PlanError, StoreError])
def test_a_combination_that_fails_is_recorded_and_the_others_are_measured(tmp_path: Path, kind: type[AutotuneError]):
    def fail(plan: Plan) -> Outcome:
        if plan.kernels:
            raise kind("inductor cannot compile fused1; use --kernels aten")
        return Outcome.OK

    assert choose(Runners(outcome_of=fail), tmp_path) == ("", "channels_last")
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert "inductor cannot compile" in recorded[1]["detail"]


def test_a_full_disk_is_no_result_of_a_combination(tmp_path: Path):
    runners = Runners(outcome_of=lambda plan: Outcome.DISK_FULL if plan.kernels else Outcome.OK)
    with pytest.raises(StoreError, match=r"w\(\): the disk is full: .*; free space there, then run the command again"):
        choose(runners, tmp_path)
    assert len(json.loads(RunDir(tmp_path / "run").captures.read_text())) == 1


def test_of_all_that_surely_beat_eager_s_kernels_the_fastest_wins():
    """Its lead over the second lies within the noise, which keeps only eager's kernels and the default price."""
    eager = MeasuredCapture("", "", "ok", 0.876, noise=0.05)
    second, fastest = (
        MeasuredCapture(kernels, form, "ok", ratio, noise=0.06)
        for kernels, form, ratio in (("inductor", "", 0.766), ("", "channels_last", 0.681))
    )
    assert select_capture([eager, second, fastest]) is fastest
    compiled = replace(second, memory_format="channels_last", time_ratio=0.66)
    assert select_capture([eager, second, fastest, compiled]) is fastest, "eager's kernels keep its bits"
    assert select_capture([eager, second, fastest, replace(compiled, time_ratio=0.6)]).time_ratio == 0.6
    cheaper = replace(second, rebuild_price=0.05, time_ratio=0.75)
    assert select_capture([eager, second, cheaper]) is second
