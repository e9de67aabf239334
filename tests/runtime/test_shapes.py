"""Batches of many lengths: few plans, the loss of the unpadded batch, and a message where padding would change it."""

import shutil
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autotune.capture.tracer import capture
from autotune.errors import ConfigError, PlanError
from autotune.ir.plan import Plan
from autotune.runtime.planned_loss import PlannedLoss
from autotune.runtime.shapes import batch_padding
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.shapes.padding_check import WithoutDropout, compare_padded
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload

SIZES = (8, 16, 32)
WORDS = 11
LENGTHS = (32, 5, 8, 9, 31, 17, 1, 20)

Text = dict[str, Tensor]


class Reader(nn.Module):
    """A small attention over text with a mask of padded positions."""

    def __init__(self, dropout: float = 0.0, layer: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, WORDS)
        self.extra, self.drop, self.scale = layer(), nn.Dropout(dropout), 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = self.mix(self.embed(input_ids)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attention_mask[:, None, :].bool())
        return self.head(self.drop(self.extra(self.scale * mixed)))


def loss_fn(model: nn.Module, batch: Text) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def loss_over_all_positions(model: nn.Module, batch: Text) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").mean()


def text(length: int, rows: int = 3, seed: int = 0) -> Text:
    generator = torch.Generator().manual_seed(100 * seed + length)
    words = torch.randint(WORDS, (rows, length + 1), generator=generator)
    return {
        "input_ids": words[:, :-1].contiguous(),
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
        "labels": words[:, 1:].contiguous(),
    }


def make(loss: Any = loss_fn, **options: Any) -> Workload:
    torch.manual_seed(0)
    model = Reader(**options)
    return Workload(model, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), text(32))


def step_for(workload: Workload, **options: Any) -> TrainStep:
    options = {"buckets": Buckets(SIZES)} | options
    return TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, **options)


def eager_loss(workload: Workload, batch: Text) -> Tensor:
    assert workload.loss_fn is not None
    assert workload.optimizer is not None
    loss = workload.loss_fn(workload.model, batch)
    loss.backward()
    workload.optimizer.step()
    workload.optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Batches that were captured."""
    batches: list[Any] = []

    def recorded(workload: Workload, **options: Any) -> Any:
        batches.append(workload.batch)
        return capture(workload, **options)

    monkeypatch.setattr("autotune.runtime.step_selector.capture", recorded)
    return batches


@pytest.fixture
def silent() -> Iterator[None]:
    """Any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def run_layer(layer: Any, inputs: Tensor) -> Tensor:
    results: Tensor = layer(inputs, inputs, inputs)[0] if isinstance(layer, nn.MultiheadAttention) else layer(inputs)[0]
    return results


def run_packed(layer: Any, inputs: Tensor) -> Tensor:
    results: Tensor = layer(nn.utils.rnn.pack_padded_sequence(inputs, [4, 3, 2]))[0].data
    return results


@pytest.mark.parametrize(
    ("make_layer", "run"),
    [
        (nn.MultiheadAttention, run_layer),
        *((layer, run) for layer in (nn.LSTM, nn.GRU, nn.RNN) for run in (run_layer, run_packed)),
    ],
)
def test_dropout_inside_of_pytorchs_layers_is_off_where_padding_is_compared(
    make_layer: Any, run: Callable[[Any, Tensor], Tensor]
):
    options = {"num_heads": 2} if make_layer is nn.MultiheadAttention else {"hidden_size": 8, "num_layers": 2}
    layer, inputs = make_layer(8, dropout=0.5, **options), torch.randn(4, 3, 8)
    with WithoutDropout():
        assert torch.equal(run(layer, inputs), run(layer, inputs))
    assert not torch.equal(run(layer, inputs), run(layer, inputs))


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("options", [{"verify": True}, {"accumulate": 2}], ids=str)
def test_ten_lengths_need_three_captures_and_train_as_unpadded_eager_steps_do(options: Any, captures: list[Any]):
    workload, other = make(), make()
    with step_for(workload, **options) as step:
        assert [batch["labels"].shape[1] for batch in captures] == [32, 8, 16]
        for length in LENGTHS:
            if options.get("accumulate"):
                loss = loss_fn(other.model, text(length))
                loss.backward()
                torch.testing.assert_close(step(text(length)), loss.detach())
                if LENGTHS.index(length) % 2:
                    other.optimizer.step()
                    other.optimizer.zero_grad()
            else:
                torch.testing.assert_close(step(text(length)), eager_loss(other, text(length)))
    assert len(captures) == 3
    torch.testing.assert_close(dict(workload.model.state_dict()), dict(other.model.state_dict()))


