"""Save the objects of a running training process to a private file, from which other processes load the same step.

The file holds pickled code, so it is readable and writable by its owner alone, and loaded for its owner alone. Functions and
classes of `__main__`, closures and lambdas are stored by value; everything else is imported by name.
"""

import contextlib
import functools
import importlib
import os
import pickle
import stat
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.errors import ConfigError
from autotune.workloads.batch import batch_tensors
from autotune.workloads.workload import Workload

_FACTORY_HINT = "write a factory that returns autotune.Workload, run: autotune tune file.py:factory, and pass plan='plans/NAME.json'"
_MAX_DEPTH = 12

_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
)
"""Libraries and kinds of ops whose precision for float32 can be set, the general ones first."""


def _read_precision() -> tuple[str, list[str]]:
    """Return the precision that `set_float32_matmul_precision` set, empty where a newer switch contradicts it, and those of the newer ones."""
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:
        products = ""
    return products, [torch._C._get_fp32_precision_getter(*place) for place in _PRECISIONS]


def _set_precision(precision: tuple[str, list[str]]) -> None:
    products, newer = precision
    if products:
        torch.set_float32_matmul_precision(products)
    for place, each in zip(_PRECISIONS, newer, strict=True):
        torch._C._set_fp32_precision_setter(*place, each)


def _set_cudnn(values: tuple[bool, bool, bool]) -> None:
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = values


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "float32 precision": (_read_precision, _set_precision),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cuDNN attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "cuDNN": (
        lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        _set_cudnn,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
}  # fmt: skip
"""Getter and setter of each setting of the process on which kernels or times depend, by name."""


def save_workload(workload: Workload, path: Path) -> None:
    """Write a workload and the process's settings to a new file that its owner alone may read.

    Values are those of this moment. Hooks on parameters and `.grad` are not saved. Nothing of the workload changes.

    Raises:
        ConfigError: A part cannot be pickled; the message names the attribute.
        OSError: The file cannot be written.
    """
    path.unlink(missing_ok=True)
    process = _ProcessSettings([str(Path(place).absolute()) for place in sys.path], _read_settings(workload))
    parts = (workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # one pickle: the optimizer's parameters stay the model's, tied weights stay tied
            torch.save((process, parts), file, pickle_module=_by_value(), pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    except Exception as error:
        path.unlink(missing_ok=True)
        place = _find_unpicklable(workload) or "the workload"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{place} cannot be sent to the measuring processes ({type(error).__name__}: {reason[:200]}); {_FACTORY_HINT}"
        ) from error


def _by_value() -> types.ModuleType:
    """Return a pickle module that stores functions of `__main__`, closures, and Accelerate's wrapper of a forward by value."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, part: Any) -> Any:
            kind = type(part)
            if (kind.__module__, kind.__name__) == _FORWARD_WRAPPER:  # it refuses a pickle, but holds a function alone
                return kind, (part.model_forward,)
            return super().reducer_override(part)

    module = types.ModuleType("cloudpickle")
    module.Pickler = Pickler  # type: ignore[attr-defined]
    return module


_FORWARD_WRAPPER = "accelerate.utils.operations", "ConvertOutputsToFp32"
"""Module and name of the class that casts the results of a model that Accelerate prepared for mixed precision."""


def load_live_workload(path: Path) -> Workload:
    """Load a workload that `save_workload` wrote, with the settings of the process that wrote it.

    Raises ConfigError where the file is missing, damaged, or might come from another user.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
                raise ConfigError(
                    "the file could have been written by another user, and loading it runs code; tune again"
                )
            # no memory map: pages of a file would be charged besides the copies that an update writes
            _, (model, loss_fn, optimizer, batch) = torch.load(
                file, pickle_module=_InModules("pickle"), weights_only=False
            )
    except FileNotFoundError:
        raise ConfigError(
            f"no such file: {path.name} existed while a training process tuned its own step; {_FACTORY_HINT}"
        ) from None
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(f"the saved step cannot be loaded ({type(error).__name__}: {reason[:200]})") from error
    return Workload(model, loss_fn, optimizer, batch)


def release_cached_memory() -> None:
    """Release the GPU's memory that no tensor of this process uses: the measuring processes need it."""
    torch.cuda.empty_cache()


def device_kind(workload: Workload) -> str:
    """Return the kind of device of a workload's parameters, or of its batch where it has none."""
    return _device(workload).type


def thread_count() -> int:
    """Return the number of threads that an op of this process uses."""
    return torch.get_num_threads()


def _device(workload: Workload) -> torch.device:
    tensors = (*workload.model.parameters(), *batch_tensors(workload.batch))
    return next((tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)), torch.device("cpu"))


