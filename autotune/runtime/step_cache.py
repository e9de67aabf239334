"""Look up the prepared step for a call: by the batch's signature, then by the Python values that the step reads."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import torch

from autotune.capture.python.guards import GuardFailure
from autotune.capture.signature import Signature
from autotune.capture.tracer import separate_aliases
from autotune.runtime.prepared_step import PreparedStep
from autotune.workloads.batch import FlatBatch

MAX_CAPTURES = 8
"""Number of captures kept per signature, which differ in Python values; the oldest is dropped first."""
MAX_SIGNATURES = 64
"""Number of signatures kept, such as shapes of the batch; the one whose last use is longest ago is dropped first."""


class StepCache:
    """The prepared steps of one training loop. `trains` is False for inference, whose guards run without gradients."""

    def __init__(self, *, trains: bool) -> None:
        self._trains = trains
        self.by_signature: dict[Signature, list[PreparedStep]] = {}
        """Steps of each signature, oldest first."""

    def __iter__(self) -> Iterator[PreparedStep]:
        return itertools.chain.from_iterable(self.by_signature.values())

    @property
    def offloads(self) -> bool:
        """True if any step offloads, so that the process has threads that a fork would lose."""
        return any(step.plan.offload for step in self)

    def find(self, call: Signature, batch: FlatBatch) -> tuple[PreparedStep | None, GuardFailure | None]:
        """Return the step whose guards hold for this call.

        If there is none, the second part is the value that changed since the latest capture of this signature; it is None
        if the signature is new.
        """
        change = None
        distinct = separate_aliases(batch.tensors)
        if call in self.by_signature:
            self.by_signature[call] = self.by_signature.pop(call)  # in order of use
        with nullcontext() if self._trains else torch.no_grad():
            for step in reversed(self.by_signature.get(call, ())):
                if step.program.guards.hold(distinct, batch.constants):
                    return step, None
                change = change or step.program.guards.first_failure(distinct, batch.constants)
        return None, change

    def add(self, call: Signature, step: PreparedStep) -> None:
        """Add the step of a signature's latest capture; close those beyond `MAX_CAPTURES` and `MAX_SIGNATURES`."""
        steps = self.by_signature.setdefault(call, [])
        steps.append(step)
        while len(steps) > MAX_CAPTURES:
            steps.pop(0).close()
        while len(self.by_signature) > MAX_SIGNATURES:
            for unused in self.by_signature.pop(next(iter(self.by_signature))):
                unused.close()

    def close(self) -> None:
        """Close all steps, the others too where one raises an error."""
        with ExitStack() as closing:
            for step in self:
                closing.callback(step.close)


def describe_difference(call: Signature, first: Signature) -> str:
    """Name in words what distinguishes a call from the first one, for messages."""
    if difference := call.batch_difference(first):
        return f"a batch of {call.shapes} ({difference})"
    if call.keeps_gradients != first.keeps_gradients:
        return f"the step with {call.keeps_gradients or 'nothing'} that needs every gradient at once"
    if call.backends != first.backends:
        return "the step with other backends of torch (of attention, or mkldnn or cudnn switched on or off)"
    return "the model in another mode, with other buffers or parameters to train, or with another optimizer.step"
