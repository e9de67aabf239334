"""Decide branches on a batch's numbers in a recorded run. Each decision becomes a condition of the captured step.

Tensors that a step computes from the batch and from constants alone have values while it runs on fake tensors: those of
the batch that is captured. A truth value of such a tensor decides a branch, as does a comparison of its `.item()`.
Any other use of a number of the batch is refused, because it would be another number for the next batch.
"""

import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autotune.capture.values.batch_branches import BatchBranch, is_not_tracing, tracing_checks
from autotune.capture.values.constant_values import (
    DRAWS,
    MOST_ELEMENTS,
    READERS,
    ConstantValues,
    share_memory,
    without_draws,
    writes,
    written,
)
from autotune.workloads.factory import innermost_user_line

MOST_LIVE_ELEMENTS = 2**12
"""Largest number of elements of a buffer whose content may decide a branch."""


class BatchValueNeededError(Exception):
    """Error of a step that uses a number of the batch for more than a comparison."""


class _Input(NamedTuple):
    position: int


class _Live(NamedTuple):
    """Tensor of the model or from outside, such as a buffer; its current content is read."""

    tensor: torch.Tensor
    places: Mapping[int, Callable[[], torch.Tensor]]
    """Functions that read tensors from outside of the model where the user keeps them, by id of the captured tensor."""

    def read(self) -> torch.Tensor:
        """Return the tensor that is now in the captured tensor's place."""
        place = self.places.get(id(self.tensor))
        return self.tensor if place is None else place()


