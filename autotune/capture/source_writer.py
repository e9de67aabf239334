"""Write Python source for the calls of a captured step."""

from typing import Any

from autotune.capture.bindings import Bindings
from autotune.capture.program import Call, Read, View


class SourceWriter:
    """Text of calls, arguments and views. Value 7 is the variable `v7`; constants and callables are `c0`, `c1`, ...

    `names` maps the names in the text to their objects: it is the scope in which the text runs.
    """

    def __init__(self, bindings: Bindings) -> None:
        self.names: dict[str, Any] = {}
        self._bindings = bindings
        self._constants: dict[int, str] = {}

    def statement(self, call: Call) -> tuple[str, list[str]]:
        """Return the statement that runs a call, and the variables that it assigns.

        A part of a returned tuple that is no tensor is assigned to a variable whose name begins with an underscore.
        """
        text = self.invocation(call.target, call.args, call.kwargs)
        match call.outputs:
            case None:
                return text, []
            case int(value):
                return f"v{value} = {text}", [f"v{value}"]
            case parts:
                variables = [f"v{value}" if value is not None else f"_{index}" for index, value in enumerate(parts)]
                return f"{', '.join(variables)}, = {text}", variables

    def invocation(self, target: Any, args: Any, kwargs: Any) -> str:
        """Return the expression that calls `target`; `kwargs` are pairs of a keyword and an argument."""
        arguments = [self.argument(part) for part in args]
        arguments += [f"{keyword}={self.argument(part)}" for keyword, part in kwargs]
        return f"{self.constant(self._bindings.bind(target, args, kwargs))}({', '.join(arguments)})"

    def argument(self, argument: Any) -> str:
        """Return the expression for an argument of a call."""
        match argument:
            case Read(value):
                return self.variable(value)
            case View():
                return self.view(argument)
            case tuple() | list():
                inside = "".join(self.argument(part) + ", " for part in argument)
                return f"({inside})" if isinstance(argument, tuple) else f"[{inside}]"
            case None | bool() | int() | str():
                return repr(argument)
            case _:
                return self.constant(argument)

    def variable(self, value: int) -> str:
        """Return the variable of a value that is read."""
        return f"v{value}"

    def view(self, view: View) -> str:
        """Return the expression for a view."""
        return self.invocation(view.target, view.args, view.kwargs)

    def constant(self, item: Any) -> str:
        """Return the name of a callable or a constant, and add it to `names`."""
        if id(item) not in self._constants:
            name = f"c{len(self._constants)}"
            self._constants[id(item)] = name
            self.names[name] = item
        return self._constants[id(item)]
