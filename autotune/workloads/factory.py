"""Load workloads by reference: a zoo name, `package.module:factory` or `path/file.py:factory`."""

import importlib
import importlib.util
import inspect
import itertools
import sys
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from autotune.errors import AutotuneError, ConfigError, nearest
from autotune.workloads.live_workload import load_live_workload
from autotune.workloads.loop import Loop
from autotune.workloads.reference import LIVE_SUFFIX, check_reference
from autotune.workloads.workload import Workload, check_workload

T = TypeVar("T")


def call_factory(reference: str, arguments: Mapping[str, Any]) -> Any:
    """Return the result of the factory that a reference names.

    Raises:
        ConfigError: The factory does not exist, rejects the arguments, or raises.
        MemoryError: The factory runs out of memory; torch.OutOfMemoryError on a GPU.
    """
    factory = find_factory(reference)
    _run(reference, lambda: _check_arguments(factory, arguments))
    return _run(reference, lambda: factory(**arguments))


def find_factory(reference: str) -> Callable[..., Any]:
    """Return the factory that a reference names, without a call of it.

    Raises:
        ConfigError: The factory does not exist, or its module raises.
    """
    check_reference(reference)
    return _run(reference, lambda: _find_factory(reference))


def _is_imported_class(member: object, module: object) -> bool:
    return isinstance(member, type) and member.__module__ != getattr(module, "__name__", "")


def _find_factory(reference: str) -> Callable[..., Any]:
    if reference.endswith(LIVE_SUFFIX):
        return partial(load_live_workload, Path(reference))
    place, colon, attribute = reference.rpartition(":")
    if not colon:
        from autotune.workloads.zoo import ZOO

        return ZOO[reference]
    module = _from_file(place) if place.endswith(".py") else _from_package(place)
    factory: Any = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            names = [
                name
                for name, member in vars(module).items()
                if callable(member) and not name.startswith("_") and not _is_imported_class(member, module)
            ]
            raise ConfigError(f"{place} has no {attribute!r}{nearest(attribute, names)}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise ConfigError(f"a {type(factory).__name__}; name a function that returns autotune.Workload")
    return typing.cast("Callable[..., Any]", factory)


def _from_file(place: str) -> types.ModuleType:
    path = Path(place).absolute()
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _add_to_path(Path.cwd())
    _add_to_path(path.parent)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    """Return a module name for a file: its own might shadow a package, and files of several directories may have the same.

    Dynamo searches a function's globals in the module of that name in `sys.modules`. A file that is loaded again replaces its
    earlier module, which may hold a data set.
    """
    name = f"autotune_workload_{path.stem}"
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(
        candidate
        for candidate in itertools.chain([name], numbered)
        if getattr(sys.modules.get(candidate), "__file__", str(path)) == str(path)
    )


def _from_package(name: str) -> types.ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module {error.name!r} here or installed; install it, or write path/file.py:factory"
            ) from error
        raise


def _add_to_path(directory: Path) -> None:
    importlib.invalidate_caches()
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse unknown arguments, missing arguments, and arguments of the wrong type."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):  # a builtin without a signature: the call itself reports wrong arguments
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [parameter.name for parameter in named]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in arguments:
            if name not in names:
                raise ConfigError(f"takes no argument {name!r}{nearest(name, names)}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ConfigError(f"needs {', '.join(missing)}; give it with --set {missing[0]}=VALUE")
    hints = _hints(factory)
    for name, value in arguments.items():
        if name in hints and not _matches_hint(value, hints[name]):
            raise ConfigError(f"{name} must be {_spell_hint(hints[name])} (got {value!r})")


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(factory)
    except (NameError, TypeError, AttributeError):  # annotations that do not resolve are not checked
        return {}


def _matches_hint(value: object, hint: Any) -> bool:
    """Return True if a value from YAML has the annotated type. Annotations that YAML cannot express accept everything."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_matches_hint(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (str, bool, types.NoneType):
        return isinstance(value, hint)
    return True


def _spell_hint(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _run(reference: str, call: Callable[[], T]) -> T:
    """Call what may be the user's code and turn its exceptions into one line, except running out of memory."""
    try:
        return call()
    except ConfigError as error:
        raise ConfigError(f"{reference}: {error}") from error
    except (AutotuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())[:300]
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        advice = "-v shows the traceback"
        if isinstance(error, SystemExit):  # a parser of arguments ends the process at import
            advice = 'move the code of the script itself below: if __name__ == "__main__"'
        raise ConfigError(f"{reference}: raised {text}{locate_error(error)}; {advice}") from error


def locate_error(error: BaseException) -> str:
    """Return the line of the user's code that raised an error; a library's line only if there is no other."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {_shorten(error.filename)}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((__file__, "<"))
    ]
    if not frames:
        return ""
    factory = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" at {innermost_user_line(frames) or _format_frame(factory[-1])}"


def innermost_user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of the user's code among frames, as `file.py:12 (text)`; empty if all are libraries'."""
    libraries = (*(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))
    users = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]
    return _format_frame(users[-1]) if users else ""


def _format_frame(frame: traceback.FrameSummary) -> str:
    return f"{_shorten(frame.filename)}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")


def format_location(filename: str, line: int) -> str:
    """Return a line of code as `file.py:12 (text)`."""
    return _format_frame(traceback.FrameSummary(filename, line, ""))


def _shorten(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def load_workload(reference: str, arguments: Mapping[str, Any] | None = None, loop: str = "") -> Workload:
    """Return the workload that a zoo name, `package.module:factory` or `path/file.py:factory` refers to.

    Relative paths and modules are resolved from the working directory. It joins `sys.path`, as does a file's directory,
    so that imports work as for `python file.py`.

    Args:
        reference: Reference to the factory.
        arguments: Keyword arguments of the factory.
        loop: Training loop that replaces the factory's, such as `clip,accumulate=4`; empty for the factory's own.

    Raises:
        ConfigError: The factory does not exist, rejects the arguments, raises, or returns no workload. For an exception
            of the factory, the message names the line of the user's code.
        MemoryError: The factory runs out of memory; torch.OutOfMemoryError on a GPU.

    >>> workload = load_workload("lstm", {"batch": 4, "tokens": 3, "width": 8, "vocabulary": 16})
    >>> workload.batch[0].shape
    torch.Size([4, 3])
    """
    workload = call_factory(reference, arguments or {})
    check_workload(workload, reference)
    if not loop:
        return cast("Workload", workload)
    workload = replace(workload, loop=Loop.parse(loop))
    check_workload(workload, reference)
    return cast("Workload", workload)