def _read_settings(workload: Workload) -> dict[str, Any]:
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    device = _device(workload)
    return {**settings, "CUDA device": device.index} if device.type == "cuda" else settings


class _InModules(types.ModuleType):
    """A pickle module that gives functions stored by value the globals of a module that can be imported.

    The tracer reads a function's globals through its module.
    """

    load = pickle.load

    class Unpickler(pickle.Unpickler):
        """Unpickler of functions into their modules."""

        def find_class(self, module: str, name: str) -> Any:
            """Return what a name stands for."""
            if (module, name) == ("cloudpickle.cloudpickle", "_make_function"):
                return _make_function
            return super().find_class(module, name)


def _make_function(
    code: types.CodeType, scope: dict[str, Any], name: str | None, defaults: Any, closure: Any
) -> types.FunctionType:
    module = _import_module(str(scope.get("__name__", "__main__")))
    vars(module).update({key: value for key, value in scope.items() if key not in vars(module)})
    return types.FunctionType(code, vars(module), name, defaults, closure)


@functools.cache
def _import_module(name: str) -> types.ModuleType:
    """Return the module of functions that are stored by value: a new one for a main script, which must not run again."""
    if name != "__main__":
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    module = types.ModuleType(name)
    module.__spec__ = getattr(sys.modules.get(name), "__spec__", None)  # of the measuring process, which is checked for
    _REPLACED.append(sys.modules.get(name))
    sys.modules[name] = module
    return module


_REPLACED: list[types.ModuleType | None] = []
"""Modules whose names stand for the training process's modules now; their functions still run."""


class _ProcessSettings:
    """Import path and settings of a process; loading it, before what follows in the file, applies them."""

    def __init__(self, import_path: list[str], settings: dict[str, Any]) -> None:
        self._import_path, self._settings = import_path, settings

    def __reduce__(self) -> tuple[Any, ...]:
        return _apply_process_settings, (self._import_path, self._settings)


def _apply_process_settings(import_path: list[str], settings: dict[str, Any]) -> None:
    sys.path.extend(place for place in import_path if place not in sys.path)
    for name, value in settings.items():
        if name == "CUDA device":
            torch.cuda.set_device(value or 0)
        else:
            _SETTINGS[name][1](value)


def _find_unpicklable(workload: Workload) -> str:
    """Return the path of the innermost object that cannot be pickled, such as `model.encoder.logger`; empty if none."""
    parts = {
        "model": workload.model,
        "loss_fn": workload.loss_fn,
        "optimizer": workload.optimizer,
        "batch": workload.batch,
    }
    place, visited = "", set[int]()
    children = iter(parts.items())
    for _ in range(_MAX_DEPTH):
        culprit = next(((name, part) for name, part in children if not _can_be_pickled(part)), None)
        if culprit is None or id(culprit[1]) in visited:
            break
        name, part = culprit
        visited.add(id(part))
        place = f"{place}{name}"
        children = _children(part)
    return place


def _can_be_pickled(part: Any) -> bool:
    import io

    class Pickler(_by_value().Pickler):  # type: ignore[misc]
        def persistent_id(self, part: Any) -> str | None:
            return "tensor" if isinstance(part, torch.Tensor) else None  # tensors can be pickled; their bytes take long

    try:
        Pickler(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(part)
    except Exception:  # noqa: BLE001 - the user's objects raise anything
        return False
    return True


def _children(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, with the text that follows the object's own path."""
    match part:
        case torch.nn.Module():
            yield from ((f".{name}", child) for name, child in part._modules.items())
            yield from ((f".{name}", child) for name, child in vars(part).items() if name != "_modules")
        case dict():
            yield from ((f"[{key!r}]", child) for key, child in part.items())
        case list() | tuple():
            yield from ((f"[{index}]", child) for index, child in enumerate(part))
        case functools.partial():
            yield ".func", part.func
            yield ".args", part.args
            yield ".keywords", part.keywords
        case types.MethodType():
            yield ".__self__", part.__self__
            yield ".__func__", part.__func__
        case types.FunctionType():
            for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
                try:
                    yield f": variable {name}", cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
            named = (name for name in part.__code__.co_names if name in part.__globals__)
            yield from ((f": global {name}", part.__globals__[name]) for name in named)
        case _:
            yield from ((f".{name}", child) for name, child in getattr(part, "__dict__", {}).items())
