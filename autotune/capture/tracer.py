"""Capture a training step as one graph: forward, loss, backward, and one update per parameter.

Dynamo traces the user's Python, and AOTAutograd traces forward and backward together. Both work on fake tensors: nothing
is allocated and no kernel runs. Views are folded into the ops that read them, so that every value owns its memory.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autotune.capture import autocast
from autotune.capture.capture_checks import (
    refuse_checkpoints_that_write,
    refuse_gradients_of_the_batch,
    refuse_layouts,
    refuse_old_torch,
    refuse_parameter_hooks,
    refuse_reentrant_checkpoints,
    refuse_scripted,
    refuse_writes_in_backward,
)
from autotune.capture.eager_kernels import eager_kernels
from autotune.capture.joint_graph import JointTrace
from autotune.capture.loop_checks import (
    find_differentiated,
    one_capture,
    refuse_no_gradient,
    refuse_result,
    warn_of_untrained,
)
from autotune.capture.optimizers.loop_ops import apply_loop
from autotune.capture.program import Program, round_values
from autotune.capture.python.python_trace import PythonTrace, trace_python
from autotune.capture.python.recorded_run import record_step
from autotune.capture.python.side_effects import (
    SideEffectWarning,
    changed_sources,
    is_count,
    refuse_read_side_effects,
    settle,
)
from autotune.capture.python.step_module import StepModule
from autotune.capture.python.step_trace import StepTrace
from autotune.capture.rewrites import batch_norm, clamp, dropout, recurrent, slices
from autotune.capture.signature import refuse_uninitialized
from autotune.errors import AutotuneError, CaptureError
from autotune.workloads.batch import batch_tensors
from autotune.workloads.workload import Workload

TraceWay = Literal["auto", "dynamo", "recorded"]
raises_side_effects: ContextVar[bool] = ContextVar("raises_side_effects", default=False)
"""True where `capture` raises its `SideEffectWarning`, whatever the filters of `warnings` are."""


def capture(
    workload: Workload,
    name: str = "",
    *,
    dynamic: frozenset[str] = frozenset(),
    gradients: bool | None = None,
    way: TraceWay = "auto",
) -> Program:
    """Capture the workload's step; model, optimizer, batch and generators stay unchanged.

    A setting that only the first step would assign, such as a model's `config.problem_type`, is assigned.

    `name` is the graph's name, by default that of the model's class. `dynamic` names floats (`GuardFailure.source`) that
    become inputs of the step instead of constants. `gradients` makes the gradients results of the step; by default they
    are where the workload has a loss and no optimizer. `way` is that of tracing the step's Python: Dynamo, or one run on
    fake tensors; by default the second only where Dynamo refuses.

    >>> import torch
    >>> from autotune.workloads.workload import Workload
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> program = capture(Workload(model, lambda model, x: model(x).sum(), optimizer, torch.ones(3, 4)))
    >>> program.graph.ops[-1].name
    'weight.update'

    Raises:
        CaptureError: if the step cannot be captured; the message names the op or the user's line and the next step.
    """
    name = name or type(workload.model).__name__
    _refuse_model(workload)
    tensors = batch_tensors(workload.batch)
    if not tensors:
        kind = type(workload.batch)
        raise CaptureError(
            f"the batch of {name} ({kind.__module__}.{kind.__qualname__}) contains no tensor; pass a tensor, or a tuple, "
            "dict or dataclass of tensors"
        )
    if gradients is None:
        gradients = workload.loss_fn is not None and workload.optimizer is None
    if workload.loss_fn is not None and not gradients:  # autograd calls the hooks of gradients that are handed to it
        refuse_parameter_hooks(workload.model, workload.loss_fn)
    if workload.loss_fn is not None:
        refuse_gradients_of_the_batch(tensors)
    step = StepModule(workload)
    devices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    tensors = separate_aliases(tensors)
    refuse_layouts([*workload.model.named_parameters(), *workload.model.named_buffers()])
    with (
        one_capture(),
        _silence_tracer(),
        _restore_modes(),
        torch.random.fork_rng(devices=sorted(devices)),
        ExitStack() as stack,
    ):
        trains = gradients or workload.optimizer is not None
        with _restore_tensors(step):
            trace = _trace(stack, step, tensors, name, _Options(dynamic, way, trains))
        if trains:
            refuse_result(trace.joint.out_spec)
        graph = trace.joint.graph_module.graph
        refuse_writes_in_backward(graph)
        for rewrite in REWRITES:
            with _name_errors(name, f"{rewrite.__module__}.{rewrite.__name__}"):
                rewrite(graph)
        differentiated = find_differentiated(graph, trace.owner)
        # a batch may have lengths and the like on the CPU while the model is elsewhere
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)

        def read(open_layers: bool) -> Program:
            reader = JointTrace(
                graph, trace.owner, workload, len(tensors), trace.free,
                returns_gradients=gradients, open_layers=open_layers,
            )  # fmt: skip
            with _name_errors(name, "the trace", reader):
                reader.read()
                reader.refuse_shared(tensors)
            with _name_errors(name, "the graph", reader):
                guards = trace.make_guards()
                program = reader.program(name, trace.joint.out_spec, device, guards, recorded=trace.recorded)
                return replace(round_values(program), attached=trace.attached, passed=trace.passed)

        program = read(False)
        if recurrent.has_regions(graph):
            program = replace(program, opened=read(True))
        if trains:
            refuse_no_gradient(program, name)
        with _name_errors(name, "the graph"):
            program = apply_loop(program, workload.loop)
    warn_of_untrained(workload, program, differentiated)
    for changed, line in trace.unrepeated:
        effect = SideEffectWarning(
            f"{changed} changes in the step{line}; a captured step does not repeat that change, so do it between steps if "
            "anything reads it"
        )
        if raises_side_effects.get():
            raise effect
        warnings.warn(effect, stacklevel=2)
    return program


def _refuse_model(workload: Workload) -> None:
    refuse_old_torch()
    refuse_scripted(workload.model.named_modules())
    refuse_uninitialized(workload.model, workload.loss_fn)


REWRITES: tuple[Callable[[fx.Graph], None], ...] = (
    dropout.split_dropout,
    dropout.draw_in_layout,
    batch_norm.correct_statistics,
    batch_norm.split_batch_norm,
    clamp.read_results,
    slices.fold_writes,
    recurrent.mark_regions,
    autocast.cast_inside,
)
"""Rewrites of the joint trace before it is read, in this order."""


@contextmanager
def _name_errors(name: str, where: str, trace: JointTrace | None = None) -> Iterator[None]:
    """Turn an exception of another library into an error that names the model, the op and the next step."""
    try:
        yield
    except AutotuneError:
        raise
    except Exception as error:  # a foreign exception names neither the model nor the op
        op = f", at {trace.current_op}" if trace is not None and trace.current_op else ""
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise CaptureError(
            f"cannot capture {name}: reading {where}{op} failed with {type(error).__name__}: {reason}; leave that op out "
            "of the model, and report the traceback as a bug"
        ) from error


def separate_aliases(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same tensors, each as a distinct object.

    The tracer has one input for two tensors that are the same object, and they may differ in the next batch.
    """
    if len(set(map(id, tensors))) == len(tensors):
        return tensors
    return [x.detach() if any(x is other for other in tensors[:i]) else x for i, x in enumerate(tensors)]


