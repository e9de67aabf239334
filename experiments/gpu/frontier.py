"""Measure plans beside eager and PyTorch's own ways to save memory, in one process on one GPU.

`python -m experiments.gpu.frontier MODEL [--arguments JSON] --out FILE [--lock FILE] [--seconds S]`

Every variant is prepared first: ours on ATen's kernels and on compiled regions for shares of the traced step's bytes, some
of them in CUDA graphs, plans that offload to the host's memory, and the peers. Then all run in turns, a few steps each, in
rounds of different orders. Eager runs before every two others and at the end of a round; ratios are to the eager blocks
beside a variant. Bytes are those that PyTorch's allocator counts: what the variant holds between two steps, plus the rise
within a step; a step in CUDA graphs adds the memory of its graphs. Several models may be prepared side by side: with
`--lock` each waits with its measurements until no other one prepares or measures.
"""

import argparse
import contextlib
import fcntl
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from autotune.capture.optimizers.optimizer_copy import collect_state_tensors
from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.kernels.region_program import compile_regions, with_kernels
from autotune.measure.interleaving import EAGER, pair_with_baseline, ratios_to_baseline, turn_order
from autotune.planners import KINDS, make_plan
from autotune.planners.auto import best_plan
from autotune.planners.space import build_space, preset_settings
from autotune.predict.simulate import simulate
from autotune.records.run_dir import write_json
from autotune.runtime.executor import Executor
from autotune.runtime.gpu.cuda_recorder import CudaRecorder
from autotune.runtime.gpu.graphed_step import WARM_UP_STEPS, GraphRecorder
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.op_profiler import profile
from autotune.runtime.stores import measure_stores, open_store
from autotune.study.verdicts.statistics import median_interval
from autotune.workloads.batch import batch_tensors, map_batch
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from experiments.gpu import peers

Figures = dict[str, Any]
KERNELS = ("inductor", "")
"""Kernels of our plans: compiled regions, and eager's."""
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35)
"""Budgets of plans, as shares of the traced step's bytes."""
GRAPHED = (1.0, 0.5)
"""Budgets of the plans that also run in CUDA graphs."""
PEERS = ("checkpoint", "inductor 1", "inductor 0.5", "save_on_cpu", "inductor 0.1")
ALSO = (EAGER, "inductor 1")
"""Peers that are also measured with other arguments."""
WINDOWS = (1, 2, 4, 8)
"""Offload windows N."""
PLAN_SECONDS = 10.0
"""Maximum duration of the search for one plan."""
COMPILE_THREADS = 8
"""Number of Triton's compilers at a time."""
ROUNDS = 8
STEPS = 2
"""Timed steps of a variant in one round, after one that is not timed."""


@dataclass
class Variant:
    """One way to run the step."""

    step: Callable[[], Any]
    static: Callable[[], list[torch.Tensor]]
    """Returns the tensors that live between two steps."""
    drop_gradients: Callable[[], Any]
    figures: Figures = field(default_factory=dict)
    graphs: Callable[[], int] | None = None
    """Returns the number of CUDA graphs of a step; None for a step without."""


