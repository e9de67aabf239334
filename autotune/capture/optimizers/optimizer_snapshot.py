"""Save the content of an optimizer and restore it into the same objects: groups, state, inner optimizers."""

from typing import Any

import torch

from autotune.capture.optimizers.optimizer_copy import HOOKS, collect_parameters, iter_mutable_objects


class OptimizerSnapshot:
    """Content of every dictionary, list, object and tensor that an optimizer refers to, parameters excepted.

    Schedulers, checkpoints and wrappers refer to these objects, so `restore` fills them instead of replacing them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = set(map(id, collect_parameters(optimizer)))
        objects = [item for item in iter_mutable_objects(optimizer) if id(item) not in parameters]
        self.values = [(item, item.detach().clone()) for item in objects if isinstance(item, torch.Tensor)]
        """Tensors beside the parameters, each with a copy."""
        self._contents = [(item, _copy_content(item)) for item in objects if not isinstance(item, torch.Tensor)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved content; may be called repeatedly."""
        for item, content in self._contents:
            _fill(item, content)
        for tensor, value in self.values:
            tensor.copy_(value)


def _copy_content(item: Any) -> Any:
    """Return a copy of one object's content; the objects within it have separate entries."""
    match item:
        case torch.Generator():
            return item.get_state()
        case dict() | set() | list():
            return item.copy()
    return {key: part for key, part in vars(item).items() if key not in HOOKS}


def _fill(item: Any, content: Any) -> None:
    match item:
        case torch.Generator():
            item.set_state(content)
        case dict() | set():
            item.clear()
            item.update(content)
        case list():
            item[:] = content
        case _:
            attributes = vars(item)
            for key in [key for key in attributes if key not in content and key not in HOOKS]:
                del attributes[key]
            attributes.update(content)
