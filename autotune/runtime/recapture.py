"""Capture a step again after Python values that it read have changed, and transfer its plan."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from autotune.capture.program import Program
from autotune.capture.python.guards import GuardFailure
from autotune.capture.python.step_module import CONSTANTS
from autotune.capture.signature import Signature
from autotune.errors import CaptureError, PlanError
from autotune.ir.graph import Op, TrainGraph
from autotune.ir.plan import Plan

RECENT_STEPS = 10
"""Smallest number of steps between two captures for one value; each capture takes seconds."""
BATCH_CAPTURES = 8
"""Number of captures that may follow more closely: for a number or word of the batch, a branch on its tensors, a float that
becomes an int, or for other tensors of the model."""


class Recaptures:
    """The Python values of one step that have changed so far, each captured as a constant or as an input."""

    def __init__(self) -> None:
        self.steps = 0
        """Number of steps started."""
        self._captured_at: dict[tuple[str, Signature], int] = {}
        """Step of the latest capture, by `_value_of` a change and the call."""
        self._captures: Counter[tuple[str, Signature]] = Counter()
        self._tensors_at: dict[Signature, list[int]] = {}
        self._inputs: set[str] = set()
        self._constants: set[str] = set()
        self._changed: set[str] = set()

    def is_first(self, change: GuardFailure) -> bool:
        """Return True if this is asked for the first change of a value."""
        is_first = _value_of(change) not in self._changed
        self._changed.add(_value_of(change))
        return is_first

    def refuse_frequent(self, change: GuardFailure, call: Signature) -> None:
        """Raise PlanError for a value that also changed at most `RECENT_STEPS` steps ago.

        The steps of each signature count apart: one change of a value needs a capture of each.
        """
        key = (_value_of(change), call)
        last = self._captured_at.get(key)
        # each outcome of a branch is captured once, and so is an int where floats are inputs
        has_few = change.source.startswith(CONSTANTS) or change.of_branch or change.source in self._inputs
        if last is None or self.steps - last > RECENT_STEPS or self._captures[key] < (BATCH_CAPTURES if has_few else 1):
            return
        remedy = "pass it in the batch as a tensor, change it less often" if change.source else "change it less often"
        remedy = "use torch.where" if change.of_branch else remedy
        raise PlanError(
            f"{change}; it also changed in step {last}, this is step {self.steps}, and each change needs another capture: "
            f"{remedy}, or use other_shapes='eager'"
        )

    def refuse_frequent_tensors(
        self, call: Signature, known: Iterable[Signature], name_changed: Callable[[], str]
    ) -> None:
        """Raise PlanError where other parameters or buffers need one capture after the other, as where a step replaces one.

        `known` are the calls that have captures. Each of a few sets of tensors, such as those of a loop that freezes layers in
        turn, is captured once.
        """
        key = replace(call, tensors=0)
        if all(replace(each, tensors=0) != key for each in known):
            return
        recent = [step for step in self._tensors_at.get(key, ()) if self.steps - step <= RECENT_STEPS]
        if len(recent) >= BATCH_CAPTURES:
            raise PlanError(
                f"{name_changed()} changed to another tensor in {len(recent)} of the last {RECENT_STEPS} steps, and each needs "
                "another capture: change it in place, with copy_(), or use other_shapes='eager'"
            )
        self._tensors_at[key] = [*recent, self.steps]

    def capture(self, change: GuardFailure, call: Signature, capture: Callable[[frozenset[str]], Program]) -> Program:
        """Capture again; a float that changed becomes an input of the step if the tracer supports it."""
        self._captured_at[_value_of(change), call] = self.steps
        self._captures[_value_of(change), call] += 1
        if type(change.current) is float and change.source not in self._constants:
            try:
                program = capture(frozenset(self._inputs | {change.source}))
            except CaptureError:
                self._constants.add(change.source)
            else:
                # `record_step` has no such inputs: in its program the float is a constant
                (self._constants if program.recorded else self._inputs).add(change.source)
                return program
        return capture(self.inputs)

    @property
    def inputs(self) -> frozenset[str]:
        """Sources of the floats that are inputs of the step so far."""
        return frozenset(self._inputs)


def _value_of(change: GuardFailure) -> str:
    """Return the source of a changed value; of a global setting of torch, which has none, its condition."""
    return change.source or change.condition


def transfer_plan(plan: Plan, old: Program, new: Program) -> Plan | None:
    """Return the plan for the same step with other constants, or None if ops or bytes differ.

    A float that became an input of the new step adds a value, so values are matched by their order.
    """
    values = _match_values(old, new)
    if values is None or not _has_same_wiring(old.graph, new.graph, values):
        return None
    return replace(
        plan,
        offload=tuple(replace(swap, value=values[swap.value]) for swap in plan.offload),
        inplace=tuple(replace(choice, value=values[choice.value]) for choice in plan.inplace),
    )


def _match_values(old: Program, new: Program) -> dict[int, int] | None:
    old_ids, new_ids = (
        [value.id for value in program.graph.values if value.id not in dict(program.free)] for program in (old, new)
    )
    if len(old_ids) != len(new_ids):
        return None
    return dict(zip(old_ids, new_ids, strict=True))


def _has_same_wiring(old: TrainGraph, new: TrainGraph, values: dict[int, int]) -> bool:
    matched = set(values.values())
    if len(old.ops) != len(new.ops):
        return False
    if any(
        (old.values[a].nbytes, old.values[a].role) != (new.values[b].nbytes, new.values[b].role)
        for a, b in values.items()
    ):
        return False
    return all(_is_same_op(a, b, values, matched) for a, b in zip(old.ops, new.ops, strict=True))


def _is_same_op(old: Op, new: Op, values: dict[int, int], matched: set[int]) -> bool:
    return (
        old.target == new.target
        and _renamed(old.outputs, values) == new.outputs
        and _renamed(old.writes, values) == tuple(value for value in new.writes if value in matched)
        and set(_renamed(old.inputs, values)) == matched.intersection(new.inputs)
        and set(_renamed(old.inplace, values)) <= set(new.inplace)
        and old.random == new.random
    )


def _renamed(ids: tuple[int, ...], values: dict[int, int]) -> tuple[int, ...]:
    return tuple(values[value] for value in ids if value in values)
