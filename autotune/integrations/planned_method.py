"""Replace a method of a module, which returns a loss, by the same method under a plan."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from autotune.capture.python.step_module import like_tuple
from autotune.errors import ConfigError
from autotune.integrations.method_code import may_read
from autotune.integrations.side_effects import refuse_side_effects
from autotune.runtime.executor import Executor
from autotune.runtime.planned_loss import PlannedLoss


class LogRecorder:
    """Stand-in for a module's `log` and `log_dict` while its step is captured or runs."""

    METHODS = ("log", "log_dict")

    def __init__(self) -> None:
        self.entries: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        """Name, arguments and keyword arguments of each call since the step began."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Record a call of `log`."""
        _refuse_graph(kwargs)
        self.entries.append(("log", args, kwargs))

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Record a call of `log_dict`."""
        _refuse_graph(kwargs)
        self.entries.append(("log_dict", args, kwargs))

    def install(self, module: torch.nn.Module) -> None:
        """Record what the module logs, instead of logging it."""
        self.entries.clear()
        module.__dict__.update({name: getattr(self, name) for name in self.METHODS})

    def uninstall(self, module: torch.nn.Module) -> None:
        """Let the module log again."""
        for name in self.METHODS:
            module.__dict__.pop(name, None)

    def replay(self, module: torch.nn.Module, logged: list[Any]) -> None:
        """Log recorded calls through the module's own methods."""
        for name, args, kwargs in logged:
            getattr(module, name)(*args, **kwargs)


class MethodLoss:
    """The loss function of a method, for `PlannedLoss`, with what the method logs among its extras.

    Args:
        kind: The class of the module.
        name: Name of the method.
    """

    def __init__(self, kind: type[torch.nn.Module], name: str) -> None:
        self._function: Callable[..., Any] = getattr(kind, name)
        self._name = name
        parameters = inspect.signature(self._function).parameters.values()
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [parameter.name for parameter in parameters if parameter.kind in named][1:]
        rests = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_POSITIONAL]
        self._rest = rests[0] if rests else ""
        self._unread = {parameter.name for parameter in parameters if not may_read(self._function, parameter.name)}
        self.recorder = LogRecorder()
        self.arguments: dict[str, Any] = {}
        """Numbers and strings of the current call that the method never reads: they may change at every step."""

    def split_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name. Numbers and strings that the method never reads go into `arguments` instead.

        Raises:
            ConfigError: The method reads `*args` that have values: a number in it, such as Lightning's index of the batch, has
                no name by which it could be told apart.
        """
        if len(args) > len(self._names) and self._rest and self._rest not in self._unread:
            raise ConfigError(
                f"{self._function.__qualname__} takes the batch or its index as *{self._rest}, which a plan cannot tell apart; "
                "name the method's parameters: (self, batch, batch_idx)"
            )
        values = {**dict(zip(self._names, args, strict=False)), **kwargs}
        plain = (int, float, str)
        self.arguments = {
            key: value for key, value in values.items() if key in self._unread and isinstance(value, plain)
        }
        return {name: value for name, value in values.items() if name not in self.arguments}

    def __call__(self, module: torch.nn.Module, batch: dict[str, Any]) -> Any:
        """Return the loss, the rest of the method's result, and the recorded calls of `log`.

        The rest of a named tuple is one whose first field, that of the loss, is None.
        """
        result = self._function(module, **batch, **self.arguments)
        logged = list(self.recorder.entries)
        self.recorder.entries.clear()
        if result is None:
            raise ConfigError(
                f"{self._function.__name__} returned None instead of a loss, and a plan cannot skip a batch"
            )
        if isinstance(result, Mapping):
            # Lightning reads no attribute of the result of training_step
            if self._name != "training_step" and type(result) is not dict and type(result) is not OrderedDict:
                raise ConfigError(
                    f"{self._function.__name__} returned a {type(result).__name__}, of which a plan would keep no attribute; "
                    "return a dict, or a tuple that begins with the loss"
                )
            return result["loss"], {key: value for key, value in result.items() if key != "loss"}, logged
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return result[0], like_tuple(result, (None, *result[1:])), logged
        if isinstance(result, tuple):
            return result[0], result[1:], logged
        return result, None, logged


def _refuse_graph(options: Mapping[str, Any]) -> None:
    if options.get("enable_graph"):
        raise ConfigError(
            "log(enable_graph=True) keeps a graph, which a planned loss does not have; leave enable_graph out"
        )


_KEEP = "or keep it in training_step, and pass PlanCallback(loss=...) with the name of a method that computes the loss alone"


class PlannedMethod:
    """A method of a module under a plan, from construction to `close`. Copies of the module keep the plain method.

    Args:
        module: The module; its parameters require gradients.
        name: Name of the method, as its class defines it.
        plan: The plan, as of `PlannedLoss`, like further keyword arguments.
        skips_backward: Returns True while the trainer calls no `backward()`: then the plain method runs.
        clear_gradients: Called before each planned call, to clear what the trainer would clear only after it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        plan: Any,
        *,
        skips_backward: Callable[[], bool],
        clear_gradients: Callable[[], None],
        **options: Any,
    ) -> None:
        self._module, self._name = module, name
        self._skips_backward, self._clear_gradients = skips_backward, clear_gradients
        self._original: Callable[..., Any] = getattr(type(module), name)
        self._loss = MethodLoss(type(module), name)
        self.planned = PlannedLoss(module, self._loss, plan, **options)

        @functools.wraps(self._original)
        def call(target: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(target, args, kwargs)

        # a bound method, because a deep copy binds it to the copy, and a pickle leaves it to the class
        module.__dict__[name] = MethodType(call, module)

    def close(self) -> None:
        """Restore the method; release the plan's memory and stores."""
        self._module.__dict__.pop(self._name, None)
        self.planned.close()

    def running_step(self) -> Executor | None:
        """Return the executor of a step that runs now and offloads; None without one."""
        steps = [selector.last for selector, *_ in self.planned._selectors.values()]
        return next((step.executor for step in steps if step.plan.offload and step.executor.is_running), None)

    def _call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or module is not self._module:
            return self._original(module, *args, **kwargs)
        if not torch.is_grad_enabled() or self._skips_backward():
            self.planned.release_memory()  # an evaluation needs memory of its own
            return self._original(module, *args, **kwargs)
        batch = self._loss.split_arguments(args, kwargs)
        # a plan that tunes itself sends the module elsewhere, without the trainer behind this method
        method = module.__dict__.pop(self._name)
        self._loss.recorder.install(module)
        try:
            self._clear_gradients()
            with refuse_side_effects(_KEEP):
                loss, rest, logged = self.planned(batch)
        finally:
            self._loss.recorder.uninstall(module)
            module.__dict__[self._name] = method
        self._loss.recorder.replay(module, logged)
        if isinstance(rest, Mapping):
            return {"loss": loss, **rest}
        if hasattr(rest, "_fields"):
            return like_tuple(rest, (loss, *rest[1:]))
        return loss if rest is None else (loss, *rest)
