"""Keep what an optimizer holds at one moment, and put it back into the same objects: groups, state, inner optimizers."""

from typing import Any

import torch

from autotune.capture.optimizers.optimizer_copy import HOOKS, holders, owned_parameters


class OptimizerSnapshot:
    """The content of every dictionary, list, object and tensor that an optimizer reaches, parameters excepted.

    Schedulers, checkpoints and wrappers refer to these objects, so `restore` fills them instead of replacing them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        owned = set(map(id, owned_parameters(optimizer)))
        held = [thing for thing in holders(optimizer) if id(thing) not in owned]
        self.values = [(thing, thing.detach().clone()) for thing in held if isinstance(thing, torch.Tensor)]
        """Tensors beside the parameters, each with a copy."""
        self._contents = [(thing, _content(thing)) for thing in held if not isinstance(thing, torch.Tensor)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; more than once if need be."""
        for thing, content in self._contents:
            _fill(thing, content)
        for tensor, value in self.values:
            tensor.copy_(value)


def _content(thing: Any) -> Any:
    """Return a copy of one object's content; the objects within it have entries of their own."""
    match thing:
        case torch.Generator():
            return thing.get_state()
        case dict() | set() | list():
            return thing.copy()
    return {key: part for key, part in vars(thing).items() if key not in HOOKS}


def _fill(thing: Any, content: Any) -> None:
    match thing:
        case torch.Generator():
            thing.set_state(content)
        case dict() | set():
            thing.clear()
            thing.update(content)
        case list():
            thing[:] = content
        case _:
            attributes = vars(thing)
            for key in [key for key in attributes if key not in content and key not in HOOKS]:
                del attributes[key]
            attributes.update(content)
