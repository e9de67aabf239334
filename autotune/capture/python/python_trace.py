"""Trace the Python of a step with Dynamo: its forward as an FX graph, the guards of what it read, its free inputs.

Dynamo reads Python values once, as constants of the graph. `guards.Guards` checks before each step that they are unchanged.
Tensors that the step reads from outside of model and batch (a closure, a global, a second model) are free inputs of the
graph, read again for each step. So are the floats named in `dynamic`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx

from autotune.capture.python.guards import Guards, Sources
from autotune.capture.python.side_effects import SideEffect, record_side_effects
from autotune.capture.python.step_module import StepModule
from autotune.capture.values.batch_branches import decide_batch_branches
from autotune.errors import CaptureError


@dataclass(frozen=True, slots=True)
class FreeInput:
    """A tensor or a float that the step reads from outside of model and batch."""

    source: str
    """Dynamo's expression for the input."""
    name: str
    """Expression of the input in the user's code."""
    read: Callable[[], torch.Tensor]
    """Function that returns the current tensor; a float as a tensor of one element in float64."""
    example: torch.Tensor
    """Tensor to trace with: for a float the one of Dynamo's that stands for its symbol."""


@dataclass(frozen=True)
class PythonTrace:
    """Forward of one step as Dynamo traced it."""

    forward: fx.GraphModule
    """Module of the graph: takes the batch's tensors, then one tensor for each free input."""
    free: tuple[FreeInput, ...]
    guards_without: Callable[[frozenset[str], frozenset[str]], Guards]
    """Function that builds the guards, without those on some sources and their parts."""
    sources: Sources
    """Reader of the sources' values."""
    side_effects: tuple[SideEffect, ...]
    inputs: frozenset[str]
    """Sources of the graph's inputs."""
    read: frozenset[str]
    """Sources of the inputs that a result depends on."""
    conditions: frozenset[str]
    """Sources that a guard depends on."""
    constants: frozenset[str]
    """Sources of numbers that became constants of the graph."""
    branches: bool
    """A condition on a symbol decided which ops were traced."""
    text: str
    """Ops that results depend on, as text."""
    symbols: Any
    """Dynamo's environment of symbols."""

    @property
    def ops(self) -> list[tuple[Any, ...]]:
        """Every op of the graph, those that only write included; nodes by their position, as names follow the sources."""
        nodes = {node: f"%{position}" for position, node in enumerate(self.forward.graph.nodes)}
        return [
            (
                node.op,
                "" if node.op == "placeholder" else str(node.target),
                *map(str, fx.node.map_arg((node.args, node.kwargs), nodes.get)),
            )
            for node in nodes
        ]

    @property
    def specialized(self) -> bool:
        """An input of `dynamic` became a constant after all, because an op used it as a plain number."""
        return any(constant.is_number for constant in self.symbols.replacements.values())


def trace_python(
    step: StepModule, tensors: list[torch.Tensor], dynamic: frozenset[str] = frozenset(), *, ints: bool = True
) -> PythonTrace:
    """Trace `step(*tensors)`. `dynamic` has the sources of numbers that become inputs instead of constants.

    Ints among them become symbols too if `ints`. Such a symbol shows who reads the number; no captured step has it as an input.

    Raises whatever Dynamo or the step itself raises.
    """
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.functional_export import create_fx_graph_from_captured_output
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._export.utils import _compiling_state_context

    with (
        _compiling_state_context(),
        torch._dynamo.config.patch(
            replay_side_effects=False,
            use_numpy_random_stream=True,  # else numpy's numbers would come from torch's generator
            side_effect_replay_policy="warn",
            ignore_logger_methods=_logger_methods(),
            specialize_float=not dynamic,
            allow_unspec_int_on_nn_module=bool(dynamic),
        ),
        _numbers_as_inputs(dynamic, ints=ints),
        _not_exporting(),
        record_side_effects() as (effects, hooked),
        decide_batch_branches(tensors) as branches,
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
    ):
        captured = fullgraph_capture(step, tuple(tensors), {})
        output: Any = captured.graph_capture_output
    graph = output.output_graph
    sources = Sources(step, output.f_globals)
    if hooked:
        raise CaptureError(
            f"the step registers a hook on {sources.spell(hooked[0])}, which a captured step never calls; multiply or change "
            "the gradient in before_update, or register the hook on a result of an op"
        )

    def guards_without(names: frozenset[str], alone: frozenset[str]) -> Guards:
        # with recursive tags, which older versions use by default, changes in closures and classes go unnoticed
        complete = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, use_recursive_dict_tags_for_guards=False)
        # torch times each set of guards for a log, with all caches flushed: a sixth of a small capture
        untimed = mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0)
        with complete, untimed, get_metrics_context(), dynamo_timed("guards"):
            manager = output.build_guards(step.forward.__code__, _hooks(names, alone)).guard_manager
            return Guards(manager, sources, tuple(branches))

    inputs = graph.export_metadata.graph_input_idx_to_local_source
    forward: Any = create_fx_graph_from_captured_output(captured, step, tuple(tensors), {})
    free = _free_inputs(step, forward.graph.find_nodes(op="placeholder"), inputs, sources)
    _pass_free_inputs(forward, len(tensors), list(free))
    live = _live(forward)
    placeholders = live.find_nodes(op="placeholder")
    return PythonTrace(
        forward,
        tuple(free.values()),
        guards_without,
        sources,
        tuple(effects),
        frozenset(source.name for source in inputs.values()),
        frozenset(inputs[i].name for i, node in enumerate(placeholders) if node.users and i in inputs),
        frozenset(map(_guarded, graph.guards)),
        frozenset(guard.name for guard in graph.guards if guard.create_fn_name() in ("EQUALS_MATCH", "CONSTANT_MATCH")),
        bool(graph.shape_env.guards),
        "\n".join(node.format_node() for node in live.nodes if node.op != "placeholder" or node.users),
        graph.shape_env,
    )