class _Expression(NamedTuple):
    """Call of a function, with expressions and constants as arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    structure: pytree.TreeSpec

    def call(self, parts: list[Any]) -> Any:
        """Call the function with these leaves of its arguments."""
        args, kwargs = pytree.tree_unflatten(parts, self.structure)
        return self.function(*args, **kwargs)

    def sequence(self) -> "list[_Expression]":
        """Return the expressions that this one consists of, in the order of their evaluation; itself last."""
        found: dict[int, _Expression] = {}
        stack = [self]
        while stack:
            waiting = [part for part in stack[-1].arguments if isinstance(part, _Expression) and id(part) not in found]
            stack += waiting
            if not waiting:
                done = stack.pop()
                found[id(done)] = done
        return list(found.values())


def _evaluate(sequence: list[_Expression], tensors: Mapping[int, torch.Tensor]) -> Any:
    """Return the value of the last expression of a sequence for other tensors of the batch, by position."""
    values: dict[int, Any] = {}

    def value(part: Any) -> Any:
        if isinstance(part, _Input):
            return tensors[part.position]
        if isinstance(part, _Live):
            return part.read()
        return values[id(part)] if isinstance(part, _Expression) else part

    for expression in sequence:
        values[id(expression)] = expression.call([value(part) for part in expression.arguments])
    return values[id(sequence[-1])]


class BatchValues:
    """Values of the tensors that depend on the batch and on constants alone, and the branches that they decided."""

    def __init__(self, batch: list[torch.Tensor], constants: ConstantValues) -> None:
        self._batch = [] if any(isinstance(tensor, FakeTensor) for tensor in batch) else batch
        self._constants = constants
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}
        self._keep: list[Any] = []  # ids stay unique
        self.branches: list[BatchBranch] = []
        self.places: dict[int, Callable[[], torch.Tensor]] = {}
        """Functions that read tensors from outside of the model where the user keeps them, by id of the captured tensor."""

    def add_inputs(self, traced: Sequence[torch.Tensor]) -> None:
        """Follow the tracer's tensors that stand for those of the batch."""
        for position, (tensor, real) in enumerate(zip(traced, self._batch, strict=False)):
            self._known[id(tensor)] = real, _Input(position)
            self._keep.append(tensor)

    def add_live(self, traced: torch.Tensor, real: torch.Tensor) -> None:
        """Follow a tracer's tensor that stands for a buffer, or for a tensor from outside of model and batch."""
        if self._batch and real.numel() <= MOST_LIVE_ELEMENTS and not real.requires_grad and not real.is_meta:
            self._known[id(traced)] = real, _Live(real, self.places)
            self._keep.append(traced)

    def read(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return what a reader of known values returns, in a tuple; None where a value is unknown.

        Raises:
            BatchValueNeededError: an argument is a number of the batch.
        """
        name = getattr(function, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, BatchNumber) for leaf in leaves):
            raise BatchValueNeededError(f"Tensor.item() in {name}")
        if name not in READERS or (computed := self._computed(function, args, kwargs)) is None:
            return None
        expression, value = computed
        if isinstance(value, bool):
            return (self.decide(expression, value),)
        return (BatchNumber(self, expression, value),) if name == "item" else None

    def decide(self, expression: _Expression, value: bool) -> bool:
        """Note a branch; return its value."""
        sequence = expression.sequence()
        read = (part for each in sequence for part in each.arguments if isinstance(part, _Input))
        positions = tuple(dict.fromkeys(part.position for part in read))

        def compute(*tensors: torch.Tensor) -> Any:
            return _evaluate(sequence, dict(zip(positions, tensors, strict=True)))

        line = innermost_user_line(traceback.extract_stack())
        self.branches.append(BatchBranch(compute, value, positions, line))
        return value

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the value of a call's result, if those of its arguments are known."""
        if not self._known:
            return
        name = getattr(function, "__name__", "")
        if writes(name, kwargs, function, args):
            for tensor in written(name, args, kwargs, function):
                self._forget(tensor)
            return
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if DRAWS.search(name) or not all(isinstance(part, torch.Tensor) for part in results):
            return
        if any(part.numel() > MOST_ELEMENTS or part.requires_grad for part in results):
            return
        try:
            computed = self._computed(function, args, kwargs)
        except Exception:  # noqa: BLE001 - a call that fails on values has no value to follow
            return
        if computed is None:
            return
        expression, value = computed
        for position, part in enumerate(results):
            single = expression if part is result else _call(operator.getitem, expression, position)
            self._known[id(part)] = (value if part is result else value[position]), single
        self._keep.append(result)

    def _computed(self, function: Any, args: Any, kwargs: Any) -> "tuple[_Expression, Any] | None":
        """Return a call as an expression, with its value.

        None where the call reads no tensor of the batch, or a tensor whose value is unknown.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        parts: list[Any] = []
        values: list[Any] = []
        for leaf in leaves:
            part = value = leaf
            if isinstance(leaf, torch.Tensor):
                if id(leaf) in self._known:
                    value, part = self._known[id(leaf)]
                elif (constant := self._constants.value(leaf)) is not None:
                    with _plainly():  # the step may change it in place afterwards
                        part = value = constant.clone()
                else:
                    return None
            parts.append(part)
            values.append(value)
        if not any(isinstance(part, (_Input, _Live, _Expression)) for part in parts):
            return None
        expression = _Expression(function, tuple(parts), structure)
        with _plainly():
            return expression, without_draws(lambda: expression.call(values))

    def _forget(self, tensor: torch.Tensor) -> None:
        """Forget the values in the memory of a tensor that the step overwrites."""
        kept = [tensor] if id(tensor) in self._known else pytree.tree_leaves(self._keep)
        same = [each for each in kept if id(each) in self._known and (each is tensor or share_memory(each, tensor))]
        storages = {self._known[id(each)][0].untyped_storage()._cdata for each in same}
        if storages:
            self._known = {
                key: known for key, known in self._known.items() if known[0].untyped_storage()._cdata not in storages
            }


def _call(function: Callable[..., Any], *arguments: Any) -> _Expression:
    leaves, structure = pytree.tree_flatten((arguments, {}), is_leaf=lambda part: isinstance(part, _Expression))
    return _Expression(function, tuple(leaves), structure)


class BatchNumber:
    """Number of a batch, to which a step may compare other numbers; each result is a condition of the captured step."""

    __slots__ = ("_expression", "_value", "_values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: BatchValues, expression: _Expression, value: float) -> None:
        self._values, self._expression, self._value = values, expression, value

    def __bool__(self) -> bool:
        return self._values.decide(_call(bool, self._expression), bool(self._value))


def _compare(function: Callable[[Any, Any], bool]) -> Callable[[BatchNumber, Any], bool]:
    def compare(number: BatchNumber, other: Any) -> bool:
        if type(other) not in (bool, int, float):
            raise BatchValueNeededError(f"Tensor.item() compared with a {type(other).__name__}")
        return number._values.decide(_call(function, number._expression, other), function(number._value, other))

    return compare


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        del arguments
        raise BatchValueNeededError(f"Tensor.item() in {name}")

    return refuse


for _function in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(BatchNumber, f"__{_function.__name__}__", _compare(_function))
for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "neg", "abs", "round", "trunc", "floor", "ceil", "int", "float", "index", "format", "str",
):  # fmt: skip
    setattr(BatchNumber, f"__{_name}__", _refuse(_name))


@contextmanager
def _plainly() -> Iterator[None]:
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def as_eager_decides(batch: list[torch.Tensor]) -> Iterator[None]:
    """Let libraries read the batch's numbers as in eager, where a recorded run has them."""
    has_numbers = not any(isinstance(tensor, FakeTensor) for tensor in batch)
    saved = {check: check.__code__ for check in tracing_checks()} if has_numbers else {}
    for check in saved:
        check.__code__ = is_not_tracing.__code__  # the function stays the same object, for guards on it
    try:
        yield
    finally:
        for check, code in saved.items():
            check.__code__ = code