@contextmanager
def _restore_tensors(step: StepModule) -> Iterator[None]:
    """Restore the tensors of model and loss afterwards: the tracer leaves stand-ins in a module that has two names."""
    saved = [(module, dict(module._parameters), dict(module._buffers)) for module in step.modules()]
    try:
        yield
    finally:
        for module, parameters, buffers in saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextmanager
def _restore_modes() -> Iterator[None]:
    """Restore grad mode and autocast afterwards: a trace that fails within a `with` of the step never leaves it.

    Autocast keeps the weights that it cast until the outermost region ends; a region that never ends would leak them.
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


class _Options(NamedTuple):
    dynamic: frozenset[str]
    way: TraceWay
    trains: bool
    """The step computes gradients; eager runs any other step without autograd."""


def _trace(stack: ExitStack, step: StepModule, tensors: list[torch.Tensor], name: str, options: _Options) -> StepTrace:
    """Return the joint graph of a step: from Dynamo's trace of its Python, or from one run where Dynamo refuses."""
    # fake results of earlier traces would be used again: their strides may be others, and two results one object
    FakeTensorMode.cache_clear()
    stack.callback(FakeTensorMode.cache_clear)
    dynamic, way, trains = options
    if not trains:
        stack.enter_context(torch.no_grad())
    stack.enter_context(eager_kernels())
    stack.enter_context(autocast.eager_autocast())
    # eager draws for results that nothing reads, too: the tracer's own removal of dead code keeps draws only with this
    stack.enter_context(torch._inductor.config.patch(fallback_random=True))
    if way == "recorded":
        return record_step(stack, step, tensors, name)
    try:
        with ExitStack() as attempt:  # of a failed attempt no context stays open for the other way
            trace = _trace_with_dynamo(attempt, step, tensors, name, dynamic)
            stack.enter_context(attempt.pop_all())
        return trace
    except CaptureError:
        raise
    except Exception as refusal:  # Dynamo raises the user's own exceptions and dozens of its own
        if way == "dynamo":
            raise CaptureError(f"cannot capture {name} as one graph: {_reason(refusal)}") from refusal
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            raise CaptureError(
                f"cannot estimate {name} on tensors without memory: Dynamo refuses its step ({_reason(refusal)}); run "
                "autotune plan, which captures such a step on real tensors"
            ) from refusal
        return record_step(stack, step, tensors, name)
    finally:
        torch._dynamo.reset()


