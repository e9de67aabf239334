"""Orders in which a net may run, with the outcomes of memonger's tests."""

import pytest
from hypothesis import given

from experiments.claims.memonger.sharing.net import Net, NetOp
from experiments.claims.memonger.sharing.orders import depth_first, longest_chain_first
from tests.experiments.memonger.nets import nets, run


def convolutions(*more: NetOp) -> Net:
    """Two convolutions in a row; each of their weights is a copy."""
    ops = (
        NetOp("copy", ("conv0_w_raw",), ("conv0_w",)),
        NetOp("conv", ("conv0_w", "data"), ("conv0",)),
        NetOp("copy", ("conv2_w_raw",), ("conv2_w",)),
        NetOp("conv", ("conv0", "conv2_w"), ("conv2",)),
        *more,
    )
    return Net(ops, ("data", "conv0_w_raw", "conv2_w_raw"))


TWO_ENDS = (NetOp("copy", ("data",), ("aside",)), NetOp("copy", ("aside",), ("end",)))
ALONE = Net((NetOp("copy", ("x",), ("y",)),), ("x",))


@pytest.mark.parametrize(
    ("net", "plain", "longest"),
    [
        (convolutions(), (2, 0, 1, 3), (0, 1, 2, 3)),
        (convolutions(*TWO_ENDS), (4, 5, 2, 0, 1, 3), (0, 1, 2, 3, 4, 5)),
        (ALONE, (0,), (0,)),
    ],
    ids=["one end", "two ends", "one op"],
)
def test_the_longest_chain_comes_first_and_else_what_was_found_last(net, plain, longest):
    assert depth_first(net) == plain
    assert longest_chain_first(net) == longest


@given(nets(12))
def test_a_net_in_either_order_computes_the_same(net):
    for order in (depth_first(net), longest_chain_first(net)):
        assert run(net, order) == run(net)
