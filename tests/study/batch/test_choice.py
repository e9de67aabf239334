"""Choice of the batch size: the sizes around the answer are measured under the limit, each once, and the study gets the answer."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import (
    AutotuneError,
    ConfigError,
    InfeasibleError,
    OutOfTimeError,
    PlanError,
    StoreError,
    WorkerError,
)
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.auto import best_plan
from autotune.planners.candidates import find_smallest
from autotune.planners.space import space_for_device
from autotune.records import plan_file as planfile
from autotune.records.budget import STEP_TOLERANCE, tolerated_bytes
from autotune.records.config import Config, dump_config
from autotune.records.measurement import Measurement, Outcome, apply_budget
from autotune.records.run_dir import RunDir
from autotune.study.batch.choice import STUDY_FACTOR, choose_batch, config_for_kernels
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.batch.measurements import _measure_candidate, enforce_beyond
from autotune.study.batch.race import SizeRace
from autotune.study.batch.records import (
    BatchSearch,
    MeasuredSize,
    SideResult,
    StepSize,
    read_batch_search,
    write_batch_search,
)
from autotune.study.batch.sized_steps import capture_sizes
from autotune.study.captures import AIM, CaptureRunner
from autotune.testing.fake_runner import DEVICE, FLOOR_BYTES, FakeRunner
from autotune.testing.graphs import training_chain
from autotune.workloads.loop import Loop
from tests.study.remembered import remembered

from .fakes import OWN, FakeWorkload, charge_of_eager, graph_of, traced_bytes

QUICK = {"recompute": ["keep", "greedy"], "reorder": ["keep"], "order": ["traced"]}
FITS = SideResult(Outcome.OK)
LIMIT = FLOOR_BYTES + traced_bytes(3 * OWN)


@pytest.fixture(scope="module", autouse=True)
def planned_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.study.batch.estimate.find_smallest", remembered(find_smallest))
        patch.setattr("autotune.study.batch.candidates.best_plan", remembered(best_plan))
        patch.setattr("autotune.study.captures.best_plan", remembered(best_plan))
        yield


def make_config(tmp_path: Path, **fields: Any) -> Config:
    options = {"objective": "batch", "budget": f"{LIMIT}B", "planners": QUICK, "plans": str(tmp_path / "plans")}
    return Config.model_validate({"workload": "w", **options, **fields})


def choose(tmp_path: Path, workload: FakeWorkload, **fields: Any) -> Config:
    return choose_batch(make_config(tmp_path, **fields), tmp_path / "run", workload.sources)


def recorded(tmp_path: Path) -> BatchSearch:
    search = read_batch_search(tmp_path / "run")
    assert search is not None
    return search


@cache
def lowest_peak(batch: int) -> int:
    """Peak of the smallest plan of one size, planned for that size."""
    space = space_for_device(make_config(Path()).planners.model_dump(), "cpu", {})
    return find_smallest(graph_of(batch), Costs.unit(graph_of(batch)), space).estimate.peak_bytes


def largest_by_brute_force(overhead: float) -> int:
    fits = (size for size in range(109, 9, -1) if FLOOR_BYTES + int(lowest_peak(size) * (1 + overhead)) <= LIMIT)
    return next(fits)


@pytest.mark.parametrize("overhead", [0.0, 0.02, 0.08, 0.3])
def test_the_largest_batch_is_within_two_percent_of_the_largest_whose_smallest_plan_fits(
    tmp_path: Path, overhead: float
):
    workload = FakeWorkload(overhead=overhead)
    chosen = choose(tmp_path, workload)
    largest = largest_by_brute_force(overhead)
    size = chosen.arguments["batch"]
    assert isinstance(size, int)
    assert 0.96 * largest - 1 <= size <= largest
    assert size > 1.5 * max(batch for batch in range(1, 400) if charge_of_eager(batch, workload) <= LIMIT)
    measured = recorded(tmp_path).find(StepSize(size))
    assert measured is not None
    assert measured.plan is not None
    assert measured.plan.fits


def graph_of_eights(batch: int) -> TrainGraph:
    if batch % 8:
        raise ConfigError(f"{batch} is no multiple of 8")
    return graph_of(batch)


@pytest.mark.parametrize("objective", ["batch", "throughput"])
def test_no_size_that_the_workload_refuses_is_measured(tmp_path: Path, objective: str):
    workload = FakeWorkload(graph_of=graph_of_eights)
    chosen = choose(tmp_path, workload, objective=objective)
    search = recorded(tmp_path)
    assert {each.size.batch % 8 for each in search.measured} == {0}
    fits = (size for size in range(104, 0, -8) if FLOOR_BYTES + int(lowest_peak(size) * 1.02) <= LIMIT)
    if objective == "batch":
        assert 0 <= next(fits) - chosen.arguments["batch"] <= 8
        assert not any("none between" in note or "time ended" in note for note in search.notes)


def test_eager_s_largest_batch_is_measured_too(tmp_path: Path):
    workload = FakeWorkload()
    choose(tmp_path, workload)
    largest = max(batch for batch in range(1, 400) if charge_of_eager(batch, workload) <= LIMIT)
    search = recorded(tmp_path)
    assert search.eager_largest is not None
    assert largest - max(1, int(0.02 * largest)) <= search.eager_largest.batch <= largest
    refused = [each.size.batch for each in search.measured if each.eager is not None and not each.eager.fits]
    assert min(refused) > search.eager_largest.batch


def test_eager_alone_is_measured_in_the_time_that_it_takes_itself(tmp_path: Path):
    """A plan took 100 s, eager and a plan at the workload's own size 10 s; 30 s are left, then eager alone takes 40 s."""
    choose(tmp_path, FakeWorkload())
    search = recorded(tmp_path)
    search = replace(search, measured=(MeasuredSize(search.start, FITS, FITS, seconds=10.0),))
    workload: Any = None  # nothing is measured
    race = SizeRace(
        config=make_config(tmp_path), run_dir=tmp_path, steps=workload, measurer=workload, search=search,
        notify=lambda _: None, deadline=time.monotonic() + 30, capture=capture_sizes,
    )  # fmt: skip
    for batch, plan, seconds, has_time in ((60, FITS, 100.0, True), (20, None, 40.0, False)):
        race.search = race.search.add(MeasuredSize(StepSize(batch), FITS, plan, seconds=seconds))
        race.announce(StepSize(batch))
        assert (race.has_time(), race.has_time_for_eager()) == (False, has_time)


