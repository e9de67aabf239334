"""Correct predicted seconds by measured plans: a linear Gaussian model of the costs that op profiles do not show.

A plan's seconds are modelled as a constant plus its features: seconds of recomputation by operator, waiting for the store,
transfers, early updates, and runs far from the producer of their inputs. Before any measurement the weights reproduce the
simulator's seconds; each measured plan shifts them. The model ranks moves only. Measurements decide.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, early_updates
from autotune.predict.simulate import Estimate

Vector = npt.NDArray[np.float64]

CONSTANT, RECOMPUTE, WAIT, TRANSFER, EARLY, APART = "constant", "recompute", "wait", "transfer", "early", "apart"
"""Names of the features; `recompute:TARGET` is the share of one operator."""
PRIORS: Mapping[str, tuple[float, float]] = {
    RECOMPUTE: (1.0, 0.3),
    WAIT: (1.0, 0.5),
    TRANSFER: (0.0, 0.2),
    EARLY: (0.0, 0.1),
    APART: (0.0, 0.05),
}
"""Mean and standard deviation of each weight before any measurement, in seconds per second of the feature."""
TARGET_PRIOR = (0.0, 0.3)
"""Mean and standard deviation of one operator's deviation from the weight that all recomputation shares."""
LOWEST_WEIGHT = 0.05
"""Least weight of an operator's recomputation, so that no corrected cost is 0 or below."""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """Measured plan, as the belief reads it."""

    plan: Plan
    estimate: Estimate
    seconds: float
    """Seconds of a step."""
    noise: float
    """Standard error of the seconds, in seconds."""


@dataclass(frozen=True, slots=True)
class CostBelief:
    """Gaussian belief about the weights of all features."""

    names: tuple[str, ...] = ()
    mean: Vector = field(default_factory=lambda: np.zeros(0))
    covariance: Vector = field(default_factory=lambda: np.zeros((0, 0)))

    def predict(self, before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float]:
        """Return mean and standard deviation of the seconds that the second plan saves over the first."""
        saved = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in sorted({*before, *after})}
        row = np.array([saved.get(name, 0.0) for name in self.names])
        rest = [(amount, _prior(name)) for name, amount in saved.items() if name not in self.names]
        mean = float(row @ self.mean) + sum(amount * weight for amount, (weight, _) in rest)
        variance = float(row @ self.covariance @ row) + sum((amount * spread) ** 2 for amount, (_, spread) in rest)
        return mean, max(variance, 0.0) ** 0.5

    def weight(self, target: str) -> float:
        """Return the measured over the profiled seconds of one operator's recomputation."""
        weights = dict(zip(self.names, self.mean.tolist(), strict=True))
        common = weights.get(RECOMPUTE, PRIORS[RECOMPUTE][0])
        return max(LOWEST_WEIGHT, float(common + weights.get(f"{RECOMPUTE}:{target}", TARGET_PRIOR[0])))


def learn_costs(graph: TrainGraph, costs: Costs, measured: Sequence[MeasuredPlan]) -> CostBelief:
    """Return the belief after these measurements.

    >>> from autotune.testing.graphs import chain
    >>> learn_costs(chain(2), Costs.unit(chain(2)), []).weight("op")
    1.0
    """
    if not measured:
        return CostBelief()
    features = [describe_costs(graph, costs, each.plan, each.estimate) for each in measured]
    names = (CONSTANT, *sorted({name for row in features for name in row}))
    base = sum(costs.seconds)
    rows = np.array([[1.0, *(row.get(name, 0.0) for name in names[1:])] for row in features])
    priors = [(base, max(base, 1e-9)), *map(_prior, names[1:])]
    mean, spread = np.array([prior[0] for prior in priors]), np.array([prior[1] for prior in priors])
    noise = np.array([max(each.noise, 1e-12) for each in measured])
    seconds = np.array([each.seconds for each in measured])
    # the singular value decomposition gives the covariance as a matrix times its transpose, so no variance is negative
    left, singular, right = np.linalg.svd(rows * spread / noise[:, None])
    residual = left.T @ ((seconds - rows @ mean) / noise)
    count = len(singular)
    shift = right[:count].T @ (singular / (1 + singular**2) * residual[:count])
    scales = np.ones(len(names))
    scales[:count] = 1 / np.hypot(1.0, singular)
    factor = spread[:, None] * right.T * scales
    return CostBelief(names, mean + spread * shift, factor @ factor.T)


def describe_costs(graph: TrainGraph, costs: Costs, plan: Plan, estimate: Estimate) -> dict[str, float]:
    """Return the features of a plan, in seconds by name, without the constant."""
    features: defaultdict[str, float] = defaultdict(float)
    ran: set[int] = set()
    latest: dict[int, int] = {}
    for position, op_id in enumerate(plan.order):
        op = graph.ops[op_id]
        seconds = costs.seconds[op_id]
        if op_id in ran:
            features[RECOMPUTE] += seconds
            features[f"{RECOMPUTE}:{op.target}"] += seconds
        ran.add(op_id)
        produced = [latest[value] for value in op.inputs if value in latest]
        if produced and max(produced) < position - 1:
            features[APART] += seconds
        latest.update(dict.fromkeys(op.outputs, position))
    features[WAIT] += estimate.seconds - sum(costs.seconds[op] for op in plan.order)
    if plan.offload:
        features[TRANSFER] += estimate.transfer_bytes / costs.stores[plan.store].read_bytes_per_second
    features[EARLY] += sum(costs.seconds[op] for op in early_updates(graph, plan.order))
    return dict(features)


def correct_costs(graph: TrainGraph, costs: Costs, belief: CostBelief) -> tuple[float, ...]:
    """Return the seconds of each op, times the measured weight of its operator's recomputation."""
    weights = {target: belief.weight(target) for target in sorted({op.target for op in graph.ops})}
    return tuple(weights[op.target] * costs.seconds[op.id] for op in graph.ops)


def _prior(name: str) -> tuple[float, float]:
    return PRIORS.get(name, TARGET_PRIOR)
