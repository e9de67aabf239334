"""Refuse what a run on fake tensors does and a captured step would leave out."""

import io
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autotune.capture.python.state_places import StateReads
from autotune.errors import CaptureError
from autotune.workloads.factory import innermost_user_line


def refuse_iterators(reads: StateReads) -> None:
    """Raise CaptureError for an iterator that the step reads: a captured step does not advance it."""
    for place, value in reads.reads.values():
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise CaptureError(
                f"{place.name} is an iterator, which a captured step does not advance; draw from it before the step, and pass the "
                "result in the batch"
            )


@contextmanager
def refusing_unrecorded() -> Iterator[None]:
    """Refuse what a recorded step would leave out: seeding of torch's generator, and functions for tensors saved for backward."""
    internal = str(Path(torch.__file__).parent)

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if caller.startswith(internal):  # a checkpoint restores the state that it saved
                return original(*args, **kwargs)
            raise CaptureError(
                f"the step calls torch.{name}{user_place()}, and a captured step does not; call it before the step, or draw there "
                "and pass the numbers in the batch as tensors"
            )

        return call

    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def enter_hooks(hook: Any) -> Any:
        if type(hook) is not hooks and type(hook).__module__.startswith("torch."):
            return enter(hook)
        raise CaptureError(
            f"the step changes what is saved for backward (saved_tensors_hooks){user_place()}, and a captured step does not; leave "
            "the hooks out, as a plan chooses what to keep"
        )

    with ExitStack() as stack:
        for module, name in _GENERATOR_CALLS:
            spelled = f"cuda.{name}" if "cuda" in module.__name__ else name
            stack.enter_context(mock.patch.object(module, name, refusing(spelled, getattr(module, name))))
        stack.enter_context(mock.patch.object(hooks, "__enter__", enter_hooks))
        state = torch.default_generator.get_state()
        try:
            yield
            if not torch.equal(state, torch.default_generator.get_state()):  # numbers are drawn on fake tensors
                raise CaptureError(
                    "the step seeds torch.default_generator, and a captured step does not; seed it before the step"
                )
        finally:
            torch.default_generator.set_state(state)


def _of_devices(name: str) -> list[tuple[Any, str]]:
    return [(torch.cuda, name), (torch.cuda.random, name)]


_GENERATOR_CALLS = (
    (torch, "manual_seed"), (torch, "seed"), (torch, "set_rng_state"), (torch.random, "manual_seed"), (torch.random, "seed"),
    (torch.random, "set_rng_state"), (torch.random, "fork_rng"), *_of_devices("manual_seed"), *_of_devices("manual_seed_all"),
    *_of_devices("seed"), *_of_devices("seed_all"), *_of_devices("set_rng_state"), *_of_devices("set_rng_state_all"),
)  # fmt: skip


def user_place() -> str:
    """Return the user's line that runs now, for a message; empty if there is none."""
    place = innermost_user_line(traceback.extract_stack())
    return f" at {place}" if place else ""