def test_the_study_gets_the_size_the_enforced_limit_and_the_measured_plan_as_its_seed(tmp_path: Path):
    workload = FakeWorkload()
    chosen = choose(tmp_path, workload, time="100s")
    enforced = f"{enforce_beyond(LIMIT, 'cpu')}B"
    assert (chosen.objective, chosen.budget, chosen.limit) == ("time", f"{LIMIT}B", enforced)
    assert workload.limits == {enforced}, "every plan was measured under the limit"
    assert chosen.seed_from is not None
    seed = planfile.read(Path(chosen.seed_from))
    assert seed.workload.arguments["batch"] == chosen.arguments["batch"]
    assert seed.graph_digest == graph_of(seed.workload.arguments["batch"]).digest
    assert 25 <= chosen.time_seconds <= 100


def test_the_study_of_a_size_that_took_long_to_measure_gets_time_to_measure_it_again(tmp_path: Path):
    chosen = choose(tmp_path, FakeWorkload(), time="100s")
    size, search = StepSize(chosen.arguments["batch"]), recorded(tmp_path)
    measured = search.find(size)
    assert measured is not None
    write_batch_search(tmp_path / "run", search.add(replace(measured, seconds=50.0)))
    again = choose(tmp_path, FakeWorkload(), time="100s")
    assert again.time_seconds >= STUDY_FACTOR * 50


def test_a_budget_in_percent_is_a_share_of_eager_s_peak_at_the_workload_s_own_batch(tmp_path: Path):
    workload = FakeWorkload(overhead=0.0)
    chosen = choose(tmp_path, workload, budget="150%")
    nbytes = int(1.5 * traced_bytes(OWN)) // 1024 * 1024
    assert chosen.budget == f"step:{nbytes // 1024}KiB"
    assert recorded(tmp_path).budget_bytes == nbytes
    assert chosen.limit_bytes == enforce_beyond(FLOOR_BYTES + tolerated_bytes(nbytes, STEP_TOLERANCE), "cpu")


def test_a_budget_of_the_step_is_kept_as_it_is_written(tmp_path: Path):
    chosen = choose(tmp_path, FakeWorkload(), budget="step:3MB")
    assert (chosen.budget, recorded(tmp_path).budget_bytes) == ("step:3MB", 3_000_000)


