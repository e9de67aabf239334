"""Compute the outputs of a region in float64, and how far they move if rounding changes decisions.

A *decision* is an op whose result jumps where an operand passes a threshold: a comparison, a sign, the gradient of ReLU.
Rounding may change a decision only where the operand lies within its rounding error of the threshold. An input of the
region has no rounding error, and neither has a value that ops such as ReLU, `where` or a view select from inputs.

A *witness* evaluates the region in float64, but moves the operands of decisions by their admitted errors. No other operand
is moved, so the difference of a witness to the float64 result is the effect of changed decisions alone.
"""

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autotune.runtime.verification.gates import EPS, NOISE, epsilon, magnitude, witness_distance
from autotune.runtime.verification.witness import to_double

RANDOM_PATTERNS = 6
"""Number of witnesses with random signs, beside the two in which all operands move one way."""

_SELECTS = frozenset(
    [
        "relu", "neg", "abs", "clamp", "clamp_min", "clamp_max", "hardtanh", "leaky_relu", "threshold",
        "maximum", "minimum", "fmax", "fmin", "amax", "amin", "where", "masked_fill",
        "cat", "stack", "clone", "copy", "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand",
        "unsqueeze", "squeeze", "slice", "select", "split", "split_with_sizes", "unbind", "alias", "detach", "as_strided",
        "flip", "roll", "gather", "index", "index_select", "repeat", "constant_pad_nd", "triu", "tril",
        "full", "full_like", "ones", "ones_like", "zeros", "zeros_like", "empty", "empty_like", "arange", "scalar_tensor",
        "lift_fresh_copy",
    ]
)  # fmt: skip
"""Ops that return constants, or elements of their operands up to their sign, without rounding."""
_DECIDES: dict[str, tuple[int, ...]] = {
    "threshold_backward": (1,), "hardtanh_backward": (1,), "leaky_relu_backward": (1,), "hardsigmoid_backward": (1,),
    "hardswish_backward": (1,), "hardshrink_backward": (1,), "softshrink_backward": (1,), "_prelu_kernel_backward": (1,),
    "elu_backward": (5,), "floor_divide": (0, 1),
    "sign": (0,), "sgn": (0,), "signbit": (0,), "round": (0,), "floor": (0,), "ceil": (0,), "trunc": (0,),
    "argmax": (0,), "argmin": (0,), "logical_not": (0,),
    "gt": (0, 1), "ge": (0, 1), "lt": (0, 1), "le": (0, 1), "eq": (0, 1), "ne": (0, 1),
    "logical_and": (0, 1), "logical_or": (0, 1), "logical_xor": (0, 1),
}  # fmt: skip
"""Positions of the operands that decide, for each op whose result jumps."""
_UNDEFINED = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
"""Ops that return uninitialized memory."""
_THRESHOLDS = {"hardswish_backward": (-3.0, 3.0), "elu_backward": (0.0,)}
"""Thresholds of the ops whose result also changes between them."""


@dataclass(frozen=True, slots=True)
class OutputValues:
    """One output of a region in float64."""

    center: torch.Tensor
    moved: torch.Tensor
    """The output if every input and every result inside is moved by one rounding, with the same decisions."""
    jumps: torch.Tensor | None
    """Largest change of each element by other decisions; None where no decision may change."""


