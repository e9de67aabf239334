"""Share the buffers of a step's gradients, and of its activations: how many bytes memonger's model takes for the step."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import PlanError
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import handed_over
from experiments.memonger.sharing.net import Net, NetOp, held_bytes
from experiments.memonger.sharing.recycle import recycle, recycle_largest_first


@dataclass(frozen=True, slots=True)
class Shared:
    """Who shares a buffer with whom, right for every order in which the step's ops may run.

    Bytes are of the whole step: parameters, state, buffers, batch and all that the step makes.
    """

    unshared_bytes: int
    """Every value in a buffer of its own, unless it is made in place."""
    shared_bytes: int
    buffers: Mapping[int, str]
    """Per value that shares the name of its buffer."""

    @property
    def saving(self) -> float:
        """The part of the unshared bytes that sharing saves."""
        return 1 - self.shared_bytes / self.unshared_bytes if self.unshared_bytes else 0.0


def share(graph: TrainGraph, plan: Plan | None = None, *, activations: bool = False) -> Shared:
    """Let gradients share buffers, parameters' own apart; with `activations` also all that forward makes.

    An inference step has no gradients: without `activations` nothing of it is shared. What outlives the step is not.
    """
    net, blobs = net_of(graph, plan)
    nbytes = blob_bytes(graph, blobs)
    wanted = gradients(graph) | made_forward(graph) if activations else gradients(graph)
    shareable = frozenset(blobs) - {blobs[value.id] for value in graph.values if value.id not in wanted}
    found = (recycle(net, shareable, nbytes=nbytes), recycle_largest_first(net, nbytes, shareable))
    names = min(found, key=lambda names: held_bytes(nbytes, names))
    return Shared(
        held_bytes(nbytes),
        held_bytes(nbytes, names),
        {value: names[blob] for value, blob in enumerate(blobs) if blob in names},
    )


def gradients(graph: TrainGraph) -> frozenset[int]:
    """Values that backward makes for itself; the gradients of parameters are the optimizer's."""
    return frozenset(
        value
        for op in graph.ops
        if op.phase is Phase.BACKWARD
        for value in op.outputs
        if graph.values[value].role is not Role.GRAD
    )


def made_forward(graph: TrainGraph) -> frozenset[int]:
    """Values that forward makes, whether backward reads them or not."""
    return frozenset(value for op in graph.ops if op.phase is Phase.FORWARD for value in op.outputs)


def net_of(graph: TrainGraph, plan: Plan | None = None) -> tuple[Net, tuple[str, ...]]:
    """The graph, in a plan's order, as a net of blobs, and per value its blob: what is made in place has its input's."""
    plan = plan or Plan.traced(graph)
    if plan.recomputed or plan.offload:
        raise PlanError("buffers are shared where every op runs once and no value leaves: give the plan before those")
    blobs = [f"{value.name}:{value.id}" for value in graph.values]
    taken = handed_over(graph, plan.order) | {made.position: made.value for made in plan.inplace}
    for position, value in sorted(taken.items()):
        blobs[graph.ops[plan.order[position]].outputs[0]] = blobs[value]
    ops = []
    for number in plan.order:
        op = graph.ops[number]
        inputs, outputs = dict.fromkeys((*op.inputs, *op.writes)), (*op.outputs, *op.writes)
        ops.append(NetOp(op.target, tuple(blobs[v] for v in inputs), tuple(blobs[v] for v in outputs)))
    own, wanted = (tuple(blobs[value] for value in values) for values in (graph.inputs, graph.outputs))
    return Net(tuple(ops), own, wanted), tuple(blobs)


def blob_bytes(graph: TrainGraph, blobs: tuple[str, ...]) -> dict[str, int]:
    """Per blob its bytes."""
    return {blobs[value.id]: value.nbytes for value in graph.values}