def largest_sizes(workload: FakeWorkload) -> tuple[StepSize | None, StepSize | None, str]:
    with tempfile.TemporaryDirectory() as place:
        chosen = choose(Path(place), workload, budget="200%")
        search = recorded(Path(place))
        return search.plan_largest, search.eager_largest, chosen.budget


@cache
def largest_sizes_of_equal_floors() -> tuple[StepSize | None, StepSize | None, str]:
    return largest_sizes(FakeWorkload())


@given(st.lists(st.integers(-FLOOR_BYTES // 2, FLOOR_BYTES // 2), min_size=1, max_size=5))
@settings(max_examples=8, deadline=None)
def test_idle_processes_of_other_sizes_change_no_answer_for_a_budget_in_percent(differences: list[int]):
    floors = itertools.cycle([FLOOR_BYTES + difference for difference in differences])
    first = FLOOR_BYTES  # the workload's own size
    other = FakeWorkload(floor_of=lambda batch: first if batch == OWN else next(floors))
    assert largest_sizes(other) == largest_sizes_of_equal_floors()


def test_measured_sizes_are_recorded_as_they_end_and_not_measured_again(tmp_path: Path):
    class Killed(BaseException):
        pass

    def kill(size: StepSize) -> None:
        if len({*broken.planned, size}) == 3:
            raise Killed

    broken = FakeWorkload(overhead=0.3, before_measure=kill)
    with pytest.raises(Killed):
        choose(tmp_path, broken)
    search = recorded(tmp_path)
    assert search.chosen is None
    assert {each.size for each in search.measured} == set(broken.planned)
    assert len(set(broken.planned)) == 2
    again, whole = FakeWorkload(overhead=0.3), FakeWorkload(overhead=0.3)
    resumed = choose(tmp_path, again)
    assert not set(again.planned) & set(broken.planned)
    expected = choose(tmp_path / "other", whole)
    assert resumed.arguments == expected.arguments
    assert [*broken.planned, *again.planned] == whole.planned, "the resumed search decides as the whole one does"
    third = FakeWorkload(overhead=0.3)
    assert choose(tmp_path, third).arguments == expected.arguments
    assert not third.planned
    assert not third.eager


def test_a_resumed_search_that_may_measure_nothing_more_keeps_the_largest_size_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A small step has a large overhead: with it among others, a resumed search began with a size that nobody measured."""

    class Small(FakeWorkload):
        @contextmanager
        def open(self, config: Config) -> Iterator[CaptureRunner]:
            self.overhead = 1.0 if config.arguments["batch"] == OWN else 0.02
            with FakeWorkload.open(self, config) as runner:
                yield runner

    for batch in (600, 800, 1000):
        budget = f"step:{lowest_peak(batch) // 1024}KiB"
        workload = Small()
        whole = choose(tmp_path / f"whole {batch}", workload, budget=budget)
        with monkeypatch.context() as patch:
            patch.setattr("autotune.study.batch.race.MAX_MEASURED", len(set(workload.planned)))
            with monkeypatch.context() as interrupted:
                interrupted.setattr(SizeRace, "find_eager_largest", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    choose(tmp_path / f"resumed {batch}", Small(), budget=budget)
            resumed = choose(tmp_path / f"resumed {batch}", Small(), budget=budget)
        assert resumed.arguments == whole.arguments


def interrupt(race: SizeRace) -> int:
    raise KeyboardInterrupt


def test_a_resumed_search_measures_the_same_sizes_where_bytes_are_not_linear_in_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From a batch of 24 on, tensors are three times as large as the line through batches of 8 and 16 predicts."""

    def make_workload() -> FakeWorkload:
        return FakeWorkload(graph_of=lambda batch: graph_of(batch if batch < 24 else 3 * batch))

    choose(tmp_path / "whole", make_workload())
    with monkeypatch.context() as patch:
        patch.setattr(SizeRace, "find_largest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            choose(tmp_path / "resumed", make_workload())
    choose(tmp_path / "resumed", make_workload())
    whole, resumed = (recorded(tmp_path / name) for name in ("whole", "resumed"))
    assert [each.size for each in resumed.measured] == [each.size for each in whole.measured]
    assert resumed.estimate is not None
    assert not resumed.estimate.is_interpolated


def choose_until(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Run a search that is interrupted before a phase."""
    with monkeypatch.context() as patch:
        patch.setattr(SizeRace, phase, interrupt)
        with pytest.raises(KeyboardInterrupt):
            choose(tmp_path, FakeWorkload(), **fields)


def test_a_search_is_not_resumed_with_another_graph_and_one_of_an_earlier_version_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    choose_until("find_largest", tmp_path, monkeypatch)
    changed = FakeWorkload(graph_of=lambda batch: training_chain(9, nbytes=11_000 * batch, param_bytes=50_000))
    with pytest.raises(ConfigError, match=r"batch sizes of w.* with graph \w{8}, which is now \w{8}, .*another --name"):
        choose(tmp_path, changed)
    assert not changed.planned
    write_batch_search(tmp_path / "run", replace(recorded(tmp_path), graph_digest="", device="", torch=""))
    choose(tmp_path, FakeWorkload())


class OnOtherDevice(FakeWorkload):
    device = replace(DEVICE, torch="2.14.0")

    @contextmanager
    def open(self, config: Config) -> Iterator[CaptureRunner]:
        with FakeWorkload.open(self, config) as opened:
            runner: Any = opened
            prepare = runner.prepare
            runner.prepare = lambda: replace(prepare(), device=self.device)
            yield runner


@pytest.mark.parametrize("phase", ["find_largest", "find_eager_largest"])
def test_a_search_is_not_resumed_on_another_device_or_with_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
):
    choose_until(phase, tmp_path, monkeypatch)
    before = recorded(tmp_path)
    with pytest.raises(ConfigError, match=r"with torch 2\.13\.0, this is .* with torch 2\.14\.0; resume on the former"):
        choose(tmp_path, OnOtherDevice())
    assert recorded(tmp_path) == before


def test_an_interrupted_search_whose_recorded_seeds_are_gone_goes_on_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    choose(tmp_path / "other", FakeWorkload())
    seed = (RunDir(tmp_path / "other" / "run").batch_plans / f"{OWN}x1.json").rename(tmp_path / "seed.json")
    choose_until("find_largest", tmp_path, monkeypatch, seed_from=str(seed))
    seed.unlink()
    workload = FakeWorkload()
    chosen = choose(tmp_path, workload, seed_from=str(seed))
    assert workload.notes[0].startswith(f"the recorded seeds are left out: {seed}: ")
    assert chosen.seed_from is not None
    assert Path(chosen.seed_from).parent == RunDir(tmp_path / "run").batch_plans


class WithStore(FakeWorkload):
    def costs_of(self, batch: int, accumulate: int = 1) -> Costs:
        store = StoreCost(5e9, 5e9, 3e9, 3e9)
        return replace(FakeWorkload.costs_of(self, batch, accumulate), stores={"ssd": store})


KEPT = {"recompute": ["keep"], "reorder": ["keep"], "order": ["traced"]}
OFFLOADED = {"planners": {**KEPT, "offload": ["window"]}, "stores": {"ssd": "/tmp"}}


def test_sizes_that_fit_only_with_a_store_are_measured_although_the_estimate_has_no_store(tmp_path: Path):
    without = choose(tmp_path / "without", FakeWorkload(), planners=KEPT)
    chosen = choose(tmp_path / "with", WithStore(), **OFFLOADED)
    size, estimated = chosen.arguments["batch"], recorded(tmp_path / "with").estimate
    assert estimated is not None
    assert isinstance(size, int)
    assert size > 1.2 * estimated.largest
    assert estimated.largest >= int(str(without.arguments["batch"]))
    refused = [one.size.batch for one in recorded(tmp_path / "with").measured if one.plan and not one.plan.fits]
    assert size < min(refused) <= size + max(1, int(0.02 * size)) or len(recorded(tmp_path / "with").measured) >= 8


def long_chain(batch: int) -> TrainGraph:
    return training_chain(20, nbytes=100_000 * batch, param_bytes=1_000)


HALF = f"step:{traced_bytes(1, long_chain) // 2}B"
"""Half of the bytes of one sample without a store: by estimate no size fits. With a store one sample does."""


def test_sizes_below_the_workload_s_own_are_measured_where_only_a_store_makes_them_fit(tmp_path: Path):
    workload = WithStore(graph_of=long_chain, overhead=0.0)
    chosen = choose(tmp_path, workload, budget=HALF, **OFFLOADED)
    assert 1 <= chosen.arguments["batch"] < OWN
    assert recorded(tmp_path).estimate.largest == 0


def test_a_search_that_may_fit_with_a_store_at_a_smaller_size_is_out_of_time_and_not_infeasible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SizeRace, "has_time", lambda self: False)
    words = rf"smallest size that was measured, batch={OWN // 2}, does not fit step:.*; continue with: autotune resume"
    with pytest.raises(OutOfTimeError, match=words):
        choose(tmp_path, WithStore(graph_of=long_chain, overhead=0.0), budget=HALF, **OFFLOADED)


def test_a_search_goes_on_with_more_devices_and_one_of_an_earlier_version_with_its_budget(tmp_path: Path):
    choose(tmp_path, FakeWorkload(), budget="200%")
    search, files = recorded(tmp_path), RunDir(tmp_path / "run")
    keys = {key: value for key, value in search.config.items() if key != "parallel"}  # a key of this version
    write_batch_search(tmp_path / "run", replace(search, config=keys))
    assert choose(tmp_path, FakeWorkload(), budget="200%", parallel=2).parallel == 2
    old = choose(tmp_path, FakeWorkload(), budget="200%").model_copy(update={"budget": f"{LIMIT}B"})
    files.config.write_text(dump_config(old))
    assert choose(tmp_path, FakeWorkload(), budget="200%").budget == f"{LIMIT}B"


def test_a_run_directory_with_a_search_for_another_budget_is_refused(tmp_path: Path):
    choose(tmp_path, FakeWorkload())
    with pytest.raises(ConfigError, match=r"with budget '\d+B', not '\d+B'; tune under another --name"):
        choose(tmp_path, FakeWorkload(), budget=f"{2 * LIMIT}B")
    choose(tmp_path, FakeWorkload(), time="3m")


def test_a_budget_that_no_batch_fits_is_named_with_the_reason(tmp_path: Path):
    with pytest.raises(InfeasibleError, match="no batch size fits") as error:
        choose(tmp_path, FakeWorkload(), budget=f"{FLOOR_BYTES + 1000}B")
    assert "raise --budget" in str(error.value)


@pytest.mark.parametrize("kind", [PlanError, StoreError])
def test_a_size_whose_plan_fails_is_a_result_and_the_search_goes_on(tmp_path: Path, kind: type[AutotuneError]):
    def fail(size: StepSize) -> None:
        if size.batch > OWN:
            raise kind("the plan cannot run")

    assert choose(tmp_path, FakeWorkload(before_measure=fail)).arguments["batch"] == OWN
    failed = [each.plan for each in recorded(tmp_path).measured if each.size.batch > OWN and each.plan is not None]
    assert {(plan.outcome, plan.detail) for plan in failed} == {(Outcome.CRASHED, "the plan cannot run")}


FULL = Measurement(Outcome.DISK_FULL, "No space left on device")
KILLED = Measurement(Outcome.CRASHED, "killed by SIGKILL: the log's last lines")


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("prepare", StoreError("eager's results could not be written"), "eager's results could not be written"),
        ("baseline", FULL, r"batch=\d+: the disk is full: No space .*; free space there, then continue with: autotune"),
        ("measure", FULL, r"batch=\d+: the disk is full: No space .*; free space there, then continue with: autotune"),
        ("measure", KILLED, r"batch=\d+: the process of a measurement was killed by SIGKILL; continue with: autotune"),
    ],
)
def test_a_full_disk_and_a_kill_from_outside_are_no_result_of_a_size(
    tmp_path: Path, method: str, result: Measurement | StoreError, message: str
):
    def answer(*arguments: object, **options: object) -> Measurement:
        if isinstance(result, StoreError):
            raise result
        return result

    class CutOff(FakeWorkload):
        @contextmanager
        def open(self, config: Config) -> Iterator[CaptureRunner]:
            with FakeWorkload.open(self, config) as runner:
                if config.arguments["batch"] != OWN:
                    setattr(runner, method, answer)
                yield runner

    with pytest.raises((StoreError, WorkerError), match=message):
        choose(tmp_path, CutOff())
    assert [each.size.batch for each in recorded(tmp_path).measured] == [OWN]


def test_where_a_size_fills_the_disk_of_a_store_a_search_without_it_is_suggested(tmp_path: Path):
    class Full(FakeWorkload):
        @contextmanager
        def open(self, config: Config) -> Iterator[CaptureRunner]:
            with FakeWorkload.open(self, config) as runner:
                if config.arguments["batch"] != OWN:
                    setattr(runner, "measure", lambda *arguments, **options: FULL)  # noqa: B010
                yield runner

    with pytest.raises(StoreError, match=r"the disk is full: .*, or tune under another --name without --store"):
        choose(tmp_path, Full(), stores={"ssd": str(tmp_path)})


def test_a_plan_file_that_cannot_be_written_is_no_result_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = planfile.write

    def fail(path: Path, file: planfile.PlanFile, *, remedy: str) -> None:
        if path.name != f"{OWN}x1.json":
            raise ConfigError(f"{path}: cannot write the plan (No space left on device); {remedy}")
        write(path, file, remedy=remedy)

    monkeypatch.setattr(planfile, "write", fail)
    with pytest.raises(ConfigError, match=r"cannot write the plan .*; free space there, then continue with: autotune"):
        choose(tmp_path, FakeWorkload())
    assert [each.size.batch for each in recorded(tmp_path).measured] == [OWN]


def test_a_search_that_ends_at_the_maximum_of_sizes_does_not_name_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("autotune.study.batch.race.MAX_MEASURED", 2)
    workload = FakeWorkload(overhead=3.0)
    with pytest.raises(
        InfeasibleError, match="2 sizes were measured, the maximum; tune under another --name with"
    ) as error:
        choose(tmp_path, workload, budget=f"{FLOOR_BYTES + lowest_peak(5)}B")
    smallest = min(each.size.batch for each in recorded(tmp_path).measured if each.plan is not None)
    assert f"--set batch={smallest // 2} --budget" in str(error.value)


def test_a_workload_that_does_not_fit_at_its_own_size_gets_a_smaller_one(tmp_path: Path):
    workload = FakeWorkload()
    chosen = choose(tmp_path, workload, budget=f"{FLOOR_BYTES + lowest_peak(5)}B")
    assert 1 <= chosen.arguments["batch"] < OWN


def test_other_objectives_pass_unchanged_and_measure_nothing(tmp_path: Path):
    config = make_config(tmp_path, objective="time")
    workload = FakeWorkload()
    assert choose_batch(config, tmp_path / "run", workload.sources) is config
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_objective_is_refused_before_a_size_is_measured(tmp_path: Path):
    files, workload = RunDir(tmp_path / "run"), FakeWorkload()
    files.path.mkdir()
    files.config.write_text(dump_config(make_config(tmp_path, objective="time")))
    with pytest.raises(ConfigError, match="a study with objective 'time', not 'batch'; tune under another --name"):
        choose(tmp_path, workload)
    assert not files.batch_search.exists()
    files.config.unlink()
    choose(tmp_path, workload)
    with pytest.raises(ConfigError, match="with objective 'batch', not 'time'; tune under another --name"):
        choose(tmp_path, workload, objective="time")


def test_graphs_whose_wiring_depends_on_the_size_are_captured_one_by_one(tmp_path: Path):
    """From a batch of 24 on, the model takes another path."""

    def change(batch: int) -> TrainGraph:
        graph = graph_of(batch)
        if batch < 24:
            return graph
        return replace(graph, ops=tuple(replace(op, target=f"{op.target}_large") for op in graph.ops))

    workload = FakeWorkload(graph_of=change)
    largest = largest_by_brute_force(workload.overhead)
    size = choose(tmp_path, workload).arguments["batch"]
    assert isinstance(size, int)
    assert 0.96 * largest - 1 <= size <= largest


# throughput


def rate(workload: FakeWorkload, size: StepSize) -> float:
    return size.samples / workload.seconds_of(size)


def test_throughput_takes_the_fastest_size_that_was_measured_within_the_budget(tmp_path: Path):
    workload = FakeWorkload()
    chosen = choose(tmp_path, workload, objective="throughput", micro_batches="never")
    search = recorded(tmp_path)
    fitting = [each for each in search.measured if each.plan is not None and each.plan.fits]
    fastest = max(fitting, key=lambda each: each.plan.rate.middle)  # type: ignore[union-attr]
    assert search.plan_best is not None
    assert search.plan_best.plan.rate.high >= fastest.plan.rate.low  # type: ignore[union-attr]
    assert chosen.arguments["batch"] == search.plan_best.size.batch
    assert search.eager_best is not None
    assert search.eager_largest is not None
    assert any(size.batch > search.eager_largest.batch for size in workload.planned)
    assert any(size == search.eager_largest for size in workload.planned), (
        "a plan is measured where eager is at its best"
    )


def test_a_size_beyond_which_the_step_slows_down_is_not_exceeded(tmp_path: Path):
    """A cache that overflows at 24 samples doubles the time of each sample."""
    workload = FakeWorkload(seconds_of=lambda size: 0.01 + 0.001 * size.samples * (1 if size.batch <= 24 else 2))
    chosen = choose(tmp_path, workload, objective="throughput", micro_batches="never")
    size = chosen.arguments["batch"]
    assert isinstance(size, int)
    assert OWN < size <= 24


def test_throughput_takes_a_smaller_size_than_all_candidates_where_these_are_charged_too_much(tmp_path: Path):
    """Charges are twice the estimates, by which the workload's own size and larger ones fit."""
    workload = FakeWorkload(overhead=1.0)
    budget = f"step:{int(2.02 * lowest_peak(4))}B"
    chosen = choose(tmp_path, workload, objective="throughput", micro_batches="never", budget=budget)
    fits = {each.size.batch: each.plan.fits for each in recorded(tmp_path).measured if each.plan is not None}
    assert max(batch for batch, is_within in fits.items() if is_within) < OWN
    assert chosen.arguments["batch"] < OWN


def test_throughput_in_a_budget_that_no_batch_fits_when_measured_is_infeasible_and_not_out_of_time(tmp_path: Path):
    workload = FakeWorkload(overhead=1.0)
    budget = f"step:{int(1.9 * lowest_peak(1))}B"
    with pytest.raises(InfeasibleError, match=r"no batch size fits .* batch=1: .*; raise --budget"):
        choose(tmp_path, workload, objective="throughput", micro_batches="never", budget=budget)
    estimate = recorded(tmp_path).estimate
    assert estimate is not None
    assert estimate.largest >= OWN


def test_micro_batches_are_tried_and_their_loop_goes_into_the_study(tmp_path: Path):
    """An update that takes most of the time is paid once for several micro-batches."""
    workload = FakeWorkload(seconds_of=lambda size: 1.0 + 0.001 * size.samples)
    chosen = choose(tmp_path, workload, objective="throughput")
    search = recorded(tmp_path)
    assert any(size.accumulate > 1 for size in workload.planned)
    assert search.chosen is not None
    assert search.chosen.accumulate > 1
    assert Loop.parse(chosen.loop).accumulate == search.chosen.accumulate
    assert any(f"divide a mean loss by {search.chosen.accumulate}" in note for note in search.notes)
    assert any("training dynamics change" in note for note in search.notes)


def with_batch_norm(batch: int) -> TrainGraph:
    graph = graph_of(batch)
    first, *rest = graph.ops
    return replace(graph, ops=(replace(first, target="aten._native_batch_norm_legit_functional.default"), *rest))


def test_micro_batches_are_excluded_with_batch_norm_unless_the_config_allows_them(tmp_path: Path):
    slow_update = lambda size: 1.0 + 0.001 * size.samples  # noqa: E731
    honest = FakeWorkload(graph_of=with_batch_norm, seconds_of=slow_update)
    chosen = choose(tmp_path, honest, objective="throughput")
    assert {size.accumulate for size in [*honest.planned, *honest.eager]} == {1}
    assert chosen.loop == ""
    notes = recorded(tmp_path).notes
    assert any("micro-batches were not tried" in note for note in notes)
    assert any(f"statistics of {chosen.arguments['batch']} samples instead of {OWN}" in note for note in notes)
    allowed = FakeWorkload(graph_of=with_batch_norm, seconds_of=slow_update)
    choose(tmp_path / "allowed", allowed, objective="throughput", micro_batches="always")
    assert any(size.accumulate > 1 for size in allowed.planned)


@pytest.mark.parametrize("case", ["gradients", "inference"])
def test_steps_without_an_update_have_no_micro_batches(tmp_path: Path, case: str):
    workload = FakeWorkload(loop=Loop(gradients=case == "gradients"), has_updates=False)
    choose(tmp_path, workload, objective="throughput")
    assert {size.accumulate for size in workload.planned} == {1}


def test_the_loop_s_other_words_stay_when_micro_batches_are_chosen(tmp_path: Path):
    workload = FakeWorkload(loop=Loop(clip=True), seconds_of=lambda size: 1.0 + 0.001 * size.samples)
    chosen = Loop.parse(choose(tmp_path, workload, objective="throughput").loop)
    assert chosen.clip
    assert chosen.accumulate > 1


def test_every_kept_plan_has_a_file_that_names_its_size(tmp_path: Path):
    choose(tmp_path, FakeWorkload(), objective="throughput", micro_batches="never")
    for each in recorded(tmp_path).measured:
        path = RunDir(tmp_path / "run").batch_plans / f"{each.size.batch}x{each.size.accumulate}.json"
        assert path.exists() == (each.plan is not None and each.plan.fits)


def test_the_plan_file_of_a_size_has_the_peak_that_its_planners_were_allowed(tmp_path: Path):
    choose(tmp_path, FakeWorkload())
    files = [planfile.read(path) for path in RunDir(tmp_path / "run").batch_plans.glob("*.json")]
    assert files
    for file in files:
        assert file.target_bytes is not None
        assert file.target_bytes <= AIM * file.budget_bytes


@pytest.mark.parametrize(
    ("eager_largest", "size", "budget", "expected"),
    [
        (20, 8, "200%", (15, "step:1024KiB")),
        (100, 8, "200%", (32, "step:1024KiB")),
        (0, 8, "200%", (8, "step:1024KiB")),
        (20, 8, "2GiB", (15, "2GiB")),
    ],
)
def test_kernels_are_compared_at_a_batch_that_eager_fits(eager_largest: int, size: int, budget: str, expected: Any):
    estimate = BatchEstimate("w", "batch", size, budget, 2**20, None, 50, 900, eager_largest, 400, False)
    config = Config(workload="w", objective="throughput", kernels="any", budget=budget, samples=6)
    raced = config_for_kernels(config, estimate)
    assert ((raced.arguments["batch"], raced.budget), raced.objective) == (expected, "time")
    assert raced.samples > config.samples


def test_a_workload_that_refuses_all_smaller_sizes_is_infeasible_and_not_out_of_time(tmp_path: Path):
    budget = f"{FLOOR_BYTES + lowest_peak(5)}B"
    with pytest.raises(
        InfeasibleError, match=r"no batch size fits .* batch=8: .*; raise --budget under another --name"
    ):
        choose(tmp_path, FakeWorkload(graph_of=graph_of_eights), budget=budget, stores={"ssd": str(tmp_path)})


def test_kernels_are_compared_at_a_multiple_of_the_own_batch_where_the_workload_refuses_sizes():
    estimate = BatchEstimate("w", "batch", 8, "2GiB", 2**20, None, 50, 900, 20, 400, False, refused="batch=15: odd")
    config = Config(workload="w", objective="throughput", kernels="any", budget="2GiB")
    assert config_for_kernels(config, estimate).arguments["batch"] == 8


def test_eager_s_largest_size_by_estimate_is_measured_where_no_time_is_left_to_rank_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("autotune.study.batch.race.predict_rates", lambda *_: [])
    monkeypatch.setattr(SizeRace, "find_eager_largest", lambda self: 0)
    monkeypatch.setattr(SizeRace, "has_time", lambda self: False)
    choose(tmp_path, FakeWorkload(), objective="throughput", micro_batches="never")
    search = recorded(tmp_path)
    assert search.estimate is not None
    assert {each.size.batch for each in search.measured} == {OWN, search.estimate.eager_largest}


def test_a_plan_within_the_budgets_tolerance_fits_as_eager_does():
    class Judging(FakeRunner):
        """The harness judges by the bytes that it is given."""

        def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
            return apply_budget(Measurement(Outcome.OK, charged_bytes=1003, floor_bytes=0), budget_bytes)

    config = Config(workload="w", budget="65%")
    candidate: Any = SimpleNamespace(plan=Plan((0,)), estimate=SimpleNamespace(peak_bytes=990))
    assert _measure_candidate(config, Judging(), candidate, 1000).outcome is Outcome.OK
    assert _measure_candidate(config, Judging(), candidate, 990).outcome is Outcome.OVER_BUDGET