@pytest.mark.usefixtures("silent")
def test_a_planned_loss_pads_calls_with_gradients_and_no_others(captures: list[Any]):
    workload, other = make(), make()
    planned = PlannedLoss(workload.model, loss_fn, buckets=Buckets([8, 32]))
    for length in LENGTHS[1:]:  # the first call's batch is not of the largest size
        with torch.no_grad():
            assert torch.equal(planned(text(length)), loss_fn(workload.model, text(length)))
        loss = planned(text(length))
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        torch.testing.assert_close(loss.detach(), eager_loss(other, text(length)))
    assert [batch["labels"].shape[1] for batch in captures] == [32, 8]
    torch.testing.assert_close(dict(workload.model.state_dict()), dict(other.model.state_dict()))
    planned.close()


class Norm(nn.BatchNorm1d):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (lambda: make(loss_over_all_positions), r"padded from 6 to 8 is another step: the loss differs by 0\.2"),
        (lambda: make(layer=lambda: Norm(8)), "padded from 6 to 8 is another step: the loss differs by"),
    ],
    ids=["mean over all positions", "BatchNorm"],
)
def test_a_loss_that_padding_changes_is_never_padded_and_the_difference_is_named(
    workload: Any, words: str, captures: list[Any]
):
    first, other = workload(), workload()
    with pytest.warns(UserWarning, match=words):
        step = step_for(first, other_shapes="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in LENGTHS:
            assert torch.equal(step(text(length)), eager_loss(other, text(length)))
    assert len(captures) == 1
    step.close()


def test_padding_that_reaches_a_buffer_alone_is_a_difference():
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, hidden):
            with torch.no_grad():
                self.mean.lerp_(hidden.mean((0, 1)), 0.1)
            return hidden

    workload = make(layer=Mean)
    effect = compare_padded(workload.model, loss_fn, text(6), Buckets(SIZES).resize(text(6), 8))
    assert "buffer" in effect.difference


