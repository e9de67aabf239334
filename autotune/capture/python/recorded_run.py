"""Trace a step by running its Python once on fake tensors, where Dynamo cannot read the Python itself.

A first run records the Python state that the step reads (`state_reads`), and refuses what a recorded step would freeze:
random numbers of Python and numpy, branches on the values of tensors, changes that the next step reads. AOTAutograd then
runs the step again and records its ops. All ops and all Python in between are those of eager, so results are equal.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autotune.capture.capture_checks import refuse_dataclasses
from autotune.capture.python.code_facts import is_recordable
from autotune.capture.python.python_trace import FreeInput
from autotune.capture.python.refusals import explain, refusal_of_change
from autotune.capture.python.state_guards import StateGuards
from autotune.capture.python.state_places import CONTAINERS, StateReads, plain_content
from autotune.capture.python.state_reads import Recorder
from autotune.capture.python.step_module import StepModule
from autotune.capture.python.step_trace import StepTrace
from autotune.capture.python.unrecorded import refuse_iterators, refusing_unrecorded, user_place
from autotune.capture.python.words import Words
from autotune.capture.rewrites.recurrent import annotate_call
from autotune.capture.values import ctc_loss
from autotune.capture.values.batch_values import BatchValues, as_eager_decides
from autotune.capture.values.constant_values import ConstantValues, writes, written
from autotune.errors import CaptureError
from autotune.workloads.factory import innermost_user_line


def record_step(stack: ExitStack, step: StepModule, tensors: list[torch.Tensor], name: str) -> StepTrace:
    """Run the step on fake tensors; return its joint graph, with guards on the Python state that it read.

    Raises:
        CaptureError: the step depends on something that a recorded step would freeze.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    reads, swap = _observe_settled(step, tensors, name)
    words = Words(step.constants)

    def run(constants: list[Any]) -> list[Any] | None:
        other = _observe(step, tensors, constants, name)[1]
        return other.leaves if other.calls == swap.calls else None

    words.find_unread(run)
    parameters = {id(tensor) for tensor in (*step.parameters(), *step.buffers())}
    free, twins = _free_inputs(reads, [tensor for key, tensor in swap.reals.items() if key not in parameters])
    swap.batch.places |= {id(each.example): each.read for each in free}
    inputs = (*tensors, *(each.example for each in free))
    stack.enter_context(fx_traceback.preserve_node_meta())
    stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
    with as_eager_decides(tensors), _traced(step, [each.example for each in free], tensors, reads):
        joint = _explained(lambda: aot_export_joint_with_descriptors(stack, step, inputs), name)
    return StepTrace(
        owner=step,
        free=tuple(free),
        joint=joint,
        unrepeated=tuple(
            (change.place.name, f" at {change.place.line}") for change in reads.changes if change.place.line
        ),
        make_guards=lambda: StateGuards(step, reads, words, parameters, branches=swap.batch.branches, twins=twins),
        attached=(),
        recorded=True,
        passed=tuple((leaf, partial(_read_word, step, *place)) for leaf, place in words.passed.items()),
    )


def _read_word(step: StepModule, position: int, index: int | None) -> Any:
    """Return a word of the present batch."""
    part = step.constants[position]
    return part if index is None else part[index]


def _observe_settled(step: StepModule, tensors: list[torch.Tensor], name: str) -> "tuple[StateReads, _Swap]":
    """Observe a step whose changes the next step does not read, after one that fills a library's registries if needed.

    Raises:
        CaptureError: the step changes what it reads, or draws random numbers outside of torch.
    """
    reads, swap = _observe(step, tensors, step.constants, name)
    changes = [change for change in reads.changes if change.is_read]
    if not changes:
        _refuse(reads, name)
        return reads, swap
    if not reads.draws and not any(_has_fakes(change.after) for change in changes):
        settled = False
        try:
            for change in changes:
                change.apply()
            again, second = _observe(step, tensors, step.constants, name)
            settled = second.calls == swap.calls and not again.draws and not any(each.is_read for each in again.changes)
            if settled:
                return again, second
        except CaptureError:
            pass  # the change is refused below, with its name
        finally:
            for change in changes if not settled else ():
                change.restore()
    _refuse(reads, name)
    raise AssertionError


