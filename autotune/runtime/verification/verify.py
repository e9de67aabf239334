"""Compare the first steps under a plan with the user's own eager steps, in the user's own process.

Both steps start from the same state. Tensors that differ in any bit go through the relative gate (`gates`), whose further
eager runs are made only then. The user's objects end in the state of the planned step, or in eager's if it is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.optimizer_copy import HOOKS
from autotune.errors import ConfigError, NumericsError
from autotune.runtime.verification import gates
from autotune.runtime.verification.snapshot import Snapshot, named_tensors
from autotune.runtime.verification.witness import float64, in_double, move_weights

See = Callable[[str, torch.Tensor], None]
Tensors = dict[str, torch.Tensor]

STEPS = 2
"""Number of steps of each captured program compared under `verify=True`."""
_FIRST = ("result ", "gradient ")
"""Names of what a step makes before its first update."""


class Verifier:
    """The comparison of one training loop's first steps with eager."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        steps: int,
    ) -> None:
        if steps < 0:
            raise ConfigError(f"verify is {steps}; pass True, or the number of steps to compare with eager")
        self.how = ""
        """How the last verified step was compared; empty before the first."""
        self._model, self._optimizer, self._scaler, self._steps = model, optimizer, scaler, steps
        self._done: dict[Any, int] = {}

    def due(self, key: Any) -> bool:
        """Check whether the next step of this program is one to compare."""
        return self._done.get(key, 0) < self._steps

    def step(self, key: Any, batch: Any, eager: Callable[[Any, See], Any], planned: Callable[[See], Any]) -> Any:
        """Run the step both ways; NumericsError names the worst tensor that the gate refuses."""
        self._refuse_hooks()
        before = self._snapshot()
        expected = self._record(partial(eager, batch))
        after = self._snapshot()
        expected |= after.named
        before.restore()
        results, found = self._run_planned(planned, expected)
        self.how = "bit-equal to eager"
        if found:
            kept = self._snapshot()
            try:
                shares, gate = self._gate(before, partial(self._run_eager, eager, batch), expected, found)
            except BaseException:
                after.restore()
                raise
            name = gates.worst(shares, _FIRST)
            if not shares[name] <= 1.0:
                after.restore()
                raise NumericsError(
                    f"verified step {1 + self._done.get(key, 0)}: {name} is off by {shares[name]:.3g} of its bound ({gate}); "
                    "model and optimizer hold eager's step: train on without the plan, or report the model"
                )
            kept.restore()
            self.how = f"{gate}, worst {shares[name]:.2g} of the bound"
        self._done[key] = self._done.get(key, 0) + 1
        return results

    def _refuse_hooks(self) -> None:
        own = self._optimizer
        if own is not None and any(getattr(own, name, None) for name in HOOKS):
            raise ConfigError(
                f"verify runs each step twice, and with it the hooks of {type(own).__name__}'s step; remove them for the "
                "verified steps, or pass verify=False"
            )

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._model, self._optimizer, self._scaler)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_tensors(self._model, self._optimizer)

    def _record(self, run: Callable[[See], Any]) -> Tensors:
        """Run a step; its results and gradients by name."""
        found: Tensors = {}

        def see(name: str, gradient: torch.Tensor) -> None:
            found[f"gradient {name}"] = gradient.detach().clone()

        return found | _results(run(see))

    def _run_planned(self, planned: Callable[[See], Any], expected: Mapping[str, torch.Tensor]) -> tuple[Any, Tensors]:
        """Run the planned step; what it returns, and by name what differs from eager's in any bit.

        An empty tensor stands for one that only one of the two steps made.
        """
        found: Tensors = {}
        names: set[str] = set()

        def see(name: str, tensor: torch.Tensor) -> None:
            names.add(name)
            if name not in expected or not _same(tensor, expected[name]):
                found[name] = tensor.detach().clone()

        results = planned(lambda name, gradient: see(f"gradient {name}", gradient))
        for name, tensor in (*_results(results).items(), *self._named()):
            see(name, tensor)
        return results, found | {name: torch.empty(0) for name in expected.keys() - names}

    def _run_eager(self, eager: Callable[[Any, See], Any], batch: Any, kind: str) -> Tensors:
        """Run eager once more as a witness; everything that it made."""
        match kind:
            case "float64":
                with float64(self._model, self._optimizer):
                    found = self._record(partial(eager, in_double(batch)))
                    return found | {name: tensor.detach().clone() for name, tensor in self._named()}
            case "moved 0" | "moved 1":
                move_weights(self._model, int(kind[-1]))
        found = self._record(partial(eager, batch))
        return found | {name: tensor.detach().clone() for name, tensor in self._named()}

    def _gate(
        self, before: Snapshot, run: Callable[[str], Tensors], expected: Tensors, found: Tensors
    ) -> tuple[dict[str, float], str]:
        """Compute each differing tensor's error as a share of its bound, and how the bounds were made."""
        first = {name: tensor for name, tensor in expected.items() if name.startswith(_FIRST)}
        witnesses: dict[str, Tensors] = {}
        reasons: dict[str, str] = {}
        for kind in ("float64", "moved 0", "moved 1"):
            before.restore()
            try:
                made = run(kind)
            except Exception as error:  # noqa: BLE001 - a user's code may raise anything in another dtype
                reasons[kind] = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            if differs := _unlike(first, made):
                reasons[kind] = f"{differs} is another in it"
            else:
                witnesses[kind] = made
        center = "float64" if "float64" in witnesses else ""

        def bound(name: str, carried: Tensors | None = None) -> gates.Bound:
            made = {kind: tensors[name] for kind, tensors in witnesses.items() if name in tensors}
            return gates.bound(expected[name], made, center, None if carried is None else carried.get(name))

        bounds = {name: bound(name) for name in first}
        before.restore()
        with self._moved_gradients(bounds):
            carried = run("carried")
        shares = {}
        for name, tensor in found.items():
            shares[name] = float("inf")
            if name in expected and tensor.dtype == expected[name].dtype:
                at = bounds.get(name) or bound(name, carried)
                against = witnesses[at.center][name] if at.center else expected[name]
                shares[name] = gates.share(tensor, against, at.admitted)
        return shares, gates.how(float64=bool(center), moved=bool(witnesses), reason=reasons.get("float64", ""))

    @contextmanager
    def _moved_gradients(self, bounds: Mapping[str, gates.Bound]) -> Iterator[None]:
        """Move each gradient that backward makes by what is admitted of it."""
        with ExitStack() as hooks:
            for name, parameter in self._model.named_parameters():
                if (bound := bounds.get(f"gradient {name}")) is not None:
                    move = partial(gates.towards_zero, admitted=bound.admitted)
                    hooks.enter_context(parameter.register_hook(move))  # type: ignore[no-untyped-call]
            yield


def _results(tree: Any) -> Tensors:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {f"result {index}": leaf.detach().clone() for index, leaf in enumerate(leaves)}


def _unlike(first: Tensors, witness: Tensors) -> str:
    """Name a result or gradient that shows the witness to be another computation; empty if none does."""
    if missing := next((name for name in first if name not in witness), ""):
        return missing
    pairs = {name: (tensor, witness[name]) for name, tensor in first.items()}
    gradients = {name: pair for name, pair in pairs.items() if name.startswith("gradient ")}
    return gates.unlike({name: pair for name, pair in pairs.items() if name not in gradients}, gradients)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return torch.equal(*(_bits(tensor) for tensor in (one, other)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return plain.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