def test_a_check_leaves_gradients_buffers_and_generators_as_they_are():
    workload = make(layer=lambda: Norm(8), dropout=0.5)
    loss_fn(workload.model, text(16)).backward()
    before = {name: parameter.grad.clone() for name, parameter in workload.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
    generator = torch.get_rng_state()
    assert compare_padded(workload.model, loss_fn, text(6), Buckets(SIZES).resize(text(6), 8)).difference
    torch.testing.assert_close(torch.get_rng_state(), generator)
    for name, parameter in workload.model.named_parameters():
        assert torch.equal(parameter.grad, before[name])
    for name, buffer in workload.model.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_a_check_leaves_graphs_valid_that_autograd_has_already():
    workload = make(layer=lambda: Norm(8))
    buffer = next(buffer for buffer in workload.model.buffers() if buffer.is_floating_point())
    weight = torch.ones((), requires_grad=True)
    reader = (weight * buffer).sum()
    compare_padded(workload.model, loss_fn, text(6), Buckets(SIZES).resize(text(6), 8))
    reader.backward()
    assert weight.grad == buffer.sum()


def test_a_loss_function_that_takes_parts_out_of_its_batch_is_compared_and_the_users_batch_stays_whole():
    def popping(model: nn.Module, batch: Text) -> Tensor:
        return loss_fn(model, {**batch, "labels": batch.pop("labels")})

    batch = text(6)
    padded = Buckets(SIZES).resize(batch, 8)
    effect = compare_padded(make().model, popping, batch, padded)
    assert effect.conclusive
    assert batch.keys() == padded.keys() == text(6).keys()


@pytest.mark.usefixtures("silent")
def test_dropout_is_left_out_of_the_comparison_and_runs_in_the_steps():
    workload = make(dropout=0.5)
    with step_for(workload, buckets=Buckets([32])) as step:
        assert any(op.random for op in step.graph.ops)
        assert step(text(20)) != step(text(20))


@pytest.mark.skipif(shutil.which("g++") is None, reason="the arena is compiled with g++")
def test_steps_of_all_sizes_replay_in_one_block():
    workload, other = make(), make()
    plan = replace(Plan.traced(capture(workload).graph), allocator="arena")
    with step_for(workload, plan=plan, buckets=Buckets([8, 32])) as step:
        for length in (32, 7) * 4:
            torch.testing.assert_close(step(text(length)), eager_loss(other, text(length)))
        arenas = [prepared.arena for prepared in step._selector.cache]
        assert len(arenas) == 2
        assert len({id(arena.block) for arena in arenas}) == 1
        assert all(arena.bytes > 0 and arena.misses == 0 for arena in arenas)


@pytest.mark.parametrize("other_shapes", ["eager", "error"])
def test_a_batch_beyond_the_largest_size_is_a_matter_of_other_shapes(other_shapes: Any):
    workload, other = make(), make()
    with step_for(workload, other_shapes=other_shapes, buckets=Buckets([32])) as step:
        if other_shapes == "error":
            with pytest.raises(PlanError, match="made for a batch of 3x32, 3x32, 3x32; this is a batch of 3x33"):
                step(text(33))
        else:
            with pytest.warns(UserWarning, match="a batch of 3x33"):
                loss = step(text(33))
            assert torch.equal(loss, eager_loss(other, text(33)))


@pytest.mark.usefixtures("silent")
def test_a_shape_prepared_before_runs_under_a_plan_also_where_other_shapes_are_an_error(captures: list[Any]):
    workload, other = make(), make()
    with step_for(workload, other_shapes="error", buckets=None) as step:
        plan = step.plan
        for _ in range(2):
            step.prepare(text(12))
        assert step.plan == plan
        for length in (32, 12, 32):
            assert torch.equal(step(text(length)), eager_loss(other, text(length)))
    assert [batch["labels"].shape[1] for batch in captures] == [32, 12]
    torch.testing.assert_close(dict(workload.model.state_dict()), dict(other.model.state_dict()), rtol=0, atol=0)


@pytest.mark.usefixtures("silent")
def test_a_planned_loss_is_prepared_for_shapes_to_come(captures: list[Any]):
    model = make().model
    planned = PlannedLoss(model, loss_fn, other_shapes="error")
    planned.prepare(text(32))
    planned.prepare(text(12))
    for length in (12, 32):
        assert torch.equal(planned(text(length)), loss_fn(model, text(length)))
    assert len(captures) == 2
    planned.close()


def test_a_changed_value_costs_one_capture_for_each_size(captures: list[Any]):
    workload, other = make(), make()
    with step_for(workload, buckets=Buckets([8, 32])) as step:
        workload.model.mix.bias.requires_grad_(True)
        for number, length in enumerate((30, 4, 30, 4)):
            workload.model.scale = other.model.scale = 1.0 if number < 2 else 0.5
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.testing.assert_close(step(text(length)), eager_loss(other, text(length)))
    assert len(captures) == 4


def test_a_first_batch_without_labels_at_its_start_is_compared_at_a_longer_length_or_later():
    workload = make()
    late = text(32)
    late["labels"][:, :10] = -100
    compared: list[tuple[int, int]] = []

    def recorded(model: nn.Module, loss: Any, batch: Text, padded: Text) -> Any:
        compared.append((batch["labels"].shape[1], padded["labels"].shape[1]))
        return compare_padded(model, loss, batch, padded)

    workload = Workload(workload.model, loss_fn, workload.optimizer, late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_padding, "compare_padded", recorded)
        with step_for(workload) as step:
            assert compared == [(6, 8), (6, 16), (12, 16), (6, 32), (12, 32)]
            step(text(5))
            step(text(7))
            assert compared[5:] == [(5, 8)]


def test_within_a_small_budget_the_check_compares_few_samples(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []

    def recorded(model: nn.Module, loss: Any, batch: Text, padded: Text) -> Any:
        rows.append(len(batch["labels"]))
        return compare_padded(model, loss, batch, padded)

    monkeypatch.setattr(batch_padding, "compare_padded", recorded)
    workload = make()
    workload = Workload(workload.model, loss_fn, workload.optimizer, text(32, rows=64))
    program = capture(workload)
    for budget, smallest in ((program.graph.static_bytes, 1), (1 << 30, 64)):
        padding = batch_padding.BatchPadding(Buckets(SIZES), workload.model, loss_fn)
        padding.check(workload.batch, program, Plan.traced(program.graph), budget)
        assert rows == [smallest] * 3
        rows.clear()


@pytest.mark.usefixtures("silent")
def test_rows_can_be_padded_where_the_loss_counts_labelled_rows_alone(captures: list[Any]):
    def classify(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(4, 3))
    rows = torch.randn(8, 4), torch.randint(3, (8,))
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    buckets = Buckets([4, 8], pad={0: 0.0, 1: -100}, dim=0)
    with TrainStep(models[0], classify, steps[0], rows, buckets=buckets) as step:
        for count in (8, 3, 5, 4):
            part = rows[0][:count], rows[1][:count]
            loss = classify(models[1], part)
            torch.testing.assert_close(step(part), loss.detach())
            loss.backward()
            steps[1].step()
            steps[1].zero_grad()
    assert len(captures) == 2


@given(st.sets(st.integers(1, 600), min_size=1), st.integers(1, 700))
def test_the_bucket_of_a_size_is_the_smallest_that_holds_it(sizes: set[int], size: int):
    chosen = Buckets(list(sizes)).choose(size)
    assert chosen == min((each for each in sizes if each >= size), default=None)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, -100, 7]))