class RegionReference:
    """The float64 evaluation of a region.

    Args:
        function: The region's ops as a function of tensors that returns a tuple.
        examples: Tensors of the shapes, strides and dtypes with which the function is called.
    """

    def __init__(self, function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> None:
        self._graph = _trace(function, examples)
        self._rounded, self._selected = _classify(self._graph.graph)
        inexact = self._rounded | self._selected
        self._open = {
            node: [operand for operand in _operands(node) if operand in inexact] for node in self._graph.graph.nodes
        }
        self._open = {node: operands for node, operands in self._open.items() if operands}
        """Inexact operands of each decision that has some."""
        self._watched, self._between = self._find_sources()
        (results,) = self._graph.graph.output_node().args
        assert isinstance(results, (tuple, list))
        self.undefined = frozenset(number for number, node in enumerate(results) if _is_undefined(node))
        """Numbers of the outputs that are uninitialized memory, which a later op fills."""
        values = pytree.tree_leaves([node.meta.get("val") for node in self._graph.graph.nodes])
        self.epsilon = max((epsilon(value) for value in values if isinstance(value, torch.Tensor)), default=0.0)
        """Coarsest rounding inside of the region."""

    @torch.no_grad()
    def evaluate(self, tensors: Sequence[torch.Tensor]) -> list[OutputValues]:
        """Evaluate the region in float64 on the step's tensors, which have the dtypes of the step."""
        inputs = [to_double(tensor) for tensor in tensors]
        center = _Center(self._graph)
        outputs = center.outputs(inputs)
        # an input of half precision is exact; kernels compute with it in single precision
        finest = torch.finfo(torch.float32).eps
        moved_inputs = [
            _move(wide, number, min(epsilon(tensor), finest))
            for number, (wide, tensor) in enumerate(zip(inputs, tensors, strict=True))
        ]
        moved = _Moved(self._graph, center.decisions, self._rounded).outputs(moved_inputs)
        center.decisions.clear()
        jumps = self._find_jumps(tensors, inputs, outputs) if self._open else [None] * len(outputs)
        return [OutputValues(*values) for values in zip(outputs, moved, jumps, strict=True)]

    def _find_sources(self) -> tuple[set[fx.Node], set[fx.Node]]:
        """Return the rounded values that decisions depend on, and the selecting ops between these and the decisions."""
        watched: set[fx.Node] = set()
        between: set[fx.Node] = set()
        waiting = [operand for operands in self._open.values() for operand in operands]
        while waiting:
            node = waiting.pop()
            if node in self._rounded:
                watched.add(node)
            elif node in self._selected and node not in between:
                between.add(node)
                waiting += node.all_input_nodes
        return watched, between

    def _admitted_errors(self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> dict[fx.Node, float]:
        """Return the admitted error of each watched value, relative to that of the region's ops run one by one."""
        wide, plain = (_Watch(self._graph, self._watched, is_double=double) for double in (True, False))
        wide.outputs(inputs)
        plain.outputs(tensors)
        errors = {}
        for node, value in plain.values.items():
            center, eps = wide.values[node], epsilon(value)
            size = magnitude(center)
            gap = torch.nan_to_num((value.double() - center).abs(), 0.0, 0.0)
            error = NOISE * gap.max().item() + EPS * eps * size if gap.numel() else 0.0
            errors[node] = min(error, witness_distance(eps) * size)
        return errors

    def _find_jumps(
        self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        errors = self._admitted_errors(tensors, inputs)
        jumps: list[torch.Tensor | None] = [None] * len(outputs)
        for pattern in range(2 + RANDOM_PATTERNS):
            if pattern == 2 and self._has_single_sources() and all(jump is None for jump in jumps):
                break  # moving all operands up or down changes no decision: none is close to a threshold
            witness = _Witness(self._graph, self._open, self._between, errors, pattern)
            for number, (output, center) in enumerate(zip(witness.outputs(inputs), outputs, strict=True)):
                change = torch.nan_to_num((output.double() - center.double()).abs(), 0.0, 0.0)
                if change.any():
                    largest = jumps[number]
                    jumps[number] = change if largest is None else torch.maximum(largest, change)
        return jumps

    def _has_single_sources(self) -> bool:
        """Return True if no decision depends on two rounded values, whose movements could cancel out."""
        inexact = self._rounded | self._selected
        return all(len(operands) == 1 for operands in self._open.values()) and all(
            len(inexact.intersection(node.all_input_nodes)) == 1 for node in self._between
        )


class _Run(fx.Interpreter):
    """An evaluation of a region's graph, in float64 unless `is_double` is False."""

    def __init__(self, graph: fx.GraphModule, *, is_double: bool = True) -> None:
        super().__init__(graph)
        self._is_double = is_double

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph on tensors."""
        return list(self.run(*tensors, enable_io_processing=False))

    def run_node(self, n: fx.Node) -> Any:
        """Run one op on the operands that `choose` returns; later ops read what `adjust` returns."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_function":
            result = self._call(n, self.choose(n, args), kwargs)
        else:
            result = getattr(self, n.op)(n.target, args, kwargs)
        if self._is_double:  # constants of the region have dtypes of their own
            result = pytree.tree_map_only(torch.Tensor, _as_double, result)
        return self.adjust(n, result)

    def choose(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the operands of an op."""
        del node
        return args

    def adjust(self, node: fx.Node, value: Any) -> Any:
        """Return the value that later ops read instead of a node's value."""
        del node
        return value

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert callable(node.target)
        if self._is_double:
            args, kwargs = pytree.tree_map(_widen, (args, kwargs))
        return node.target(*args, **kwargs)


class _Center(_Run):
    """A run that keeps the operands of decisions."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.decisions: dict[fx.Node, dict[int, torch.Tensor]] = {}
        """Operands of each decision, by position."""

    def choose(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.decisions[node] = {n: args[n] for n in _positions(node)}
        return args


class _Moved(_Run):
    """A run with the decisions of another one, in which every rounded value is moved by one rounding."""

    def __init__(
        self, graph: fx.GraphModule, decisions: Mapping[fx.Node, Mapping[int, torch.Tensor]], rounded: Set[fx.Node]
    ) -> None:
        super().__init__(graph)
        self._decisions, self._rounded = decisions, rounded
        self._drawn = 0

    def choose(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        forced = self._decisions.get(node, {})
        return tuple(forced.get(n, arg) for n, arg in enumerate(args))

    def adjust(self, node: fx.Node, value: Any) -> Any:
        if node not in self._rounded:
            return value
        self._drawn += 1
        return _move(value, -self._drawn, epsilon(node.meta["val"]))


class _Watch(_Run):
    """A run that keeps some values."""

    def __init__(self, graph: fx.GraphModule, watched: Set[fx.Node], *, is_double: bool) -> None:
        super().__init__(graph, is_double=is_double)
        self.values: dict[fx.Node, torch.Tensor] = {}
        self._watched = watched

    def adjust(self, node: fx.Node, value: Any) -> Any:
        if node in self._watched:
            self.values[node] = value
        return value


class _Witness(_Run):
    """A run whose decisions see rounded operands that are moved by their admitted errors."""

    def __init__(
        self,
        graph: fx.GraphModule,
        decisions: Mapping[fx.Node, Sequence[fx.Node]],
        between: Set[fx.Node],
        errors: Mapping[fx.Node, float],
        pattern: int,
    ) -> None:
        super().__init__(graph)
        self._open, self._between, self._errors, self._pattern = decisions, between, errors, pattern
        self._moved: dict[fx.Node, Any] = {}
        """Values as decisions see them."""

    def choose(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if node not in self._open:
            return args
        chosen = list(args)
        for n in _positions(node):
            source = node.args[n]
            assert isinstance(source, fx.Node)
            moved = self._moved.get(source, args[n])
            if thresholds := _THRESHOLDS.get(_op_name(node)):
                passes = [(args[n] > each) != (moved > each) for each in thresholds]
                moved = torch.where(torch.stack(passes).any(0), moved, args[n])
            chosen[n] = moved
        return tuple(chosen)

    def adjust(self, node: fx.Node, value: Any) -> Any:
        if node in self._errors:
            self._moved[node] = value + self._errors[node] * self._signs(node, value)
        elif node in self._between:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda source: self._moved.get(source, self.env.get(source))
            )
            self._moved[node] = self._call(node, args, kwargs)
        return value

    def _signs(self, node: fx.Node, value: torch.Tensor) -> torch.Tensor | float:
        if self._pattern < 2:
            return 1.0 - 2.0 * self._pattern
        index = list(self._errors).index(node)
        return _draw_signs(value, 1 + self._pattern + (2 + RANDOM_PATTERNS) * index)


def _trace(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Trace a region's ops on fake tensors, as ATen's own kernels."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in examples]
    functional = torch.func.functionalize(function, remove="mutations")
    traced = make_fx(functional, tracing_mode="fake")(*fakes)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _classify(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes whose values are rounded, and those that select from rounded values."""
    rounded: set[fx.Node] = set()
    selected: set[fx.Node] = set()
    parts: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or _positions(node):
            continue
        value = node.meta.get("val")
        if node.target is operator.getitem:
            selects = node.args[0] not in parts
        else:
            selects = _op_name(node) in _SELECTS or _keeps_bits(node)
        if selects:
            if any(source in rounded or source in selected for source in node.all_input_nodes):
                selected.add(node)
        elif isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point:
                rounded.add(node)
        else:
            parts.add(node)
    return rounded, selected


def _keeps_bits(node: fx.Node) -> bool:
    """Return True for a conversion to a dtype that holds every value of the operand's."""
    if _op_name(node) not in ("_to_copy", "convert_element_type"):
        return False
    before, after = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    return not before.is_floating_point or torch.promote_types(before, after) == after


def _is_undefined(node: object) -> bool:
    return isinstance(node, fx.Node) and _op_name(node) in _UNDEFINED


def _op_name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", "")


def _positions(node: fx.Node) -> tuple[int, ...]:
    """Return the positions of a node's operands that decide; empty if its result does not jump."""
    if node.op != "call_function":
        return ()
    positions = _DECIDES.get(_op_name(node), ())
    return tuple(n for n in positions if n < len(node.args) and isinstance(node.args[n], fx.Node))


def _operands(node: fx.Node) -> list[Any]:
    return [node.args[n] for n in _positions(node)]


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _widen(part: Any) -> Any:
    return torch.float64 if isinstance(part, torch.dtype) and part.is_floating_point else part


def _move(wide: torch.Tensor, seed: int, eps: float) -> torch.Tensor:
    """Move each element of a float64 tensor by one rounding."""
    return wide * (1 + eps * _draw_signs(wide, seed)) if eps else wide


def _draw_signs(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, tuple(tensor.shape), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    return signs.to(tensor.device, torch.float64)