def _trace_with_dynamo(
    stack: ExitStack, step: StepModule, tensors: list[torch.Tensor], name: str, dynamic: frozenset[str]
) -> StepTrace:
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    def trace(numbers: frozenset[str], *, ints: bool = True) -> PythonTrace:
        with torch._dynamo.config.patch(allow_rnn=True):
            return trace_python(step, tensors, step.numbers_only(numbers), ints=ints)

    trace_step = partial(trace, dynamic, ints=False)  # a float that became an int is a constant
    try:
        python_trace = trace_step()
    except torch._dynamo.exc.Unsupported:
        if not _install_late_hooks(step):
            raise
        python_trace = trace_step()
    python_trace = settle(python_trace, trace_step)
    refuse_reentrant_checkpoints(python_trace.forward)
    refuse_checkpoints_that_write(python_trace.forward)
    unrepeated = refuse_read_side_effects(python_trace, trace)
    recurrent.mark_calls(python_trace.forward)
    inputs = (*tensors, *(free.example for free in python_trace.free))
    joint = aot_export_joint_with_descriptors(stack, python_trace.forward, inputs, _record_nn_module_stack=True)
    sources = python_trace.sources
    if python_trace.specialized:
        raise CaptureError(
            f"{name}: an op needs one of {', '.join(map(sources.spell, dynamic))} as a constant, so it cannot be an input of "
            "the step; pass it in the batch as a tensor"
        )
    return StepTrace(
        owner=python_trace.forward,
        free=python_trace.free,
        joint=joint,
        unrepeated=tuple(
            (sources.spell(effect.source), f" at {effect.line}" if effect.line else "")
            for effect in unrepeated
            if effect.line or effect.is_on_loss_function or is_count(effect, python_trace)  # libraries keep caches, too
        ),
        make_guards=lambda: python_trace.guards_without(*changed_sources(unrepeated, sources)),
        attached=_find_attached(python_trace.forward, tensors),
        recorded=False,
    )


def _find_attached(forward: Any, tensors: list[torch.Tensor]) -> tuple[bool, ...]:
    """Return for each leaf of the step's result whether it has a gradient in eager, before the step detaches it.

    Dynamo's code builds the result from the graph's tensors. Here that code gets the graph's nodes instead of tensors.
    Returns an empty tuple where the code fails on nodes.
    """
    (returned,) = forward.graph.output_node().args
    try:
        leaves = pytree.tree_leaves(forward.graph._codegen.dynamo_bytecode_unflatten(returned, tuple(tensors)))
    except Exception:  # noqa: BLE001 - a class of a library may compute with its tensors
        return ()
    return tuple(map(_is_detached, leaves))


def _is_detached(leaf: object) -> bool:
    if not isinstance(leaf, fx.Node) or leaf.target != "detach":
        return False
    before = leaf.args[0]
    example = before.meta.get("example_value") if isinstance(before, fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


def _install_late_hooks(step: torch.nn.Module) -> bool:
    """Install the hooks that some models of `transformers` install, under a lock, in their first forward; return whether any did."""
    library = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(library, "maybe_install_capturing_hooks", None)
    if install is None:
        return False
    models = [module for module in step.modules() if getattr(module, "_can_record_outputs", None) is not None]
    for model in models:
        install(model)
    return bool(models)


def _reason(error: Exception) -> str:
    """Return in one line the exception, the tracer's explanation, and the user's line."""
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
def _silence_tracer() -> Iterator[None]:
    """Silence the tracer: it warns of side effects that every model has, and logs tracebacks of errors that it raises."""
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