def _logger_methods() -> set[Callable[..., Any]]:
    """Return the logging methods that a trace leaves out: Dynamo refuses loggers, and every model of `transformers` has some.

    Libraries add methods to the class, such as `warning_once`.
    """
    levels = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")
    names = (name for name in dir(logging.Logger) if name.split("_")[0] in levels)
    methods: set[Callable[..., Any]] = {getattr(logging.Logger, name) for name in names}
    return methods.union(torch._dynamo.config.ignore_logger_methods)


def _hooks(names: frozenset[str], alone: frozenset[str]) -> Any:
    """Return hooks that drop guards on sources: on `names` and their parts, on `alone` without parts. None without sources."""
    from torch._dynamo.hooks import Hooks
    from torch._dynamo.types import GuardFilterEntry

    parts = tuple(f"{name}{mark}" for name in names for mark in ".[")

    def keep(entries: Sequence[GuardFilterEntry]) -> list[bool]:
        full = [entry.orig_guard.name for entry in entries]
        return [name not in names and name not in alone and not name.startswith(parts) for name in full]

    return Hooks(guard_filter_fn=keep) if names or alone else None


def _live(forward: fx.GraphModule) -> fx.Graph:
    """Return a copy of the graph without the ops that no result depends on."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(forward.graph, {}))
    graph.eliminate_dead_code()
    return graph


def _guarded(guard: Any) -> str:
    """Return the source that a guard depends on, down to the attribute whose existence it checks."""
    attribute = getattr(guard.create_fn, "keywords", {}).get("attr", "")
    return f"{guard.name}.{attribute}" if attribute else str(guard.name)


@contextmanager
def _numbers_as_inputs(names: frozenset[str], *, ints: bool) -> Iterator[None]:
    """Make Dynamo treat numbers as symbols; by itself it does so only for code that it compiles a second time."""
    from torch._dynamo import pgo
    from torch._dynamo.variables import builder

    original = builder.process_automatic_dynamic

    def process(tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
        processed = original(tx, name, entry, **kwargs)
        is_input = name in names and (ints or type(entry.scalar) is float)
        return pgo.FrameStateSizeEntry(scalar=pgo.auto_dynamic) if is_input else processed

    with mock.patch.object(builder, "process_automatic_dynamic", process):
        yield


@contextmanager
def _not_exporting() -> Iterator[None]:
    """Let `torch.compiler.is_exporting()` be False, as in eager: Dynamo treats every full graph as an export.

    Libraries leave work out where they may assume the batch's shapes, as transformers does with attention masks.
    """
    from torch._dynamo.variables.torch import tracing_state_functions

    constants = mock.patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False})  # torch before 2.13
    with constants, mock.patch.object(torch.compiler, "_is_exporting_flag", False):
        yield


def _free_inputs(
    step: torch.nn.Module, placeholders: list[fx.Node], inputs: dict[int, Any], sources: Sources
) -> dict[int, FreeInput]:
    """Return the free inputs by position among the inputs of Dynamo's graph; tensors of model and batch are not free."""
    model_tensors = {id(tensor) for tensor in (*step.parameters(), *step.buffers())}
    free = {}
    for position, source in inputs.items():
        name = source.name
        if name.startswith("L['tensors']"):
            continue
        if name.startswith(_FROM_NUMPY):
            raise CaptureError(_refusal_of_numpy(name.removeprefix(_FROM_NUMPY).removesuffix(")"), sources))
        value = sources.value(name)
        if isinstance(value, torch.Tensor) and id(value) not in model_tensors:
            if value.grad_fn is not None:
                raise CaptureError(
                    f"{sources.spell(name)} has an autograd graph from outside of the step, and a captured step cannot run "
                    "backward through it; detach the tensor, or compute it in the loss function"
                )
            free[position] = FreeInput(name, sources.spell(name), _tensor_reader(sources, name), value)
        elif isinstance(value, float):
            example = placeholders[position].meta["example_value"]
            free[position] = FreeInput(name, sources.spell(name), _float_reader(sources, name), example)
    return free


_FROM_NUMPY = "___from_numpy("
"""Prefix of Dynamo's expression for an array or a number of numpy, which it converts to a tensor."""


def _refusal_of_numpy(name: str, sources: Sources) -> str:
    value, spelled = sources.value(name), sources.spell(name)
    fix = (
        f"a tensor, as torch.as_tensor({spelled})"
        if getattr(value, "shape", ())
        else f"a Python number, as {spelled}.item()"
    )
    return f"{spelled} is a numpy.{type(value).__name__}, which a captured step cannot follow; make it {fix} before the step"


def _tensor_reader(sources: Sources, name: str) -> Callable[[], torch.Tensor]:
    return lambda: sources.value(name)


def _float_reader(sources: Sources, name: str) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(sources.value(name), dtype=torch.float64)


def _pass_free_inputs(forward: Any, batch: int, positions: list[int]) -> None:
    """Let the module accept free inputs as arguments behind the batch's tensors, instead of the values Dynamo would read."""
    codegen = forward.graph._codegen
    flatten = codegen.dynamo_bytecode_flatten

    def with_free(*arguments: Any) -> list[Any]:
        flat = list(flatten(*arguments[:batch]))
        for position, argument in zip(positions, arguments[batch:], strict=True):
            flat[position] = argument
        return flat

    with_free.input_processor = flatten.input_processor  # type: ignore[attr-defined]
    codegen.dynamo_bytecode_flatten = with_free
