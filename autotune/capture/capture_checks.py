"""Refuse steps that a captured graph would run otherwise than eager: hooks, gradients of the batch, reentrant checkpoints."""

import torch
from torch import fx

from autotune.capture.signature import has_hooks
from autotune.errors import CaptureError


def refuse_gradients_of_the_batch(tensors: list[torch.Tensor]) -> None:
    """Raise CaptureError for a tensor of the batch that requires a gradient."""
    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            lost = "comes with a graph of its own" if tensor.grad_fn is not None else "requires a gradient"
            raise CaptureError(
                f"batch.{position} {lost}, and a captured step leaves gradients of parameters alone: pass it detached"
            )


def refuse_parameter_hooks(model: torch.nn.Module) -> None:
    """Raise CaptureError for a parameter with a hook on its gradient."""
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise CaptureError(
                f"{name} has a hook on its gradient, which a captured step never calls: remove it, and do the same in "
                "the loss function or in before_update"
            )


def refuse_reentrant_checkpoints(forward: fx.GraphModule) -> None:
    """Raise CaptureError for a reentrant checkpoint of which no input requires a gradient: eager trains nothing within it."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    for node in forward.graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        # behind the block come its inputs, and the parameters that it finds in its closure
        inputs = [source for source in node.all_input_nodes if source.op != "get_attr" and not _is_parameter(source)]
        if node.kwargs.get("use_reentrant") is not False and not any(map(_requires_grad, inputs)):
            raise CaptureError(
                "a checkpoint with use_reentrant=True has no input that requires a gradient, so eager computes no gradient for "
                "its parameters, and a captured step would: pass use_reentrant=False to torch.utils.checkpoint"
            )


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _requires_grad(node: fx.Node) -> bool:
    made = node.meta.get("example_value")
    parts = made if isinstance(made, (tuple, list)) else (made,)
    return any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)
