"""Nets: what depends on what, when blobs live, and when two nets compute the same."""

from math import inf

import pytest
from hypothesis import given

from autotune.errors import PlanError
from experiments.claims.memonger.sharing.net import ALIAS, Net, NetOp, blob_lives, count_bytes
from experiments.claims.memonger.sharing.objects import Life
from tests.experiments.memonger.nets import nets, renamed, run, same


def ops(*told: str) -> tuple[NetOp, ...]:
    """`x y -> z` for each op."""
    sides = (one.split("->") for one in told)
    return tuple(NetOp("op", tuple(reads.split()), tuple(makes.split())) for reads, makes in sides)


def net(*told: str, inputs: tuple[str, ...] = ("x",), outputs: tuple[str, ...] = ()) -> Net:
    return Net(ops(*told), inputs, outputs)


DIAMOND = ("x -> y", "x -> z", "y z -> w")
BRANCHES = ("x -> y", "x -> z", "y -> u", "z -> v", "u v -> w")


def test_three_copies_in_place_depend_each_on_all_before():
    copies = net("b1 -> b1", "b1 -> b1", "b1 -> b1", inputs=("b1",))
    assert copies.before == (set(), {0}, {0, 1})


def test_a_blob_is_not_written_again_before_those_that_read_it():
    again = net("x -> y", "y -> a", "y -> b", "x -> y")
    assert again.before[3] == {0, 1, 2}
    assert again.before[2] == {0}


def test_a_net_with_other_names_computes_the_same():
    assert same(net(*DIAMOND, outputs=("w",)), net("x -> p", "x -> q", "p q -> w", outputs=("w",)))


def test_a_name_that_two_branches_use_one_after_the_other_changes_nothing():
    plain = net("x -> y", "y -> z", "x -> u", "u -> v", "z v -> w", outputs=("w",))
    assert same(plain, net("x -> y", "y -> z", "x -> y", "y -> v", "z v -> w", outputs=("w",)))


def test_two_branches_that_write_one_name_before_their_join_compute_something_else():
    other = net("x -> y", "x -> y", "y y -> w", outputs=("w",))
    assert not same(net(*DIAMOND, outputs=("w",)), other)


def test_two_branches_that_share_a_name_while_it_is_needed_compute_something_else():
    other = net("x -> y", "x -> y", "y -> u", "y -> v", "u v -> w", outputs=("w",))
    assert not same(net(*BRANCHES, outputs=("w",)), other)
    assert same(net(*BRANCHES, outputs=("w",)), net("x -> a", "x -> b", "a -> c", "b -> d", "c d -> w", outputs=("w",)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (net("x -> y"), net("x -> x")),
        (net("x -> y z"), net("x -> y y")),
        (net("x -> y"), net("x -> y", "y -> z")),
        (net("x -> y", "x -> z", outputs=("y",)), net("x -> z", "x -> y", outputs=("y",))),
        (net("x -> z", inputs=("x", "y")), net("y -> z", inputs=("x", "y"))),
        (net("x -> y"), Net((NetOp("other", ("x",), ("y",)),), ("x",))),
        (net("x -> y"), Net((NetOp("op", ("x",), ("y",), device="gpu"),), ("x",))),
        (net("x -> y"), Net((NetOp("op", ("x",), ("",)),), ("x",))),
    ],
    ids=["in place", "twice", "longer", "output", "input", "kind", "device", "missing"],
)
def test_nets_that_differ_in_what_ops_do_or_read_are_not_the_same(one, other):
    assert not same(one, other)


@given(nets(8), nets(8))
def test_nets_that_are_the_same_compute_the_same(one, other):
    if same(one, other):
        assert run(one) == run(other)
    assert same(one, renamed(one, {name: f"new {name}" for name in one.movable}))


def test_a_blob_lives_until_it_is_last_read_or_written():
    told = net("x -> a", "a -> b", "b -> a", outputs=("b",))
    assert blob_lives(told, {"x": 1, "a": 2, "b": 4}) == (
        Life("x", -inf, inf, 1),
        Life("a", 0, 2, 2),
        Life("b", 1, inf, 4),
    )


def test_what_nobody_reads_lives_to_the_end_and_an_output_that_does_not_exist_is_no_blob():
    told = Net((NetOp("dropout", ("x",), ("y", "")),), ("x",))
    assert blob_lives(told) == (Life("x", -inf, inf, 1), Life("y", 0, inf, 1))


def test_the_callers_blobs_and_those_with_two_names_stay_where_they_are():
    told = net("x -> a", "a -> b", "b -> c", "c -> out", outputs=("out",))
    assert told.movable == {"a", "b", "c"}
    aliased = Net((*told.ops, NetOp(ALIAS, ("b",), ("view",))), told.inputs, told.outputs)
    assert aliased.movable == {"a", "c"}


def test_a_blob_lies_where_it_is_first_written_and_an_op_may_put_one_on_the_host():
    told = Net((NetOp("concat", ("x",), ("y", "sizes"), "gpu", ("sizes",)), NetOp("op", ("y",), ("y",), "cpu")), ("x",))
    assert told.device == {"y": "gpu", "sizes": "cpu"}
    assert renamed(told, {"sizes": "s"}).device == {"y": "gpu", "s": "cpu"}


def test_of_blobs_that_share_the_largest_counts():
    assert count_bytes({"a": 5, "b": 7, "c": 1}) == 13
    assert count_bytes({"a": 5, "b": 7, "c": 1}, {"a": "s", "b": "s"}) == 8


def test_a_net_that_reads_what_nobody_made_is_refused_by_name():
    with pytest.raises(PlanError, match="op reads y, which is no input of the net and no op made yet"):
        net("y -> x", "x -> y")
    with pytest.raises(PlanError, match="nothing makes z, an output of the net"):
        net("x -> y", outputs=("z",))
