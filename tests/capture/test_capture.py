"""A captured step is the user's own step, and capturing it disturbs nothing."""

import copy
import warnings
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autotune.capture import tracer
from autotune.capture.capture_checks import refuse_old_torch, refuse_shared_memory
from autotune.capture.program import argument_text, reads
from autotune.capture.python.recorded_run import record_step
from autotune.capture.python.step_trace import StepTrace
from autotune.capture.signature import read_model_state
from autotune.capture.tracer import capture
from autotune.errors import CaptureError
from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, Role, TrainGraph
from autotune.planners import make_plan
from autotune.runtime.op_profiler import read_allocations
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load_workload
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload
from tests.capture.twins import Twins
from tests.support.eager import assert_equals_eager, eager_step, tensors, worst_difference
from tests.support.small import Tied, batch_of, labelled_loss, make, mlp, normalized, sgd


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def ops_of(graph: TrainGraph, *words: str) -> list[Op]:
    """Ops whose target has one of these words in it."""
    return [op for op in graph.ops if any(word in op.target for word in words)]


def updated(graph: TrainGraph) -> list[str]:
    """Parameters in the order of their updates."""
    return [op.name.removesuffix(".update") for op in graph.ops if op.target.startswith("update.")]


def test_a_plan_for_a_copied_batch_is_for_slices_of_a_data_set_too():
    workload = make(mlp)
    data, labels = (part.repeat(50, *[1] * (part.ndim - 1)) for part in workload.batch)
    sliced = replace(workload, batch=(data[6:12], labels[6:12]))
    copied, of_slices = capture(workload).graph, capture(sliced).graph
    assert of_slices.digest == copied.digest
    assert of_slices.static_bytes == copied.static_bytes
    every_second = capture(replace(workload, batch=(data[:12:2], labels[:12:2]))).graph
    (nbytes,) = [value.nbytes for value in every_second.values if value.name == "batch.0"]
    assert nbytes == 11 * 8 * 4  # from its first row to its last


# Nothing is disturbed.


def test_capturing_a_step_of_400_mib_allocates_less_than_one():
    wide = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    inputs = torch.zeros(1, 64).expand(200_000, 64)  # no memory of its own either
    workload = Workload(wide, labelled_loss, sgd(wide.parameters()), (inputs, torch.zeros(200_000, dtype=torch.int64)))
    capture(make(mlp))  # what the tracer keeps from its first use on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        program = capture(workload)
    live = highest = 0
    for _, nbytes in read_allocations(recorded)[1]:
        live += nbytes
        highest = max(highest, live)
    assert sum(value.nbytes for value in program.graph.values if value.role is Role.ACTIVATION) > 400 * 2**20
    assert highest < 2**20


def test_capture_leaves_parameters_buffers_gradients_state_and_generator_as_they_were():
    workload = make(lambda: nn.Sequential(normalized(), nn.Dropout(0.5)), (2, 3, 8, 8))
    for parameter in workload.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {key: tensor.clone() for key, tensor in workload.model.state_dict().items()}
    versions = [tensor._version for tensor in workload.model.state_dict().values()]
    generator = torch.get_rng_state()
    capture(workload)
    assert worst_difference(dict(workload.model.state_dict()), before) == 0.0
    assert [tensor._version for tensor in workload.model.state_dict().values()] == versions
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in workload.model.parameters())
    assert not workload.optimizer.state
    assert torch.equal(torch.get_rng_state(), generator)


def test_capture_leaves_optimizer_state_that_exists_as_it_was():
    workload = make(mlp, optimizer=adam)
    eager_step(workload)
    before = {key: tensor.clone() for key, tensor in tensors(workload).items()}
    capture(workload)
    assert worst_difference(tensors(workload), before) == 0.0


# What is in the graph.


def twice() -> nn.Module:
    """One layer under two names."""
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(8, 4))


def test_a_layer_with_two_names_keeps_its_own_weights_and_equals_eager():
    workload = make(twice)
    before = list(map(id, workload.model.parameters()))
    program = capture(workload)
    assert list(map(id, workload.model.parameters())) == before
    assert updated(program.graph).count("0.weight") == 1
    assert_equals_eager(make(twice), make(twice))


