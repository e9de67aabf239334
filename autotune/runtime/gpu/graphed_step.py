"""Run a step as CUDA graphs: one launch for all kernels between two pieces of the host's work."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autotune.capture.optimizers.optimizer_copy import collect_state_tensors
from autotune.capture.program import Program
from autotune.ir.schedule import Schedule
from autotune.kernels.region_program import load_variants
from autotune.runtime.gpu.graph_source import GraphWriter
from autotune.runtime.gpu.step_split import split_step

WARM_UP_STEPS = 3
"""Number of steps before a capture: libraries choose algorithms, and the optimizer creates its state."""
MAX_CAPTURES = 3
"""Number of captures after which a step whose parameters keep moving runs without graphs."""


class Graph(Protocol):
    """Recorded kernels."""

    def replay(self) -> None:
        """Queue all kernels on the current stream."""


class GraphRecorder(Protocol):
    """Recorder of the graphs of one capture; `CudaRecorder` is one."""

    graphs: list[Graph]
    """Complete graphs in order."""

    def begin(self) -> None:
        """Record the kernels from here on instead of running them."""

    def end(self) -> None:
        """Complete the graph that was begun."""

    def abort(self) -> None:
        """Drop the graph that was begun, if there is one."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the same memory that does not keep the memory from being reused by later graphs."""


class GraphedStep:
    """A step in graphs, called like the function that it replaces.

    The first steps run without graphs. Then the graphs are captured, which runs nothing and changes nothing: a capture that
    fails leaves the step as it was. Batches are copied to tensors of fixed addresses, and results are copied out. Updates
    run between graphs and read learning rates in every step. Random ops draw from the generator as without graphs.

    Args:
        program: The captured step.
        schedule: Its instructions.
        step: The step without graphs.
        engine: Transfers of offloaded values; None without offload.
        make_recorder: Creates a recorder for each capture.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        step: Callable[..., tuple[Any, ...]],
        engine: Any,
        make_recorder: Callable[[], GraphRecorder],
    ) -> None:
        self._program, self._step, self._engine = program, step, engine
        self._make_recorder = make_recorder
        self._split = split_step(program, schedule)
        self.problem = ""
        """Reason why the step runs without graphs; empty while it runs in graphs or may still do so."""
        self.captures = 0
        """Number of captures so far."""
        self._writer = GraphWriter(program, schedule, self._split)
        self._steps = 0
        self._has_checked = False
        self._addresses: tuple[int, ...] = ()
        self._inputs: list[torch.Tensor | None] = []
        self._recorder: GraphRecorder | None = None
        self._scope: dict[str, Any] = {}
        if self._split.reason:
            self._give_up(self._split.reason)

    @property
    def graphs(self) -> int:
        """Number of graphs of a step; 0 before a capture and without graphs."""
        return 0 if self._recorder is None or self.problem else len(self._recorder.graphs)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run one step on the loss's gradient, the batch, and the values from outside."""
        updates = self._program.updates
        watched = updates is not None and updates.on_gradient is not None  # a callback may keep the gradients
        if self.problem or watched or self._steps < WARM_UP_STEPS:
            self._steps += 1
            return self._step(*inputs)
        addresses = tuple(self._program.tensors[value].data_ptr() for value in self._split.fixed)
        if self._recorder is None or addresses != self._addresses:
            self._addresses = addresses
            self._capture(inputs)
            if self.problem:
                return self._step(*inputs)
        results = self._scope["replay"](*map(self._renew, self._inputs, inputs))
        if not self._has_checked:
            self._has_checked = True
            self._check_state()
        self._steps += 1
        return tuple(result.clone() if isinstance(result, torch.Tensor) else result for result in results)

    def release(self) -> None:
        """Release the graphs and their memory; a later step captures them again."""
        if self._recorder is None or self.problem:  # the optimizer's state may lie in that memory, see `_check_state`
            return
        self._scope.clear()  # its functions refer to it, and it refers to the recorder
        self._recorder, self._scope, self._inputs = None, {}, []

    def _capture(self, inputs: Sequence[Any]) -> None:
        """Capture the graphs; if that fails, set `problem` and warn."""
        self.release()
        if self.captures == MAX_CAPTURES:
            self._give_up(f"its parameters have moved in memory {MAX_CAPTURES} times")
            return
        self.captures += 1
        recorder = self._make_recorder()
        try:
            self._inputs = [self._hold(tensor) for tensor in inputs]
            sources = self._writer.capture_source(), self._writer.replay_source()  # both calls add to `names`
            scope = self._writer.names | {
                "recorder": recorder, "borrowed": {}, "graphs": recorder.graphs, "engine": self._engine,
                "updates": self._program.updates,
            }  # fmt: skip
            for source in sources:
                exec(compile(source, f"<graphs of {self._program.graph.name}>", "exec"), scope)
            load_variants(scope.values())
            scope["capture"](*map(self._renew, self._inputs, inputs))
        except Exception as error:  # noqa: BLE001 - a kernel may refuse a capture with any exception
            recorder.abort()
            reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
            self._give_up(f"{type(error).__name__}: {reason}")
            return
        except BaseException:  # an interrupt must not leave the stream capturing
            recorder.abort()
            raise
        self._recorder, self._scope = recorder, scope

    def _renew(self, copied: torch.Tensor | None, passed: Any) -> Any:
        """Copy an input into its tensor of fixed address, and return that tensor; return an input without one as it is."""
        return passed if copied is None else copied.copy_(passed)

    def _hold(self, passed: Any) -> torch.Tensor | None:
        """Return a tensor of a fixed address for an input; None for one on another device, which only the host reads."""
        if passed.device.type != self._program.device.type:
            return None
        copied: torch.Tensor = passed.detach().clone()
        if copied.stride() != passed.stride():
            raise ValueError(f"an input of shape {tuple(passed.shape)} has overlapping elements or gaps")
        return copied

    def _check_state(self) -> None:
        """Give up where the optimizer keeps a gradient itself as its state, which the next step would overwrite."""
        if self._program.updates is None:
            return
        lent = {tensor.untyped_storage().data_ptr() for tensor in self._scope["borrowed"].values() if tensor.numel()}
        state = collect_state_tensors(self._program.updates.optimizer)
        if any(tensor.untyped_storage().data_ptr() in lent for tensor in state):
            # the recorder stays, and with it the memory of the state
            self._give_up("the optimizer keeps a gradient as its state, which a graph overwrites in the next step")

    def _give_up(self, reason: str) -> None:
        self.problem = reason
        warnings.warn(
            f"the step runs without CUDA graphs: {reason}; leave cuda_graphs out to silence this", stacklevel=4
        )
