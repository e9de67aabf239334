"""Made-up CUDA graphs on the CPU: a capture runs nothing, a replay repeats kernels at fixed addresses, and memory is reused.

Each step begins with memory of no defined content. A tensor whose memory the capture released is destroyed in every replay
at that place, as if a later kernel had written over it. So a step that depends on either has other results.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class FakeGraph:
    """Recorded kernels of one graph."""

    def __init__(self) -> None:
        self.events: list[Callable[[], object]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for event in self.events:
            event()


class FakeRecorder:
    """A recorder of one capture. An op whose name contains `refused` cannot be captured."""

    def __init__(self, refused: str = "") -> None:
        self.graphs: list[Any] = []
        self.refused = refused
        self.pool: dict[int, torch.UntypedStorage] = {}
        """Memory of the graphs. Between two steps it has no defined content."""
        self._mode: _Capture | None = None
        self._released: list[torch.UntypedStorage] = []
        self._users: dict[int, int] = {}
        self._generator = torch.get_rng_state()

    def begin(self) -> None:
        graph = FakeGraph()
        if not self.graphs:
            graph.events.append(lambda: [destroy(storage) for storage in self.pool.values()])
        released, self._released = self._released, []  # between two graphs: the next one may reuse this memory
        graph.events.append(lambda: [destroy(storage) for storage in released])
        self.graphs.append(graph)
        self._generator = torch.get_rng_state()
        self._mode = _Capture(self, graph)
        self._mode.__enter__()

    def end(self) -> None:
        assert self._mode is not None
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        torch.set_rng_state(self._generator)

    def abort(self) -> None:
        if self._mode is not None:
            self.end()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return alias(tensor)

    def watch(self, tensor: torch.Tensor) -> None:
        """Record the place where no tensor of the caller is left on memory of the graphs."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.pool:
            self._users[storage._cdata] = self._users.get(storage._cdata, 0) + 1
            weakref.finalize(tensor, self._release, storage).atexit = False

    def _release(self, storage: torch.UntypedStorage) -> None:
        self._users[storage._cdata] -= 1
        if self._users[storage._cdata]:
            return
        if self._mode is None:
            self._released.append(storage)
        else:
            self._mode.graph.events.append(lambda: destroy(storage))


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: FakeRecorder, graph: FakeGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self.graph = recorder, graph

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS or (self._recorder.refused and self._recorder.refused in str(func)):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        stored = pytree.tree_map_only(torch.Tensor, alias, (tuple(args), dict(kwargs)))
        if written := _written(func, args, kwargs):
            self.graph.events.append(lambda: func(*stored[0], **stored[1]))
            returned = len(func._schema.returns)
            return None if not returned else written[0] if returned == 1 else tuple(written[:returned])
        known = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(stored) if isinstance(leaf, torch.Tensor)}
        results = func(*args, **kwargs)
        parts = [part for part in pytree.tree_leaves(results) if isinstance(part, torch.Tensor)]
        places = [None if part.untyped_storage()._cdata in known else alias(part) for part in parts]
        for part, place in zip(parts, places, strict=True):
            if place is not None:
                self._recorder.pool[part.untyped_storage()._cdata] = part.untyped_storage()
            self._recorder.watch(part)
        grads = torch.is_grad_enabled()  # a recurrent kernel of oneDNN looks at it
        self.graph.events.append(lambda: _run_again(func, stored, places, grads=grads))
        return results


def _run_again(func: Any, stored: tuple[Any, Any], places: list[torch.Tensor | None], *, grads: bool) -> None:
    with torch.set_grad_enabled(grads):
        results = func(*stored[0], **stored[1])
    parts = [part.detach() for part in pytree.tree_leaves(results) if isinstance(part, torch.Tensor)]
    for place, part in zip(places, parts, strict=True):
        if place is not None:
            place.copy_(part)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an op writes."""
    names = {argument.name: position for position, argument in enumerate(func._schema.arguments)}
    written = []
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            position = names[argument.name]
            written.append(args[position] if position < len(args) else kwargs[argument.name])
    return written


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor in the same memory."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def destroy(storage: torch.UntypedStorage) -> None:
    """Fill memory with bytes that are NaN as floating-point numbers and -1 as integers."""
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