class Slices(nn.Module):
    """A loss on the first layer of another model, which has two names in it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = mlp().requires_grad_(False)
        self.parts = nn.ModuleList([self.features[:1]])

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).square().mean() + self.parts[0](batch[0]).mean() * self.features[0].bias.sum()


def test_a_layer_of_the_loss_with_two_names_keeps_its_own_weights_and_equals_eager():
    loss = Slices()
    before = list(map(id, loss.parameters()))
    assert_equals_eager(make(mlp, loss_fn=loss), make(mlp, loss_fn=loss))
    assert list(map(id, loss.parameters())) == before
    assert all(type(parameter) is nn.Parameter for parameter in loss.parameters())


def test_tied_weights_are_one_value_with_one_gradient_and_one_update():
    twins = Twins(lambda: make(Tied))
    graph = twins.graph
    names = ["entry.bias", "entry.weight", "first.bias", "first.weight"]
    assert sorted(value.name for value in graph.values if value.role is Role.PARAM) == names
    assert sorted(updated(graph)) == names
    assert [value.name for value in graph.values if value.role is Role.GRAD].count("first.weight.grad") == 1
    (weight,) = [value.id for value in graph.values if value.name == "first.weight"]
    (writer,) = [op.id for op in graph.ops if weight in op.writes]
    assert set(graph.consumers[weight]) - {writer} <= graph.predecessors[writer]
    settings = {"update": {"planner": "with_gradient"}, "recompute": {"planner": "segments", "count": 3}}
    twins.assert_equals_eager(make_plan(graph, settings, 0, Costs.unit(graph)), steps=2)


def test_batchnorm_statistics_are_committed_once_each_after_every_forward_op():
    graph = capture(make(normalized, (2, 3, 8, 8))).graph
    commits = ops_of(graph, "commit")
    assert sorted(op.name for op in commits) == sorted(
        f"{layer}.{name}.commit" for layer in (1, 4) for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    assert all(op.phase is Phase.UPDATE and not op.repeatable for op in commits)
    assert min(op.id for op in commits) > max(op.id for op in graph.ops if op.phase is Phase.FORWARD)


def test_batchnorm_statistics_move_once_a_step_where_the_normalization_runs_twice():
    twins = Twins(lambda: make(normalized, (2, 3, 8, 8)))
    graph = twins.graph
    settings = {"recompute": {"planner": "segments", "count": 3}, "allocator": {"planner": "system"}}
    plan = make_plan(graph, settings, 0, Costs.unit(graph))
    norms = [op.id for op in ops_of(graph, "native_batch_norm") if op.phase is Phase.FORWARD]
    assert any(plan.order.count(op) == 2 for op in norms)
    twins.assert_equals_eager(plan, steps=2)
    assert twins.one.model[1].num_batches_tracked == 2


class Viewer(nn.Module):
    """A view of a view, a slice, an expansion, a split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = (inputs * 2).view(6, 2, 4).transpose(1, 2).split(2, dim=1)
        joined = (left * right).flatten(1)[:, :4]
        return joined * self.scale.expand(6, 4)


def test_a_view_is_no_value_and_its_readers_read_the_memory_behind_it():
    twins = Twins(lambda: make(Viewer))
    graph = twins.graph
    assert not ops_of(graph, "view", "transpose", "split", "slice", "expand", "getitem", "unsqueeze")
    scale = next(value for value in graph.values if value.name == "scale")
    products = [op for op in ops_of(graph, "mul") if op.phase is Phase.FORWARD]
    assert scale.id in products[-1].inputs
    assert products[1].inputs == products[0].outputs  # left and right lie in one memory
    twins.assert_equals_eager(steps=2)


