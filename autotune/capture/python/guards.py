"""Check before a step that the Python values which its capture read are still the same."""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autotune.workloads.factory import own_line


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs from the one that was captured."""

    source: str
    """Dynamo's expression for the value; empty for global state, such as the number of threads."""
    name: str
    """The value as the user's code spells it."""
    condition: str
    """The condition that held when the step was captured."""
    now: Any
    """The current value; None where it cannot be read."""
    line: str
    """File, number and text of the user's line that reads the value; empty if unknown."""

    def __str__(self) -> str:
        at = f" (read at {self.line})" if self.line else ""
        if not self.source:
            return f"{self.name} changed since the step was captured: {self.condition}{at}"
        now = f"; now it is {self.now!r}" if isinstance(self.now, (bool, int, float, str)) else ""
        return f"{self.name} changed: the captured step holds for {self.condition}{now}{at}"


class Sources:
    """Read values by Dynamo's expressions for them, such as `L['self']._modules['model'].beta`."""

    def __init__(self, step: torch.nn.Module, f_globals: dict[str, Any]) -> None:
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
        """Whether an expression has a value at present."""
        try:
            self.value(name)
        except (AttributeError, LookupError, NameError):
            return False
        return True

    def assign(self, name: str, value: Any) -> None:
        """Assign to an expression."""
        exec(f"{name} = value", self._scope, {"L": {"self": self.step}, "value": value})

    def shown(self, name: str) -> str:
        """Spell an expression as the user's code does: `model.beta`, `weights['kl']`."""
        for cell, code in re.findall(r"(([\w\[\]'.()]+?)\.__closure__\[\d+\]\.cell_contents)", name):
            number = int(re.findall(r"\[(\d+)\]\.cell_contents$", cell)[0])
            try:
                name = name.replace(cell, self.value(code).__code__.co_freevars[number])
            except (AttributeError, IndexError, KeyError, NameError):
                continue
        name = re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), name)
        name = re.sub(r"^G\['(\w+)'\]", r"\1", name)
        name = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name)
        name = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", name)
        name = re.sub(r"^__main__\.", "", name)
        return name.removeprefix("L['self'].")


class Guards:
    """The conditions on Python values under which a captured step is the user's step.

    Parameters and buffers as objects are not covered, nor the batch's shapes: `TrainStep` compares those itself.
    """

    def __init__(self, manager: Any, sources: Sources) -> None:
        self._manager = manager
        self.sources = sources
        # Dynamo guards what a module has of its own, and takes it that its class stays
        self._forwards: dict[type[torch.nn.Module], Any] = {
            type(module): type(module).forward for module in sources.step.modules()
        }

    def hold(self, tensors: list[torch.Tensor]) -> bool:
        """Check all of them for a step on the batch's tensors; some microseconds."""
        if self._replaced() is not None:
            return False
        with _without_modes():
            return bool(self._manager.check({"self": self.sources.step, "tensors": tuple(tensors)}))

    def change(self, tensors: list[torch.Tensor]) -> Change | None:
        """Find the first value that differs; None where all hold."""
        if (kind := self._replaced()) is not None:
            name = f"{kind.__qualname__}.forward"
            return Change(f"{kind.__module__}.{name}", name, f"{name} being the same function", None, "")
        with _without_modes():
            found = self._manager.check_verbose({"self": self.sources.step, "tensors": tuple(tensors)})
        if found.result:
            return None
        condition = found.verbose_code_parts[0].partition("  #")[0].partition(" (HINT:")[0].strip()
        source = _source_of(condition)
        shown = self.sources.shown(source) if source else "global state of torch"
        try:
            now = self.sources.value(source) if source else None
        except Exception:  # noqa: BLE001 - the expression may fail in any way once its objects have changed
            now = None
        named = condition.replace(source, shown) if source else condition
        return Change(source, shown, _plain(named), now, own_line(found.user_stack or ()))

    def _replaced(self) -> type[torch.nn.Module] | None:
        """Return a class of the step's modules whose forward is another than when the step was captured."""
        return next((kind for kind, own in self._forwards.items() if kind.forward is not own), None)


_SPELLINGS = (
    (r"___check_type_id\((.+), \d+\), type=<class '(.+)'>", r"\1 of type \2"),
    (r"___check_type_id\((.+), \d+\).*", r"\1 of its type then"),
    (r"___check_obj_id\((.+), \d+\).*", r"\1 being the same object"),
    (r"not ___dict_contains\('(\w+)', (.+?)(?:\.__dict__)?\)", r"\2 without a '\1' of its own"),
    (r"___dict_contains\('(\w+)', (.+?)(?:\.__dict__)?\)", r"\2 with a '\1' of its own"),
    (r"not (.+\._\w*hooks)", r"\1 being empty"),
    (r"GLOBAL_STATE changed: (.*)", r"\1"),
)
"""Dynamo's conditions that no user would understand, each with words for it."""


def _plain(condition: str) -> str:
    for pattern, words in _SPELLINGS:
        if found := re.fullmatch(pattern, condition):
            return found.expand(words)
    return condition


def _without_modes() -> AbstractContextManager[Any]:
    """A mode that only watches ops, such as a counter of FLOPs, is no other step, though tensors look different under it."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _source_of(condition: str) -> str:
    """The expression inside of a condition that names a value; empty where it names none."""
    found = re.search(r"[LG]\[(?:[^\[\]]|\[[^\]]*\])*\](?:\.\w+|\[[^\]]*\])*", condition)
    return found[0] if found else ""
