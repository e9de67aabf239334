"""A captured step calls the kernels that eager calls, and ends at eager's bits."""

from collections import Counter
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autotune.capture.eager_kernels import eager_kernels
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from autotune.workloads.zoo import ZOO
from tests.capture.twins import Beside, run_beside
from tests.support.eager import assert_equals_eager, eager_step
from tests.support.kernel_counts import ALLOWED, other_layouts, unexplained
from tests.support.kernel_models import MODELS, Of, square_loss
from tests.support.small import make
from tests.support.value_bytes import too_small
from tests.workloads.zoo.tiny import TINY


def of(name: str) -> Workload:
    if name in ZOO:
        return ZOO[name](**TINY[name])
    model, shape = MODELS[name]
    return make(model, shape, loss_fn=square_loss)


@cache
def beside(name: str) -> Beside:
    """All claims on a model look at the same steps: a capture takes longer than they do."""
    return run_beside(partial(of, name))


SLOW = ("resnet50", "mobilenet_v2", "segformer", "vit", "bert")
READY = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name in TINY
    if name != "resnet152"  # as small as this, it is resnet50
]


@pytest.mark.parametrize("name", [*MODELS, *READY], scope="module")
def test_the_kernels_of_a_step_are_eagers_but_for_the_listed_differences(name: str):
    made = beside(name)
    assert made.eager.counts
    assert unexplained(made.eager.counts, made.traced.counts, name) == {}
    assert other_layouts(made.eager, made.traced, name) == []


@pytest.mark.parametrize("name", MODELS, scope="module")
def test_three_steps_end_at_eagers_bits(name: str):
    beside(name).assert_equal()


@pytest.mark.parametrize("name", MODELS, scope="module")
def test_no_kernel_allocates_more_for_a_value_than_the_graph_has(name: str):
    assert too_small(beside(name).twins.program) == []


def test_a_kernel_that_eager_does_not_run_is_reported():
    assert unexplained(Counter({"mul": 1}), Counter({"mul": 1, "index_put": 2})) == {"index_put": (0, 2)}
    assert all(ALLOWED.values())


def test_an_upsampling_is_one_kernel_each_way():
    targets = [op.target for op in beside("unet_nearest").twins.graph.ops]
    assert targets.count("aten.upsample_nearest2d.vec") + targets.count("aten.upsample_nearest2d.default") == 1
    assert [target for target in targets if "index" in target and "max_pool" not in target] == []


class Patches(nn.Module):
    """A convolution over transposed data, whose gradient lies otherwise than its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.reduce = nn.Linear(4, 8), nn.Conv2d(8, 8, 2, stride=2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        lifted = self.lift(data).transpose(1, 2)
        return self.reduce(lifted.reshape(lifted.shape[0], 8, 4, 4)).flatten(1)


def test_a_gradient_that_is_kept_lies_as_backward_leaves_it():
    # clipping adds up in the order of memory, so other strides are another norm
    strides: dict[str, list[tuple[int, ...]]] = {"eager": [], "planned": []}
    eager, planned = (make(Patches, (2, 16, 4), loss_fn=square_loss) for _ in range(2))
    eager.loss_fn(eager.model, eager.batch).backward()
    strides["eager"] = [parameter.grad.stride() for parameter in eager.model.parameters()]

    def look() -> None:
        strides["planned"] = [parameter.grad.stride() for parameter in planned.model.parameters()]

    with TrainStep(planned.model, planned.loss_fn, planned.optimizer, planned.batch, before_update=look) as step:
        step(planned.batch)
    assert strides["planned"] == strides["eager"]


def test_views_of_one_sample_have_the_strides_of_the_kernel():
    # a linear layer over contiguous data is another kernel, and torch's fake view says it is contiguous
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Linear(4, 4)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            image = data.transpose(1, 2).view(1, 4, 2, 2)
            return self.last(F.gelu(self.first(image).flatten(2).transpose(1, 2)))

    made = run_beside(partial(make, Swapped, (1, 4, 4), loss_fn=square_loss))
    assert unexplained(made.eager.counts, made.traced.counts) == {}
    assert other_layouts(made.eager, made.traced) == []


def test_decompositions_are_back_after_a_capture_that_fails():
    op = torch.ops.aten.upsample_nearest2d.vec
    before = dict(op.py_kernels)

    def fail() -> None:
        with eager_kernels():
            assert op.py_kernels.keys() != before.keys()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert op.py_kernels == before


# one_hot and assertions


def one_hot_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), F.one_hot(batch[1], 4).float())


def asserting_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    made = model(batch[0])
    torch._assert_async((batch[0] < 100).all(), "too large")
    return made.square().mean()


@pytest.mark.parametrize("loss_fn", [one_hot_loss, asserting_loss])
def test_one_hot_and_assertions_are_captured_and_equal_eager(loss_fn):
    workloads = [make(lambda: Of(torch.relu), loss_fn=loss_fn) for _ in range(2)]
    assert_equals_eager(*workloads, steps=3)


def test_a_class_out_of_range_raises_an_error_as_eager_does():
    workload, other = (make(lambda: Of(torch.relu), loss_fn=one_hot_loss) for _ in range(2))
    other.batch = workload.batch[0], workload.batch[1] + 10
    with pytest.raises(RuntimeError, match="Class values must be smaller than num_classes"):
        eager_step(other)
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch)
    with step, pytest.raises(RuntimeError, match="index 11 is out of bounds for dimension 1 with size 4"):
        step(other.batch)


def test_a_false_assertion_raises_in_the_captured_step():
    workload = make(lambda: Of(torch.relu), loss_fn=asserting_loss)
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch) as step:
        step(workload.batch)
        with pytest.raises(RuntimeError, match="too large"):
            step((workload.batch[0] + 1000, workload.batch[1]))


def test_a_linear_solve_keeps_its_check_and_eagers_bits() -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = model(batch[0])
        return torch.linalg.solve(hidden.T @ hidden + torch.eye(4), hidden.T).sum()

    assert_equals_eager(*(make(lambda: nn.Linear(8, 4), loss_fn=loss) for _ in range(2)))
    singular = make(
        lambda: nn.Linear(8, 4),
        loss_fn=lambda model, batch: torch.linalg.solve(0 * model(batch[0])[:4], torch.eye(4)).sum(),
    )
    with (
        TrainStep(singular.model, singular.loss_fn, singular.optimizer, singular.batch) as step,
        pytest.raises(RuntimeError, match="singular"),
    ):
        step(singular.batch)
