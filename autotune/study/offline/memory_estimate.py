"""Count the bytes of a training step on fake tensors, with nothing allocated and nothing trained."""

from dataclasses import dataclass

from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.candidates import find_smallest
from autotune.planners.space import space_without_stores
from autotune.predict.simulate import simulate
from autotune.records.config import Config


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one training step, counted on fake tensors."""

    workload: str
    """Reference of the workload with its arguments."""
    ops: int
    """Number of ops in the captured step."""
    eager_bytes: int
    """Peak of live tensor bytes in plain eager, at the ends of ATen ops of a warm step. Eager's measured peak is higher by
    the kernels' workspaces and the allocator's rounding, which fake tensors do not have."""
    traced_bytes: int
    """Peak of live tensor bytes of the captured step in its traced order, without workspaces."""
    lowest_bytes: int
    """Peak of the smallest plan that the planners make without a store, without workspaces."""
    lower_bound_bytes: int
    """Proved lower bound on the peak of every plan of this graph."""


def estimate_memory(config: Config) -> MemoryEstimate:
    """Return the bytes of a config's training step in plain eager, as captured, and under the smallest plan.

    Raises ConfigError where the workload cannot be made, and CaptureError where its step cannot be captured.
    """
    from autotune.capture.fake.eager_bytes import count_workload_bytes
    from autotune.capture.fake.fake_workload import load_and_capture
    from autotune.capture.fake.modelled_costs import model_costs

    program = load_and_capture(config.workload, config.arguments, config.loop)
    graph, costs = program.graph, model_costs(program)
    lowest = find_smallest(graph, costs, space_without_stores(config.planners.model_dump(), "cpu")).estimate
    return MemoryEstimate(
        workload=str(config.ref),
        ops=len(graph.ops),
        eager_bytes=count_workload_bytes(config.workload, config.arguments, config.loop),
        traced_bytes=simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes,
        lowest_bytes=lowest.peak_bytes,
        lower_bound_bytes=lowest.lower_bound_bytes,
    )
