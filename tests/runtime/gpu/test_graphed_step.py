"""A step in graphs has the bits of the step without: over batches, learning rates, dropout, and any plan. On made-up graphs."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan, early_updates
from autotune.ir.schedule import Schedule, lower
from autotune.planners.auto import best_plan
from autotune.predict.simulate import simulate
from autotune.runtime.executor import Executor
from autotune.runtime.gpu.graphed_step import MAX_CAPTURES, WARM_UP_STEPS
from autotune.runtime.gpu.step_split import Part, split_step
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.stores import open_store
from autotune.testing.graphs import random_plan
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload
from tests.support.fake_graphs import FakeRecorder

STEPS = WARM_UP_STEPS + 4


class Embedded(nn.Module):
    """Integer inputs, attention and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(tokens))).mean(1)


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def forward(self, outputs: Any) -> torch.Tensor:
        result: torch.Tensor = outputs[0][:, -1]
        return result


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)),
        lambda: torch.randn(5, 6),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        lambda: torch.randn(5, 2, 6, 6),
    ),
    "embedding": (Embedded, lambda: torch.randint(0, 17, (4, 7))),
    "lstm": (lambda: nn.Sequential(nn.LSTM(6, 5, batch_first=True), Last()), lambda: torch.randn(3, 4, 6)),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}


@dataclass
class Training:
    """One of two equal trainings."""

    workload: Workload
    program: Program


def make(model: str, optimizer: str = "sgd") -> Training:
    torch.manual_seed(7)
    network = MODELS[model][0]()
    batch = MODELS[model][1]()
    loss: Callable[..., Any] = lambda net, batch: net(batch).square().mean()  # noqa: E731
    workload = Workload(network, loss, OPTIMIZERS[optimizer](network.parameters()), batch)
    return Training(workload, capture(workload))


def train(
    training: Training, executor: Executor, model: str, on_step: Callable[[int], object] = lambda _: None
) -> list[Any]:
    """Train on other batches and learning rates in each step; return every bit that can differ."""
    results: list[Any] = []
    assert training.program.updates is not None
    assert training.workload.optimizer is not None
    torch.manual_seed(11)
    for step in range(STEPS):
        on_step(step)
        for group in training.workload.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        with training.program.updates.step():
            results.append(executor([MODELS[model][1]()]))
    state = training.workload.optimizer.state_dict()["state"]
    leaves = torch.utils._pytree.tree_leaves([training.workload.model.state_dict(), state])
    return [*results, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.get_rng_state()]


@contextmanager
def opened(training: Training, schedule: Schedule, directory: Path) -> Iterator[Any]:
    if not schedule.store:
        yield None
        return
    with open_store(schedule.store, directory, slot_sizes(training.program, schedule)) as store:
        yield store


def compare(
    model: str,
    optimizer: str,
    make_plan: Callable[[Program], Plan],
    directory: Path,
    expected_graphs: int | None = None,
) -> Executor:
    """Train without and with graphs; all bits must agree, and graphs must have been replayed."""
    bits = []
    recorders: list[FakeRecorder] = []

    def record() -> FakeRecorder:
        recorders.append(FakeRecorder())
        return recorders[-1]

    for graphs in (False, True):
        training = make(model, optimizer)
        schedule = lower(training.program.graph, make_plan(training.program))
        with opened(training, schedule, directory) as store:
            executor = Executor(training.program, schedule, store, make_recorder=record if graphs else None)
            bits.append(train(training, executor, model))
    assert executor.graphed is not None
    assert executor.graphed.problem == ""
    (recorder,) = recorders
    assert {graph.replays for graph in recorder.graphs} == {STEPS - WARM_UP_STEPS}
    assert expected_graphs is None or len(recorder.graphs) == expected_graphs
    for plain, graphed in zip(*bits, strict=True):
        assert torch.equal(plain, graphed)
    assert all(tensor.isfinite().all() for tensor in bits[0][:STEPS])
    return executor


def traced(program: Program) -> Plan:
    return Plan.traced(program.graph)


def smaller(program: Program) -> Plan:
    """Return a plan of few bytes: recomputation, early updates and runs in place."""
    graph, costs = program.graph, Costs.unit(program.graph)
    peak = simulate(graph, lower(graph, traced(program)), costs).peak_bytes
    return best_plan(graph, costs, int(0.75 * (peak - graph.static_bytes)) + graph.static_bytes, accept_first=True).plan


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        pytest.param(model, optimizer, marks=() if model == "dropout" or optimizer == "sgd" else pytest.mark.slow)
        for model, optimizer in itertools.product(MODELS, OPTIMIZERS)
    ],
)
def test_a_traced_step_is_one_graph_and_has_the_same_bits(model: str, optimizer: str, tmp_path: Path) -> None:
    compare(model, optimizer, traced, tmp_path, expected_graphs=1)


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_of_fewer_bytes_has_the_same_bits(model: str, tmp_path: Path) -> None:
    compare(model, "adamw", smaller, tmp_path)


