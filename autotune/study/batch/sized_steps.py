"""Derive the step of a workload at any batch size from captures at a few sizes."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import CaptureError, ConfigError
from autotune.ir.costs import Costs
from autotune.ir.graph import Op, TrainGraph, Value
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.predict.simulate import simulate
from autotune.records.config import Config
from autotune.workloads.loop import Loop

if TYPE_CHECKING:
    from autotune.capture.fake.sized_step import CapturedStep

_NORMALIZES = "batch_norm"
_NORMALIZES_EACH_SAMPLE = ("no_training", "elemt", "backward", "normalize")
"""Parts of the names of batch norm's ops that compute no statistics of the batch."""


@dataclass(frozen=True, slots=True)
class SizedStep:
    """Graph of one batch size, with modelled costs."""

    graph: TrainGraph
    costs: Costs


class SizedSteps:
    """Steps of one workload and one training loop, by batch size.

    Two sizes are captured. If their graphs differ in bytes alone, bytes and seconds of other sizes are interpolated linearly,
    because tensor sizes grow linearly with the batch size. `check` captures one more size and compares its bytes with the
    interpolated ones. If they differ, every size is captured from then on. A workload may refuse sizes, such as those that
    are no multiple of 8; `round_down` returns one that it accepts.
    """

    def __init__(
        self, capture: "Callable[[int], CapturedStep]", count_eager_bytes: Callable[[int], int], size: int
    ) -> None:
        self._capture_step, self._count_eager_bytes, self._size = capture, count_eager_bytes, size
        self._captured: dict[int, CapturedStep] = {}
        self._eager_bytes: dict[int, float] = {}
        self.refusals: dict[int, str] = {}
        """Sizes that the workload refuses, with the reason."""
        self.counts_eager = False
        """True once eager ran on fake tensors at the workload's own size."""
        self._steps: dict[int, SizedStep] = {}
        # a size of 1 is special in many models: dimensions of one element are broadcast
        self._base = max(size, 2), 2 * max(size, 2)
        small, large = (self._capture(base) for base in self._base)
        self.loop: Loop = small.loop
        self.has_updates = small.has_updates
        self.is_interpolated = same_wiring(small.graph, large.graph)
        self.depends_on_size = not self.is_interpolated or _list_bytes(small.graph) != _list_bytes(large.graph)
        """False if the argument changes nothing about the step."""

    @property
    def normalizes_over_batch(self) -> bool:
        """True if the step has batch norm in training."""
        return normalizes_over_batch(self._captured[self._base[0]].graph)

    @property
    def digest(self) -> str:
        """Identity of the step: the digest of the graph that was captured at the smallest size."""
        return self._captured[self._base[0]].graph.digest

    @property
    def captures(self) -> int:
        """Number of sizes captured so far."""
        return len(self._captured)

    @property
    def unit(self) -> int:
        """Number of which every size that may be accepted is a multiple; 1 unless the workload refused a size.

        Of the powers of two that divide the workload's own size, and that size, it is the smallest that divides no
        refused size. A refused multiple of the own size has another reason, and so have sizes of 1 and 2: batch norm and
        losses of pairs need several samples.
        """
        refused = [size for size in self.refusals if size > 2 and size % self._size]
        return next(number for number in _divisors(self._size) if all(size % number for size in refused))

    def at_size(self, size: int) -> SizedStep:
        """Return the step of a batch size."""
        if size not in self._steps:
            self._steps[size] = self._make(size)
        return self._steps[size]

    def eager_bytes(self, size: int) -> float:
        """Return the peak of live tensor bytes in plain eager; infinity for a size that the workload refuses.

        Where eager cannot run on fake tensors, it is the peak of the traced step.
        """
        if size not in self._eager_bytes:
            try:
                self._eager_bytes[size] = self._count_eager_bytes(size)
                self.counts_eager = self.counts_eager or size == self._size
            except ConfigError:
                is_refused = self.counts_eager and not self.accepts(size)  # by the factory
                self._eager_bytes[size] = math.inf if is_refused else self._count_traced_bytes(size)
            except Exception as error:  # noqa: BLE001 - the user's step may raise anything
                self._refuse(size, error)
                self._eager_bytes[size] = math.inf
        return self._eager_bytes[size]

    def _count_traced_bytes(self, size: int) -> float:
        if size in self.refusals or not (self.is_interpolated or self.accepts(size)):
            return math.inf
        step = self.at_size(size)
        return simulate(step.graph, lower(step.graph, Plan.traced(step.graph)), step.costs).peak_bytes

    def check(self, size: int) -> bool:
        """Return True if a size's captured graph equals the interpolated one; if not, capture every size from now on.

        Raises ConfigError or CaptureError if the workload refuses the size, which `round_down` prevents.
        """
        expected, captured = self._interpolate(size), self._capture(size)
        is_exact = same_wiring(captured.graph, expected.graph) and _list_bytes(captured.graph) == _list_bytes(
            expected.graph
        )
        if not is_exact:
            self.capture_all()
        return is_exact

    def capture_all(self) -> None:
        """Capture every size from now on."""
        self.is_interpolated = False
        self._steps.clear()

    def accepts(self, size: int) -> bool:
        """Return True if a size can be captured; raise ConfigError or CaptureError if the workload's own cannot."""
        if size not in self.refusals:
            try:
                self._capture(size)
            except (ConfigError, CaptureError) as error:
                self._refuse(size, error)
        return size not in self.refusals

    def may_accept(self, size: int) -> bool:
        """Return False for a size that is refused, or excluded by the refusals of others.

        Where every size is captured, this one is, too.
        """
        if size % self.unit or size in self.refusals:
            return False
        return self.is_interpolated or self.accepts(size)

    def round_down(self, size: int) -> int:
        """Capture sizes from `size` down until the workload accepts one, and return that; 0 where it accepts none."""
        size -= size % self.unit
        while size and not self.accepts(size):
            size = step_down(size, self._size)
        return size

    def _refuse(self, size: int, error: Exception) -> None:
        if size == self._size:
            raise error
        self.refusals[size] = " ".join(str(error).split()) or type(error).__name__

    def _capture(self, size: int) -> "CapturedStep":
        if size not in self._captured:
            self._captured[size] = self._capture_step(size)
        return self._captured[size]

    def _make(self, size: int) -> SizedStep:
        if size in self._captured or not self.is_interpolated:
            captured = self._capture(size)
            return SizedStep(captured.graph, captured.costs)
        return self._interpolate(size)

    def _interpolate(self, size: int) -> SizedStep:
        small, large = (self._captured[base] for base in self._base)
        return interpolate(SizedStep(small.graph, small.costs), SizedStep(large.graph, large.costs), self._base, size)


