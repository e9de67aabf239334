"""Capture a step again when Python values that it read have changed, and carry its plan over."""

from collections.abc import Callable
from dataclasses import replace

from autotune.capture.program import Program
from autotune.capture.python.guards import Change
from autotune.errors import CaptureError, PlanError
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan

RECENT_STEPS = 10
"""A value that changes again within so many steps of its last capture is refused: each capture takes seconds."""


class Recaptures:
    """The values of one step that have changed so far, and how each is captured: as a constant or as an input."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that began."""
        self._captured_at: dict[str, int] = {}
        self._inputs: set[str] = set()
        self._constants: set[str] = set()

    def first_time(self, change: Change) -> bool:
        """Whether this value changes for the first time."""
        return change.source not in self._captured_at

    def refuse_what_changes_often(self, change: Change) -> None:
        """Raise PlanError for a value that changed a few steps ago, too."""
        last = self._captured_at.get(change.source)
        if last is not None and self.steps - last <= RECENT_STEPS:
            raise PlanError(
                f"{change}; it changed in step {last}, too, this is step {self.steps}, and each change needs another capture: "
                "pass it in the batch as a tensor, change it less often, or use other_shapes='eager'"
            )

    def capture(self, change: Change, capture: Callable[[frozenset[str]], Program]) -> Program:
        """Capture anew, with a float that changed as an input of the step where the tracer can."""
        self._captured_at[change.source] = self.steps
        if type(change.now) is float and change.source not in self._constants:
            try:
                program = capture(frozenset(self._inputs | {change.source}))
            except CaptureError:
                self._constants.add(change.source)
            else:
                self._inputs.add(change.source)
                return program
        return capture(self.inputs)

    @property
    def inputs(self) -> frozenset[str]:
        """Sources of the floats that are inputs of the step by now."""
        return frozenset(self._inputs)


def transferred(plan: Plan, old: Program, new: Program) -> Plan | None:
    """The plan of a step for the same step with other constants; None where ops or bytes differ.

    A float that became an input of the new step adds a value, so values are matched by their order.
    """
    values = _matched(old, new)
    if values is None or not _same_wiring(old.graph, new.graph, values):
        return None
    return replace(
        plan,
        offload=tuple(replace(swap, value=values[swap.value]) for swap in plan.offload),
        inplace=tuple(replace(made, value=values[made.value]) for made in plan.inplace),
    )


def _matched(old: Program, new: Program) -> dict[int, int] | None:
    kept = [[value.id for value in one.graph.values if value.id not in dict(one.free)] for one in (old, new)]
    if len(kept[0]) != len(kept[1]):
        return None
    return dict(zip(*kept, strict=True))


def _same_wiring(old: TrainGraph, new: TrainGraph, values: dict[int, int]) -> bool:
    known = set(values.values())
    if len(old.ops) != len(new.ops):
        return False
    if any(
        (old.values[a].nbytes, old.values[a].role) != (new.values[b].nbytes, new.values[b].role)
        for a, b in values.items()
    ):
        return False
    return all(
        one.target == other.target
        and _renamed(one.outputs, values) == other.outputs
        and _renamed(one.writes, values) == tuple(value for value in other.writes if value in known)
        and set(_renamed(one.inputs, values)) == known.intersection(other.inputs)
        and set(_renamed(one.inplace, values)) <= set(other.inplace)
        and one.random == other.random
        for one, other in zip(old.ops, new.ops, strict=True)
    )


def _renamed(ids: tuple[int, ...], values: dict[int, int]) -> tuple[int, ...]:
    return tuple(values[value] for value in ids if value in values)
