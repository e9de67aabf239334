"""From a reference to what it makes: a zoo name, `package.module:factory` or `path/file.py:factory`."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from autotune.errors import AutotuneError, ConfigError, nearest
from autotune.workloads.workload import Workload, check

T = TypeVar("T")


def make(reference: str, arguments: Mapping[str, Any]) -> Any:
    """Call the factory; ConfigError where it is not found, does not take the arguments, or raises."""
    factory = _run(reference, lambda: _find(reference))
    _run(reference, lambda: _check_arguments(factory, arguments))
    return _run(reference, lambda: factory(**arguments))


def _find(reference: str) -> Callable[..., Any]:
    place, colon, attribute = reference.rpartition(":")
    if not colon:
        return _from_zoo(reference)
    if not place or not attribute:
        raise ConfigError("not a reference; write a zoo name, package.module:factory or path/file.py:factory")
    module = _from_file(place) if place.endswith(".py") else _from_package(place)
    factory: Any = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            known = [name for name, member in vars(module).items() if callable(member) and not name.startswith("_")]
            raise ConfigError(f"{place} has no {attribute!r}{nearest(attribute, known)}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise ConfigError(f"a {type(factory).__name__}; name a function that returns autotune.Workload")
    return typing.cast("Callable[..., Any]", factory)


def _from_zoo(name: str) -> Callable[..., Any]:
    from autotune.workloads.zoo import ZOO

    if name in ZOO:
        return ZOO[name]
    if name.endswith(".py"):
        raise ConfigError(f"names no factory; write {name}:FUNCTION")
    package, dot, attribute = name.rpartition(".")
    if dot:
        raise ConfigError(f"no zoo workload; for a factory of your own write {package}:{attribute}")
    raise ConfigError(f"no zoo workload{nearest(name, ZOO)}")


def _from_file(place: str) -> types.ModuleType:
    path = Path(place).absolute()
    if not path.is_file():
        raise ConfigError(f"no such file in {Path.cwd()}; give the path of the file that holds the factory")
    # not under the file's own name, which might shadow a package; but in sys.modules, where Dynamo looks
    name = f"autotune_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _look_in(Path.cwd())
    _look_in(path.parent)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str) -> types.ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module {error.name!r} here or installed; install it, or write path/file.py:factory"
            ) from error
        raise


def _look_in(directory: Path) -> None:
    importlib.invalidate_caches()
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the factory does not take, lacks, or takes as another type."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):  # a builtin without a signature: its own call will tell
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [parameter.name for parameter in named]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in arguments:
            if name not in known:
                raise ConfigError(f"takes no argument {name!r}{nearest(name, known)}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ConfigError(f"needs {', '.join(missing)}; give it with --set {missing[0]}=VALUE")
    hints = _hints(factory)
    for name, value in arguments.items():
        if name in hints and not _fits(value, hints[name]):
            raise ConfigError(f"{name} must be {_spelt(hints[name])} (got {value!r})")


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(factory)
    except (NameError, TypeError, AttributeError):  # annotations that do not resolve bind nobody
        return {}


def _fits(value: object, hint: Any) -> bool:
    """Whether a value from YAML is of an annotated type; an annotation that YAML cannot spell admits everything."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (str, bool, types.NoneType):
        return isinstance(value, hint)
    return True


def _spelt(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _run(reference: str, call: Callable[[], T]) -> T:
    """Run what may be the user's code; what it raises becomes one line. Out of memory is no fault of the code."""
    try:
        return call()
    except ConfigError as error:
        raise ConfigError(f"{reference}: {error}") from error
    except (AutotuneError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())[:300]
        said = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise ConfigError(f"{reference}: raised {said}{_place(error)}; -v shows the traceback") from error


def _place(error: BaseException) -> str:
    """Where the error left the user's own code: neither an installed package's, if it can be helped, nor ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {_short(error.filename)}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((__file__, "<"))
    ]
    if not frames:
        return ""
    factory = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" at {own_line(frames) or _spelt_frame(factory[-1])}"


def own_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of the user's own code among frames, as `file.py:12 (text)`; empty where all are libraries'."""
    libraries = (*(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]
    return _spelt_frame(own[-1]) if own else ""


def _spelt_frame(frame: traceback.FrameSummary) -> str:
    return f"{_short(frame.filename)}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def load(reference: str, arguments: Mapping[str, Any] | None = None) -> Workload:
    """Make the workload that a zoo name, `package.module:factory` or `path/file.py:factory` stands for.

    Relative paths and modules are looked up from the working directory, which, like a file's own directory, joins
    `sys.path` as it would for `python file.py`. Whatever goes wrong is a ConfigError, an exception of the factory's with
    the line of the user's code that raised it; running out of memory is passed on as it is.
    """
    made = make(reference, arguments or {})
    check(made, reference)
    return cast("Workload", made)