@pytest.mark.parametrize(
    ("model", "seed"), [*(("dropout", seed) for seed in range(6)), *(("batch norm", seed) for seed in (1, 3, 9))]
)
def test_random_plans_with_recomputation_and_offload_have_the_same_bits(model: str, seed: int, tmp_path: Path) -> None:
    """In those of the batch norm, the host writes over memory of a graph before another graph runs."""
    offloads = []

    def drawn(program: Program) -> Plan:
        plan = random_plan(program.graph, random.Random(seed), repeat=6)
        offloads.append(plan.offload)
        return replace(plan, store="ssd") if plan.offload else plan

    compare(model, "sgd", drawn, tmp_path)
    assert offloads[0] == offloads[1]
    assert offloads[0]


def early(program: Program) -> Plan:
    """Return a plan that updates every parameter as soon as its gradient exists."""
    from autotune.planners.update.with_gradient import WithGradient

    return WithGradient().plan(program.graph, Plan.traced(program.graph), 0, Costs.unit(program.graph))


def test_updates_beside_their_gradients_split_the_step(tmp_path: Path) -> None:
    program = make("dropout").program
    plan = early(program)
    assert len(early_updates(program.graph, plan.order)) > 3
    graphs = split_step(program, lower(program.graph, plan)).graphs
    assert graphs > 3
    compare("dropout", "adamw", early, tmp_path, expected_graphs=graphs)


def test_an_offloaded_activation_is_written_between_graphs_and_its_readers_run_on_the_host(tmp_path: Path) -> None:
    program = make("dropout").program
    graph = program.graph
    drawn = [random_plan(graph, random.Random(seed), repeat=0) for seed in range(20)]
    plan, swap = next((plan, swap) for plan in drawn for swap in plan.offload if swap.value not in graph.static)
    plan, value = replace(plan, offload=(swap,), store="ssd"), swap.value
    schedule = lower(graph, plan)
    split = split_step(program, schedule)
    read_back = False
    for part, instruction in zip(split.parts, schedule.instructions, strict=True):
        name = type(instruction).__name__
        if name in ("Offload", "Prefetch"):
            assert part is Part.HOST
            read_back |= name == "Prefetch"
        if name == "Run" and read_back and value in graph.ops[instruction.op].inputs:  # type: ignore[union-attr]
            assert part is Part.HOST
    assert split.graphs >= 2
    compare("dropout", "sgd", lambda _: plan, tmp_path, expected_graphs=split.graphs)


def executor_of(training: Training, make_recorder: Callable[[], Any], plan: Plan | None = None) -> Executor:
    graph = training.program.graph
    return Executor(training.program, lower(graph, plan or Plan.traced(graph)), make_recorder=make_recorder)


def test_a_kernel_that_refuses_a_capture_leaves_the_step_as_it_was() -> None:
    plain, graphed = make("dropout"), make("dropout")
    executor = executor_of(graphed, lambda: FakeRecorder(refused="gelu_backward"))
    with pytest.warns(UserWarning, match="without CUDA graphs: RuntimeError: CUDA error: operation not permitted"):
        bits = train(graphed, executor, "dropout")
    expected = train(plain, Executor(plain.program, lower(plain.program.graph, traced(plain.program))), "dropout")
    assert all(map(torch.equal, expected, bits))
    assert executor.graphed is not None
    assert executor.graphed.captures == 1


def test_parameters_that_move_cause_a_new_capture_and_those_that_keep_moving_end_it() -> None:
    plain, graphed = make("dropout"), make("dropout")
    recorders: list[FakeRecorder] = []

    def record() -> FakeRecorder:
        recorders.append(FakeRecorder())
        return recorders[-1]

    executor = executor_of(graphed, record)
    weight = graphed.workload.model[0].weight  # type: ignore[index]

    def move(step: int) -> None:
        if step >= WARM_UP_STEPS:
            weight.data = weight.data.clone()

    with pytest.warns(UserWarning, match=f"moved in memory {MAX_CAPTURES} times"):
        bits = train(graphed, executor, "dropout", move)
    expected = train(plain, Executor(plain.program, lower(plain.program.graph, traced(plain.program))), "dropout")
    assert all(map(torch.equal, expected, bits))
    assert [recorder.graphs[0].replays for recorder in recorders] == [1] * MAX_CAPTURES


