"""Refuse what a run on fake tensors does and a captured step would leave out."""

import io
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from autotune.capture.python.code_facts import is_recordable, user_line
from autotune.capture.python.state_places import (
    StateReads,
    generator_state,
    is_same_state,
    numpy_state,
    set_generator_state,
)
from autotune.errors import CaptureError
from autotune.workloads.factory import innermost_user_line


def refuse_iterators(reads: StateReads) -> None:
    """Raise CaptureError for an iterator that the step reads: a captured step does not advance it."""
    for place, value in reads.reads.values():
        is_own = is_recordable(type(value))  # its Python state is recorded, and so are the iterators that it reads
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_own:
            raise CaptureError(
                f"{place.name} is an iterator, which a captured step does not advance; draw from it before the step, and pass the "
                "result in the batch"
            )


class Draws:
    """The random numbers that a step draws from Python and numpy, from the construction to `restore`."""

    def __init__(self) -> None:
        self._before = random.getstate(), numpy_state()
        self._generators: list[tuple[Any, Any, str]] = []
        self._line = ""
        self._has_drawn = False

    def add(self, generator: Any, name: str) -> None:
        """Observe another generator, of the user's name."""
        self._generators.append((generator, generator_state(generator), name))

    def note_call(self, function: Any, frame: Any) -> None:
        """Note a call of a function that is written in C, if it draws from a generator of Python."""
        if not self._has_drawn and isinstance(getattr(function, "__self__", None), random.Random):
            self._has_drawn, self._line = True, user_line(frame)

    def restore(self) -> str:
        """Restore the generators; return which one the step drew from, with the line, and an empty text for none.

        Another thread, such as one that prepares batches, may draw from Python's generator meanwhile.
        """
        drawn, where = "", f" at {self._line}" if self._line else ""
        is_alone = threading.active_count() == 1  # numbers that C code draws are not noted
        if random.getstate() != self._before[0] and (self._has_drawn or is_alone):
            drawn = f"Python's random{where}"
            random.setstate(self._before[0])
        if not is_same_state(self._before[1], numpy_state()):
            drawn = drawn or "numpy.random"
            np.random.set_state(self._before[1])
        for generator, state, name in self._generators:
            if not is_same_state(state, generator_state(generator)):
                drawn = drawn or f"{name}{where}"
                set_generator_state(generator, state)
        return drawn


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
