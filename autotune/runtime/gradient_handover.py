"""Hand the gradients of a planned call over to autograd, and predict the gradient of the loss that they start from."""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.program import Program
from autotune.errors import ConfigError
from autotune.ir.graph import Role
from autotune.runtime.executor import Executor, seed_gradient

LossGradient = Callable[[torch.Tensor], torch.Tensor]
"""Function from the gradient that `backward()` starts with, 1, to the gradient of the loss."""

_MAX_PERIOD = 16
"""Number of calls after which a repeating pattern must have repeated to be expected."""
_WINDOW = 64
"""Number of latest calls in which a pattern is searched."""
_WARNED_RERUNS, _OF_CALLS = 8, 32
"""Number of calls that ran twice, among how many, for a warning."""


class PlannedCall:
    """One call of a planned loss: its gradients, and the state from which it can run once more."""

    def __init__(
        self,
        executor: Executor,
        tensors: list[torch.Tensor],
        expected: "ExpectedTangent",
        lock: "threading.RLock",
        reopen: Callable[[], None],
    ) -> None:
        """`lock` is held while the executor runs: threads that share a loss take turns. `reopen` lets it run once more."""
        program, self._expected, self._lock, self._reopen = executor.program, expected, lock, reopen
        self._written = {value for op in program.graph.ops for value in op.writes}
        self._executor, self._inputs = executor, executor.inputs(tensors)
        tensors_of_step = self._tensors()
        self._state = _State([tensors_of_step[value] for value in self._written], program)
        self._before = self._state.copy()
        self._versions = self._read_versions()
        self._gradients: tuple[torch.Tensor, ...] | None = None

    def run(self, observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None) -> Any:
        """Run forward and backward; return the results. `observe` is called with each parameter and its gradient."""
        self._executor.tangent = self._expected.tensor
        results, self._gradients = self._executor.run(self._inputs)
        if observe is not None:
            program = self._executor.program
            for value, gradient in zip(program.gradients, self._gradients, strict=True):
                observe(program.tensors[value], gradient)
        return results

    def take_gradients(self, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients for a gradient of the loss. A retained graph may ask again, and each time the step runs again."""
        with self._lock:
            return self._take_gradients(tangent)

    def _take_gradients(self, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients, self._gradients = self._gradients, None
        if gradients is not None and self._expected.settle(tangent):
            return gradients
        del gradients
        for value, version in self._read_versions().items():
            if version != self._versions[value]:
                changed = self._executor.program.graph.values[value]
                what = f"the buffer {changed.name}" if changed.role is Role.BUFFER else "a parameter or an input"
                raise RuntimeError(
                    f"{what} of the planned loss changed in place between the call and backward(); call the planned loss again "
                    "after the change"
                )
        self._reopen()
        current = self._state.copy()
        # the buffers end as they are now, so graphs that read them stay valid
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(self._state.buffers):
            self._state.restore(self._before)
            self._executor.tangent = tangent.detach().to(self._expected.tensor.dtype, copy=True)
            try:
                # backward() may run within torch.autocast; the step that was captured did not
                with torch.autocast(self._executor.program.device.type, enabled=False):
                    return self._executor.run(self._inputs)[1]
            finally:
                self._state.restore(current)

    def _tensors(self) -> dict[int, torch.Tensor]:
        """Return the tensors of the step by their values: the model's, and those that the call passes."""
        program = self._executor.program
        inputs = (*program.batch, *(value for value, _ in program.free))
        return program.tensors | dict(zip(inputs, self._inputs, strict=True))

    def _read_versions(self) -> dict[int, int]:
        """Return the version of each tensor that the step reads and does not write, by its value."""
        # a tensor of inference mode has no version
        return {
            value: 0 if tensor.is_inference() else tensor._version
            for value, tensor in self._tensors().items()
            if value not in self._written
        }


@dataclass(slots=True, eq=False)
class ExpectedTangent:
    """Expectation of one call: the gradient of the loss that its `backward()` will pass."""

    tensor: torch.Tensor
    value: float
    from_user: bool
    """True if the user's function predicted it."""
    tangents: "Tangents"
    actual: float | None = None
    """Gradient of the loss; None until `backward()`."""

    def settle(self, tangent: torch.Tensor) -> bool:
        """Record the gradient of the loss that `backward()` passed; return whether it is the expected one."""
        self.actual = float(tangent.item())
        is_right = self.actual == self.value
        self.tangents.record(self, is_right=is_right)
        return is_right


class Tangents:
    """Prediction of the gradient of the loss that the next `backward()` passes; all executors share it.

    A constant is expected after one call, and a pattern of up to `_MAX_PERIOD` calls once it has begun to repeat.
    """

    def __init__(self, loss_gradient: LossGradient | None) -> None:
        self._loss_gradient = loss_gradient
        self._predicted: float | None = None
        self._trusts_user = True
        self._calls: deque[ExpectedTangent] = deque(maxlen=_WINDOW)
        self._reruns: deque[bool] = deque(maxlen=_OF_CALLS)
        self._has_warned = False

    def restart(self) -> "Tangents":
        """Return a prediction that has seen no call."""
        return Tangents(self._loss_gradient)

    def expect(self, program: Program) -> ExpectedTangent:
        """Return the expectation for the next call."""
        seed = seed_gradient(program)
        value, from_user = self._repeat(), False
        if self._loss_gradient is not None:
            predicted = float(self._loss_gradient(seed).detach().to(seed.dtype).item())
            if self._trusts_user or predicted != self._predicted:
                value, from_user = predicted, True
            self._predicted = predicted
        call = ExpectedTangent(torch.full_like(seed, value), value, from_user, self)
        self._calls.append(call)
        return call

    def record(self, call: ExpectedTangent, *, is_right: bool) -> None:
        """Learn from a call's `backward()`; warn once where many calls run twice."""
        if call.from_user:
            self._trusts_user = is_right
        self._reruns.append(not is_right)
        if not self._has_warned and sum(self._reruns) >= _WARNED_RERUNS:
            self._has_warned = True
            warnings.warn(
                f"{sum(self._reruns)} of the last {len(self._reruns)} calls of a planned loss ran twice, because the factor "
                "between the loss and the tensor of backward() changed unexpectedly; pass that factor as loss_gradient, such "
                "as lambda one: scaler.scale(one) / steps",
                stacklevel=2,
            )

    def _repeat(self) -> float:
        """Return the gradient that the pattern of the latest calls repeats; 1 before any."""
        known = [call.actual for call in self._calls]
        value, longest = 1.0, -1
        for period in range(1, min(_MAX_PERIOD, len(known)) + 1):
            candidate = known[-period]
            if candidate is None:  # of a call whose backward() has not run
                continue
            matches = 0
            pairs = [
                (later, earlier) for later, earlier in zip(known[period:], known, strict=False)
                if later is not None and earlier is not None
            ]  # fmt: skip
            for later, earlier in reversed(pairs):
                if later != earlier:
                    break
                matches += 1
            if matches > longest:
                value, longest = candidate, matches
            if pairs and matches == len(pairs):
                break
        return value


class _State:
    """State that a call changes: buffers, tensors from outside, and random number generators."""

    def __init__(self, buffers: Sequence[torch.Tensor], program: Program) -> None:
        self.buffers = tuple(buffers)
        self._devices = list_drawing_devices(program)

    def copy(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of the state."""
        return [buffer.detach().clone() for buffer in self.buffers], [_read_generator(each) for each in self._devices]

    def restore(self, state: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        """Write copies back into the state."""
        buffers, generators = state
        for buffer, copy in zip(self.buffers, buffers, strict=True):
            buffer.detach().copy_(copy)
        for device, generator in zip(self._devices, generators, strict=True):
            if device.type == "cuda":
                torch.cuda.set_rng_state(generator, device)
            else:
                torch.set_rng_state(generator)


def list_drawing_devices(program: Program) -> tuple[torch.device, ...]:
    """Return the devices from whose generators a step may draw: the CPU, and each GPU with a value of the step.

    The result is empty for a step without random ops.
    """
    if not any(op.random for op in program.graph.ops):
        return ()
    gpus = [meta.device for meta in program.metas if meta is not None and meta.device.type == "cuda"]
    return torch.device("cpu"), *dict.fromkeys(gpus)


def _read_generator(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class _HandOver(torch.autograd.Function):
    """A loss as autograd sees it: its backward returns gradients that exist already."""

    @staticmethod
    def forward(ctx: Any, call: PlannedCall, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        del parameters  # they are arguments so that autograd asks for their gradients
        ctx.call = call
        ctx.save_for_backward(loss)
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "backward() of a planned loss has create_graph=True, but its gradients have no graph; compute a loss whose "
                "gradients are differentiated again with loss_fn(model, batch)"
            )
        _ = ctx.saved_tensors  # as of any node: autograd raises where the graph was not retained
        gradients = ctx.call.take_gradients(tangent)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # autograd frees what it saved, not attributes: a loss that is kept for a log would keep its batch
            ctx.call = None
        return None, None, *gradients


hand_over: Callable[..., torch.Tensor] = _HandOver.apply
"""Function from a call, its loss and its parameters to the loss as autograd sees it."""


class _DetachedExtra(torch.autograd.Function):
    """A result beside the loss, which has a gradient in eager and none under a plan."""

    @staticmethod
    def forward(ctx: Any, extra: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        del parameter  # it makes the result require a gradient, as in eager
        return extra.view_as(extra)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[None, None]:
        del ctx
        if all(tangent is None for tangent in tangents):  # a node of DistributedDataParallel has all results
            return None, None
        raise ConfigError(
            "backward() reached a result beside the loss, which has no gradient under a plan; add its term to the loss within "
            "the loss function, or detach it"
        )


def refuse_gradients(results: tuple[Any, ...], attached: tuple[bool, ...], parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return results whose differentiation is refused, where eager would compute gradients through them.

    `attached` has one entry for each leaf of the results; results without entries stay detached.
    """
    leaves, spec = pytree.tree_flatten(results)
    if len(leaves) != len(attached) or not any(attached):
        return results
    refuse: Callable[..., torch.Tensor] = _DetachedExtra.apply
    refused = [refuse(leaf, parameter) if has_graph else leaf for leaf, has_graph in zip(leaves, attached, strict=True)]
    return tuple(pytree.tree_unflatten(refused, spec))