class Several(nn.Module):
    """Ops that return several tensors, not all of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        variance, mean = torch.var_mean(inputs, dim=1, keepdim=True)
        highest = inputs.max(dim=1, keepdim=True).values
        return self.head(self.norm((inputs - mean) / variance) + highest)


def test_an_op_of_several_results_makes_a_value_for_each():
    twins = Twins(lambda: make(Several))
    graph = twins.graph
    (norm,) = [op for op in ops_of(graph, "native_layer_norm") if op.phase is Phase.FORWARD]
    assert [graph.values[value].nbytes for value in norm.outputs] == [6 * 8 * 4, 6 * 4, 6 * 4]
    (moments,) = ops_of(graph, "var_mean")
    assert len(moments.outputs) == 2
    twins.assert_equals_eager(steps=2)


def frozen_first() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def last_only(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[2:], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("model", "optimizer"), [(frozen_first, last_only), (mlp, last_only), (frozen_first, sgd)])
def test_what_nobody_updates_has_no_gradient_computed(model, optimizer):
    twins = Twins(lambda: make(model, optimizer=optimizer))
    graph = twins.graph
    assert sorted(updated(graph)) == ["3.bias", "3.weight"]
    assert {value.name for value in graph.values if value.role is Role.GRAD} <= {"3.bias.grad", "3.weight.grad"}
    assert not [op for op in graph.ops if op.phase is Phase.BACKWARD and op.layer == "0"]
    twins.assert_equals_eager(steps=1)


def test_gradients_that_no_optimizer_of_the_step_reads_are_warned_of_with_and_without_clipping():
    for loop, reader in ((Loop(), "a planned step computes"), (Loop(clip=True), "before_update sees")):
        workload = replace(make(mlp, optimizer=last_only), loop=loop)
        with pytest.warns(UserWarning, match=rf"^0\.weight, 0\.bias require .*{reader} no gradient .*use PlannedLoss"):
            capture(workload)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            capture(workload)  # as for another shape of the batch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(make(frozen_first, optimizer=last_only))


class Unused(nn.Module):
    """A layer that the forward passes by, and one that it calls without a use of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.passed_by, self.dead = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        self.dead(inputs)
        return self.used(inputs)


def decaying(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def test_an_unused_parameter_is_not_updated_not_even_decayed():
    twins = Twins(lambda: make(Unused, optimizer=decaying))
    assert sorted(updated(twins.graph)) == ["used.bias", "used.weight"]
    assert not [op for op in twins.graph.ops if op.layer == "dead"]
    twins.assert_equals_eager(steps=2)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.heads = nn.ModuleDict({"main": nn.Linear(8, 4)})

    def forward(self, inputs: Tensor) -> Tensor:
        for stage in self.stages:
            inputs = stage(inputs)
        return self.heads["main"](inputs)


def test_layers_are_the_models_own_paths_forward_and_backward():
    workload = make(Nested)
    graph = capture(workload).graph
    known = {name for name, _ in workload.model.named_modules() if name} | {"loss"}
    assert {op.layer for op in graph.ops} <= known
    for layer in ("stages.0.0", "stages.1.1", "heads.main"):
        assert {op.phase for op in graph.ops if op.layer == layer} >= {Phase.FORWARD, Phase.BACKWARD}
    assert {op.layer for op in graph.ops if op.name.startswith("stages.1.0.weight.")} == {"stages.1.0"}


def test_dropout_is_random_only_where_it_drops():
    dropping = [op for op in capture(make(lambda: mlp(0.5))).graph.ops if op.random]
    assert dropping != []
    assert [op.name for op in capture(make(lambda: mlp(0.0))).graph.ops if op.random] == []
    assert all(not op.repeatable for op in dropping)


def test_inference_has_no_backward_and_no_update():
    model = mlp()
    graph = capture(Workload(model, None, None, batch_of(6, 8)[0])).graph
    assert {op.phase for op in graph.ops} == {Phase.FORWARD}
    assert {value.role for value in graph.values} == {Role.PARAM, Role.BATCH, Role.ACTIVATION}


def dictionary_loss(model: nn.Module, batch: dict) -> Tensor:
    smoothing = batch["settings"]["smoothing"]
    each = F.cross_entropy(model(batch["images"][0]), batch["labels"], reduction="none", label_smoothing=smoothing)
    return (each * batch["settings"]["weights"]).mean()


def dictionary(seed: int) -> dict:
    inputs, labels = batch_of(6, 8, seed=seed)
    weights = torch.rand(6, generator=torch.Generator().manual_seed(seed))
    return {"images": [inputs], "labels": labels, "settings": {"smoothing": 0.1, "weights": weights}}


def test_every_tensor_of_the_batch_is_an_input_so_that_the_next_batch_counts():
    workload, other = (make(mlp, loss_fn=dictionary_loss) for _ in range(2))
    workload.batch = dictionary(1)
    program = capture(workload)
    assert [program.graph.values[value].nbytes for value in program.batch] == [6 * 8 * 4, 6 * 8, 6 * 4]
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    for seed in (1, 2):
        other.batch = dictionary(seed)
        assert torch.equal(step(dictionary(seed)), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(inputs)[0][:, -1])


def test_an_lstm_is_one_op_each_way_however_many_steps():
    twins = Twins(lambda: make(Recurrent, (2, 30, 8)))
    graph = twins.graph
    assert sorted(op.phase for op in ops_of(graph, "mkldnn_rnn_layer")) == [Phase.BACKWARD, Phase.FORWARD]
    assert len(graph.ops) < 60
    twins.assert_equals_eager(steps=2)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, proj_size=2, batch_first=True)
        self.head = nn.Linear(2, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(inputs)[0][:, -1])


