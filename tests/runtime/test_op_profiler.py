"""What ops cost is measured once, on made-up tensors, and kept."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.capture.program import Meta, Program
from autotune.capture.tracer import capture
from autotune.runtime import op_profiler as profiling
from autotune.runtime.op_profiler import profile
from autotune.workloads import live_workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import make, mlp, normalized

IMAGES = (2, 3, 8, 8)


@pytest.fixture
def measured(monkeypatch) -> list[list[str]]:
    """Signatures that were measured, call by call."""
    calls: list[list[str]] = []
    really = profiling._measure

    def watched(program: Program, ops: list, listen: Callable[[int, int], None]) -> dict:
        calls.append([op.signature for op in ops])
        return really(program, ops, listen)

    monkeypatch.setattr(profiling, "_measure", watched)
    monkeypatch.setattr(profiling, "STALE_RATIO", 1e3)  # the machine of a test may be busy for a moment
    return calls


def twins() -> nn.Module:
    """Three layers of which the first two cost the same."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@functools.cache
def captured(model: Callable[[], nn.Module]) -> Program:
    """Capture a model once: profiling leaves a program and its tensors as they were."""
    return capture(make(model))


def test_ops_of_one_signature_are_measured_once_and_share_their_cost(measured):
    graph = captured(twins).graph
    costs = profile(captured(twins))
    (signatures,) = measured
    assert sorted(signatures) == sorted({op.signature for op in graph.ops})
    assert len(signatures) < len(graph.ops)
    first, second = (op.id for op in graph.ops if "tanh.default" in op.target)
    assert costs.seconds[first] == costs.seconds[second]
    assert len(costs.seconds) == len(costs.scratch_bytes) == len(graph.ops)
    assert all(seconds > 0 for seconds in costs.seconds)


def test_layers_of_different_shapes_have_signatures_of_their_own():
    graph = captured(twins).graph
    linear = [op.signature for op in graph.ops if "addmm" in op.target]
    assert linear[0] == linear[1] != linear[2]


def test_a_second_profile_reads_the_cache_and_measures_nothing(measured, tmp_path: Path):
    cache = tmp_path / "deep" / "costs.json"
    first = profile(captured(twins), cache=cache)
    second = profile(capture(make(twins)), cache=cache)
    assert measured[1] == []
    assert first == second
    assert [path.name for path in cache.parent.iterdir()] == ["costs.json"]


def test_another_model_measures_only_what_the_cache_lacks(measured, tmp_path: Path):
    cache = tmp_path / "costs.json"
    profile(captured(twins), cache=cache)
    wider = capture(make(lambda: nn.Sequential(twins(), nn.Linear(4, 4))))
    profile(wider, cache=cache)
    measured_before = set(measured[0])
    assert measured[1]
    assert measured_before.isdisjoint(measured[1])
    assert {op.signature for op in wider.graph.ops} <= measured_before | set(measured[1])


def test_costs_of_another_device_are_not_taken_and_not_lost(measured, tmp_path: Path, monkeypatch):
    cache = tmp_path / "costs.json"
    first = profile(captured(mlp), cache=cache)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(profiling, "_device_name", lambda device: "another processor")
        profile(captured(mlp), cache=cache)
    assert measured[0] == measured[1]
    assert len(json.loads(cache.read_text())) == 2
    assert profile(captured(mlp), cache=cache) == first
    assert measured[2] == []


def test_costs_of_other_kernels_or_another_precision_are_measured_again(measured, tmp_path: Path):
    cache = tmp_path / "costs.json"
    profile(captured(mlp), cache=cache)
    with torch.backends.mkldnn.flags(enabled=False):
        profile(captured(mlp), cache=cache)
    before = live_workload._read_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        profile(captured(mlp), cache=cache)
    finally:
        live_workload._set_precision(before)
    profile(captured(mlp), cache=cache)
    assert measured[0] == measured[1] == measured[2]
    assert measured[3] == []


def test_a_cache_from_a_busy_machine_is_measured_anew(measured, tmp_path: Path):
    cache = tmp_path / "costs.json"
    profile(captured(mlp), cache=cache)
    text = json.loads(cache.read_text())
    busy = {key: {s: [1e6 * seconds, scratch] for s, (seconds, scratch) in rows.items()} for key, rows in text.items()}
    cache.write_text(json.dumps(busy))
    profile(captured(mlp), cache=cache)
    assert measured[1] == measured[0]


