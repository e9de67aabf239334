"""Describe the batch and the model state that a prepared step depends on, beside Python values."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from autotune.errors import CaptureError
from autotune.workloads.batch import FlatBatch, Node, structure_difference, tensor_names


class TensorForm(NamedTuple):
    """Properties of a tensor that its captured step depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> str:
        """Shape in words."""
        return "x".join(map(str, self.shape)) or "scalar"

    def difference(self, other: "TensorForm") -> str:
        """Return in words how the form differs from another one."""
        if self.shape != other.shape:
            return f"is {self.size}, not {other.size}"
        if self.dtype != other.dtype:
            return f"is {self.dtype}, not {other.dtype}"
        if self.device != other.device:
            return f"is on {self.device}, not {other.device}"
        return f"has strides {self.stride}, not {other.stride}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Key of a prepared step. Steps with equal signatures run the same graph while the guards of its Python values hold."""

    batch: tuple[TensorForm, ...]
    """Form of each tensor of the batch. Other parts are compared by guards, where the step reads them."""
    structure: Node
    """Containers of the batch."""
    tensors: int
    """Hash of the model's parameters and buffers as objects, with form and device, and whether each is trained."""
    modes: tuple[bool, ...]
    """`training` of each module."""
    keeps_gradients: str
    """Feature that needs every gradient before any update; empty if none does."""
    backends: tuple[Any, ...] = ()
    """Libraries of kernels and backends of attention that are enabled: a capture chooses among them, as each call of eager does."""

    @property
    def shapes(self) -> str:
        """Shapes of the batch's tensors, for messages."""
        return ", ".join(form.size for form in self.batch)

    def batch_difference(self, first: "Signature") -> str:
        """Return what distinguishes the batch from the first one, for messages; empty if they have one form."""
        if difference := structure_difference(self.structure, first.structure):
            return difference
        names = tensor_names(first.structure)
        forms = zip(names, self.batch, first.batch, strict=True)
        differences = [f"{name} {form.difference(other)}" for name, form, other in forms if form != other]
        more = f" and {len(differences) - 3} more tensors differ" if len(differences) > 3 else ""
        return "; ".join(differences[:3]) + more


@dataclass(frozen=True, slots=True)
class ModelState:
    """State of a model that a step is captured for."""

    tensors: int
    modes: tuple[bool, ...]
    has_parameter_hooks: bool


def read_model_state(
    model: torch.nn.Module, trained: set[int], loss_fn: object = None, replaced_step: object = None
) -> ModelState:
    """Return the state of a model, and of a loss that is a module, in one walk, as it is read before each step.

    `trained` has ids of the optimizer's parameters. `replaced_step` is a function that replaces its `step`, or None.

    Raises CaptureError for a parameter or buffer that a lazy module has not initialized.
    """
    try:
        return _read_state(_modules(model, loss_fn), trained, replaced_step)
    except RuntimeError:  # of the shape of such a tensor; a check of each would take time before every step
        refuse_uninitialized(model, loss_fn)
        raise


def refuse_uninitialized(*parts: object) -> None:
    """Raise CaptureError for a parameter or buffer of a module that a lazy layer has not initialized."""
    for part in parts:
        if not isinstance(part, torch.nn.Module):
            continue
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if is_lazy(tensor):
                raise CaptureError(
                    f"{name} is not initialized yet; call model(batch) once before the optimizer and the step are made"
                )


def _read_state(modules: list[torch.nn.Module], trained: set[int], replaced_step: object) -> ModelState:
    modes: list[bool] = []
    parts: list[Any] = [id(replaced_step)]
    met: set[int] = set()
    has_any_hook = False
    for module in modules:
        modes.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                key = id(parameter)
                trains = parameter.requires_grad and key in trained
                met.add(key)
                # Dynamo guards the shape itself, a step that it refused does not
                parts.append((key, parameter.dtype, parameter.device, trains, parameter.shape, parameter.stride()))
                has_any_hook = has_any_hook or has_hooks(parameter)
        # a model that goes to another device or dtype and back has other buffers, but the same parameters
        parts.extend((id(b), b.shape, b.dtype) for b in module._buffers.values() if b is not None)
    parts.append(frozenset(trained - met))  # a tensor from elsewhere that the optimizer trains is refused
    return ModelState(hash(tuple(parts)), tuple(modes), has_any_hook)


def _modules(model: torch.nn.Module, loss_fn: object) -> list[torch.nn.Module]:
    """Return the modules, each once; `Module.modules` recurses through generators, which is ten times as slow."""
    modules = [model]
    if isinstance(loss_fn, torch.nn.Module) and loss_fn is not model:
        modules.append(loss_fn)
    ids = set(map(id, modules))
    for module in modules:
        for child in module._modules.values():
            if child is not None and id(child) not in ids:
                ids.add(id(child))
                modules.append(child)
    return modules


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a hook on its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def make_signature(batch: FlatBatch, state: ModelState, keeps_gradients: str) -> Signature:
    """Return the signature of one call of a step."""
    forms = tuple([TensorForm(tuple(x.shape), x.stride(), x.dtype, x.device) for x in batch.tensors])
    return Signature(forms, batch.structure, state.tensors, state.modes, keeps_gradients, _read_backends())


def _read_backends() -> tuple[Any, ...]:
    """Return which libraries of kernels and backends of attention are enabled, and the order in which the latter are tried."""
    backends: Any = torch.backends.cuda
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        backends.fp16_bf16_reduction_math_sdp_allowed(),
        *torch._C._get_sdp_priority_order(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
    )