def test_an_lstm_whose_state_is_projected_trains_its_projection():
    twins = Twins(lambda: make(Projected, (2, 5, 8)))
    assert "lstm.weight_hr_l0" in updated(twins.graph)
    twins.assert_equals_eager(steps=2)


def autocast_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return labelled_loss(model, batch)


def test_autocast_in_the_loss_function_equals_eager_bit_for_bit():
    twins = Twins(lambda: make(normalized, (2, 3, 8, 8), loss_fn=autocast_loss))
    assert torch.bfloat16 in {meta.dtype for meta in twins.program.metas if meta}
    twins.assert_equals_eager(steps=2)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden += inputs
        return self.last(F.relu(hidden, inplace=True))


def test_in_place_ops_change_nothing_that_another_op_reads():
    twins = Twins(lambda: make(InPlace))
    assert [op.name for op in twins.graph.ops if op.writes and op.phase is not Phase.UPDATE] == []
    twins.assert_equals_eager(steps=2)


class NamedAsInputs(nn.Module):
    """Its parameters are called as the trace's own inputs: `tangent`, `batch.0`, `batch.1`."""

    def __init__(self) -> None:
        super().__init__()
        self.tangent = nn.Parameter(torch.rand(8))
        self.batch = nn.ParameterList([torch.rand(8, 8), torch.rand(8, 4)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.tangent * inputs @ self.batch[0] @ self.batch[1]


def test_parameters_may_be_called_as_the_steps_own_inputs():
    twins = Twins(lambda: make(NamedAsInputs))
    assert sorted(updated(twins.graph)) == ["batch.0", "batch.1", "tangent"]
    twins.assert_equals_eager(steps=2)


# Identity.


def test_a_digest_changes_with_shape_dtype_stride_dropout_and_optimizer_and_not_with_values_or_names():
    digest = capture(make(mlp)).graph.digest
    workload = make(mlp)
    inputs, labels = batch_of(6, 8, seed=5)
    workload.batch = (inputs, labels)
    assert capture(workload, "another name").graph.digest == digest
    workload.batch = (inputs.t().contiguous().t(), labels)
    strided = capture(workload).graph.digest
    doubled = make(lambda: mlp().double())
    doubled.batch = (doubled.batch[0].double(), doubled.batch[1])
    others = [
        strided,
        capture(make(mlp, (5, 8))).graph.digest,
        capture(doubled).graph.digest,
        capture(make(lambda: mlp(0.1))).graph.digest,
        capture(make(lambda: mlp(0.2))).graph.digest,
        capture(make(mlp, optimizer=adam)).graph.digest,
    ]
    assert len({digest, *others}) == 1 + len(others)


def test_a_device_among_the_arguments_counts_by_its_kind_so_a_plan_fits_the_second_gpu():
    texts = {argument_text((torch.device("cuda", number),), []) for number in range(2)}
    assert texts == {"(device(type='cuda', index=0))"}


def renamed() -> nn.Module:
    made = mlp()
    return nn.Sequential(OrderedDict(zip(("one", "act", "drop", "two"), made, strict=True)))


def test_names_are_no_part_of_the_digest_and_updates_of_one_shape_cost_the_same():
    assert capture(make(renamed)).graph.digest == capture(make(mlp)).graph.digest
    graph = capture(make(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)))).graph
    updates = {op.name: op.signature for op in graph.ops if op.phase is Phase.UPDATE}
    assert updates["0.weight.update"] == updates["1.weight.update"] != updates["2.weight.update"]


