"""Add the ops of the optimizer's update to a captured graph."""

from typing import Any

import torch

from autotune.capture.graph_builder import GraphBuilder
from autotune.capture.optimizers.optimizer import Updates
from autotune.capture.optimizers.whole_update import WholeUpdates
from autotune.capture.program import Call, Read, stable_text
from autotune.ir.graph import Phase


class UpdateOps:
    """Updates of one step: an op for each parameter, or one op for all where the optimizer needs every gradient at once."""

    def __init__(self, builder: GraphBuilder, updates: Updates, tensors: dict[int, torch.Tensor]) -> None:
        """`tensors` maps the values of parameters to the user's parameters."""
        self._builder = builder
        self._updates = updates
        self._tensors = tensors
        self._collected: list[tuple[str, int, Any, bool]] = []  # for the op that updates all parameters

    def add(self, name: str, parameter: int, gradient: Any, shared: bool) -> None:
        """Add the update of one parameter. `shared`: other ops read the gradient too."""
        if isinstance(self._updates, WholeUpdates):
            self._collected.append((name, parameter, gradient, shared))
            return
        state = self._builder.add_state(f"{name}.state", self._updates.state_bytes(self._tensors[parameter]))
        self._builder.layer = name.rpartition(".")[0]
        optimizer = self._updates.optimizer
        self._builder.add_op(
            Call(self._updates.update, (name, Read(parameter), gradient, shared)),
            name=f"{name}.update",
            target=f"update.{type(optimizer).__name__}",
            detail=repr(sorted((k, stable_text(v)) for k, v in optimizer.defaults.items() if k != "lr")),
            phase=Phase.UPDATE,
            extra=(state,),
            writes=(parameter, state),
            repeatable=False,
            covered=(Read(parameter), gradient, shared and self._updates.writes_gradients),
        )

    def finish(self) -> None:
        """Add the one op for all parameters, after every gradient, where the optimizer updates them together."""
        if not self._collected or not isinstance(self._updates, WholeUpdates):
            return
        names, parameters, gradients, shared = (list(column) for column in zip(*self._collected, strict=True))
        self._updates.expect([self._tensors[parameter] for parameter in parameters])
        state = self._builder.add_state("optimizer.state", self._updates.state_bytes(self._tensors[parameters[0]]))
        self._builder.layer = "optimizer"
        arguments = [Read(parameter) for parameter in parameters]
        self._builder.add_op(
            Call(self._updates.update_all, (names, arguments, gradients, shared)),
            name="optimizer.step",
            target=f"step.{self._updates.label}",
            detail=self._updates.settings,
            phase=Phase.UPDATE,
            extra=(state,),
            writes=(*parameters, state),
            repeatable=False,
            random=self._updates.draws,
            covered=(arguments, gradients, [is_shared and self._updates.writes_gradients for is_shared in shared]),
        )
