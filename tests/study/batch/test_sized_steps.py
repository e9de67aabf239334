"""Steps of other batch sizes: interpolated bytes are those of a capture, and batch norm is detected where it trains."""

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.capture.fake.eager_bytes import count_workload_bytes
from autotune.capture.fake.sized_step import CapturedStep, capture_sized_step
from autotune.errors import CaptureError, ConfigError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.candidates import Candidate, find_smallest
from autotune.planners.space import Space, space_for_device
from autotune.predict.simulate import peak_bytes
from autotune.records.config import Config, load_config
from autotune.study.batch.estimate import SmallestPlans, estimate_batch, estimate_from_steps, search_largest
from autotune.study.batch.sized_steps import SizedSteps, capture_sizes, normalizes_over_batch
from autotune.testing.fake_runner import FLOOR_BYTES
from autotune.testing.graphs import training_chain
from autotune.workloads.batch_argument import BatchArgument

TEXT = {"tokens": 8, "depth": 1, "width": 32, "vocabulary": 64}
IMAGES = {"size": 32, "width": 8, "depth": 1}


NET = """
import os

import torch
from autotune import Workload


def loss_fn(model, batch):
    return model(batch).square().mean()


def make(batch: int = 4):
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))]
    model = torch.nn.Sequential(*layers)
    return Workload(model, loss_fn, torch.optim.AdamW(model.parameters()), torch.randn(batch, 16, 32))


def steps(batch: int = 4, unused: int = 3):
    return make(batch)


def grouped(batch: int = 4):
    if batch % 4:
        raise ValueError(f"{batch} samples cannot be grouped")
    return make(batch)


def moving(batch: int = 4):
    os.chdir("/")
    return make(batch)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET, encoding="utf-8")
    return "net.py:steps"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("net.py:steps", {}),
        pytest.param("gpt2", TEXT, marks=pytest.mark.slow),
        pytest.param("resnet18", IMAGES, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("net")
def test_interpolated_bytes_and_peaks_are_those_of_a_capture_of_the_size(name: str, arguments: dict[str, Any]):
    steps = capture_sizes(Config(workload=name, arguments=arguments), "batch", 4)
    assert steps.is_interpolated
    plan = find_smallest(*vars_of(steps, 4), space_for_device({}, "cpu", {})).plan
    for size in (3, 13):
        captured = capture_sized_step(name, {**arguments, "batch": size})
        interpolated = steps.at_size(size)
        assert [value.nbytes for value in interpolated.graph.values] == [
            value.nbytes for value in captured.graph.values
        ]
        for other in (Plan.traced(captured.graph), plan):
            expected = peak_bytes(captured.graph, other, captured.costs)
            assert peak_bytes(interpolated.graph, other, interpolated.costs) == expected
        assert steps.check(size)


def vars_of(steps: SizedSteps, size: int) -> tuple[Any, Any]:
    step = steps.at_size(size)
    return step.graph, step.costs


def test_a_size_that_the_line_misses_ends_the_interpolation():
    """Padding to a multiple of eight: bytes are no line."""

    def capture(size: int) -> CapturedStep:
        graph = training_chain(4, nbytes=1000 * -(-size // 8) * 8)
        return CapturedStep(graph, Costs.unit(graph))

    steps = SizedSteps(capture, lambda size: size, 8)
    assert steps.is_interpolated
    assert steps.check(32)
    assert not steps.check(13)
    assert not steps.is_interpolated
    assert [steps.at_size(size).graph for size in (9, 20)] == [capture(size).graph for size in (9, 20)]


def make_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> CapturedStep:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "import torch\nfrom autotune import Workload\n\n\n"
        "def loss_fn(model, batch):\n    return model(batch).square().mean()\n\n\n"
        f"def make(batch=4):\n    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), {body})\n"
        "    return Workload(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(batch, 3, 8, 8))\n"
    )
    return capture_sized_step("net.py:make", {})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("torch.nn.BatchNorm2d(4)", True),
        ("torch.nn.BatchNorm2d(4, affine=False)", True),
        ("torch.nn.BatchNorm2d(4, track_running_stats=False)", True),
        ("torch.nn.BatchNorm2d(4).eval()", False),
        ("torch.nn.GroupNorm(2, 4)", False),
        ("torch.nn.LayerNorm([4, 6, 6])", False),
    ],
)
def test_batch_norm_is_detected_where_it_uses_statistics_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: bool
):
    assert normalizes_over_batch(make_steps(tmp_path, monkeypatch, body).graph) is expected


def test_an_argument_that_changes_nothing_is_refused(net: str):
    with pytest.raises(ConfigError, match="the step is the same for unused=3 and unused=6; name the argument"):
        capture_sizes(Config(workload=net), "unused", 3)


QUICK = {"recompute": ["keep", "greedy"], "reorder": ["keep"], "order": ["traced"]}


def test_the_estimate_agrees_with_captures_of_the_sizes_around_it(net: str):
    config = load_config(net, overrides={"budget": "300%", "planners": QUICK})
    estimate = estimate_batch(config, lambda _: pytest.fail("a share of eager's peak needs no floor"))
    space = space_for_device(config.planners.model_dump(), "cpu", {})

    def charge(size: int) -> float:
        step = capture_sized_step(net, {"batch": size})
        return find_smallest(step.graph, step.costs, space).estimate.peak_bytes * 1.03

    assert charge(estimate.largest) <= estimate.budget_bytes
    assert charge(estimate.largest + max(2, estimate.largest // 20)) > estimate.budget_bytes
    assert estimate.eager_largest < estimate.largest
    assert estimate.budget_bytes == 3 * estimate.eager_bytes
    assert estimate.captures <= 5
    assert count_workload_bytes(net, {"batch": estimate.eager_largest}) <= estimate.budget_bytes
    assert count_workload_bytes(net, {"batch": estimate.eager_largest + 1}) > estimate.budget_bytes


def test_without_interpolation_a_size_is_planned_once_and_after_the_planning_time_smaller_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    planned: list[TrainGraph] = []

    def capture(size: int) -> CapturedStep:
        graph = training_chain(4, nbytes=1000 * size)
        return CapturedStep(graph, Costs.unit(graph))

    def record(graph: TrainGraph, costs: Costs, space: Space) -> Candidate:
        planned.append(graph)
        return find_smallest(graph, costs, space)

    monkeypatch.setattr("autotune.study.batch.estimate.find_smallest", record)
    steps = SizedSteps(capture, lambda size: size, 8)
    steps.capture_all()
    plans = SmallestPlans(steps, space_for_device(QUICK, "cpu", {}))
    small, large, again = (plans.peak_at(size) for size in (8, 20, 8))
    assert small == again < large
    assert planned == [capture(8).graph, capture(20).graph]
    monkeypatch.setattr("autotune.study.batch.estimate.PLANNING_SECONDS", -1.0)
    assert [plans.peak_at(size) for size in (8, 9, 21)] == [small, large, math.inf]
    assert len(planned) == 2
    assert plans.peak_at(7) < small, "or no size would seem to fit where the first ones do not"


def capture_multiples_of_8(size: int) -> CapturedStep:
    if size % 8:
        raise CaptureError(f"{size} is no multiple of 8")
    graph = training_chain(4, nbytes=100_000 * size)
    return CapturedStep(graph, Costs.unit(graph))


def count_multiples_of_8(size: int) -> int:
    if size % 8:
        raise ValueError(f"{size} samples cannot be grouped")
    return 1_000_000 * size


@pytest.mark.parametrize("is_interpolated", [True, False])
def test_the_largest_sizes_are_those_that_the_workload_accepts_and_a_refusal_is_named(is_interpolated: bool):
    steps = SizedSteps(capture_multiples_of_8, count_multiples_of_8, 8)
    if not is_interpolated:
        steps.capture_all()
    config = load_config("w", overrides={"budget": "560%", "planners": QUICK})
    estimate = estimate_from_steps(
        config, BatchArgument("batch", 8), steps, lambda _: pytest.fail("no floor"), time.monotonic()
    )
    plans = SmallestPlans(steps, space_for_device(QUICK, "cpu", {}))
    plans.make(8)
    assert (steps.unit, estimate.largest % 8, estimate.eager_largest) == (8, 0, 40)
    assert plans.peak_at(estimate.largest) < estimate.budget_bytes < 1.1 * plans.peak_at(estimate.largest + 8)
    assert plans.peak_at(estimate.largest + 4) == math.inf
    assert re.fullmatch(r"batch=\d+: (\d+ is no multiple of 8|\d+ samples cannot be grouped)", estimate.refused)


@pytest.mark.parametrize("is_interpolated", [True, False])
def test_a_workload_that_refuses_one_sample_has_no_size_where_none_fits(is_interpolated: bool):
    def capture(size: int) -> CapturedStep:
        if size == 1:
            raise CaptureError("Expected more than 1 value per channel when training")
        graph = training_chain(4, nbytes=1000 * size)
        return CapturedStep(graph, Costs.unit(graph))

    steps = SizedSteps(capture, lambda size: size, 8)
    if not is_interpolated:
        steps.capture_all()
    assert search_largest(steps, SmallestPlans(steps, space_for_device(QUICK, "cpu", {})), 1, 8, time.monotonic()) == 0


def test_a_workload_that_needs_three_samples_may_accept_every_larger_size():
    def capture(size: int) -> CapturedStep:
        if size < 3:
            raise CaptureError(f"{size} samples are too few")
        graph = training_chain(4, nbytes=1000 * size)
        return CapturedStep(graph, Costs.unit(graph))

    steps = SizedSteps(capture, lambda size: size, 10)
    assert not steps.accepts(2)
    assert (steps.unit, steps.round_down(29)) == (1, 29)


def test_the_workloads_own_size_is_refused_with_its_error():
    steps = SizedSteps(capture_multiples_of_8, count_multiples_of_8, 8)
    assert (steps.round_down(7), steps.round_down(29), steps.eager_bytes(29)) == (0, 24, math.inf)
    odd = SizedSteps(lambda size: capture_multiples_of_8(4 * size), count_multiples_of_8, 1)
    with pytest.raises(CaptureError, match="4 is no multiple of 8"):
        odd.round_down(1)


def test_a_budget_in_bytes_is_one_of_the_process(net: str):
    config = load_config(net, overrides={"budget": f"{FLOOR_BYTES + 10**6}B", "planners": QUICK})
    estimate = estimate_batch(config, lambda argument: FLOOR_BYTES)
    assert (estimate.floor_bytes, estimate.budget_bytes) == (FLOOR_BYTES, 10**6)


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize(("factory", "size"), [("steps", 2), ("grouped", 4)])
def test_an_idle_process_is_measured_at_a_small_batch_that_the_workload_accepts(factory: str, size: int):
    sizes: list[int] = []

    def measure_floor(argument: BatchArgument) -> int:
        sizes.append(argument.size)
        return FLOOR_BYTES

    overrides = {"budget": f"{FLOOR_BYTES + 10**6}B", "planners": QUICK}
    estimate = estimate_batch(load_config(f"net.py:{factory}", overrides=overrides), measure_floor)
    assert sizes == [size]
    if factory == "grouped":
        assert (estimate.largest % 4, estimate.eager_largest % 4) == (0, 0)
        assert "samples cannot be grouped" in estimate.refused


@pytest.mark.usefixtures("net")
def test_a_factory_that_changes_the_working_directory_moves_no_path_of_this_process():
    place = Path.cwd()
    steps = capture_sizes(Config(workload="net.py:moving"), "batch", 4)
    steps.eager_bytes(6)
    assert Path.cwd() == place


def test_random_state_of_the_process_stays(net: str):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    capture_sizes(Config(workload=net), "batch", 2)
    assert torch.equal(torch.rand(3), expected)


def test_a_step_that_reads_data_cannot_be_counted_on_fake_tensors(tmp_path: Path):
    reads = "        scale = torch.arange(1, 5).sum().item()\n        return model(batch).sum() * scale"
    path = tmp_path / "reads.py"
    path.write_text(
        "import torch\nfrom autotune import Workload\n\ndef make():\n"
        "    model = torch.nn.Linear(4, 1)\n    def loss(model, batch):\n"
        f"{reads}\n    return Workload(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4))\n"
    )
    with pytest.raises(ConfigError, match=r"reads\.py:make: the eager step cannot run on fake tensors: "):
        count_workload_bytes(f"{path}:make", {})
