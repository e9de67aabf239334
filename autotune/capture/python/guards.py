"""Check before a step that the Python values which its capture read are unchanged."""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import _disable_current_modes

from autotune.capture.python.step_module import StepModule
from autotune.capture.values.batch_branches import BatchBranch
from autotune.workloads.factory import innermost_user_line


@dataclass(frozen=True, slots=True)
class GuardFailure:
    """A value that differs from its value at capture."""

    source: str
    """Dynamo's expression for the value; empty for global state, such as the number of threads."""
    name: str
    """Expression of the value in the user's code."""
    condition: str
    """Condition that was true when the step was captured."""
    current: Any
    """Current value; None where it cannot be read."""
    line: str
    """File, number and text of the user's line that reads the value; empty if unknown."""
    of_branch: bool = False
    """True for a branch on numbers in the batch's tensors."""

    def __str__(self) -> str:
        line = f" (read at {self.line})" if self.line else ""
        if not self.source:
            return f"{self.name} changed since the step was captured: {self.condition}{line}"
        now = f"; now it is {self.current!r}" if isinstance(self.current, (bool, int, float, str)) else ""
        return f"{self.name} changed: the captured step is valid for {self.condition}{now}{line}"


class Sources:
    """Read values by Dynamo's expressions for them, such as `L['self']._modules['model'].beta`."""

    def __init__(self, step: StepModule, f_globals: dict[str, Any]) -> None:
        from torch._dynamo.guards import _get_closure_vars

        self.step = step
        self._scope = {**_get_closure_vars(), "G": f_globals}
        self._code: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """Evaluate an expression that does not read the batch."""
        if name not in self._code:
            self._code[name] = compile(name, "<source>", "eval")
        return eval(self._code[name], self._scope, {"L": {"self": self.step}})

    def exists(self, name: str) -> bool:
        """Return whether an expression has a value at present."""
        try:
            self.value(name)
        except (AttributeError, LookupError, NameError):
            return False
        return True

    def assign(self, name: str, value: Any) -> None:
        """Assign to an expression."""
        exec(f"{name} = value", self._scope, {"L": {"self": self.step}, "value": value})

    def delete(self, name: str) -> None:
        """Delete the attribute or the item that an expression names."""
        exec(f"del {name}", self._scope, {"L": {"self": self.step}})

    @contextmanager
    def assigned(self, name: str, value: Any) -> Iterator[None]:
        """Assign to an expression within a block; an attribute or item that did not exist is deleted afterwards."""
        exists = self.exists(name)
        before = self.value(name) if exists else None
        self.assign(name, value)
        try:
            yield
        finally:
            if exists:
                self.assign(name, before)
            else:
                self.delete(name)

    def spell(self, name: str) -> str:
        """Return an expression as the user's code has it: `model.beta`, `weights['kl']`."""
        name = self.step.spell(name)
        for cell, code in re.findall(r"(([\w\[\]'.()]+?)\.__closure__\[\d+\]\.cell_contents)", name):
            number = int(re.findall(r"\[(\d+)\]\.cell_contents$", cell)[0])
            try:
                name = name.replace(cell, self.value(code).__code__.co_freevars[number])
            except (AttributeError, IndexError, KeyError, NameError):
                continue
        name = re.sub(r"G\['__import_(\w+)'\]", lambda match: match[1].replace("_dot_", "."), name)
        name = re.sub(r"^G\['(\w+)'\]", r"\1", name)
        name = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name)
        name = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", name)
        name = re.sub(r"^__main__\.", "", name)
        return name.removeprefix("L['self'].")


