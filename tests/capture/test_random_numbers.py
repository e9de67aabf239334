"""A captured step draws what eager draws, in the same order, whether or not anything reads it."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.ir.costs import Costs
from autotune.planners import make_plan
from autotune.runtime.train_step import TrainStep
from tests.capture.twins import Twins
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.kernel_models import Of
from tests.support.small import make


def attention(data: Tensor, p: float = 0.3) -> Tensor:
    return F.scaled_dot_product_attention(data[None], data[None], data[None], dropout_p=p)[0]


def dead_branch(data: Tensor) -> Tensor:
    F.gelu(F.dropout(data, 0.3)) * 2
    return F.dropout(data, 0.5)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dead dropout": lambda x: (F.dropout(x, 0.3), F.dropout(x, 0.5))[1],
    "dead branch": dead_branch,
    "dead attention": lambda x: (attention(x), F.dropout(x))[1],
    "dead rand_like": lambda x: (torch.rand_like(x), F.dropout(x))[1],
    "dead bernoulli": lambda x: (torch.bernoulli(torch.full_like(x, 0.5)), F.dropout(x))[1],
    "dead bernoulli of 0": lambda x: (torch.bernoulli(x, 0.0), F.dropout(x))[1],
    "dead rrelu": lambda x: (F.rrelu(x, 0.1, 0.3, True), F.dropout(x))[1],
    "p = 1": lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.5),
    "p = 0": lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5),
    "empty": lambda x: torch.cat([x, F.dropout(x[:, :0])], 1) + F.dropout(x),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True) + F.alpha_dropout(x, 1.0, True),
    "feature": lambda x: F.dropout1d(x[:, :, None], 0.3)[:, :, 0] + F.feature_alpha_dropout(x, 0.3, True),
    "in place": lambda x: F.dropout(x, 0.3, inplace=True),
    "attention": attention,
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, True),
    "randperm": lambda x: x[torch.randperm(6)] + torch.randn(8),
}


@cache
def twins(name: str) -> Twins:
    return Twins(lambda: make(lambda: Of(DRAWS[name])))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", DRAWS, scope="module")
def test_losses_weights_and_the_generator_are_eagers_after_every_step(name: str, recompute: bool):
    made = twins(name)
    graph = made.graph
    plan = make_plan(graph, {"recompute": {"planner": "greedy"}}, 0, Costs.unit(graph)) if recompute else None
    with made.planned(plan) as step:
        for seed in range(3):
            torch.manual_seed(seed)
            planned, drawn = step(), torch.get_rng_state()
            torch.manual_seed(seed)
            expected, _ = eager_step(made.other)
            assert torch.equal(planned, expected)
            assert torch.equal(drawn, torch.get_rng_state())
    assert worst_difference(tensors(made.one), tensors(made.other)) == 0.0


def test_a_dropout_of_everything_keeps_the_sign_and_the_nan_of_eagers_zeros():
    data = torch.tensor([[-1.0, float("nan"), float("inf"), 1.0, -0.0, 2.0, -2.0, 0.0]]).expand(6, 8)
    bits = []
    for _ in range(2):
        workload = make(
            lambda: Of(torch.relu), loss_fn=lambda model, batch: (model(batch[0]).sum(), F.dropout(batch[1], 1.0))
        )
        batch = (workload.batch[0], data.contiguous())
        if bits:
            bits.append(workload.loss_fn(workload.model, batch)[1])
        else:
            with TrainStep(workload.model, workload.loss_fn, workload.optimizer, batch) as step:
                bits.append(step(batch)[1])
    assert torch.equal(bits[0].view(torch.int32), bits[1].view(torch.int32))