# What cannot be captured.


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.head(inputs)
        if made.sum().item() > 0:
            return made
        return made * 2


def test_a_branch_on_data_is_refused_in_one_line_with_its_place():
    with pytest.raises(CaptureError) as caught:
        capture(make(DataDependent))
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "sum().item() > 0:" in text)
    said = str(caught.value)
    assert "\n" not in said
    assert "DataDependent" in said
    assert "test_capture.py" in said
    assert f"test_capture.py:{line} (" in said


def test_an_exception_of_the_loss_is_told_in_its_own_words_with_its_place():
    def picky(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) != 7:
            raise ValueError(f"expected 7 rows, not {len(batch[0])}")
        return summed(model, batch)

    with pytest.raises(
        CaptureError, match=r"the step raised ValueError\('expected 7 rows, not 6'\) at .*test_capture.py:\d+ \(raise"
    ):
        capture(make(mlp, loss_fn=picky))


def test_an_operator_that_refuses_its_inputs_is_told_in_one_line_and_prints_nothing(capfd):
    def wrong(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), torch.zeros(len(batch[0])))

    with pytest.raises(CaptureError, match="Expected dtype int32/int64 for index") as caught:
        capture(make(mlp, loss_fn=wrong))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_loss_of_half_or_double_precision_seeds_its_own_gradient():
    def scaled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0].to(model[0].weight.dtype)) * 0.5).mean()

    for dtype in (torch.bfloat16, torch.float64):
        assert_equals_eager(*(make(lambda dtype=dtype: mlp().to(dtype), loss_fn=scaled) for _ in range(2)))


def test_a_loss_scaled_after_its_sum_may_run_in_place_nowhere_that_its_bytes_differ():
    def half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 0.5 * F.mse_loss(model(batch[0]), torch.zeros(6, 4))

    twins = Twins(lambda: make(mlp, loss_fn=half))
    plan = make_plan(twins.graph, {"inplace": {"planner": "greedy"}}, 0, Costs.unit(twins.graph))
    twins.assert_equals_eager(plan, steps=2)


def test_a_tensor_that_is_in_the_batch_twice_may_be_two_in_the_next():
    def rebuilt(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0])[:, :2], batch[1][:, :2])

    one, other = make(mlp, loss_fn=rebuilt), make(mlp, loss_fn=rebuilt)
    inputs, targets = batch_of(6, 8)[0], batch_of(6, 8, seed=2)[0]
    step = TrainStep(one.model, one.loss_fn, one.optimizer, (inputs, inputs))
    other.batch = (inputs, targets)
    assert torch.equal(step((inputs, targets)), eager_step(other)[0])


def with_hook() -> nn.Module:
    made = mlp()
    made[0].weight.register_hook(lambda gradient: gradient * 2)
    return made


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).sum()