class Guards:
    """Conditions on Python values. While they hold, a captured step computes the user's step.

    The identity of parameters and buffers and the batch's shapes are not covered: `TrainStep` compares those itself.
    """

    def __init__(self, manager: Any, sources: Sources, branches: tuple[BatchBranch, ...] = ()) -> None:
        self._manager = manager
        self.branches = branches
        """Branches that the capture took because of the batch's numbers."""
        self.sources = sources
        # Dynamo guards attributes of a module, and assumes that its class stays unchanged
        self._forwards: dict[type[torch.nn.Module], Any] = {
            type(module): type(module).forward for module in sources.step.modules()
        }
        self._hooks = _global_hooks()

    @property
    def conditions(self) -> list[str]:
        """Conditions on Python values as text, equal for two captures in one process that depend on the same values."""
        return sorted(_COUNTED.sub("", line) for line in str(self._manager).splitlines())

    def hold(self, tensors: list[torch.Tensor], constants: list[Any]) -> bool:
        """Return whether all conditions hold for a step on the batch's parts; takes some microseconds."""
        return self.values_hold(tensors, constants) and all(branch.holds(tensors) for branch in self.branches)

    def values_hold(self, tensors: list[torch.Tensor], constants: list[Any]) -> bool:
        """Return whether the conditions on Python values hold; branches on the batch's numbers are left out."""
        self.sources.step.constants[:] = constants
        if self._replaced() is not None or self._hooks != _global_hooks():
            return False
        with _without_modes():
            return bool(self._manager.check({"self": self.sources.step, "tensors": tuple(tensors)}))

    def first_failure(self, tensors: list[torch.Tensor], constants: list[Any]) -> GuardFailure | None:
        """Return the first value that differs from its value at capture; None where all conditions hold."""
        return self.changed_value(tensors, constants) or other_branch(self.branches, tensors)

    def changed_value(self, tensors: list[torch.Tensor], constants: list[Any]) -> GuardFailure | None:
        """Return the first Python value that differs from its value at capture; None if there is none."""
        self.sources.step.constants[:] = constants
        if (kind := self._replaced()) is not None:
            name = f"{kind.__qualname__}.forward"
            return GuardFailure(f"{kind.__module__}.{name}", name, f"{name} being the same function", None, "")
        if self._hooks != _global_hooks():
            return GuardFailure("", "global hooks of modules", "the same global hooks of modules", None, "")
        with _without_modes():
            failure = self._manager.check_verbose({"self": self.sources.step, "tensors": tuple(tensors)})
        if failure.result:
            return None
        condition = failure.verbose_code_parts[0].partition("  #")[0].partition(" (HINT:")[0].strip()
        source = _source_of(condition)
        spelled = self.sources.spell(source) if source else "global state of torch"
        try:
            current = self.sources.value(source) if source else None
        except Exception:  # noqa: BLE001 - the expression may fail in any way once its objects have changed
            current = None
        named = condition.replace(source, spelled) if source else condition
        return GuardFailure(source, spelled, _plain(named), current, innermost_user_line(failure.user_stack or ()))

    def _replaced(self) -> type[torch.nn.Module] | None:
        """Return a class of the step's modules whose forward was replaced since the capture; None if there is none."""
        return next((kind for kind, forward in self._forwards.items() if kind.forward is not forward), None)


def _global_hooks() -> list[Any]:
    """Return the hooks that run around every module, without torch's own, such as those that count operations."""
    hooks = [hook for table in GLOBAL_HOOKS for hook in table.values()]
    return [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("torch.")]


GLOBAL_HOOKS = (
    module_globals._global_forward_pre_hooks, module_globals._global_forward_hooks,
    module_globals._global_backward_pre_hooks, module_globals._global_backward_hooks,
)  # fmt: skip
"""Torch's tables of hooks that run around every module."""

_COUNTED = re.compile(
    r"__builtins_dict___\d+|(?<=_)c\d+(?='\])|(?<=requires_grad=False), size=\[.*?\], stride=\[.*?\](?=\))"
)
"""Names that Dynamo numbers anew for each trace, and sizes of the batch."""


def other_branch(branches: Iterable[BatchBranch], tensors: list[torch.Tensor]) -> GuardFailure | None:
    """Return the failure of the first branch that another batch takes differently; None if there is none."""
    return next((branch_failure(branch) for branch in branches if not branch.holds(tensors)), None)


def branch_failure(branch: BatchBranch) -> GuardFailure:
    """Return the failure of a branch that another batch takes differently."""
    read = " and ".join(f"batch.{number}" for number in branch.inputs) or "a tensor"
    return GuardFailure(
        f"{read} at {branch.line}",
        f"a condition on {read}",
        str(branch.value),
        not branch.value,
        branch.line,
        of_branch=True,
    )


_SPELLINGS = (
    (r"___check_type_id\((.+), \d+\), type=<class '(.+)'>", r"\1 of type \2"),
    (r"___check_type_id\((.+), \d+\).*", r"\1 of its type at capture"),
    (r"___check_obj_id\((.+), \d+\).*", r"\1 being the same object"),
    (r"not ___dict_contains\('(\w+)', (.+?)(?:\.__dict__)?\)", r"\2 without an attribute '\1'"),
    (r"___dict_contains\('(\w+)', (.+?)(?:\.__dict__)?\)", r"\2 with an attribute '\1'"),
    (r"not (.+\._\w*hooks)", r"\1 being empty"),
    (r"GLOBAL_STATE changed: (.*)", r"\1"),
)
"""Patterns of Dynamo's conditions that need its internals to be understood, each with a plain wording."""


def _plain(condition: str) -> str:
    for pattern, words in _SPELLINGS:
        if match := re.fullmatch(pattern, condition):
            return match.expand(words)
    return condition


def _without_modes() -> AbstractContextManager[Any]:
    """Disable modes that only observe ops, such as a counter of FLOPs: tensors look different to guards under them."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _source_of(condition: str) -> str:
    """Return the expression in a condition that names a value; empty where it names none."""
    match = re.search(r"[LG]\[(?:[^\[\]]|\[[^\]]*\])*\](?:\.\w+|\[[^\]]*\])*", condition)
    return match[0] if match else ""
