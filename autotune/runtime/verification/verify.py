"""Compare the first steps under a plan with eager steps of the same objects, in the training process.

Both steps start from the same state. Tensors that differ in any bit go through the relative gate (`gates`), which needs
further eager runs. The user's objects end in the state of the planned step, or of the eager step if the gate refuses it.
After any other failure the state before the step is restored, unless offloaded tensors are not back yet.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.optimizer_copy import GLOBAL_HOOKS, HOOKS
from autotune.errors import ConfigError, NumericsError
from autotune.runtime.verification import gates
from autotune.runtime.verification.region_gate import RegionGate
from autotune.runtime.verification.snapshot import Snapshot, named_tensors
from autotune.runtime.verification.witness import Witness, float64, move_weights, to_double
from autotune.workloads.batch import map_batch, rebuild_batch
from autotune.workloads.memory_format import convert_state

GradientCallback = Callable[[str, torch.Tensor], None]
"""Function that is called with a parameter's name and its gradient."""
Tensors = dict[str, torch.Tensor]

DEFAULT_STEPS = 2
"""Number of steps of each captured program compared under `verify=True`."""
_FIRST = ("result ", "gradient ")
"""Prefixes of tensors that a step computes before its first update."""


@dataclass(frozen=True, slots=True)
class RegionRuns:
    """Two further ways to run a step on compiled regions, for comparing each region on its own."""

    one_by_one: Callable[[GradientCallback], Any]
    """The step with the regions' ops run one by one."""
    compared: Callable[[GradientCallback], Any]
    """The step whose regions `gate` compares."""
    gate: RegionGate