class Clamped(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(inputs)


class Transposed(nn.Module):
    """Autoencoder of two parameters in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 4), nn.Linear(4, 8)
        self.dec.weight = nn.Parameter(self.enc.weight.t())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dec(self.enc(inputs))


def branching(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cond(batch[0].sum() > 0, lambda made: made.sum(), lambda made: made.mean(), (model(batch[0]),))


@pytest.mark.parametrize(
    ("model", "loss_fn", "words"),
    [
        (with_hook, summed, "0.weight has a hook on its gradient"),
        (mlp, lambda model, batch: model(batch[0]), "the loss has 24 elements"),
        (mlp, lambda model, batch: [model(batch[0]).sum()] * 2, "returns a list, whose backward\\(\\) fails"),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), *mlp()), summed, "changes batch.0 in place"),
        (lambda: nn.Sequential(Clamped(8, 4)), summed, "changes 0.weight in place while it is trained"),
        (
            lambda: nn.Embedding(4, 4, sparse=True),
            lambda model, batch: model(batch[1]).sum(),
            "makes a sparse tensor",
        ),
        (Transposed, summed, "enc.weight and dec.weight are two tensors in the same memory"),
        (mlp, branching, "cond runs a function as a graph of its own"),
    ],
)
def test_what_a_captured_step_would_do_otherwise_than_eager_is_refused(model, loss_fn, words: str):
    with pytest.raises(CaptureError, match=words):
        capture(make(model, loss_fn=loss_fn))


class ScaledLoss(nn.Module):
    """Loss with a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return labelled_loss(model, batch) * self.scale


def test_a_hook_on_a_parameter_of_the_loss_is_refused_by_name() -> None:
    loss_fn = ScaledLoss()
    workload = make(mlp, loss_fn=loss_fn)
    workload.optimizer.add_param_group({"params": [loss_fn.scale]})
    capture(workload)
    loss_fn.scale.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(CaptureError, match=r"^loss_fn\.scale has a hook on its gradient"):
        capture(workload)


def test_a_batch_in_the_memory_of_a_weight_is_refused_where_the_step_writes_the_weight():
    workload = make(mlp, loss_fn=lambda model, batch: (model(batch[0]) * batch[2].sum()).square().mean())
    workload.batch = (*workload.batch, workload.model[0].weight.detach())
    with pytest.raises(CaptureError, match=r"0\.weight and batch\.2 are two tensors in the same memory"):
        capture(workload)
    PlannedLoss(workload.model, workload.loss_fn)(workload.batch).backward()


class Checkpointed(nn.Module):
    """Two blocks; the input of the first requires no gradient."""

    def __init__(self, *, first: bool, reentrant: bool) -> None:
        super().__init__()
        self.entry, self.head, self.first, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 4), first, reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.entry, inputs, use_reentrant=self.reentrant) if self.first else self.entry(inputs)
        return checkpoint(self.head, hidden, use_reentrant=self.reentrant)


def test_a_reentrant_checkpoint_that_eager_does_not_train_is_refused_and_the_others_equal_eager():
    with pytest.raises(CaptureError, match="pass use_reentrant=False"):
        capture(make(lambda: Checkpointed(first=True, reentrant=True)))
    for first, reentrant in ((False, True), (True, False)):
        one, other = (make(lambda: Checkpointed(first=first, reentrant=reentrant)) for _ in range(2))  # noqa: B023
        assert_equals_eager(one, other)


def test_a_trained_tensor_that_is_not_the_models_is_refused():
    workload = make(mlp)
    scale = nn.Parameter(torch.ones(()))
    workload.loss_fn = lambda model, batch: summed(model, batch) * scale
    capture(workload)
    workload.optimizer.add_param_group({"params": [scale]})
    with pytest.raises(CaptureError, match="register it as a parameter of the model"):
        capture(workload)


def test_a_planned_loss_refuses_a_trainable_tensor_of_its_closure_and_takes_it_frozen():
    workload = make(mlp)
    scale = nn.Parameter(torch.ones(()))
    planned = PlannedLoss(workload.model, lambda model, batch: model(batch[0]).square().mean() * scale)
    with pytest.raises(CaptureError, match=r"reads scale of shape \(\), which requires a gradient"):
        planned(workload.batch)
    scale.requires_grad_(False)
    planned(workload.batch).backward()
    assert all(parameter.grad is not None for parameter in workload.model.parameters())


@dataclass
class Predicted:
    logits: Tensor


def test_results_in_a_dataclass_that_torch_does_not_know_are_refused_with_its_name():
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return labelled_loss(model, batch), Predicted(model(batch[0]))

    with pytest.raises(CaptureError, match=r"the loss function returns a Predicted, .*; return them in a tuple"):
        capture(make(mlp, loss_fn=loss_fn))


def test_a_lazy_layer_is_refused_until_it_is_initialized():
    workload = make(lambda: nn.Sequential(nn.LazyLinear(4)))
    for refused in (capture, lambda workload: read_model_state(workload.model, set())):
        with pytest.raises(CaptureError, match=r"^0\.weight is not initialized yet; call model\(batch\) once before"):
            refused(workload)
    workload.model(workload.batch[0])
    capture(workload)


def test_a_batch_without_a_tensor_is_refused():
    workload = make(mlp)
    workload.batch = (3, "x")
    with pytest.raises(
        CaptureError, match=r"the batch of Sequential \(builtins.tuple\) contains no tensor; pass a tensor"
    ):
        capture(workload)