def _has_fakes(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(isinstance(tensor, FakeTensor) for tensor in (*value.parameters(), *value.buffers()))
    return any(isinstance(tensor, FakeTensor) for tensor, *_ in _tensors_in(value, "", lambda: value))


def _observe(
    step: StepModule, tensors: list[torch.Tensor], constants: list[Any], name: str
) -> "tuple[StateReads, _Swap]":
    """Run forward and backward once on fake tensors; return the Python state read, and the mode with the tensors read."""
    mode = FakeTensorMode(allow_fallback_kernels=True)
    swap = _Swap(mode.from_tensor, tensors)
    roots = {"model": step.model, getattr(step.loss_fn, "__name__", "loss_fn"): step.loss_fn}
    roots |= {name: part for name, part in step.named_constants() if is_recordable(type(part))}
    recorder = Recorder(roots)
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    swap.batch.add_inputs(fakes)
    own = list(step.constants)
    step.constants[:] = constants

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            result = step(*fakes)
            swap.leaves = pytree.tree_leaves(result)
            refuse_dataclasses(swap.leaves, "model" if step.loss_fn is None else "loss function")
            loss = result[0] if isinstance(result, tuple) else result
            if step.loss_fn is not None and isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
                leaves = [fake for fake in swap.fakes.values() if fake.requires_grad and fake.is_leaf]
                torch.autograd.grad(loss, leaves, allow_unused=True)

    try:
        with (
            as_eager_decides(tensors), recorder.recording() as reads, refusing_unrecorded(), _compiling(), _in_backward(swap),
            mode, swap,
        ):  # fmt: skip
            _explained(run, name)
    finally:
        step.constants[:] = own
    reads.ignore_stand_ins(swap.fakes)
    refuse_iterators(reads)
    return reads, swap


def _refuse(reads: StateReads, name: str) -> None:
    if reads.draws:
        raise CaptureError(
            f"{name} draws random numbers from {reads.draws}, and a captured step would repeat the first ones; draw with "
            "torch.rand, or draw before the step and pass the numbers in the batch as tensors"
        )
    change = next((change for change in reads.changes if change.is_read), None)
    if change is not None:
        raise CaptureError(refusal_of_change(change))


def _explained(run: Callable[[], Any], name: str) -> Any:
    try:
        return run()
    except CaptureError:
        raise
    except Exception as error:  # the user's own exceptions, and torch's on fake tensors
        raise CaptureError(explain(name, error, traceback.extract_tb(error.__traceback__))) from error


class _Swap(TorchFunctionMode):
    """Mode that replaces real tensors by the tracer's, and annotates recurrent calls."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor], batch: list[torch.Tensor]) -> None:
        super().__init__()
        self._convert = convert
        self.reals: dict[int, torch.Tensor] = {}
        """Real tensors that the step read, by id."""
        self.fakes: dict[int, torch.Tensor] = {}
        """Tensors in their places."""
        self.calls: list[str] = []
        """Names of the functions called."""
        self.leaves: list[Any] = []
        """Leaves of the step's result."""
        self.recomputes = False
        """A checkpoint runs layers again."""
        self._constants = ConstantValues()
        self.batch = BatchValues(batch, self._constants)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._swap, (args, kwargs or {}))
        self.calls.append(getattr(func, "__name__", ""))
        is_data_assigned = getattr(func, "__self__", None) is torch.Tensor.data and self.calls[-1] == "__set__"
        if is_data_assigned and any(args[0] is fake for fake in self.fakes.values()):
            raise CaptureError(
                f"the step assigns the .data of a parameter or a buffer{user_place()}, and a captured step does not repeat that; "
                "change it in place: .copy_(...)"
            )
        if self.recomputes and self._writes_buffer(func, args, kwargs):
            raise CaptureError(
                f"a checkpoint contains {self.calls[-1]}, which changes a buffer: eager changes it again as it recomputes, and a "
                "captured step does not. Leave torch.utils.checkpoint out, as a plan chooses what to recompute, or that layer out "
                "of it"
            )
        if (value := self._constants.read(func, args, kwargs) or self.batch.read(func, args, kwargs)) is not None:
            return value[0]
        if (loss := ctc_loss.with_lengths(func, args, kwargs, self._constants.value)) is not None:
            return loss[0]
        with annotate_call(func):
            result = func(*args, **kwargs)
        self.batch.follow(func, args, kwargs, result)
        self._constants.follow(func, args, kwargs, result)
        if type(result) is torch.Tensor and func in _FROM_MEMORY:  # such as an array's; guards compare the array
            return torch.ops.aten.lift_fresh.default(result.clone())
        return result

    def _writes_buffer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether a call changes a tensor of the model, or one from outside."""
        if func in (nn.functional.batch_norm, nn.functional.instance_norm):
            named = {**dict(zip(_NORM_ARGUMENTS, args, strict=False)), **kwargs}
            trains = named.get("training", named.get("use_input_stats", func is nn.functional.instance_norm))
            return bool(trains) and named.get("running_mean") is not None
        if not writes(self.calls[-1], kwargs, func, args):
            return False
        ours = {id(fake) for fake in self.fakes.values()}
        return any(id(tensor) in ours for tensor in written(self.calls[-1], args, kwargs, func))

    def _swap(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.fakes:
            return self.fakes[id(tensor)]
        if isinstance(tensor, FakeTensor) or not _is_real(tensor):
            return tensor
        self.reals[id(tensor)] = tensor
        with torch._C.DisableTorchFunction():
            self.fakes[id(tensor)] = self._convert(tensor)
        self.batch.add_live(self.fakes[id(tensor)], tensor)
        return self.fakes[id(tensor)]


_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training")
_FROM_MEMORY = (torch.from_numpy, torch.frombuffer)


def _is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory, and is no wrapper of a tracer."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and not torch._is_functional_tensor(tensor)


@contextmanager
def _traced(
    step: StepModule, free: list[torch.Tensor], tensors: list[torch.Tensor], reads: StateReads
) -> Iterator[None]:
    """Let the step take the free tensors as arguments behind the batch's, and record the module of each op.

    What the step changes is restored before each run, of which there are several, and afterwards.
    """
    owners: list[tuple[Any, str, Any]] = [
        (module._parameters, key, tensor) for module in step.modules() for key, tensor in module._parameters.items()
    ]
    owners += [(module._buffers, key, tensor) for module in step.modules() for key, tensor in module._buffers.items()]
    owners = [(table, key, tensor) for table, key, tensor in owners if tensor is not None]
    swap, batch = _Swap(lambda tensor: tensor, tensors), len(tensors)
    forward = type(step).forward

    def with_free(*inputs: torch.Tensor) -> Any:
        reads.restore_changes()
        swap.fakes = {}
        for table, key, tensor in owners:
            if (
                table.get(key) is not tensor
            ):  # the tracer has an input for each name of a tied weight: the first is read
                table[key] = swap.fakes.setdefault(id(tensor), table[key])
        swap.fakes |= {id(tensor): traced for tensor, traced in zip(free, inputs[batch:], strict=True)}
        swap.batch.add_inputs(inputs[:batch])
        for tensor in [*free, *(tensor for _, _, tensor in owners)]:
            if id(tensor) in swap.fakes:
                swap.batch.add_live(swap.fakes[id(tensor)], tensor)
        return forward(step, *inputs[:batch])

    step.__dict__["forward"] = with_free
    try:
        with _compiling(), _module_stacks(step), _in_backward(swap), swap:
            yield
    finally:
        del step.__dict__["forward"]
        reads.restore_changes()


@contextmanager
def _in_backward(swap: _Swap) -> Iterator[None]:
    """Keep the mode where a checkpoint runs layers again, and refuse a backward pass of the step's own."""
    run: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    frame: Callable[..., Any] = torch.utils.checkpoint._CheckpointFrame

    def run_backward(*arguments: Any, **named: Any) -> Any:
        if named.get("accumulate_grad"):
            raise CaptureError(_own_backward(traceback.extract_stack()))
        return run(*arguments, **named)

    def make_frame(recompute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        def recompute_in_mode(*inputs: Any) -> Any:
            swap.recomputes = True
            try:
                with swap:
                    return recompute(*inputs)
            finally:
                swap.recomputes = False

        return frame(recompute_in_mode, *arguments, **named)

    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
        mock.patch.object(torch.utils.checkpoint, "_CheckpointFrame", make_frame),
    ):
        yield


