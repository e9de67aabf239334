"""Keep compiled regions as files that another process loads without a compiler and without tracing.

An entry is a directory with the generated Python code, the libraries of its C++ kernels, and its constants. It is written
elsewhere and renamed, so an interrupted compilation leaves no part of an entry.
"""

import ast
import contextlib
import errno
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autotune.errors import CaptureError, ConfigError

Kernel = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled region: takes a list of tensors, which it empties, and returns new tensors."""

_PACKAGE = Path(__file__).parents[1]
_SOURCES = tuple(
    _PACKAGE / name
    for name in (
        "capture/regions.py", "capture/rewrites/batch_norm.py", "capture/rewrites/dropout.py", "capture/source_writer.py",
        "kernels/compiled_region.py", "kernels/kernel_cache.py", "kernels/overwriting.py",
    )
)  # fmt: skip
"""Files that define what is compiled and how an entry is written: other contents are another key."""
_CODE, _NAMES, _CONSTANTS, _FAILURE = "region.py", "kernels.txt", "constants.pt", "failure.txt"
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a process that lacks something; its files may be right."""
_COMPILER = "async_compile"
"""Variable of generated code by which it compiles C++ kernels."""
_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""Variable in which a kernel's library finds the function that returns the address of a tensor's data."""


def kernel_directory() -> Path:
    """Return the directory of compiled kernels, `autotune/kernels` in the user's cache directory; make it private.

    Raises:
        ConfigError: The directory belongs to another user, or cannot be made.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "autotune" / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(f"cannot use {directory} for compiled kernels: {error}; set XDG_CACHE_HOME") from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{directory} can be written by other users, who could run code as you; make it yours alone, or set XDG_CACHE_HOME"
        )
    return directory


def compiler_directory() -> Path:
    """Return inductor's directory for this torch, Python and CPU, because the names of inductor's files do not depend on them."""
    text = repr((torch.__version__, sys.version, _cpu()))
    return kernel_directory() / "inductor" / hashlib.sha256(text.encode()).hexdigest()[:16]


def entry_path(signature: str) -> Path:
    """Return the directory of a region's entry for this code, torch, Python, CPU, number of threads and default dtype.

    `signature` is the digest of the region's ops, wiring, shapes, dtypes and strides.
    """
    settings = torch.get_num_threads(), torch.get_default_dtype()  # the latter is that of quotients of integers
    text = repr((_digest_sources(), signature, torch.__version__, sys.version, settings, _cpu()))
    return kernel_directory() / "entries" / hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _digest_sources() -> str:
    """Return a digest of `_SOURCES`."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()


@cache
def _cpu() -> str:
    """Describe the CPU's instruction sets: the compiler uses all of them."""
    capabilities = sorted(torch.cpu.get_capabilities().items(), key=str)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {capabilities}"


def write_entry(path: Path, code: str, scope: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> None:
    """Write an entry from generated code, and from the scope in which the code ran and that contains its kernels."""
    code, kernels = _separate_kernels(code)
    with _new_entry(path) as unfinished:
        (unfinished / _CODE).write_text(code, encoding="utf-8")
        (unfinished / _NAMES).write_text("\n".join(kernels), encoding="utf-8")
        for name in kernels:
            shutil.copyfile(scope[name].__self__.__file__, unfinished / f"{name}.so")
        if constants:
            torch.save(dict(constants), unfinished / _CONSTANTS)


def write_failure(path: Path, reason: str) -> None:
    """Write an entry that states why there is no kernel, so that no process tries again."""
    with _new_entry(path) as unfinished:
        (unfinished / _FAILURE).write_text(reason, encoding="utf-8")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise ConfigError where the block cannot write `path`, which is in the directory of compiled kernels."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error}; free space or add the permission there, or set XDG_CACHE_HOME"
        ) from error


