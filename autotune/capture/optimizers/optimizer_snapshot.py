"""Save the content of an optimizer and restore it into the same objects: groups, state, inner optimizers."""

from typing import Any

import torch

from autotune.capture.optimizers.optimizer_copy import (
    HOOKS,
    collect_parameters,
    iter_mutable_objects,
    object_fields,
    slot_names,
)


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
    return {key: part for key, part in object_fields(item) if key not in HOOKS}


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
            _fill_fields(item, content)


def _fill_fields(item: Any, content: dict[str, Any]) -> None:
    attributes: dict[str, Any] = getattr(item, "__dict__", {})  # a class with slots may have none
    slots = slot_names(item)
    for key in [key for key, _ in object_fields(item) if key not in content and key not in HOOKS]:
        if key in attributes:
            del attributes[key]
        else:
            object.__delattr__(item, key)
    for key, part in content.items():
        if key in slots:
            object.__setattr__(item, key, part)
        else:
            attributes[key] = part
