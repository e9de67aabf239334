"""Find the prepared step of a call, or capture, plan and prepare another one."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from autotune.capture.program import Program
from autotune.capture.python.guards import GuardFailure
from autotune.capture.signature import Signature
from autotune.capture.tracer import capture, separate_aliases
from autotune.errors import ConfigError, PlanError, StoreError
from autotune.runtime import malloc
from autotune.runtime.prepared_step import PreparedStep, StepPreparer
from autotune.runtime.recapture import Recaptures, transfer_plan
from autotune.runtime.shapes.background import BackgroundShapes
from autotune.runtime.shapes.batch_padding import BatchPadding
from autotune.runtime.step_cache import StepCache, describe_difference
from autotune.workloads.batch import FlatBatch
from autotune.workloads.workload import Workload

OtherShapes = Literal["replan", "background", "eager", "error"]
OTHER_SHAPES: tuple[str, ...] = get_args(OtherShapes)
"""Actions for a batch of another shape."""


def check_other_shapes(other_shapes: str) -> None:
    """Raise ConfigError for an unknown action."""
    if other_shapes not in OTHER_SHAPES:
        raise ConfigError(f"other_shapes is {other_shapes!r}; known: {', '.join(OTHER_SHAPES)}")


class StepSelector:
    """The prepared steps of one loop.

    Args:
        make_workload: Makes the workload of a batch.
        preparer: Plans captured programs and makes them ready to run.
        other_shapes: Action for a call without a prepared step: prepare another one, run in eager, or raise PlanError.
        trains: False for steps without gradients.
        gradients: True if gradients are results of the step.
        maker: Name of the class that a message tells the user to create.
    """

    def __init__(
        self,
        make_workload: Callable[[Any], Workload],
        preparer: StepPreparer,
        other_shapes: OtherShapes,
        *,
        trains: bool,
        gradients: bool,
        maker: str,
    ) -> None:
        self._make_workload, self._preparer = make_workload, preparer
        self._other_shapes, self._maker = other_shapes, maker
        self._gradients = gradients
        self._recaptures = Recaptures()
        self._background: BackgroundShapes | None = None
        self.cache = StepCache(trains=trains)
        self._has_warned = False
        self._first_call: Signature
        self.first: Program
        """Program of the first batch."""
        self.last: PreparedStep
        """Step of the last call that did not run in eager."""

    def start(
        self, batch: Any, padding: BatchPadding, signature: Callable[[Any], Signature], gradient_users: str
    ) -> None:
        """Prepare the step of the first batch, and those of its other sizes where batches are padded.

        Raises:
            CaptureError: The step cannot be captured.
            PlanError: The plan is for another graph.
            StoreError: A store cannot be opened.
        """
        first = padding.resize_first(batch)
        self._first_call, self.first = signature(first), self._capture(first, frozenset())
        plan = self._preparer.first_plan(self.first, partial(self._make_workload, first), gradient_users)
        self.last = self._preparer.prepare(self.first, plan)
        self.cache.add(self._first_call, self.last)
        try:
            padding.check(batch, self.first, plan, self._preparer.budget_bytes)
            for other in padding.other_batches(batch):
                self.prepare(other, signature(other))
        except BaseException:
            self.close()  # the error's traceback would keep the store's space
            raise
        if self._other_shapes == "background" and not self._preparer.kernels:
            self._background = self._preparer.plan_in_background(
                self.first, self._first_call, self._make_workload(first), gradients=self._gradients
            )

    def close(self) -> None:
        """Release the stores' space and the arenas, and end the process that plans new shapes."""
        try:
            self.cache.close()
        finally:
            if self._background is not None:
                self._background.close()

    def release_memory(self) -> None:
        """Release the arena's memory until the next step."""
        if self.last.arena is not None:
            self.last.arena.release()

    def prepare(self, batch: Any, call: Signature) -> None:
        """Capture, plan and prepare the step of a call that is to come; do nothing if there is one.

        Raises:
            CaptureError: The step cannot be captured.
            StoreError: A store cannot be opened.
        """
        if call in self.cache.by_signature:
            return
        program = self._capture(batch, self._recaptures.inputs)
        self.last.suspend()  # its memory is free for the profile
        try:
            step = self._preparer.prepare(program, self._preparer.make_plan(program))
            self.cache.add(call, step)
            step.suspend()
        finally:
            self.last.resume()
        malloc.trim()  # a capture leaves megabytes of free memory, which would be charged beside the steps

    def select(self, batch: Any, call: Signature, parts: FlatBatch) -> PreparedStep | None:
        """Return the step of a call, ready to run; None for a call that runs in eager.

        Raises:
            CaptureError: The step must be captured again, which fails.
            PlanError: `other_shapes` is "error", or a value changes too often.
            StoreError: A store cannot be opened.
        """
        self._recaptures.steps += 1
        step, change = self.cache.find(call, parts)
        if step is None and self._other_shapes == "error":
            self._refuse_call(call, change)
        if step is not self.last:
            self.last.suspend(step)  # alternating shapes would otherwise hold an arena and a store each
        if step is None:
            self._warn(call, change)
            step = None if self._other_shapes == "eager" else self._prepare_missing(batch, call, change, parts)
            if step is None:
                return None
            self.cache.add(call, step)
        step.memory.refuse(parts.tensors)
        step.resume()
        self.last = step
        return step

    def reopen(self, step: PreparedStep) -> None:
        """Make the step of an earlier call ready to run again, as `select` does.

        Raises StoreError if its store was closed for good, by `close` or for the steps of other calls.
        """
        if step.plan.offload and step.open_store is None:
            raise StoreError(
                f"a step must run again, but its {step.plan.store} store was closed, by close() or for steps of newer shapes; "
                "call backward() before that"
            )
        if step is not self.last:
            self.last.suspend(step)
        step.resume()
        self.last = step

    def _refuse_call(self, call: Signature, change: GuardFailure | None) -> None:
        raise PlanError(
            f"this step was made for a batch of {self._first_call.shapes}; this is "
            f"{describe_difference(call, self._first_call)}. Pass other_shapes='replan' or make a {self._maker} for it"
            if change is None
            else f"{change}. Pass other_shapes='replan' or make a {self._maker} for it"
        )

    def _warn(self, call: Signature, change: GuardFailure | None) -> None:
        eager = self._other_shapes == "eager"
        if change is not None:
            if self._recaptures.is_first(change):
                action = "runs in plain eager" if eager else "is captured again"
                warnings.warn(f"{change}; the step {action} whenever it changes", stacklevel=5)
            return
        if not self._has_warned:
            action = (
                "runs as it is traced"
                if self._preparer.file is None
                else "is planned again with the same settings, once, which takes seconds"
            )
            if self._background is not None:
                action = "runs in plain eager until another process has captured and planned it"
            action = "runs in plain eager" if eager else action
            difference = describe_difference(call, self._first_call)
            advice = (
                ". So is each further shape: prepare() plans shapes before training, and buckets pads to a few"
                if "takes seconds" in action
                else ""
            )
            text = f"{difference} {action}; the plan is for a batch of {self._first_call.shapes}{advice}"
            warnings.warn(text, stacklevel=5)
        self._has_warned = True

    def _capture(self, batch: Any, inputs: frozenset[str]) -> Program:
        """Capture the step for a batch; `inputs` names floats that become inputs of the step."""
        program = capture(self._make_workload(batch), dynamic=inputs, gradients=self._gradients)
        return self._preparer.with_kernels(program)

    def _name_other_tensors(self, batch: Any) -> str:
        """Return the names of parameters and buffers that are other objects than in the last step, for a message."""
        model, known = self._make_workload(batch).model, set(map(id, self.last.program.tensors.values()))
        named = [*model.named_parameters(), *model.named_buffers()]
        names = [name for name, tensor in named if id(tensor) not in known]
        return ", ".join(names[:3]) or "which parameters are trained"

    def _prepare_missing(
        self, batch: Any, call: Signature, change: GuardFailure | None, parts: FlatBatch
    ) -> PreparedStep | None:
        """Return the step of a call without one; None while another process captures and plans it."""
        if self._background is None or change is not None or not self._background.serves(call):
            return self._prepare_again(batch, call, change)
        answer = self._background.take(call, batch)
        if answer is None:
            return None if self._background.serves(call) else self._prepare_again(batch, call, change)
        if answer.change is not None and answer.plan is not None:
            program = answer.change.apply(self.first)
            # a Python value may have changed since the other process got its copy
            if program.guards.hold(separate_aliases(parts.tensors), parts.constants):
                return self._preparer.prepare(program, answer.plan)
        return self._prepare_again(batch, call, change)

    def _prepare_again(self, batch: Any, call: Signature, change: GuardFailure | None) -> PreparedStep:
        """Capture and prepare a call without a step; keep the plan if only Python constants differ."""
        plan = None
        if change is None:
            self._recaptures.refuse_frequent_tensors(
                call, self.cache.by_signature, partial(self._name_other_tensors, batch)
            )
            program = self._capture(batch, self._recaptures.inputs)
        else:
            self._recaptures.refuse_frequent(change, call)
            program = self._recaptures.capture(change, call, partial(self._capture, batch))
            before = self.cache.by_signature[call][-1]
            plan = transfer_plan(before.captured_plan, before.program, program)
        if plan is None:
            plan = self._preparer.make_plan(program)
        return self._preparer.prepare(program, plan)
