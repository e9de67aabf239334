"""Choice of kernels and memory format: the combination whose plan was fastest within the budget is tuned."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autotune.errors import CaptureError, ConfigError
from autotune.ir.plan import Plan
from autotune.records.config import Config, dump_config
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir
from autotune.study.captures import CaptureRunner, choose_capture
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.graphs import training_chain

GRAPH = training_chain(8, nbytes=100_000, param_bytes=5_000)
CONFIG = Config(workload="w", budget="70%", kernels="any")
SPEED = {("", ""): 1.0, ("inductor", ""): 0.9, ("", "channels_last"): 0.8, ("inductor", "channels_last"): 0.7}


@dataclass
class Runners:
    """Runners of all combinations, with the time of each; the plans that they measured, and the baselines they were handed."""

    speed: dict[tuple[str, str], float] = field(default_factory=lambda: dict(SPEED))
    outcome_of: Callable[[Plan], Outcome] = lambda plan: Outcome.OK
    disturbed: Callable[[int], bool] = lambda number: False
    refused: tuple[tuple[str, str], ...] = ()
    opened: list[tuple[str, str]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    reused: int = 0

    @contextmanager
    def open(self, config: Config) -> Iterator[CaptureRunner]:
        combination = (config.kernels, config.memory_format)
        self.opened.append(combination)
        if combination in self.refused:
            raise ConfigError("leaves no choice of a memory format")
        runners = self

        class Runner(FakeRunner):
            def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
                runners.plans.append(plan)
                return super().measure(plan, budget_bytes=budget_bytes, beat=beat)

            def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
                runners.reused += 1

        yield Runner(
            graph=GRAPH,
            slowdown_of=lambda plan: self.speed[combination],
            outcome_of=self.outcome_of,
            disturbed=self.disturbed,
        )


def choose(runners: Runners, tmp_path: Path, config: Config = CONFIG) -> tuple[str, str]:
    chosen = choose_capture(config, tmp_path / "run", runners.open, lambda text: None)
    return chosen.kernels, chosen.memory_format


def test_the_fastest_combination_is_tuned_and_every_measurement_is_recorded(tmp_path: Path):
    runners = Runners()
    assert choose(runners, tmp_path) == ("inductor", "channels_last")
    assert set(runners.opened) == set(SPEED)
    assert runners.reused == 3, "the baseline is measured once"
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert [(each["kernels"], each["memory_format"]) for each in recorded] == runners.opened
    assert [(plan.kernels, plan.memory_format) for plan in runners.plans] == runners.opened
    assert min(recorded, key=lambda each: each["time_ratio"]) == recorded[-1]


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


def test_a_model_without_another_format_is_tuned_in_its_own(tmp_path: Path):
    runners = Runners(refused=(("", "channels_last"), ("inductor", "channels_last")))
    assert choose(runners, tmp_path) == ("inductor", "")
    assert ("inductor", "channels_last") not in runners.opened, "a format that was refused is not tried again"


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
    files.config.write_text(dump_config(CONFIG.model_copy(update={"kernels": "inductor"})))
    runners = Runners()
    assert choose(runners, tmp_path) == ("inductor", "")
    assert not runners.opened


def test_aten_is_a_name_for_the_default():
    assert Config.model_validate({"workload": "w", "kernels": "aten"}).kernels == ""


def test_a_combination_that_cannot_be_captured_is_recorded(tmp_path: Path):
    class Failing(Runners):
        @contextmanager
        def open(self, config: Config) -> Iterator[CaptureRunner]:
            if config.kernels:
                raise CaptureError("inductor cannot compile fused1; use --kernels aten")
            with super().open(config) as runner:
                yield runner

    assert choose(Failing(), tmp_path) == ("", "channels_last")
    recorded = json.loads(RunDir(tmp_path / "run").captures.read_text())
    assert "inductor cannot compile" in recorded[1]["detail"]