def step_down(size: int, accepted: int) -> int:
    """Return the next size to try below a refused one, for a workload that accepts another size; 0 for none.

    It is the largest multiple of a divisor of `accepted` that does not divide `size`; if all divide it, half of `size`.

    >>> [step_down(size, 24) for size in (47, 46, 44, 40, 48)]
    [46, 44, 40, 24, 24]
    """
    return max((size // number * number for number in _divisors(accepted) if size % number), default=size // 2)


def _divisors(size: int) -> list[int]:
    """Return the powers of two that divide a size, and the size itself.

    >>> _divisors(24)
    [1, 2, 4, 8, 24]
    """
    powers = (2**exponent for exponent in range((size & -size).bit_length()))
    return sorted({*powers, size})


def interpolate(small: SizedStep, large: SizedStep, sizes: tuple[int, int], size: int) -> SizedStep:
    """Return the step of another size, on a line through two steps of the same wiring."""
    share = (size - sizes[0]) / (sizes[1] - sizes[0])

    def value_at(first: Value, second: Value) -> Value:
        rise = (second.nbytes - first.nbytes) * (size - sizes[0])
        return replace(first, nbytes=max(0, first.nbytes + rise // (sizes[1] - sizes[0])))

    values = tuple(map(value_at, small.graph.values, large.graph.values))
    seconds = tuple(
        max(0.0, first + (second - first) * share)
        for first, second in zip(small.costs.seconds, large.costs.seconds, strict=True)
    )
    return SizedStep(replace(small.graph, values=values), replace(small.costs, seconds=seconds))


def same_wiring(left: TrainGraph, right: TrainGraph) -> bool:
    """Return True if two graphs differ in sizes alone, so that a plan of the first is a plan of the second."""
    return (
        (left.inputs, left.outputs) == (right.inputs, right.outputs)
        and [value.role for value in left.values] == [value.role for value in right.values]
        and list(map(_wires, left.ops)) == list(map(_wires, right.ops))
    )


def _list_bytes(graph: TrainGraph) -> list[int]:
    return [value.nbytes for value in graph.values]


def _wires(op: Op) -> Op:
    return replace(op, name="", layer="", signature="")


def normalizes_over_batch(graph: TrainGraph) -> bool:
    """Return True if an op normalizes by statistics of the whole batch, as batch norm does in training."""
    return any(
        _NORMALIZES in op.target and not any(word in op.target for word in _NORMALIZES_EACH_SAMPLE) for op in graph.ops
    )


def capture_sizes(config: Config, argument: str, size: int, loop: str | None = None) -> SizedSteps:
    """Capture a config's step at a few batch sizes, on fake tensors in this process; nothing is allocated.

    `loop` replaces the config's training loop. Raises ConfigError where the workload cannot be made, and CaptureError
    where its step cannot be captured.
    """
    from autotune.capture.fake.eager_bytes import count_workload_bytes
    from autotune.capture.fake.sized_step import capture_sized_step

    words = config.loop if loop is None else loop

    def arguments_of(value: int) -> Mapping[str, Any]:
        return {**config.arguments, argument: value}

    # the user's code may change the working directory, from which this process resolves its own paths
    def count(value: int) -> int:
        with contextlib.chdir(Path.cwd()):
            return count_workload_bytes(config.workload, arguments_of(value), words)

    def capture(value: int) -> "CapturedStep":
        with contextlib.chdir(Path.cwd()):
            return capture_sized_step(config.workload, arguments_of(value), words)

    steps = SizedSteps(capture, count, size)
    if not steps.depends_on_size:
        raise ConfigError(
            f"{config.ref}: the step is the same for {argument}={size} and {argument}={2 * size}; name the argument that "
            "sets the batch size with --batch-argument NAME"
        )
    return steps
