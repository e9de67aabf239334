"""Shared buffers for a step's gradients and activations: the bytes of the step in memonger's model."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import PlanError
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import aliased_runs
from experiments.claims.memonger.sharing.net import Net, NetOp, count_bytes
from experiments.claims.memonger.sharing.recycle import recycle, recycle_largest_first


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """Values by shared buffer, correct for every order in which the step's ops may run.

    Bytes are of the whole step: parameters, state, buffers, batch and all results of the step.
    """

    unshared_bytes: int
    """Bytes with every value in a buffer of its own, except in-place results."""
    shared_bytes: int
    buffers: Mapping[int, str]
    """Name of the buffer of each value that shares one."""

    @property
    def saving(self) -> float:
        """Share of the unshared bytes that sharing saves."""
        return 1 - self.shared_bytes / self.unshared_bytes if self.unshared_bytes else 0.0


def share_buffers(graph: TrainGraph, plan: Plan | None = None, *, activations: bool = False) -> SharedBuffers:
    """Let gradients share buffers, except those of parameters; with `activations` also all results of forward.

    An inference step has no gradients: without `activations` it shares nothing. Values that outlive the step do not share.
    """
    net, blobs = build_net(graph, plan)
    nbytes = blob_bytes(graph, blobs)
    sharing_values = find_gradients(graph) | find_forward_values(graph) if activations else find_gradients(graph)
    shareable = frozenset(blobs) - {blobs[value.id] for value in graph.values if value.id not in sharing_values}
    candidates = (recycle(net, shareable, nbytes=nbytes), recycle_largest_first(net, nbytes, shareable))
    names = min(candidates, key=lambda names: count_bytes(nbytes, names))
    return SharedBuffers(
        count_bytes(nbytes),
        count_bytes(nbytes, names),
        {value: names[blob] for value, blob in enumerate(blobs) if blob in names},
    )


def find_gradients(graph: TrainGraph) -> frozenset[int]:
    """Return the values that backward makes for itself; gradients of parameters belong to the optimizer."""
    return frozenset(
        value
        for op in graph.ops
        if op.phase is Phase.BACKWARD
        for value in op.outputs
        if graph.values[value].role is not Role.GRAD
    )


def find_forward_values(graph: TrainGraph) -> frozenset[int]:
    """Return the values that forward makes."""
    return frozenset(value for op in graph.ops if op.phase is Phase.FORWARD for value in op.outputs)


def build_net(graph: TrainGraph, plan: Plan | None = None) -> tuple[Net, tuple[str, ...]]:
    """Return the graph in a plan's order as a net of blobs, and the blob of each value.

    An in-place result has the blob of its input. PlanError: the plan recomputes or offloads.
    """
    plan = plan or Plan.traced(graph)
    if plan.recomputed or plan.offload:
        raise PlanError("buffers are shared where every op runs once and no value leaves: give the plan before those")
    blobs = [f"{value.name}:{value.id}" for value in graph.values]
    reused = aliased_runs(graph, plan.order) | {inplace.position: inplace.value for inplace in plan.inplace}
    for position, value in sorted(reused.items()):
        blobs[graph.ops[plan.order[position]].outputs[0]] = blobs[value]
    ops = []
    for number in plan.order:
        op = graph.ops[number]
        inputs, outputs = dict.fromkeys((*op.inputs, *op.writes)), (*op.outputs, *op.writes)
        ops.append(NetOp(op.target, tuple(blobs[v] for v in inputs), tuple(blobs[v] for v in outputs)))
    inputs_of_net, outputs_of_net = (
        tuple(blobs[value] for value in values) for values in (graph.inputs, graph.outputs)
    )
    return Net(tuple(ops), inputs_of_net, outputs_of_net), tuple(blobs)


def blob_bytes(graph: TrainGraph, blobs: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes of each blob."""
    return {blobs[value.id]: value.nbytes for value in graph.values}
