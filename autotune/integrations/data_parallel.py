"""Run a planned loss of the model within DistributedDataParallel."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from autotune.runtime.planned_loss import PlannedLoss


def run_in_wrapper(wrapper: DistributedDataParallel, planned: PlannedLoss, batch: Any) -> Any:
    """Return `planned(batch)`, run in the wrapper's forward, which prepares the reduction of the gradients over the ranks."""
    module = wrapper.module
    wrapper.module = planned
    try:
        return wrapper(batch)
    finally:
        wrapper.module = module
