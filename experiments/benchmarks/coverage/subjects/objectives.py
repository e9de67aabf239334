"""Plain torch: objectives with second models, sampled actions, gradients in the loss, branches on data."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.coverage.subject import Subject, adamw
from experiments.benchmarks.coverage.subjects.layers import (
    CLASSES,
    ROWS,
    WIDTH,
    Layers,
    classify,
    labelled,
    regress,
    valued,
)
from experiments.benchmarks.coverage.subjects.training import make_layers


def _distill(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, _ = batch
    with torch.no_grad():
        wanted = model.teacher(inputs).softmax(1)
    return F.kl_div(model.student(inputs).log_softmax(1), wanted, reduction="batchmean")


def _pair() -> nn.Module:
    model = Layers(lambda self, inputs: self.student(inputs), student=make_layers(), teacher=make_layers(dropout=0.0))
    model.teacher.requires_grad_(False)
    return model


def _criticize(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, values = batch
    logits, value = model.actor(inputs), model.critic(inputs).mean(1)
    advantage = (values - value).detach()
    policy = torch.distributions.Categorical(logits=logits)
    actions = policy.sample()
    return -(policy.log_prob(actions) * advantage).mean() + F.mse_loss(value, values) - 0.01 * policy.entropy().mean()


def _actor_and_critic() -> nn.Module:
    return Layers(lambda self, inputs: self.actor(inputs), actor=make_layers(), critic=make_layers(dropout=0.0))


def _oppose(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, _ = batch
    fake = model.generator(torch.randn(ROWS, WIDTH))
    ones, zeros = torch.ones(ROWS, CLASSES), torch.zeros(ROWS, CLASSES)
    compare = F.binary_cross_entropy_with_logits
    judged = compare(model.critic(real), ones) + compare(model.critic(fake.detach()), zeros)
    return judged + compare(model.critic(fake), ones)


def _rivals() -> nn.Module:
    maker = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, WIDTH))
    return Layers(lambda self, inputs: self.critic(inputs), generator=maker, critic=make_layers(dropout=0.0))


def _penalize(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    mixed = (inputs + torch.randn_like(inputs)).requires_grad_()
    (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return classify(model, (inputs, labels)) + ((gradient.norm(dim=1) - 1) ** 2).mean()


def _meta_learn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    weights = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], rows: slice) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, parameters, (inputs[rows],))
        return F.cross_entropy(outputs, labels[rows])

    gradients = torch.func.grad(loss)(weights, slice(0, 4))
    return loss({name: weight - 0.1 * gradients[name] for name, weight in weights.items()}, slice(4, 8))


def _encode(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, _ = batch
    mean, deviation = model.encoder(inputs).chunk(2, 1)
    posterior = torch.distributions.Normal(mean, F.softplus(deviation) + 1e-3)
    latent = posterior.rsample()
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    likelihood = torch.distributions.Normal(model.decoder(latent), 1.0).log_prob(inputs)
    return torch.distributions.kl_divergence(posterior, prior).sum(1).mean() - likelihood.sum(1).mean()


def _autoencoder() -> nn.Module:
    return Layers(
        lambda self, inputs: self.encoder(inputs),
        encoder=make_layers(),
        decoder=nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, WIDTH)),
    )


def _use_mask(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    kept = labels != 0
    return F.cross_entropy(model(inputs)[kept], labels[kept])


def _run_item(self: Any, inputs: Tensor) -> Tensor:
    outputs: Tensor = self.layers(inputs * (1 / max(1.0, inputs.abs().max().item())))
    return outputs


def _run_branch(self: Any, inputs: Tensor) -> Tensor:
    hidden = self.layers(inputs)
    outputs: Tensor = hidden.tanh() if hidden.mean() > 0 else hidden.sigmoid()
    return outputs


def _run_dropped_layers(self: Any, inputs: Tensor) -> Tensor:
    hidden = inputs
    for layer in self.blocks:
        if not self.training or torch.rand(()) > 0.2:
            hidden = hidden + layer(hidden)
    outputs: Tensor = self.layers(hidden)
    return outputs


class _Queue(nn.Module):
    queue: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers(dropout=0.0)
        self.register_buffer("queue", F.normalize(torch.randn(16, CLASSES), dim=1))
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        keys = F.normalize(self.layers(inputs), dim=1)
        scores = torch.cat([keys @ keys.flip(0).detach().T, keys @ self.queue.clone().T], 1) / 0.1
        with torch.no_grad():
            self.queue.copy_(torch.cat([keys, self.queue[: 16 - ROWS]]))
            self.mean.mul_(0.9).add_(keys.mean(0), alpha=0.1)
        return scores


def _with_extras(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    inputs, labels = batch
    outputs = model(inputs)
    return F.cross_entropy(outputs, labels), {
        "outputs": outputs.detach(),
        "hits": (outputs.argmax(1) == labels).float().mean(),
        "rows": len(labels),
    }


def _solve(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    state, values = batch
    for _ in range(3):  # Runge-Kutta
        first = model(state).repeat(1, 4)
        second = model(state + 0.05 * first).repeat(1, 4)
        state = state + 0.1 * (first + second) / 2
    return F.mse_loss(state.sum(1), values)


def _generate_weights(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    weights = model.maker(inputs).unflatten(1, (CLASSES, 3))
    return F.cross_entropy(torch.vmap(torch.matmul)(weights, inputs[:, :3]), labels)


def _hypernetwork() -> nn.Module:
    return Layers(
        lambda self, inputs: self.maker(inputs),
        maker=nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 3 * CLASSES)),
    )


def _denoise(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    clean, _ = batch
    steps = torch.randint(0, 100, (ROWS,))
    strength = torch.linspace(0.99, 0.1, 100)[steps, None]
    noise = torch.randn_like(clean)
    predicted = model(strength.sqrt() * clean + (1 - strength).sqrt() * noise).repeat(1, 4)
    return F.mse_loss(predicted, noise)


def _mixture(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, values = batch
    mean, deviation = model(inputs).chunk(2, 1)
    parts = torch.distributions.Normal(mean, deviation.exp())
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=mean), parts)
    return -mixture.log_prob(values).mean()


class _Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(32, 8, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)])

    def forward(self, images: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            images = layer(images).relu()
            skips.append(images)
            images = F.avg_pool2d(images, 2)
        images = self.middle(images).relu()
        for layer in self.up:
            images = F.interpolate(images, scale_factor=2.0)
            images = layer(torch.cat([images, skips.pop()], 1)).relu()
        return images


def _subject(name: str, what: str, make: Callable[[], nn.Module], draw: Any = None, loss: Any = classify, *, follows_data: bool = False) -> Subject:  # fmt: skip
    return Subject(name, what, make, draw or labelled(ROWS, WIDTH), loss, adamw, follows_data=follows_data)


SUBJECTS: tuple[Subject, ...] = (
    _subject("teacher", "distillation from a frozen teacher", _pair, loss=_distill),
    _subject("actor_critic", "actor and critic, sampled actions", _actor_and_critic, valued(ROWS, WIDTH), _criticize),
    _subject("gan", "generator and critic in one loss", _rivals, loss=_oppose),
    _subject("gradient_penalty", "gradient of an output in the loss", partial(make_layers, dropout=0.0), loss=_penalize),
    _subject("maml", "inner step by torch.func.grad", partial(make_layers, dropout=0.0), loss=_meta_learn),
    _subject("vae", "VAE by torch.distributions", _autoencoder, loss=_encode),
    _subject("mixture_density", "mixture of normal distributions", make_layers, valued(ROWS, WIDTH), _mixture),
    _subject("boolean_mask", "rows chosen by a mask", make_layers, loss=_use_mask, follows_data=True),
    _subject("item", ".item() in the forward", lambda: Layers(_run_item, layers=make_layers()), follows_data=True),
    _subject("branch", "if over a tensor in the forward", lambda: Layers(_run_branch, layers=make_layers()), follows_data=True),
    _subject("dropped_layers", "layers dropped at random", lambda: Layers(_run_dropped_layers, layers=make_layers(), blocks=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))), follows_data=True),
    _subject("queue", "queue of keys and running mean in buffers", _Queue),
    _subject("extras", "outputs and counts beside the loss", make_layers, loss=_with_extras),
    _subject("differential_equation", "solver that calls the model six times", partial(make_layers, dropout=0.0), valued(ROWS, WIDTH), _solve),
    _subject("hypernetwork", "weights that the model makes, vmap", _hypernetwork, loss=_generate_weights),
    _subject("denoising", "noise at random steps", make_layers, loss=_denoise),
    _subject("unet", "U-Net with skips", _Unet, valued(4, 3, 16, 16), regress),
)  # fmt: skip