def _own_backward(frames: traceback.StackSummary) -> str:
    place = innermost_user_line(frames)
    return (
        f"the step itself runs a backward pass that adds to .grad{f' at {place}' if place else ''}, and a captured step would "
        "lose those gradients; return the loss, or use torch.autograd.grad"
    )


@contextmanager
def _compiling() -> Iterator[None]:
    """Leave out checks of tensors' values: libraries do so while compiling, distributions where they are told to."""
    distributions = mock.patch.object(torch.distributions.Distribution, "_validate_args", False)
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True), distributions:
        yield


@contextmanager
def _module_stacks(step: nn.Module) -> Iterator[None]:
    """Note at each traced op the module that runs it."""
    paths = {id(module): path for path, module in reversed(list(step.named_modules()))}
    call: Callable[..., Any] = nn.Module._call_impl

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return call(module, *args, **kwargs)
        meta: dict[str, Any] = fx_traceback.current_meta
        before = meta.get("nn_module_stack")
        meta["nn_module_stack"] = {**(before or {}), path: (f"step.{path}", type(module))}
        try:
            return call(module, *args, **kwargs)
        finally:
            meta["nn_module_stack"] = before or {}

    with mock.patch.object(nn.Module, "_call_impl", noting):
        yield


def _free_inputs(
    reads: StateReads, tensors: list[torch.Tensor]
) -> tuple[list[FreeInput], list[tuple[FreeInput, FreeInput]]]:
    """Return the tensors from outside of model and batch, each with its place, and pairs of places that hold one tensor."""
    places: dict[int, list[tuple[str, Callable[[], Any]]]] = {}
    for place, value in reads.reads.values():
        for tensor, name, read in _tensors_in(value, place.name, place.read):
            places.setdefault(id(tensor), []).append((name, read))
    free, twins = [], []
    for tensor in tensors:
        if id(tensor) not in places:
            raise CaptureError(
                f"the step reads a tensor of shape {tuple(tensor.shape)} that is no part of model or batch, and its name "
                "cannot be determined; make it a buffer of the model, or pass it in the batch"
            )
        (name, read), *others = places[id(tensor)]
        if tensor.grad_fn is not None:
            raise CaptureError(
                f"{name} has an autograd graph from outside of the step, and a captured step cannot run backward through "
                "it; detach the tensor, or compute it in the loss function"
            )
        free.append(FreeInput(name, name, read, tensor))
        twins += [(free[-1], FreeInput(other, other, read_other, tensor)) for other, read_other in others]
    return free, twins


def _tensors_in(
    value: Any, name: str, read: Callable[[], Any]
) -> Iterator[tuple[torch.Tensor, str, Callable[[], Any]]]:
    if isinstance(value, torch.Tensor):
        yield value, name, read
    elif isinstance(value, CONTAINERS) and not isinstance(value, (set, frozenset)):
        content = plain_content(value)
        for key in content if isinstance(content, dict) else range(len(content)):
            yield from _tensors_in(content[key], f"{name}[{key!r}]", lambda key=key: plain_content(read())[key])  # type: ignore[misc]
