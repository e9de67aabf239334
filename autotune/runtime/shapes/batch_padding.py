"""Pad the batches of one training loop to its buckets, once padding is proved to change nothing."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from autotune.capture.program import Program
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.predict.simulate import peak_bytes
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.shapes.padding_check import compare_padded
from autotune.workloads.workload import LossFn


class BatchPadding:
    """The buckets of one loop. Without `buckets` every batch stays as it is."""

    def __init__(self, buckets: Buckets | None, model: torch.nn.Module, loss_fn: LossFn | None) -> None:
        self._buckets, self._model, self._loss_fn = buckets, model, loss_fn
        self._unchecked = set(buckets.sizes) if buckets is not None else set()
        self._spare_bytes = self._sample_bytes = 0.0

    def resize_first(self, batch: Any) -> Any:
        """Return the first batch in the size that the plan belongs to."""
        if self._buckets is None:
            return batch
        self._buckets.measure(batch)  # refuses a batch without the fields
        return self._buckets.resize(batch, self._buckets.largest)

    def check(self, batch: Any, program: Program, plan: Plan, budget_bytes: int) -> None:
        """Compare padded with unpadded steps for each size; warn and pad no batch if padding changes the loss or a gradient.

        Only the first samples of the batch are compared if all of them would need more memory than the plan.

        Args:
            batch: The first batch, as the loop has it.
            program: Step of the largest size.
            plan: Plan of `program`.
            budget_bytes: Budget of the plan's step, static bytes included; 0 for the plan's peak.
        """
        if self._buckets is None:
            return
        self._limit_samples(batch, program, plan, budget_bytes)
        buckets = self._buckets
        for size in buckets.sizes:
            for length in _lengths(buckets, buckets.measure(batch), size):
                if size in self._unchecked and self._buckets is not None:
                    self._compare(buckets, buckets.resize(batch, length), size)

    def other_batches(self, batch: Any) -> Iterator[Any]:
        """Yield the first batch in each size but the largest, to capture the steps of all sizes."""
        if self._buckets is not None:
            yield from (self._buckets.resize(batch, size) for size in self._buckets.sizes[:-1])

    def pad(self, batch: Any) -> Any:
        """Return the batch padded to the next size; the batch itself if all are smaller, or if padding may change the step."""
        buckets = self._buckets
        if buckets is None:
            return batch
        length = buckets.measure(batch)
        size = buckets.choose(length)
        if size is None:
            return batch
        if size in self._unchecked and length < size:
            self._compare(buckets, batch, size)
            if size in self._unchecked:  # nothing was proved
                return batch
        return batch if self._buckets is None else buckets.resize(batch, size)

    def _limit_samples(self, batch: Any, program: Program, plan: Plan, budget_bytes: int) -> None:
        assert self._buckets is not None
        graph, unit = program.graph, Costs.unit(program.graph)
        if not budget_bytes:  # the peak of a plan that offloads depends on its store
            budget_bytes = graph.static_bytes if plan.offload else peak_bytes(graph, plan, unit)
        gradients = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        eager = peak_bytes(graph, Plan.traced(graph), unit) - graph.static_bytes
        self._spare_bytes = budget_bytes - graph.static_bytes - 2 * gradients
        self._sample_bytes = eager / max(1, self._buckets.count_samples(batch)) / self._buckets.largest

    def _compare(self, buckets: Buckets, batch: Any, size: int) -> None:
        """Compare a batch with itself padded to `size`; stop padding if they differ."""
        assert self._loss_fn is not None
        count = max(1, int(self._spare_bytes // max(1.0, self._sample_bytes * size)))
        few = buckets.take_samples(batch, count)
        effect = compare_padded(self._model, self._loss_fn, few, buckets.resize(few, size))
        if not effect.conclusive:
            return
        self._unchecked.discard(size)
        if effect.difference:
            warnings.warn(
                f"a batch padded from {buckets.measure(few)} to {size} is another step: {effect.difference}. No batch is "
                "padded, and other_shapes decides; check the values of pad, or leave padded positions out of the loss",
                stacklevel=4,
            )
            self._buckets = None


def _lengths(buckets: Buckets, available: int, size: int) -> list[int]:
    """Return lengths below `size` to compare at, shortest first: a short eager step needs little memory."""
    lengths = {max(1, 3 * bucket // 4) for bucket in buckets.sizes} | {available}
    return sorted(length for length in lengths if length <= available and length < size)