DAMAGE = {
    "torn": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "binary": lambda text: "\x00\xff\udc80",
    "a list": lambda text: "[1, 2]",
    "other rows": lambda text: json.dumps({key: {"x": "y"} for key in json.loads(text)}),
    "no rows": lambda text: json.dumps(dict.fromkeys(json.loads(text), 3)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_measured_anew_and_mended(kind: str, measured, tmp_path: Path):
    cache = tmp_path / "costs.json"
    profile(captured(mlp), cache=cache)
    cache.write_text(DAMAGE[kind](cache.read_text()), errors="surrogateescape")
    profile(captured(mlp), cache=cache)
    profile(captured(mlp), cache=cache)
    assert measured[0] == measured[1]
    assert measured[2] == []


def test_profiling_leaves_the_users_tensors_and_generator_as_they_were():
    workload = make(lambda: nn.Sequential(normalized(), nn.Dropout(0.5)), IMAGES)
    eager_step(workload)
    workload.model[0][0].weight.grad = torch.ones_like(workload.model[0][0].weight)
    before = {name: tensor.clone() for name, tensor in tensors(workload).items()}
    batch = [tensor.clone() for tensor in workload.batch]
    generator = torch.get_rng_state()
    profile(capture(workload))
    assert worst_difference(tensors(workload), before) == 0.0
    assert all(map(torch.equal, workload.batch, batch))
    assert torch.equal(workload.model[0][0].weight.grad, torch.ones_like(workload.model[0][0].weight))
    assert torch.equal(torch.get_rng_state(), generator)


def test_profiling_before_the_first_step_makes_no_optimizer_state():
    workload = make(mlp, optimizer=torch.optim.AdamW)
    profile(capture(workload))
    assert not workload.optimizer.state
    assert all(parameter.grad is None for parameter in workload.model.parameters())


class Copies(nn.Module):
    """A convolution, which works in a copy of what it reads and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 5, padding=2)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.convolution(inputs).mean((2, 3)))


def test_what_a_convolution_takes_beside_its_result_is_scratch():
    workload = make(Copies, (2, 8, 32, 32))
    program = capture(workload)
    costs = profile(program)
    forward = next(op for op in program.graph.ops if "aten.convolution.default" in op.target)
    (output,) = forward.outputs
    call = program.calls[forward.id]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call.target(*profiling._synthesize(program, {}, call.args))
    assert result.untyped_storage().nbytes() == program.graph.values[output].nbytes
    live = highest = 0
    for _, nbytes in profiling.read_allocations(recorded)[1]:
        live += nbytes
        highest = max(highest, live)
    inputs = sum(program.graph.values[value].nbytes for value in forward.inputs)
    assert costs.scratch_bytes[forward.id] == highest - inputs - program.graph.values[output].nbytes > 0


def test_an_op_that_works_in_its_result_alone_has_no_scratch():
    graph = captured(twins).graph
    costs = profile(captured(twins))
    assert {costs.scratch_bytes[op.id] for op in graph.ops if "tanh" in op.target} == {0}


def squared_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0][:, :4])


def test_a_loss_whose_memory_is_larger_than_its_shape_is_counted_as_it_is():
    program = capture(make(mlp, (64, 8), loss_fn=squared_loss))
    loss = next(op for op in program.graph.ops if "mse_loss.default" in op.target)
    predicted = program.graph.values[loss.outputs[0]].nbytes + profile(program).scratch_bytes[loss.id]
    assert predicted >= F.mse_loss(torch.zeros(64, 4), torch.ones(64, 4)).untyped_storage().nbytes() > 4


def test_an_updates_first_run_which_makes_the_state_is_not_what_it_costs():
    program = capture(make(lambda: nn.Linear(8, 4)))
    costs = profile(program)
    (update,) = [op for op in program.graph.ops if op.name == "weight.update"]
    (state,) = [value for value in program.graph.values if value.name == "weight.state"]
    assert state.nbytes == 8 * 4 * 4
    assert costs.scratch_bytes[update.id] < state.nbytes  # a number or two


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for cache in (tmp_path / "file" / "costs.json", tmp_path / "folder"):
        assert len(profile(captured(mlp), cache=cache).seconds) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(("busy_rounds", "seconds"), [(5, 0.01), (10_000, 0.25)])
def test_what_was_measured_while_something_else_ran_is_measured_anew_but_not_for_ever(
    busy_rounds: int, seconds: float, monkeypatch
):
    program = captured(twins)
    kinds = len({op.signature for op in program.graph.ops})
    calls = 0

    def taken(*_: object) -> float:
        nonlocal calls
        calls += 1
        return 0.25 if calls <= busy_rounds * kinds else 0.01

    monkeypatch.setattr(profiling, "_time_op", taken)
    assert set(profile(program).seconds) == {seconds}
    assert calls < 30 * kinds


def test_seconds_are_those_of_memory_that_has_its_pages(monkeypatch):
    """As an arena's has: what is timed is the second of two calls, whose results lie where the first's did."""
    program = captured(twins)
    op = next(op for op in program.graph.ops if "tanh.default" in op.target)
    ready = profiling._synthesize_call(program, op)
    places = []

    def watched(*args, **kwargs):
        result = ready[0](*args, **kwargs)
        places.append(result.data_ptr())
        return result

    monkeypatch.setattr(profiling, "_synthesize_call", lambda *_: (watched, *ready[1:]))
    assert profiling._time_op(program, op) > 0
    first, second = places
    assert first == second


def test_values_of_eight_bit_floats_are_made_though_torch_draws_none():
    meta = Meta((4, 8), (8, 1), torch.float8_e4m3fn, torch.device("cpu"))
    tensor = profiling._synthetic_tensor(meta, 32).float()
    assert bool(((tensor > 0.05) & (tensor <= 1.0)).all())
