"""Capture a training step as one graph: forward, loss, backward, and one update per parameter.

Dynamo reads the user's Python, AOTAutograd traces forward and backward together, both on fake tensors: nothing is
allocated and nothing runs. Views are folded into the ops that read them, so that every value owns its memory.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune import batch_norm, clips, dropout, lstm
from autotune.errors import CaptureError
from autotune.joint_trace import JointTrace
from autotune.program import Program
from autotune.workload import Workload, infer


def capture(workload: Workload, name: str = "") -> Program:
    """Capture the workload's step; model, optimizer, batch and generators stay as they are."""
    name = name or type(workload.model).__name__
    leaves, spec = pytree.tree_flatten(workload.batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise CaptureError(f"the batch of {name} holds no tensor; give a tensor or a tuple of tensors")
    if workload.loss_fn is not None:
        _refuse_hooks(workload)
    step = _Step(workload, leaves, spec)
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    # the tracer reads one tensor for two that are the same object; in the next batch they may be two
    tensors = [x.detach() if any(x is other for other in tensors[:at]) else x for at, x in enumerate(tensors)]
    with _quiet(), torch.random.fork_rng(devices=sorted(devices)), ExitStack() as stack:
        joint, owner = _trace(stack, step, tensors, name)
        dropout.split_dropout(joint.graph_module.graph)
        batch_norm.split_batch_norm(joint.graph_module.graph)
        clips.read_results(joint.graph_module.graph)
        trace = JointTrace(joint.graph_module.graph, owner, workload)
        trace.read()
        # a batch may have lengths and the like on the CPU while the model is elsewhere
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
        return trace.program(name, joint.out_spec, device)


def _refuse_hooks(workload: Workload) -> None:
    for name, parameter in workload.model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"{name} has a hook on its gradient, which a captured step never calls: remove it, and do the same in "
                "the loss function or in before_update"
            )


_TENSOR = "<tensor>"
"""Where a batch has a tensor."""


class _Step(torch.nn.Module):
    """The step's forward as a module of flat tensors in, loss and detached extras out."""

    def __init__(self, workload: Workload, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.training = workload.model.training
        self.model = workload.model
        self._loss_fn = workload.loss_fn
        # kept here, the batch's own tensors would be traced as constants: every later batch would be the first
        self._leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._spec = spec

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self._leaves]
        batch = pytree.tree_unflatten(leaves, self._spec)
        if self._loss_fn is not None:
            made = self._loss_fn(self.model, batch)
            return (made[0], *_detached(made[1:])) if isinstance(made, tuple) else made
        return infer(self.model, batch)


def _detached(tree: Any) -> Any:
    return pytree.tree_map(lambda part: part.detach() if isinstance(part, torch.Tensor) else part, tree)


def _trace(stack: ExitStack, step: _Step, tensors: list[torch.Tensor], name: str) -> tuple[Any, fx.GraphModule]:
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    if step._loss_fn is None:
        stack.enter_context(torch.no_grad())
    stack.enter_context(torch._dynamo.config.patch(allow_rnn=True))
    try:
        try:
            forward = dynamo_graph_capture_for_export(step)(*tensors)
        except torch._dynamo.exc.Unsupported:
            if not _install_late_hooks(step):
                raise
            forward = dynamo_graph_capture_for_export(step)(*tensors)
        lstm.keep_lstm_whole(forward)
        joint = aot_export_joint_with_descriptors(stack, forward, tuple(tensors), _record_nn_module_stack=True)
    except Exception as error:  # the tracer raises the user's own exceptions and dozens of its own
        raise CaptureError(f"cannot capture {name} as one graph: {_reason(error)}") from error
    finally:
        torch._dynamo.reset()
    return joint, forward


def _install_late_hooks(step: torch.nn.Module) -> bool:
    """Some models of `transformers` install hooks, under a lock, in their first forward: do it before the capture."""
    library = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(library, "maybe_install_capturing_hooks", None)
    if install is None:
        return False
    models = [module for module in step.modules() if getattr(module, "_can_record_outputs", None) is not None]
    for model in models:
        install(model)
    return bool(models)


def _reason(error: Exception) -> str:
    """In one line: the exception, what the tracer says of it, and the user's line that it came from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = [line for line in lines if line.startswith("File ")]
    where = f" (at {frames[-1].removeprefix('File ')})" if frames else ""
    if raised := _after("Developer debug context: raised exception ", lines):
        return f"the step raised {raised}{where}"
    cause = _after("Explanation: ", lines)
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}. {cause}".rstrip(". ") + where


def _after(label: str, lines: list[str]) -> str:
    return next((line.removeprefix(label) for line in lines if line.startswith(label)), "")


_FAKE = "torch._subclasses.fake_tensor"


@contextmanager
def _quiet() -> Iterator[None]:
    """The tracer warns of side effects that every model has, and prints the traceback of errors that it also raises."""
    names = {"torch._dynamo": logging.ERROR, "torch._functorch": logging.ERROR, _FAKE: logging.CRITICAL}
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, level in names.items():
            logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
