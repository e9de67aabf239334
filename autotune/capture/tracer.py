"""Capture a training step as one graph: forward, loss, backward, and one update per parameter.

Dynamo reads the user's Python, AOTAutograd traces forward and backward together, both on fake tensors: nothing is
allocated and nothing runs. Views are folded into the ops that read them, so that every value owns its memory.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.capture import autocast
from autotune.capture.capture_checks import (
    refuse_gradients_of_the_batch,
    refuse_parameter_hooks,
    refuse_reentrant_checkpoints,
)
from autotune.capture.eager_kernels import eager_kernels
from autotune.capture.joint_graph import JointTrace
from autotune.capture.loop_checks import refuse_no_gradient
from autotune.capture.program import Program
from autotune.capture.python.python_trace import PythonTrace, trace_python
from autotune.capture.python.side_effects import SideEffect, refuse_what_the_step_reads
from autotune.capture.rewrites import batch_norm, dropout, recurrent, slices
from autotune.capture.rewrites import clamp as clips
from autotune.errors import AutotuneError, CaptureError
from autotune.workloads.workload import Workload, infer


def capture(workload: Workload, name: str = "", *, dynamic: frozenset[str] = frozenset()) -> Program:
    """Capture the workload's step; model, optimizer, batch and generators stay as they are.

    `dynamic` names floats (`Change.source`) that become inputs of the step instead of constants.
    """
    name = name or type(workload.model).__name__
    leaves, spec = pytree.tree_flatten(workload.batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise CaptureError(f"the batch of {name} holds no tensor; give a tensor or a tuple of tensors")
    if workload.loss_fn is not None:
        refuse_parameter_hooks(workload.model)
        refuse_gradients_of_the_batch(tensors)
    step = _Step(workload, leaves, spec)
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    tensors = unaliased(tensors)
    with _quiet(), _modes_restored(), torch.random.fork_rng(devices=sorted(devices)), ExitStack() as stack:
        with _tensors_restored(workload.model):
            found, unrepeated, joint = _trace(stack, step, tensors, name, dynamic)
        graph = joint.graph_module.graph
        for rewrite in REWRITES:
            with _named(name, f"{rewrite.__module__}.{rewrite.__name__}"):
                rewrite(graph)
        trace = JointTrace(graph, found.forward, workload, len(tensors), found.free)
        with _named(name, "the trace", trace):
            trace.read()
        # a batch may have lengths and the like on the CPU while the model is elsewhere
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
        with _named(name, "the graph", trace):
            guards = found.guards_without(frozenset(effect.source for effect in unrepeated))
            program = trace.program(name, joint.out_spec, device, guards)
    if workload.loss_fn is not None and workload.optimizer is not None:
        refuse_no_gradient(program, name)
    for effect in unrepeated:
        if effect.line:  # libraries keep caches and the like
            shown = found.sources.shown(effect.source)
            warnings.warn(
                f"{shown} changes in the step at {effect.line}; a captured step does not repeat that", stacklevel=2
            )
    return program


REWRITES: tuple[Callable[[fx.Graph], None], ...] = (
    dropout.split_dropout,
    dropout.draw_in_layout,
    batch_norm.correct_statistics,
    batch_norm.correct_gradients,
    batch_norm.split_batch_norm,
    clips.read_results,
    slices.fold_writes,
    recurrent.mark_regions,
    autocast.cast_inside,
)
"""Changes of the joint trace before it is read, in this order."""


@contextmanager
def _named(name: str, where: str, trace: JointTrace | None = None) -> Iterator[None]:
    """Turn an exception of another library into an error that names the model, the op and the next step."""
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:  # a foreign exception says neither which model nor which op it is of
        op = f", at {trace.reading}" if trace is not None and trace.reading else ""
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise CaptureError(
            f"cannot capture {name}: reading {where}{op} failed with {type(error).__name__}: {reason}; leave that op out "
            "of the model, and report it with the traceback"
        ) from error


def unaliased(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, each an object of its own: the tracer reads one for two that are the same, and the next batch may
    have two.
    """
    if len(set(map(id, tensors))) == len(tensors):
        return tensors
    return [x.detach() if any(x is other for other in tensors[:at]) else x for at, x in enumerate(tensors)]


@contextmanager
def _tensors_restored(model: torch.nn.Module) -> Iterator[None]:
    """Put the model's own tensors back afterwards: of a module with two names the tracer restores only its own stand-ins."""
    held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextmanager
def _modes_restored() -> Iterator[None]:
    """Leave grad mode and autocast as they were: a trace that fails within the step's own `with` never leaves that.

    Autocast keeps the weights that it cast until the outermost one ends: one that never ends would keep them for ever.
    """
    grad, depth, cached = torch.is_grad_enabled(), _autocast_depth(), torch.is_autocast_cache_enabled()
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        if _autocast_depth() > depth:
            while _autocast_depth() > depth:
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cached)
        for kind, enabled, dtype in kinds:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


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


def _trace(
    stack: ExitStack, step: _Step, tensors: list[torch.Tensor], name: str, dynamic: frozenset[str]
) -> tuple[PythonTrace, tuple[SideEffect, ...], Any]:
    """The trace of the step's Python, the side effects that it does not repeat, and the joint graph."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    def trace(numbers: frozenset[str]) -> PythonTrace:
        return trace_python(step, tensors, numbers)

    if step._loss_fn is None:
        stack.enter_context(torch.no_grad())
    stack.enter_context(torch._dynamo.config.patch(allow_rnn=True))
    stack.enter_context(eager_kernels())
    stack.enter_context(autocast.eager_autocast())
    # eager draws for results that nothing reads, too: the tracer's own removal of dead code keeps draws only with this
    stack.enter_context(torch._inductor.config.patch(fallback_random=True))
    try:
        try:
            found = trace(dynamic)
        except torch._dynamo.exc.Unsupported:
            if not _install_late_hooks(step):
                raise
            found = trace(dynamic)
        refuse_reentrant_checkpoints(found.forward)
        unrepeated = refuse_what_the_step_reads(found, trace)
        recurrent.mark_calls(found.forward)
        inputs = (*tensors, *(one.example for one in found.free))
        joint = aot_export_joint_with_descriptors(stack, found.forward, inputs, _record_nn_module_stack=True)
        if found.specialized:
            raise CaptureError(
                f"{name}: an op takes one of {', '.join(map(found.sources.shown, dynamic))} as a constant"
            )
    except CaptureError:
        raise
    except Exception as error:  # the tracer raises the user's own exceptions and dozens of its own
        raise CaptureError(f"cannot capture {name} as one graph: {_reason(error)}") from error
    finally:
        torch._dynamo.reset()
    return found, unrepeated, joint


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
