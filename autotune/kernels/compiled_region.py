"""Compile a region with inductor, once per machine; processes load it from files."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autotune.capture.program import Meta
from autotune.capture.regions import Region
from autotune.errors import CaptureError, ConfigError
from autotune.kernels.compile_pool import compile_in_pool
from autotune.kernels.kernel_cache import (
    DamagedEntryError,
    Kernel,
    compiler_directory,
    discard_entry,
    entry_path,
    load_entry,
    write_entry,
    write_failure,
)
from autotune.kernels.overwriting import find_target, write_over

_log = logging.getLogger(__name__)

_KERNELS: dict[tuple[str, str, int, torch.dtype], Kernel | str] = {}
"""Kernel of each region in this process, or the message of the error that its compilation raised.

The key is the region's signature, its device, and the number of threads and the default dtype that it is compiled for.
"""

_LACK_OF_MEMORY = (
    "out of memory", "allocate memory", "memory exhausted", "bad_alloc", "killed signal terminated program",
)  # fmt: skip
"""Texts of compilers and allocators without enough memory."""
_LACK_OF_SPACE = ("No space left on device", "Disk quota exceeded")
"""Texts of compilers on a full disk."""


class CompiledRegion:
    """The callable of a region: compiled on the first call, or before it by `compile`.

    Args:
        region: The region's ops as straight-line code.
        signature: Digest of the region's ops, wiring, shapes, dtypes and strides. Equal regions share one kernel.
        inputs: Descriptions of the tensors that the region reads.
        outputs: Descriptions of the tensors that it returns, in memory of their own.
        overwritten: Number of the input in whose memory one output is returned; None where all outputs have their own.
    """

    def __init__(
        self,
        region: Region,
        signature: str,
        inputs: Sequence[Meta],
        outputs: Sequence[Meta],
        overwritten: int | None = None,
    ) -> None:
        self.__name__ = region.__name__
        self.region, self.signature = region, signature
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self.overwritten = overwritten
        self._copied: frozenset[int] | None = None

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs = self._run(tensors)
        if self._copied is None:
            self._copied = self._find_shared(tensors, outputs)
        if self._copied:
            outputs = [self._copy(n, out) if n in self._copied else out for n, out in enumerate(outputs)]
        return outputs

    def over(self, number: int) -> "CompiledRegion":
        """Return the region with an output in the memory of an input: the first output of as many bytes.

        The bits are the same. The kernel is another one, which is compiled when it is first needed.
        """
        return CompiledRegion(self.region, f"{self.signature} into {number}", self._inputs, self._outputs, number)

    def _run(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.overwritten is None:
            return self.compile()(list(tensors))
        target = tensors[self.overwritten].view(self._outputs[self.target].shape)
        try:
            kernel = self.compile()
        except CaptureError:
            # inductor fails on some loops that write over what they read: copy, with a second buffer
            outputs = list(self._base(*tensors))
            target.copy_(outputs.pop(self.target))
        else:
            outputs = list(kernel(list(tensors)))
        return [*outputs[: self.target], target, *outputs[self.target :]]

    @property
    def _base(self) -> "CompiledRegion":
        """Return this region with all outputs in new memory."""
        return CompiledRegion(self.region, self.signature.partition(" ")[0], self._inputs, self._outputs)

    @property
    def target(self) -> int:
        """Number of the output that is written over an input."""
        assert self.overwritten is not None
        number = find_target(self._inputs[self.overwritten], self._outputs)
        assert number is not None
        return number

    @property
    def _key(self) -> tuple[str, str, int, torch.dtype]:
        return self.signature, str(self.device), torch.get_num_threads(), torch.get_default_dtype()

    @property
    def is_loaded(self) -> bool:
        """True if this process has the region's kernel."""
        return self._key in _KERNELS

    @property
    def is_cached(self) -> bool:
        """True if a process of this machine compiled the region, for the threads and the default dtype of this one."""
        return entry_path(self.signature).exists()

    def load_cached(self) -> bool:
        """Load the kernel from its entry; return False without one. An entry that cannot be loaded is discarded."""
        path = entry_path(self.signature)
        if not path.exists():
            return False
        try:
            _KERNELS[self._key] = load_entry(path)
        except DamagedEntryError as error:
            _log.warning("autotune: %s; the region is compiled again", str(error).rpartition(";")[0])
            discard_entry(path)
            return False
        except CaptureError as error:  # the entry states why there is no kernel
            _KERNELS[self._key] = str(error)
        return True

    @property
    def device(self) -> torch.device:
        """Device that the region runs on."""
        return self._outputs[0].device

    def compile(self) -> Kernel:
        """Return the region's kernel, which takes a list of tensors; load or compile it where that was not done.

        Raises:
            CaptureError: Inductor cannot compile the region.
            ConfigError: No C++ compiler works, or the directory of compiled kernels cannot be used.
        """
        key = self._key
        kernel = _KERNELS.get(key)
        if kernel is None:
            try:
                kernel = _KERNELS[key] = self._load()
            except CaptureError as error:  # or each step would compile again
                _KERNELS[key] = str(error)
                raise
        if isinstance(kernel, str):
            # a new error each time: an error that is raised again collects the frames that it passes, with their tensors
            raise CaptureError(kernel)
        return kernel

    def write(self) -> None:
        """Compile the region and write its entry for other processes.

        A region that would write over an input and cannot be compiled gets an entry with the reason: it copies instead.

        Raises:
            CaptureError: Inductor cannot compile the region.
            ConfigError: No C++ compiler works, or files cannot be written.
        """
        try:
            compiled = self._generate()
        except CaptureError as error:
            if self.overwritten is None:
                raise
            write_failure(entry_path(self.signature), str(error))
            return
        scope = compiled.current_callable.__func__.__globals__
        write_entry(entry_path(self.signature), compiled.source_code, scope, compiled.constants or {})

    def _load(self) -> Kernel:
        if self.device.type != "cpu":  # kernels of a GPU are loaded by inductor, which has a cache of its own
            compiled = self._generate()
            kernel: Kernel = compiled.current_callable or compiled
            return kernel
        if not self.load_cached():
            compile_in_pool([self])
        loaded = _KERNELS.get(self._key)
        return load_entry(entry_path(self.signature)) if loaded is None or isinstance(loaded, str) else loaded

    def _generate(self) -> Any:
        """Let inductor compile the region in this process."""
        from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
        from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
        from torch._inductor.virtualized import V

        with _compiler_settings(self.device):
            try:
                traced, mode = self._trace()
                with torch._guards.tracing(torch._guards.TracingContext(mode)), V.set_fake_mode(mode):
                    traced = _recursive_joint_graph_passes(traced, input_device=self.device)
                    self._finish(traced)
                    examples = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
                    return compile_fx_inner(traced, examples, is_inference=True)
            except Exception as error:  # inductor raises dozens of its own exceptions
                _pass_on_lack_of_memory(error)
                cause = getattr(error, "inner_exception", error)  # inductor wraps what its compiler raises
                if isinstance(cause, (CppCompileError, InvalidCxxCompiler)):
                    raise ConfigError(_explain_compiler(str(cause), self.device)) from error
                if isinstance(cause, OSError) and cause.errno is not None:  # of the machine, not of the region
                    directory, variable = _scratch(self.device)
                    raise ConfigError(
                        f"inductor cannot compile {self.__name__} in {directory}: {cause}; free space or add the "
                        f"permission there, or set {variable}"
                    ) from error
                reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                raise CaptureError(
                    f"inductor cannot compile {self.__name__} ({len(self.region.calls)} ops): {reason}; use --kernels aten"
                ) from error

    def _trace(self) -> tuple[fx.GraphModule, Any]:
        """Trace the region on fake tensors, in inductor's decompositions."""
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        mode = FakeTensorMode()
        with mode:
            examples = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device=m.device) for m in self._inputs]
        functional = torch.func.functionalize(self.region, remove="mutations")
        traced = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="fake")(*examples)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        return traced, mode

    def _finish(self, traced: fx.GraphModule) -> None:
        """Let a traced region write over an input, and keep the strides that the rest of the step was captured with."""
        if self.overwritten is not None:
            write_over(traced.graph, self.overwritten, self.target)
            traced.recompile()
        output = traced.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]

    def _find_shared(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the outputs that share memory, are part of more memory, or lie otherwise than planned."""
        taken = {tensor.untyped_storage()._cdata for n, tensor in enumerate(inputs) if n != self.overwritten}
        shared = set()
        for number, (output, meta) in enumerate(zip(outputs, self._outputs, strict=True)):
            storage = output.untyped_storage()
            fits = storage.nbytes() == storage_bytes(meta) and output.stride() == meta.stride
            if storage._cdata in taken or not fits:
                shared.add(number)
            taken.add(storage._cdata)
        return frozenset(shared)

    def _copy(self, number: int, output: torch.Tensor) -> torch.Tensor:
        meta = self._outputs[number]
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device).copy_(output)


def _explain_compiler(error: str, device: torch.device) -> str:
    """Return what the compiler lacks, and what to do, from the text of its error."""
    lines = [line.strip() for line in error.strip().splitlines()]
    full = next((line for line in lines if any(text in line for text in _LACK_OF_SPACE)), None)
    if full is not None:
        directory, variable = _scratch(device)
        return f"the C++ compiler cannot write a kernel: {full}; free space in {directory}, or set {variable}"
    reason = next((line for line in lines if "error:" in line), lines[0] if lines else "no reason given")
    fix = "install Python's headers (Debian: python3-dev)" if "Python.h" in reason else "install or repair g++"
    return f"the C++ compiler cannot compile a kernel: {reason}; {fix}, or use --kernels aten"


def _scratch(device: torch.device) -> tuple[str, str]:
    """Return the directory in which inductor compiles for a device, and the variable that moves it."""
    if device.type == "cpu":
        return str(compiler_directory()), "XDG_CACHE_HOME"
    return "inductor's directory", "TORCHINDUCTOR_CACHE_DIR"


def _pass_on_lack_of_memory(error: Exception) -> None:
    """Raise MemoryError where a compilation failed for memory: the region can be compiled, with more of it."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(phrase in text for phrase in _LACK_OF_MEMORY):
        raise MemoryError("too little memory to compile a region") from error


def storage_bytes(meta: Meta) -> int:
    """Return the bytes that a region allocates for an output."""
    if 0 in meta.shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True))) * meta.dtype.itemsize


@contextlib.contextmanager
def _compiler_settings(device: torch.device) -> Iterator[None]:
    """Compile in this process, whatever mode and whatever seed the caller has set."""
    import torch._inductor.config

    with (
        # a region of the CPU has an entry of its own; another cache may hold parts of an interrupted compilation
        torch._inductor.config.patch(compile_threads=1, fx_graph_cache=device.type != "cpu"),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        yield
