"""Several models in one loss, results beside the loss, adapters."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experiments.benchmarks.loops.cases.small import adamw, batches, loss_fn, net, run, state, train
from experiments.benchmarks.loops.ways import Way

Tensors = Iterator[torch.Tensor]


def teacher_is_ema_updated_between_steps(way: Way) -> Tensors:
    """Distill from an average of the model, which moves between steps."""
    model, data = net(), batches()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), teacher(batch[0]).detach()) + loss_fn(model, batch)

    def average(_: int) -> None:
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)

    yield from run(way.step(model, loss, optimizer, data[0]), data, average)
    yield from state(model, optimizer)
    yield from state(teacher)


def second_model_in_the_loss(way: Way) -> Tensors:
    """Judge by a frozen second model."""
    model, critic, data = net(), nn.Linear(8, 1).requires_grad_(False), batches()
    optimizer = adamw(model)
    loss = lambda model, batch: critic(model(batch[0])).square().mean()  # noqa: E731
    yield from run(way.step(model, loss, optimizer, data[0]), data)
    yield from state(model, optimizer)


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def gan_generator_and_discriminator_in_one_model(way: Way) -> Tensors:
    """Train the halves of one model in turn by two steps."""
    model, data = _Gan(), batches()
    optimizers = [adamw(part) for part in (model.generator, model.critic)]
    generate = lambda model, batch: F.softplus(-model.critic(model.generator(batch[0]))).mean()  # noqa: E731

    def judge(model: nn.Module, batch: Any) -> torch.Tensor:
        fake = model.generator(batch[0]).detach()
        return (F.softplus(model.critic(fake)) + F.softplus(-model.critic(batch[0][:, :8]))).mean()

    steps = [way.step(model, loss, each, data[0]) for loss, each in zip((generate, judge), optimizers, strict=True)]
    for batch in data:
        for step in steps:
            yield step(batch)
            model.zero_grad()
    yield from state(model, *optimizers)


def model_output_is_a_dict_and_extras_kept(way: Way) -> Tensors:
    """Return extras, and keep those of all steps."""
    model, data = net(), batches()
    optimizer = adamw(model)

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = {"logits": model(batch[0])}
        return F.cross_entropy(outputs["logits"], batch[1]), outputs

    step = way.step(model, loss, optimizer, data[0])
    kept = [step(batch) for batch in data]
    yield from (result[1]["logits"] for result in kept)
    yield from state(model, optimizer)


def extras_in_a_second_loss(way: Way) -> Tensors:
    """Differentiate an extra, which a planned loss detaches."""
    model = net()

    def loss(model: nn.Module, batch: Any) -> Any:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    value, logits = way.loss(model, loss)(batches()[0])
    (value + logits.square().mean()).backward()
    yield from (p.grad for p in model.parameters())


def gpt2_with_labels_and_loggers_ignored(way: Way) -> Tensors:
    """Train GPT-2 with dropout by its own loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer, data = adamw(model), [torch.randint(50, (4, 16)) for _ in range(4)]
    loss = lambda model, batch: model(input_ids=batch, labels=batch).loss  # noqa: E731
    yield from run(way.step(model, loss, optimizer, data[0]), data)
    yield from state(model, optimizer)


def _adapted(**options: Any) -> tuple[nn.Module, list[torch.Tensor], Any]:
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True, **options)
    model = peft.get_peft_model(GPT2LMHeadModel(config), lora)
    loss = lambda model, batch: model(input_ids=batch, labels=batch).loss  # noqa: E731
    return model, [torch.randint(50, (4, 16)) for _ in range(4)], loss


def peft_lora(way: Way) -> Tensors:
    """Train LoRA adapters."""
    model, data, loss = _adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    yield from run(way.step(model, loss, optimizer, data[0]), data)
    yield from state(model, optimizer)


def peft_adapter_disabled_between_steps(way: Way) -> Tensors:
    """Evaluate without the adapter between steps, then merge and unmerge it."""
    model, data, loss = _adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loss_of = way.loss(model, loss)
    for number, batch in enumerate(data):
        yield from train(loss_of, optimizer, [batch])
        model.eval()
        with torch.no_grad(), model.disable_adapter():
            yield loss(model, batch)
        if number == 1:
            model.merge_adapter()
            model.unmerge_adapter()
        model.train()
    yield from state(model, optimizer)


def peft_dora_and_modules_to_save(way: Way) -> Tensors:
    """Train DoRA adapters, and the head beside them."""
    model, data, loss = _adapted(use_dora=True, modules_to_save=["lm_head"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    yield from run(way.step(model, loss, optimizer, data[0]), data)
    yield from state(model, optimizer)


def model_cast_and_back_between_steps(way: Way) -> Tensors:
    """Cast the model to half precision and back, which replaces its buffers."""
    model = net()
    optimizer = adamw(model)

    def between(number: int) -> None:
        if number == 2:
            model.bfloat16().float()

    yield from train(way.loss(model, loss_fn), optimizer, batches(), between)
    yield from state(model, optimizer)


def model_cast_to_double(way: Way) -> Tensors:
    """Cast the model and later batches to double."""
    model = net()
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.1), way.loss(model, loss_fn)
    yield from train(loss_of, optimizer, batches(2))
    model.double()
    yield from train(loss_of, optimizer, [(inputs.double(), labels) for inputs, labels in batches(3)])
    yield from state(model)


def layer_grown_between_steps(way: Way) -> Tensors:
    """Add a layer to the model between steps, with new parameters of the optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def between(number: int) -> None:
        if number == 2:
            model.append(nn.Linear(8, 8))
            optimizer.add_param_group({"params": list(model[-1].parameters())})

    yield from train(way.loss(model, loss_fn), optimizer, batches(), between)
    yield from state(model, optimizer)


def weights_tied_between_steps(way: Way) -> Tensors:
    """Tie two layers between steps."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def between(number: int) -> None:
        if number == 2:
            model[2].weight = model[0].weight

    yield from train(way.loss(model, loss_fn), optimizer, batches(), between)
    yield from state(model)


CASES = (
    teacher_is_ema_updated_between_steps, second_model_in_the_loss, gan_generator_and_discriminator_in_one_model,
    model_output_is_a_dict_and_extras_kept, extras_in_a_second_loss, gpt2_with_labels_and_loggers_ignored, peft_lora,
    peft_adapter_disabled_between_steps, peft_dora_and_modules_to_save, model_cast_and_back_between_steps, model_cast_to_double,
    layer_grown_between_steps, weights_tied_between_steps,
)  # fmt: skip