class Session:
    """Variants of one model, and the time until which further ones are prepared."""

    def __init__(self, model: str, arguments: Figures, device: torch.device, stores: Mapping[str, Path]) -> None:
        self.model, self.arguments, self.device, self.stores = model, arguments, device, stores
        self.end = float("inf")
        self.stack = contextlib.ExitStack()
        """Open stores."""
        self.variants: dict[str, Variant] = {}
        self.blocks: list[Figures] = []
        """Round, variant and mean seconds of the timed steps of each block, in the order in which they ran."""
        self.failures: dict[str, str] = {}
        self.prepared: dict[str, float] = {}
        """Seconds that each part's preparation took."""

    def prepare(self, name: str, work: Callable[[], None]) -> None:
        """Prepare a part; one that fails is a finding, and the next ones may still be of use."""
        if time.monotonic() > self.end:
            self.failures[name] = "not prepared: no time was left"
            return
        begin = time.monotonic()
        try:
            work()
        except Exception as error:  # noqa: BLE001
            self.failures[name] = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"
        self.prepared[name] = round(time.monotonic() - begin, 2)
        print(f"{self.model}: {name} {self.prepared[name]} s {self.failures.get(name, '')[:300]}", file=sys.stderr)

    def workload(self, make: Callable[..., Workload], **arguments: Any) -> Workload:
        """Make a workload on the session's device."""
        torch.manual_seed(0)
        workload = make(**arguments)
        workload.model.to(self.device)
        workload.batch = map_batch(lambda leaf: leaf.to(self.device), workload.batch)
        return workload

    def add_peer(self, name: str, also: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Add plain eager, or a peer; with other arguments it has them in its name."""
        workload = self.workload(partial(peers.workload, name, self.model), **(self.arguments | dict(also)))
        if self.device.type == "cuda":
            torch._inductor.config.compile_threads = COMPILE_THREADS  # no process of the compiler is charged on a GPU
        self.add(
            " ".join((name, *(f"{argument}={value}" for argument, value in also.items()))),
            Variant(partial(eager_step, workload), partial(static_tensors, workload), workload.model.zero_grad),
        )

    def add_ours(self, kernels: str, make_recorder: Callable[[], GraphRecorder]) -> None:
        """Add plans for shares of the traced step's bytes on these kernels; on eager's also plans that offload."""
        workload = self.workload(ZOO[self.model], **self.arguments)
        program = with_kernels(capture(workload), kernels)
        compile_regions(program)
        costs = profile(program)
        graph, peak = program.graph, traced_bytes(program, costs)
        for share in SHARES:
            budget_bytes = int(share * peak)
            name = f"ours {kernels or 'aten'} {share:g}"
            plan = best_plan(graph, costs, budget_bytes, accept_first=True, seconds=PLAN_SECONDS).plan
            self.add_plan(name, workload, program, costs, plan, budget_bytes=budget_bytes)
            if share in GRAPHED:
                executor = Executor(program, lower(graph, plan), make_recorder=make_recorder)
                self.add_plan(f"{name} graphs", workload, program, costs, plan, executor=executor)
        if not kernels:
            for store, directory in self.stores.items():
                self.prepare(store, partial(self.add_windows, workload, program, costs, store, directory))

    def add_windows(self, workload: Workload, program: Program, costs: Costs, store: str, directory: Path) -> None:
        """Add plans that offload what leaves a window of N layers."""
        costs = measure_stores(costs, {store: directory}, self.device.type)
        peak = traced_bytes(program, costs)
        for window in WINDOWS:
            settings = preset_settings(KINDS, build_space(KINDS, costs.stores), {"offload": "window"})
            settings["offload"] |= {"window": window, "store": store}
            plan = make_plan(program.graph, settings, peak // 2, costs)
            schedule = lower(program.graph, plan)
            slots = slot_sizes(program, schedule)
            executor = Executor(
                program, schedule, self.stack.enter_context(open_store(store, directory, slots, self.device.type))
            )
            figures = {"budget_bytes": peak // 2, "swapped_bytes": sum(slots.values())}
            self.add_plan(f"ours {store} window {window}", workload, program, costs, plan, executor=executor, **figures)

    def add_plan(
        self, name: str, workload: Workload, program: Program, costs: Costs, plan: Plan,
        *, executor: Executor | None = None, **figures: Any,
    ) -> None:  # fmt: skip
        """Add a plan with its predictions."""
        estimate = simulate(program.graph, lower(program.graph, plan), costs)
        executor = executor or Executor(program, lower(program.graph, plan))
        predicted = {"predicted_bytes": estimate.peak_bytes, "predicted_seconds": estimate.seconds}
        predicted |= {"recomputed": len(plan.order) - len(program.graph.ops), "swaps": len(plan.offload)}
        graphed = executor.graphed
        variant = Variant(
            partial(planned_step, program, executor, batch_tensors(workload.batch)),
            partial(static_tensors, workload),
            workload.model.zero_grad,
            predicted | figures,
            None if graphed is None else lambda: graphed.graphs,
        )
        self.add(name, variant)

    def add(self, name: str, variant: Variant) -> None:
        """Add a variant after its first step, which compiles; what is measured later is warm."""
        variant.step()
        variant.drop_gradients()
        self.variants[name] = variant

    def measure(self, save: Callable[[Figures], object], seconds: float) -> None:
        """Measure the bytes of each variant, then the seconds of all in rounds; save after each round within the seconds.

        In each round every variant runs a block, in another order, between two blocks of eager.
        """
        self.end, end = float("inf"), time.monotonic() + seconds
        for name in list(self.variants):
            self.prepare(f"{name}: bytes", partial(self._measure_bytes, self.variants[name]))
            if f"{name}: bytes" in self.failures:
                del self.variants[name]
        others = [name for name in self.variants if name != EAGER]
        for number in range(ROUNDS):
            for name in [*turn_order(others, number), EAGER]:
                if name in self.variants:  # eager may have failed
                    block_seconds = time_block(self.variants[name], self.device)
                    self.blocks.append({"round": number, "variant": name, "seconds": [block_seconds]})
            save(self.figures())
            if time.monotonic() > end:
                break

    def _measure_bytes(self, variant: Variant) -> None:
        reserved = 0
        for _ in range(2 if variant.graphs is None else WARM_UP_STEPS + 2):
            if variant.graphs is not None and variant.graphs() == 0:
                variant.drop_gradients()
                reserved = reserved_bytes(self.device)
            variant.step()
        variant.drop_gradients()
        static = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in variant.static()}
        held = sum(static.values())
        if variant.graphs is not None:
            variant.figures["graphs"] = variant.graphs()
            held += reserved_bytes(self.device) - reserved
        variant.figures |= {"static_bytes": sum(static.values()), "bytes": held + rise(variant.step, self.device)}
        variant.drop_gradients()

    def figures(self) -> Figures:
        """Return all figures; a ratio is a block's seconds over those of eager's blocks right before and after it."""
        blocks = [(block["variant"], block["seconds"]) for block in self.blocks]
        rounds = len({block["round"] for block in self.blocks})
        eager = self.variants.get(EAGER)
        rows = {}
        for name, variant in self.variants.items():
            seconds = [value for other, values in blocks if other == name for value in values]
            rows[name] = variant.figures | {"seconds": statistics.median(seconds), "rounds": rounds}
            if eager is not None:
                # eager has several blocks in a round, which are no further samples of its ratio to itself
                ratios = [1.0] * rounds if name == EAGER else ratios_to_baseline(pair_with_baseline(blocks, name))
                interval = median_interval(ratios)
                rows[name] |= {"time_ratio": interval.middle, "interval": [interval.low, interval.high]}
                rows[name]["confidence"] = interval.confidence
                rows[name]["bytes_ratio"] = variant.figures["bytes"] / eager.figures["bytes"]
        return {
            "arguments": self.arguments,
            "variants": rows,
            "blocks": list(self.blocks),
            "failures": self.failures,
            "prepared": self.prepared,
        }


def time_block(variant: Variant, device: torch.device) -> float:
    """Run a block of steps and return the mean seconds of those that are timed."""
    variant.step()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        variant.step()
    synchronize(device)
    seconds = (time.perf_counter() - begin) / STEPS
    variant.drop_gradients()
    return seconds


def eager_step(workload: Workload) -> torch.Tensor:
    """Run one plain step."""
    assert workload.optimizer is not None
    assert workload.loss_fn is not None
    workload.optimizer.zero_grad(set_to_none=True)
    result = workload.loss_fn(workload.model, workload.batch)
    loss: torch.Tensor = result[0] if isinstance(result, tuple) else result
    loss.backward()
    workload.optimizer.step()
    return loss.detach()


def planned_step(program: Program, executor: Executor, batch: list[torch.Tensor]) -> Any:
    """Run one step of a plan."""
    assert program.updates is not None
    with program.updates.step():
        return executor(batch)


def static_tensors(workload: Workload) -> list[torch.Tensor]:
    """Return what lives between two steps."""
    assert workload.optimizer is not None
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *batch_tensors(workload.batch)]
    tensors += collect_state_tensors(workload.optimizer)
    return [tensor for tensor in tensors if tensor.device.type == batch_tensors(workload.batch)[0].device.type]


def traced_bytes(program: Program, costs: Costs) -> int:
    """Return the predicted peak of the step as it was traced."""
    graph = program.graph
    return simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes


def rise(step: Callable[[], Any], device: torch.device) -> int:
    """Return by how many bytes the allocator's count rises within a step; 0 on a CPU."""
    if device.type != "cuda":
        step()
        return 0
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that the allocator cannot give back, those of CUDA graphs among them."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def shared_lock(path: Path | None) -> Iterator[Callable[[], None]]:
    """Hold a lock that others may hold, too; the function that is returned waits until no other process holds it."""
    if path is None:
        yield lambda: None
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield lambda: fcntl.flock(file, fcntl.LOCK_EX)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one model on the current GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--arguments", type=json.loads, default={}, help="arguments of the zoo workload, as JSON")
    parser.add_argument(
        "--also",
        type=json.loads,
        default={},
        help="other arguments, as JSON, with which eager and torch.compile are measured, too",
    )
    parser.add_argument("--out", type=Path, required=True, help="file of the figures")
    parser.add_argument("--lock", type=Path, help="file that is locked while this process measures")
    parser.add_argument(
        "--seconds",
        type=float,
        default=240.0,
        help="time after which nothing more is prepared; a third of it is for rounds",
    )
    parser.add_argument("--ssd", type=Path, help="directory of an SSD, to measure windows on it, too")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    stores = {"host": Path()} if device.type == "cuda" else {}
    stores |= {} if options.ssd is None else {"ssd": options.ssd}

    def save(figures: Figures) -> None:
        write_json(options.out, figures)

    with shared_lock(options.lock) as wait_until_alone:
        session = Session(options.model, options.arguments, device, stores)
        run(session, save, options.seconds, partial(CudaRecorder, device), wait_until_alone, also=options.also)
    return 0


def run(
    session: Session,
    save: Callable[[Figures], object],
    seconds: float,
    make_recorder: Callable[[], GraphRecorder],
    wait_until_alone: Callable[[], object] = lambda: None,
    *,
    also: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Prepare and measure all variants of a model, within about one and a half times the seconds."""
    session.end = time.monotonic() + seconds
    with session.stack:
        session.prepare(EAGER, partial(session.add_peer, EAGER))
        for peer in PEERS[:2]:
            session.prepare(peer, partial(session.add_peer, peer))
        if also:
            for peer in ALSO:
                session.prepare(f"{peer} {dict(also)}", partial(session.add_peer, peer, also))
        for kernels in KERNELS:
            session.prepare(kernels or "aten", partial(session.add_ours, kernels, make_recorder))
            if kernels == KERNELS[0]:  # eager's kernels come last, as they prepare the plans that offload, too
                for peer in PEERS[2:]:
                    session.prepare(peer, partial(session.add_peer, peer))
        wait_until_alone()
        session.measure(save, seconds / 3)


if __name__ == "__main__":
    sys.exit(main())