class Verifier:
    """The comparison of one training loop's first steps with eager."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        steps: int,
        loss_fn: object = None,
    ) -> None:
        """`loss_fn` may be a module, whose tensors are then part of the state."""
        if steps < 0:
            raise ConfigError(f"verify is {steps}; pass True, or the number of steps to compare with eager")
        self.comparison = ""
        """Method and result of the last comparison; empty before the first."""
        self._model, self._optimizer, self._scaler, self._steps = model, optimizer, scaler, steps
        self._loss_fn = loss_fn
        self._done: dict[Any, int] = {}

    def restart(self) -> "Verifier":
        """Return a verifier of the same loop that has compared no step yet."""
        return Verifier(self._model, self._optimizer, self._scaler, self._steps, self._loss_fn)

    def is_due(self, key: Any) -> bool:
        """Return True if the next step of the program `key` is to be compared."""
        return self._done.get(key, 0) < self._steps

    def run_step(
        self,
        key: Any,
        batch: Any,
        eager: Callable[[Any, GradientCallback], Any],
        planned: Callable[[GradientCallback], Any],
        regions: RegionRuns | None = None,
    ) -> Any:
        """Run a step in eager and as planned, and compare them; return the results of the planned step.

        Where the gate refuses the whole step, comparisons of its compiled regions decide; `regions` runs the step for them.
        Raises NumericsError, which names the worst tensor that the gate refuses.
        """
        self._refuse_hooks()
        before = self._snapshot()
        try:
            expected = self._record(partial(eager, rebuild_batch(batch)))
            after = self._snapshot()
            expected |= after.named
            before.restore()
            results, differing = self._run_planned(planned, expected)
            comparison, refusal = "bit-equal to eager", ""
            if differing:
                planned_state = self._snapshot()
                shares, gate = self._gate(before, partial(self._run_eager, eager, batch), expected, differing)
                name = gates.worst_tensor(shares, _FIRST)
                comparison = f"{gate}, worst {shares[name]:.2g} of the bound"
                if not shares[name] <= 1.0:
                    comparison = self._compare_regions(before, regions, expected, differing) if regions else ""
                    refusal = f"{name} is off by {shares[name]:.3g} of its bound ({gate})"
                (planned_state if comparison else after).restore()
        except BaseException:
            if self._has_memory():
                before.restore()  # else a caller that repeats the step would update twice
            raise
        if not comparison:
            remedy = "plan with --kernels aten" if regions else "train without the plan"
            raise NumericsError(
                f"verified step {1 + self._done.get(key, 0)}: {refusal}, and model and optimizer hold eager's step; "
                f"{remedy}, or report the model"
            )
        self.comparison = comparison
        self._done[key] = self._done.get(key, 0) + 1
        return results

    def _refuse_hooks(self) -> None:
        optimizer = self._optimizer
        everywhere = any(hook is not convert_state for table in GLOBAL_HOOKS for hook in table.values())
        owner = "every optimizer's step" if everywhere else f"{type(optimizer).__name__}'s step"
        if optimizer is not None and (everywhere or any(getattr(optimizer, name, None) for name in HOOKS)):
            raise ConfigError(
                f"verify runs each step at least twice, and with it the hooks of {owner}; remove them for the "
                "verified steps, or pass verify=False"
            )

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._model, self._optimizer, self._scaler, self._loss_fn)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_tensors(self._model, self._optimizer, self._loss_fn)

    def _has_memory(self) -> bool:
        """Return whether every tensor of the state has memory; a step that offloads may fail before all are back."""
        tensors = [tensor for _, tensor in self._named() if tensor.layout is torch.strided]
        return all(tensor.untyped_storage().nbytes() > 0 or not tensor.numel() for tensor in tensors)

    def _record(self, run: Callable[[GradientCallback], Any]) -> Tensors:
        """Run a step; return its results and gradients by name."""
        gradients: Tensors = {}

        def on_gradient(name: str, gradient: torch.Tensor) -> None:
            gradients[f"gradient {name}"] = gradient.detach().clone()

        return gradients | _results(run(on_gradient))

    def _run_planned(
        self, planned: Callable[[GradientCallback], Any], expected: Mapping[str, torch.Tensor]
    ) -> tuple[Any, Tensors]:
        """Run the planned step; return its results, and by name all tensors that differ from eager's in any bit.

        An empty tensor stands for one that only one of the two steps computed.
        """
        differing: Tensors = {}
        names: set[str] = set()

        def compare(name: str, tensor: torch.Tensor) -> None:
            names.add(name)
            if name not in expected or not _has_equal_bits(tensor, expected[name]):
                differing[name] = tensor.detach().clone()

        results = planned(lambda name, gradient: compare(f"gradient {name}", gradient))
        for name, tensor in (*_results(results).items(), *self._named()):
            compare(name, tensor)
        return results, differing | {name: torch.empty(0) for name in expected.keys() - names}

    def _run_eager(self, eager: Callable[[Any, GradientCallback], Any], batch: Any, kind: Witness) -> Tensors:
        """Run eager again as a witness of this kind; return all tensors that it computed or changed."""
        match kind:
            case Witness.FLOAT64:
                with float64(self._model, self._optimizer, self._loss_fn):
                    tensors = self._record(partial(eager, map_batch(to_double, batch)))
                    return tensors | {name: tensor.detach().clone() for name, tensor in self._named()}
            case Witness.MOVED_0 | Witness.MOVED_1:
                move_weights(self._model, [Witness.MOVED_0, Witness.MOVED_1].index(kind), self._loss_fn)
        tensors = self._record(partial(eager, rebuild_batch(batch)))
        return tensors | {name: tensor.detach().clone() for name, tensor in self._named()}

    def _compare_regions(self, before: Snapshot, regions: RegionRuns, expected: Tensors, differing: Tensors) -> str:
        """Compare each region of the planned step; return a description, empty if the step is refused.

        With the regions' ops run one by one, the step must equal eager in every bit. The step whose regions are compared must
        equal the planned step in every bit.
        """
        before.restore()
        try:
            if self._run_planned(regions.one_by_one, expected)[1]:
                return ""
            before.restore()
            differs = self._run_planned(regions.compared, expected | differing)[1]
        except (RuntimeError, MemoryError):  # float64 takes twice the bytes, and not every kernel has it
            return ""
        if differs or not regions.gate.max_share <= 1.0:
            return ""
        return f"each region within the relative gate against float64, worst {regions.gate.max_share:.2g} of the bound"

    def _gate(
        self, before: Snapshot, run: Callable[[Witness], Tensors], expected: Tensors, differing: Tensors
    ) -> tuple[dict[str, float], str]:
        """Return each differing tensor's error as a share of its bound, and a description of the bounds."""
        first = {name: tensor for name, tensor in expected.items() if name.startswith(_FIRST)}
        witnesses: dict[str, Tensors] = {}
        reasons: dict[str, str] = {}
        for kind in (Witness.FLOAT64, Witness.MOVED_0, Witness.MOVED_1):
            before.restore()
            try:
                witness = run(kind)
            except Exception as error:  # noqa: BLE001 - user code may raise anything in another dtype
                reasons[kind] = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            if name := _name_mismatch(first, witness):
                reasons[kind] = f"{name} differs in it"
            else:
                witnesses[kind] = witness
        center = Witness.FLOAT64 if Witness.FLOAT64 in witnesses else ""

        def bound(name: str, carried: Tensors | None = None) -> gates.Bound:
            values = {kind: tensors[name] for kind, tensors in witnesses.items() if name in tensors}
            return gates.bound(expected[name], values, center, None if carried is None else carried.get(name))

        bounds = {name: bound(name) for name in first}
        before.restore()
        with self._moved_gradients(bounds):
            carried = run(Witness.CARRIED)
        shares = {}
        for name, tensor in differing.items():
            shares[name] = float("inf")
            if name in expected and tensor.dtype == expected[name].dtype:
                limit = bounds.get(name) or bound(name, carried)
                center_tensor = witnesses[limit.center][name] if limit.center else expected[name]
                shares[name] = gates.error_share(tensor, center_tensor, limit.admitted)
        return shares, gates.describe_gate(
            float64=bool(center), moved=bool(witnesses), reason=reasons.get(Witness.FLOAT64, "")
        )

    @contextmanager
    def _moved_gradients(self, bounds: Mapping[str, gates.Bound]) -> Iterator[None]:
        """Move each gradient of backward towards zero by its admitted error."""
        with ExitStack() as hooks:
            for name, parameter in self._model.named_parameters():
                if (bound := bounds.get(f"gradient {name}")) is not None:
                    move = partial(gates.move_towards_zero, admitted=bound.admitted)
                    hooks.enter_context(parameter.register_hook(move))  # type: ignore[no-untyped-call]
            yield


def _results(tree: Any) -> Tensors:
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {f"result {index}": leaf.detach().clone() for index, leaf in enumerate(leaves)}


def _name_mismatch(first: Tensors, witness: Tensors) -> str:
    """Name a result or gradient by which the witness is another computation; empty if it is the same."""
    if missing := next((name for name in first if name not in witness), ""):
        return missing
    pairs = {name: (tensor, witness[name]) for name, tensor in first.items()}
    gradients = {name: pair for name, pair in pairs.items() if name.startswith("gradient ")}
    return gates.name_mismatch({name: pair for name, pair in pairs.items() if name not in gradients}, gradients)


def _has_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    return torch.equal(_byte_view(a), _byte_view(b))


def _byte_view(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return plain.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
