"""Derive the step of a workload at any batch size from captures at a few sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
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
    interpolated ones. If they differ, every size is captured from then on.
    """

    def __init__(
        self, capture: "Callable[[int], CapturedStep]", count_eager_bytes: Callable[[int], int], size: int
    ) -> None:
        self._capture_step, self._count_eager_bytes = capture, count_eager_bytes
        self._captured: dict[int, CapturedStep] = {}
        self._eager_bytes: dict[int, int] = {}
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
    def captures(self) -> int:
        """Number of sizes captured so far."""
        return len(self._captured)

    def at_size(self, size: int) -> SizedStep:
        """Return the step of a batch size."""
        if size not in self._steps:
            self._steps[size] = self._make(size)
        return self._steps[size]

    def eager_bytes(self, size: int) -> int:
        """Return the peak of live tensor bytes in plain eager; of the traced step where eager cannot run on fake tensors."""
        if size not in self._eager_bytes:
            try:
                self._eager_bytes[size] = self._count_eager_bytes(size)
            except ConfigError:
                step = self.at_size(size)
                traced = lower(step.graph, Plan.traced(step.graph))
                self._eager_bytes[size] = simulate(step.graph, traced, step.costs).peak_bytes
        return self._eager_bytes[size]

    def check(self, size: int) -> bool:
        """Return True if a size's captured graph equals the interpolated one; if not, capture every size from now on."""
        expected, captured = self.at_size(size), self._capture(size)
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

    def _capture(self, size: int) -> "CapturedStep":
        if size not in self._captured:
            self._captured[size] = self._capture_step(size)
        return self._captured[size]

    def _make(self, size: int) -> SizedStep:
        if size in self._captured or not self.is_interpolated:
            captured = self._capture(size)
            return SizedStep(captured.graph, captured.costs)
        small, large = (self._captured[base] for base in self._base)
        return interpolate(SizedStep(small.graph, small.costs), SizedStep(large.graph, large.costs), self._base, size)


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

    def count(value: int) -> int:
        return count_workload_bytes(config.workload, arguments_of(value), words)

    steps = SizedSteps(lambda value: capture_sized_step(config.workload, arguments_of(value), words), count, size)
    if not steps.depends_on_size:
        raise ConfigError(
            f"{config.ref}: the step is the same for {argument}={size} and {argument}={2 * size}; name the argument that "
            "sets the batch size with --batch-argument NAME"
        )
    return steps