@contextlib.contextmanager
def _new_entry(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes the entry after the block."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=path.parent))
        try:
            yield unfinished
            try:
                unfinished.rename(path)
            except OSError:
                if not path.exists():  # else another process wrote the same entry meanwhile
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


class DamagedEntryError(ConfigError):
    """Files of an entry are missing, were cut short, or need another C++ library."""


def discard_entry(path: Path) -> None:
    """Take an entry away, so that its region is compiled again.

    Inductor's own files go too, before the next compilation: it would copy the same library from them.
    """
    with contextlib.suppress(OSError):  # another process was first
        path.rename(path.with_name(f"unfinished-{path.name}-{os.getpid()}"))
    scratch = kernel_directory() / "inductor"
    with contextlib.suppress(OSError):  # a compilation in a directory that cannot be written names it
        scratch.mkdir(exist_ok=True)
        (scratch / "unfinished-load").touch()


def load_entry(path: Path) -> Kernel:
    """Return the kernel of an entry.

    Raises:
        CaptureError: Inductor cannot compile the region.
        DamagedEntryError: The entry's files cannot be loaded.
        ConfigError: The process lacks memory or open files.
    """
    if (path / _FAILURE).exists():
        raise CaptureError((path / _FAILURE).read_text(encoding="utf-8"))
    module = types.ModuleType(f"autotune_region_{path.name}")
    module.__file__ = str(path / _CODE)
    try:
        with _tensor_pointer():
            for name in (path / _NAMES).read_text(encoding="utf-8").split():
                setattr(module, name, _load_library(path / f"{name}.so"))
        if (path / _CONSTANTS).exists():
            vars(module).update(torch.load(path / _CONSTANTS, weights_only=True))
        code = compile((path / _CODE).read_text(encoding="utf-8"), module.__file__, "exec")
        exec(code, vars(module))
        kernel: Kernel = module.call
    except MemoryError:
        raise
    except Exception as error:  # files that were cut short fail in many ways
        reason = str(error) or type(error).__name__
        if getattr(error, "errno", None) in _LACKS or "allocate memory" in reason:
            raise ConfigError(f"cannot load compiled kernels: {reason}; free memory, or raise the limits") from error
        raise DamagedEntryError(
            f"cannot load compiled kernels: {reason}; delete {path}, and they are compiled again"
        ) from error
    return kernel


def _load_library(path: Path) -> Callable[..., None]:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{path.stem}.kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., None] = module.kernel
    return function


@contextlib.contextmanager
def _tensor_pointer() -> Iterator[None]:
    """Set the variable that kernels read when they are loaded."""
    before = os.environ.get(_POINTER)
    os.environ[_POINTER] = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_POINTER, None)
        else:
            os.environ[_POINTER] = before


def _separate_kernels(code: str) -> tuple[str, list[str]]:
    """Return generated code without its C++ kernels and benchmark, and the kernels' names.

    Raises:
        CaptureError: The code compiles something else than C++ kernels.
    """
    tree = ast.parse(code)
    kernels: list[str] = []
    kept: list[ast.stmt] = []
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(ast.Name(compiler), "cpp_pybinding"))) if (
                compiler == _COMPILER
            ):
                kernels.append(name)
            case ast.FunctionDef(name="get_args" | "benchmark_compiled_module") | ast.If():
                pass
            case _ if not _mentions_compiler(statement):
                kept.append(statement)
            case ast.ImportFrom() | ast.Assign() | ast.Delete() | ast.Expr(ast.Call(ast.Attribute(attr="wait"))):
                pass
            case _:
                raise CaptureError(
                    f"inductor generated code of another kind: {ast.unparse(statement)}; use --kernels aten"
                )
    return ast.unparse(ast.Module(kept, [])), kernels


def _mentions_compiler(statement: ast.stmt) -> bool:
    names = (_COMPILER, "AsyncCompile")
    return any(
        (isinstance(node, ast.Name) and node.id in names) or (isinstance(node, ast.alias) and node.name in names)
        for node in ast.walk(statement)
    )