def test_a_resized_batch_keeps_its_start_and_is_filled_with_the_fields_value(length: int, size: int, value: int):
    batch = {"labels": torch.arange(2 * length).reshape(2, length), "rows": torch.ones(2), "name": "text"}
    resized = Buckets([size], pad={"labels": value}).resize(batch, size)
    kept = min(length, size)
    assert torch.equal(resized["labels"][:, :kept], batch["labels"][:, :kept])
    assert resized["labels"].shape == (2, size)
    assert bool((resized["labels"][:, kept:] == value).all())
    assert resized["rows"] is batch["rows"]
    assert resized["labels"].is_contiguous()


def test_a_tokenizers_result_is_padded_in_a_copy_of_its_class():
    batch = type("Encoding", (UserDict,), {})(text(5, rows=3))
    resized = Buckets([8]).take_samples(Buckets([8]).resize(batch, 8), 2)
    assert type(resized) is type(batch)
    assert resized["labels"].shape == (2, 8)
    assert batch["labels"].shape == (3, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": []}, "sizes is []; give positive integers"),
        ({"sizes": [0, 4]}, "sizes is [0, 4]; give positive integers"),
        ({"sizes": [4], "dim": -1}, "dim is -1"),
        ({"sizes": [4], "pad": {}}, "pad names no field"),
    ],
)
def test_buckets_that_are_none_are_refused(options: Any, words: str):
    with pytest.raises(ConfigError) as refused:
        Buckets(**options)
    assert words in str(refused.value)


def test_a_batch_without_the_padded_fields_or_with_fields_of_two_sizes_is_refused():
    with pytest.raises(ConfigError, match=r"no tensor of the batch with a dimension 1 is one of 'input_ids', .*pad="):
        Buckets(SIZES).measure((torch.ones(2, 3), torch.ones(2)))
    with pytest.raises(ConfigError, match=r"the sizes of dimension 1 differ \(input_ids: 3, labels: 4\)"):
        Buckets(SIZES).measure({"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 4)})


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.ones_(self.layer.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.unsqueeze(-1)).squeeze(-1)


def test_padding_that_gives_a_gradient_where_eager_has_none_is_told_and_left_out():
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.relu(model(batch["x"])).sum()

    model, batch = Shifted(), {"x": torch.full((2, 5), -9.0)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="a batch padded from .* to 8 is another step"):
        step = TrainStep(model, loss_fn, optimizer, batch, buckets=Buckets([8], pad={"x": 0.0}))
    with step, pytest.warns(UserWarning, match="the plan is for a batch of 2x8"):
        assert step(batch).item() == 0.0
    assert model.layer.bias.item() == 1.0


def test_a_model_without_a_gradient_is_padded_by_its_results_alone():
    model = nn.Embedding(10, 3).requires_grad_(False).eval()

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)

    batch = {"x": torch.randint(10, (2, 12)), "y": torch.randint(3, (2, 12))}
    with TrainStep(model, loss_fn, None, batch, buckets=Buckets([8, 16], pad={"x": 0, "y": -100})) as step:
        torch.testing.assert_close(step(batch), loss_fn(model, batch))


def test_inference_has_no_buckets():
    with pytest.raises(ConfigError, match="buckets need a loss function"):
        TrainStep(nn.Linear(2, 2), None, None, torch.ones(1, 2), buckets=Buckets([2]))


@pytest.mark.usefixtures("silent")
def test_a_transformer_with_dropout_in_its_attention_is_padded():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.ModuleDict({"embed": nn.Embedding(WORDS, 8), "layer": layer, "head": nn.Linear(8, WORDS)})

    def masked_loss(model: nn.Module, batch: Text) -> Tensor:
        parts, mask = dict(model.named_children()), batch["attention_mask"] == 0
        mixed = parts["layer"](parts["embed"](batch["input_ids"]), src_key_padding_mask=mask)
        return F.cross_entropy(parts["head"](mixed).flatten(0, 1), batch["labels"].flatten())

    workload = Workload(model, masked_loss, torch.optim.SGD(model.parameters(), lr=0.1), text(32))
    with step_for(workload) as step:
        assert step(text(20)).isfinite()