def test_every_op_reads_what_its_call_names():
    program = capture(make(lambda: nn.Sequential(normalized(), nn.Dropout(0.5)), (2, 3, 8, 8)))
    for op, call in zip(program.graph.ops, program.calls, strict=True):
        named = {*reads(call.args), *reads([part for _, part in call.kwargs])}
        assert named <= set(op.inputs)
        assert all(program.graph.values[extra].role is Role.STATE for extra in set(op.inputs) - named)


class Encoded(nn.Module):
    """An encoder, with the running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        return self.head(self.encoder(inputs - self.mean))


def test_tensors_from_outside_that_are_spelled_as_the_models_are_others():
    def encoded() -> tuple[Workload, Tensor]:
        workload = make(Encoded)
        encoder, mean = copy.deepcopy(workload.model.encoder).requires_grad_(False), torch.full((8,), 0.5)

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return labelled_loss(model, batch) + (model.encoder(batch[0]) - encoder(batch[0] - mean)).square().mean()

        workload.loss_fn = loss_fn
        return workload, mean

    (one, mean), (other, _) = encoded(), encoded()
    assert {"encoder.weight", "mean"} <= {
        value.name for value in capture(one).graph.values if value.role is Role.BUFFER
    }
    assert_equals_eager(one, other, steps=3)
    assert torch.equal(mean, torch.full((8,), 0.5))


def test_a_later_batch_in_the_memory_of_a_tensor_from_outside_is_refused_where_the_step_writes_that_tensor() -> None:
    bank, workload = torch.ones(6, 8), make(mlp)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        bank.mul_(0.5)
        return labelled_loss(model, batch) + bank.sum()

    step = TrainStep(workload.model, loss_fn, workload.optimizer, workload.batch)
    for _ in range(2):
        step(workload.batch)
    with pytest.raises(CaptureError, match="are two tensors in the same memory, and the step writes to it"):
        step((bank[:], workload.batch[1]))


def test_tensors_in_one_memory_are_refused_only_where_bytes_overlap_and_one_is_written():
    whole = torch.zeros(4, 8)
    refuse_shared_memory([("whole", whole, False), ("part", whole[1], False), ("empty", whole[:0], True)])
    refuse_shared_memory([("first", whole[:2], True), ("second", whole[2:], True)])
    refuse_shared_memory([("left", whole[:, :4], True), ("right", whole[:, 4:], True)])
    with pytest.raises(CaptureError, match="left and middle are two tensors in the same memory"):
        refuse_shared_memory([("left", whole[:, :4], True), ("middle", whole[:, 3:5], False)])
    with pytest.raises(CaptureError, match=r"^whole and part are two tensors in the same memory.*: \.clone\(\)$"):
        refuse_shared_memory([("part", whole[1], True), ("whole", whole, False)])


def test_a_failed_trace_leaves_no_context_open_for_the_other_way(monkeypatch: pytest.MonkeyPatch):
    closed: list[str] = []

    def refuse(stack: ExitStack, *_: object) -> None:
        stack.callback(closed.append, "context")
        raise NotImplementedError

    def record(*arguments: Any) -> StepTrace:
        assert closed == ["context"]
        return record_step(*arguments)

    monkeypatch.setattr(tracer, "_trace_with_dynamo", refuse)
    monkeypatch.setattr(tracer, "record_step", record)
    assert capture(make(mlp)).recorded


def test_a_fused_lstm_has_one_graph_whatever_was_traced_before():
    def digest() -> str:
        workload = load_workload("lstm_fused", {"batch": 2, "tokens": 3, "depth": 2, "width": 8, "vocabulary": 16})
        return capture(workload).graph.digest

    FakeTensorMode.cache_clear()
    assert digest() == digest()


def test_a_torch_that_loses_side_effects_is_refused_by_its_version():
    with pytest.raises(CaptureError, match=r"torch is 2\.11\.0\+cpu.*pip install"):
        refuse_old_torch("2.11.0+cpu")
    for version in ("2.12.0", "2.13.1+cu128", "3.0.0a0+git1"):
        refuse_old_torch(version)


def test_a_module_of_torchscript_is_refused_by_its_name():
    workload = make(mlp)
    workload.model.extra = torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(CaptureError, match=r"extra is a module of TorchScript.*pass the Python module"):
        capture(workload)