class KeepsGradients(torch.optim.Optimizer):
    """An optimizer that remembers the last gradient without a copy."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    last = self.state[parameter].get("last", torch.zeros_like(parameter))
                    parameter.sub_(group["lr"] * (parameter.grad + 0.5 * last))
                    self.state[parameter]["last"] = parameter.grad


def test_an_optimizer_that_keeps_a_gradient_ends_the_graphs_before_it_reads_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "keeps", KeepsGradients)
    plain, graphed = make("dropout", "keeps"), make("dropout", "keeps")
    executor = executor_of(graphed, FakeRecorder)
    with pytest.warns(UserWarning, match="keeps a gradient as its state"):
        bits = train(graphed, executor, "dropout")
    expected = train(plain, Executor(plain.program, lower(plain.program.graph, traced(plain.program))), "dropout")
    assert all(map(torch.equal, expected, bits))


def test_an_optimizer_that_keeps_a_gradient_is_noticed_after_steps_with_a_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "keeps", KeepsGradients)
    graphed = make("dropout", "keeps")
    executor, updates = executor_of(graphed, FakeRecorder), graphed.program.updates
    assert updates is not None
    updates.on_gradient = lambda name, gradient: None
    train(graphed, executor, "dropout")
    updates.on_gradient = None
    with pytest.warns(UserWarning, match="keeps a gradient as its state"):
        train(graphed, executor, "dropout")


def test_gradients_that_a_callback_gets_are_not_of_a_graph() -> None:
    training = make("dropout")
    executor = executor_of(training, FakeRecorder)
    assert training.program.updates is not None
    kept: dict[str, list[torch.Tensor]] = {}
    training.program.updates.on_gradient = lambda name, gradient: kept.setdefault(name, []).append(gradient)
    train(training, executor, "dropout")
    assert executor.graphed is not None
    assert executor.graphed.captures == 0
    assert all(len({gradient.data_ptr() for gradient in gradients}) == STEPS for gradients in kept.values())


@pytest.mark.parametrize("loop", ["clip", "accumulate=2"])
def test_a_loop_that_holds_gradients_runs_without_graphs(loop: str) -> None:
    torch.manual_seed(7)
    network = MODELS["dropout"][0]()
    program = capture(
        Workload(
            network, lambda net, batch: net(batch).square().mean(), torch.optim.SGD(network.parameters(), lr=0.1),
            torch.randn(5, 6), loop=Loop.parse(loop),
        )
    )  # fmt: skip
    assert "gradients" in split_step(program, lower(program.graph, Plan.traced(program.graph))).reason


def test_a_step_that_changes_a_tensor_from_outside_runs_without_graphs() -> None:
    network, total = MODELS["dropout"][0](), torch.zeros(())

    def loss_fn(net: Any, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(batch).square().mean()
        total.add_(loss.detach())
        return loss

    program = capture(Workload(network, loss_fn, torch.optim.SGD(network.parameters(), lr=0.1), torch.randn(5, 6)))
    assert "from outside" in split_step(program, lower(program.graph, Plan.traced(program.graph))).reason


def test_results_of_a_step_stay_when_the_next_step_has_run() -> None:
    training = make("dropout")
    executor = executor_of(training, FakeRecorder)
    results = train(training, executor, "dropout")[:STEPS]
    assert len({result.item() for result in results}) == STEPS


def calls_of_updates(rows: int) -> int:
    """Return the number of calls that update six parameters of 500 numbers after a batch of so many rows."""
    torch.manual_seed(7)
    network = MODELS["dropout"][0]()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    workload = Workload(network, lambda net, batch: net(batch).square().mean(), optimizer, torch.randn(rows, 6))
    program = capture(workload)
    executor = Executor(program, lower(program.graph, Plan.traced(program.graph)), make_recorder=FakeRecorder)
    assert executor.graphed is not None
    return executor.graphed._writer.replay_source().count("update_together")


def test_updates_run_together_where_the_peak_leaves_room_for_their_temporaries() -> None:
    assert calls_of_updates(2000) == 1
    assert calls_of_updates(5) > 1


def test_a_made_up_graph_runs_nothing_when_captured_and_destroys_what_was_released() -> None:
    recorder, number = FakeRecorder(), torch.zeros(3)
    recorder.begin()
    number.add_(1)
    first = number * 2
    second = first + 1
    recorder.end()
    kept, dropped = recorder.borrow(second), recorder.borrow(first)
    del first
    recorder.begin()
    third = second * 1
    recorder.end()
    assert torch.equal(number, torch.zeros(3))
    for graph in recorder.graphs * 2:
        graph.replay()
    assert torch.equal(number, torch.full((3,), 2.0))
    assert torch.equal(kept, torch.full((3,), 5.0))
    assert torch.equal(third, kept)
    assert dropped.isnan().all()


def test_a_made_up_graph_draws_new_numbers_in_each_replay() -> None:
    recorder = FakeRecorder()
    torch.manual_seed(3)
    recorder.begin()
    drawn = torch.rand(4)
    recorder.end()
    replays = []
    for _ in range(2):
        recorder.graphs[0].replay()
        replays.append(drawn.clone())
    torch.manual_seed(3)
    assert torch.equal(torch.stack(replays), torch.stack([torch.rand(4), torch.rand(4)]))
