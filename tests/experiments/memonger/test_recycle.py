"""Recycling, on nets like those of memonger's tests and of its bugs: fewer blobs, and the same values in any order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.claims.memonger.sharing.net import Net, NetOp, count_bytes
from experiments.claims.memonger.sharing.recycle import PREFIX, recycle, recycle_largest_first
from tests.experiments.memonger.nets import (
    Toy,
    all_orders,
    blobs,
    nets,
    random_bytes,
    renamed,
    run,
    same,
    some_order,
)
from tests.experiments.memonger.test_net import net

rngs = st.randoms(use_true_random=False)


def shared_right(told: Net, names: dict[str, str], orders: int = 20) -> Net:
    """The net with shared blobs, after it was run in many orders that its branches allow before they shared."""
    found = renamed(told, names)
    assert same(told, found)
    assert names.keys() <= told.movable
    made, outputs = run(told)
    rng = random.Random(0)
    for _ in range(orders):
        order = some_order(told, rng)
        assert run(found, order) == (made, outputs)
    return found


def training(toy: Toy, *losses: str) -> Net:
    toy.backward(*losses)
    return toy.net(*losses)


# --- every order, every net


@given(nets(6), rngs)
def test_in_every_order_of_a_small_net_every_op_makes_what_it_made_before(told, rng):
    nbytes = random_bytes(told, rng)
    found = [recycle(told), recycle(told, nbytes=nbytes), recycle_largest_first(told, nbytes)]
    shared = [renamed(told, names) for names in found]
    expected = run(told)
    for order in all_orders(told):
        assert all(run(one, order) == expected for one in shared)


@given(nets(25), rngs)
def test_in_any_order_of_a_larger_net_every_op_makes_what_it_made_before(told, rng):
    nbytes = random_bytes(told, rng)
    shareable = set(rng.sample(sorted(told.touched), rng.randint(0, len(told.touched))))
    for names in (
        recycle(told, shareable),
        recycle(told, shareable, nbytes=nbytes),
        recycle_largest_first(told, nbytes, shareable),
    ):
        assert names.keys() <= shareable
        shared_right(told, names)
        assert count_bytes(nbytes, names) <= count_bytes(nbytes)


@given(nets(25))
def test_a_blob_is_shared_on_one_device_alone(told):
    for names in (recycle(told), recycle_largest_first(told, dict.fromkeys(told.touched, 1))):
        places = {(name, told.device[blob]) for blob, name in names.items()}
        assert len(places) == len(set(names.values()))


@given(nets(25))
def test_a_net_that_shares_already_is_left_as_it_is(told):
    nbytes = dict.fromkeys((*told.inputs, *told.touched), 1)
    for names in (recycle(told), recycle_largest_first(told, nbytes)):
        found = renamed(told, names)
        again = dict.fromkeys((*found.inputs, *found.touched), 1)
        if names:
            assert recycle(found) == recycle_largest_first(found, again) == {}


# --- gradients: memonger's own nets


def test_gradients_of_a_chain_share_and_with_activations_it_takes_no_more_blobs():
    toy = Toy("data", "label")
    out = toy.chain("data", "fc1", "fc2", "fc3", "fc4", "fc5")
    told = training(toy, toy.loss(out))
    gradients = shared_right(told, recycle(told, toy.gradients))
    keep = {out, *toy.activations[-2:]}
    both = shared_right(told, recycle(told, {*toy.gradients, *toy.activations} - keep))
    assert len(blobs(both)) <= len(blobs(gradients)) < len(blobs(told))
    assert out in blobs(gradients) & blobs(both)
    assert set(toy.weight_gradients) <= blobs(both)


def test_the_gradients_of_five_layers_need_two_blobs():
    toy = Toy("data", "label")
    told = training(toy, toy.loss(toy.chain("data", "fc1", "fc2", "fc3", "fc4", "fc5")))
    assert len(set(recycle(told, toy.gradients).values())) == 2


def test_no_blob_lies_on_two_devices_where_a_net_runs_on_both():
    toy = Toy("data", "label")
    toy.device = "gpu"
    trunk = toy.chain("data", "fc1", "fc2", "fc3", "fc4")
    copied = toy.op("copy", [trunk], ["copied"], host=["copied"])
    toy.device = "cpu"
    told = training(toy, toy.loss(toy.chain(copied, "fc5", "fc6", "fc7")))
    names = recycle(told, {*toy.gradients, *toy.activations})
    found = shared_right(told, names)
    assert len(blobs(found)) < len(blobs(told))
    where: dict[str, set[str]] = {}
    for op in told.ops:
        for blob in filter(None, op.outputs):
            where.setdefault(names.get(blob, blob), set()).add("cpu" if blob in op.host else op.device)
    assert set(map(len, where.values())) == {1}
    assert {told.device[blob] for blob in names} == {"cpu", "gpu"}


def test_a_tree_with_two_losses_shares_gradients_and_keeps_what_is_protected():
    toy = Toy("data", "label")
    fc5 = toy.chain("data", "fc1", "fc2", "fc3", "fc4", "fc5")
    fc6 = toy.fc(fc5, "fc6")
    told = training(toy, toy.loss(fc5, "loss1"), toy.loss(fc6, "loss2"))
    found = shared_right(told, recycle(told, {*toy.gradients, *toy.activations} - {fc5, fc6}))
    assert len(blobs(found)) < len(blobs(told))
    assert {fc5, fc6, "loss1", "loss2", *toy.weight_gradients} <= blobs(found)


def lstm(steps: int) -> Toy:
    """Two layers of LSTM cells unrolled: each reads its input, its last state and one weight for all steps."""
    toy = Toy("label", "wx", "wh", *(f"x{t}" for t in range(steps)), *(f"{s}{n}.0" for s in "hc" for n in (0, 1)))
    for t in range(1, steps + 1):
        below = f"x{t - 1}"
        for layer in (0, 1):
            state = [f"h{layer}.{t - 1}", f"c{layer}.{t - 1}"]
            gates = toy.op("gates", [below, state[0], "wx", "wh"], [f"gates{layer}.{t}"])
            below = toy.op("cell", [gates, state[1]], [f"h{layer}.{t}", f"c{layer}.{t}"])
    return toy


def test_an_lstm_of_two_layers_and_five_steps_shares_gradients_and_activations():
    toy = lstm(5)
    told = training(toy, toy.loss("h1.5"))
    gradients = shared_right(told, recycle(told, toy.gradients))
    found = shared_right(told, recycle(told, {*toy.gradients, *toy.activations}))
    assert len(blobs(found)) < len(blobs(gradients)) < len(blobs(told))


# --- inference: trees, branches and joins


def branches(*, new: bool) -> tuple[Net, Toy]:
    """A trunk, two branches of three layers and their sum; a ReLU writes over the sum, of the first branch or of itself."""
    toy = Toy("data", "label")
    trunk = toy.chain("data", "fc1", "fc2")
    first, second = toy.chain(trunk, "a1", "a2", "a3"), toy.chain(trunk, "b1", "b2", "b3")
    total = toy.add(first, second, name="sum")
    result = toy.relu(total, "relu") if new else toy.op("relu", [first], [total])
    losses = toy.loss(toy.fc(result, "fc6"), "loss1"), toy.loss(toy.fc(first, "fc7"), "loss2")
    return toy.net(*losses), toy


@pytest.mark.parametrize("new", [False, True], ids=["over the sum", "to a new blob"])
def test_branches_that_meet_again_run_at_once_in_fewer_blobs(new):
    told, _ = branches(new=new)
    found = shared_right(told, recycle(told), orders=200)
    assert len(blobs(found)) < len(blobs(told))


def test_a_weight_that_an_op_makes_is_one_more_head_and_changes_no_count():
    told, _ = branches(new=True)
    copied = Net(
        (NetOp("copy", ("raw",), ("fc1_w",)), *told.ops), ("raw", *(set(told.inputs) - {"fc1_w"})), told.outputs
    )
    shared = [shared_right(one, recycle(one, told.movable)) for one in (told, copied)]
    assert len(blobs(shared[1])) == len(blobs(shared[0])) + 1


def test_a_branch_does_not_take_what_its_sibling_frees_and_the_join_does():
    told = net("x -> a", "a -> b", "b -> c", "x -> d", "d -> e", "e -> f", "c f -> g", "g -> y", outputs=("y",))
    names = recycle(told)
    assert {names.get(one) for one in "abc"}.isdisjoint({names.get(one) for one in "def"})
    assert names["g"] in {names.get(one) for one in "abcdef"}
    shared_right(told, names)


def test_what_the_first_branch_does_not_use_passes_to_the_next():
    # t and s are free where the branches part: the first takes one of them, the second the other
    told = net("x -> t s", "t s -> u", "u -> a", "u -> b", "a b -> y", outputs=("y",))
    names = recycle(told)
    assert {names["a"], names["b"]} == {names["t"], names["s"]}
    assert len(set(names.values())) == 2


def test_without_sizes_the_blob_with_most_tenants_comes_first():
    # p holds one tenant; q and r, one after the other, are one blob with two; both are free when d is made
    told = net("x -> p q", "q -> m", "m -> r", "p r -> n", "n -> d", "d -> y", outputs=("y",))
    names = recycle(told)
    assert names["d"] == names["q"] == names["r"]


def test_with_sizes_the_tightest_free_blob_is_taken_whatever_their_order():
    told = net("x -> a b", "a b -> c", "c -> d", "d -> y", outputs=("y",))
    for large, small in (("a", "b"), ("b", "a")):
        nbytes = {"x": 1, large: 100, small: 10, "c": 1, "d": 9, "y": 1}
        assert recycle(told, nbytes=nbytes) == {small: PREFIX + "0", "d": PREFIX + "0"}


def test_where_none_is_large_enough_the_one_that_grows_least_is_taken():
    told = net("x -> a b", "a b -> c", "c -> d", "d -> y", outputs=("y",))
    nbytes = {"x": 1, "a": 5, "b": 7, "c": 1, "d": 9, "y": 1}
    names = recycle(told, nbytes=nbytes)
    assert names["d"] == names["b"]
    assert count_bytes(nbytes, names) == count_bytes(nbytes) - 7


def test_the_largest_first_spares_what_a_small_blob_in_a_large_buffer_costs():
    told = net("x -> big", "big -> mid", "mid -> tiny", "mid tiny -> large", "large tiny -> y", outputs=("y",))
    nbytes = {"x": 1, "big": 100, "mid": 50, "tiny": 1, "large": 100, "y": 1}
    assert recycle(told, nbytes=nbytes)["tiny"] == recycle(told, nbytes=nbytes)["big"]
    assert recycle_largest_first(told, nbytes) == {"big": PREFIX + "0", "large": PREFIX + "0"}


def test_no_op_lists_one_output_twice_where_a_value_is_summed_with_itself():
    toy = Toy("data")
    pair = toy.fc("data", "a"), toy.fc("data", "b")
    sums = [toy.add(one, other, name=f"sum{i}{j}") for i, one in enumerate(pair) for j, other in enumerate(pair)]
    joined = toy.op("concat", sums, ["joined", "sizes"], host=["sizes"])
    told = toy.net(toy.relu(joined, "out"))
    found = shared_right(told, recycle(told))
    assert all(len({*filter(None, op.outputs)}) == len([*filter(None, op.outputs)]) for op in found.ops)


# --- what went wrong in memonger once


def test_a_ladder_whose_branches_go_back_and_forth_shares():
    rungs = [f"l{i} r{i} -> l{i + 1}" for i in range(6)], [f"r{i} l{i + 1} -> r{i + 1}" for i in range(6)]
    steps = [step for pair in zip(*rungs, strict=True) for step in pair]
    told = net("x -> l0", "x -> r0", *steps, "l6 r6 -> y", outputs=("y",))
    found = shared_right(told, recycle(told), orders=50)
    assert len(blobs(found)) <= 2 + 3


def test_one_output_in_place_and_one_fresh_of_the_same_op_stay_two_blobs():
    told = Net(
        (*net("x -> a", "a -> b").ops, NetOp("op", ("b",), ("b", "c")), *net("b c -> d", inputs=("b", "c")).ops),
        ("x",),
        ("d",),
    )
    names = recycle(told)
    assert names["c"] == names["a"] != names.get("b", "b")
    shared_right(told, names)


def test_an_op_in_place_stays_in_place_and_another_does_not_become_so():
    told = net("x -> a", "a -> a", "a -> b", "b -> b", "b -> y", outputs=("y",))
    assert recycle(told) == {}
    longer = net("x -> a", "a -> a", "a -> b", "b -> c", "c -> c", "c -> y", outputs=("y",))
    assert set(recycle(longer)) == {"a", "c"}
    shared_right(longer, recycle(longer))


def test_a_blob_is_not_recycled_by_the_op_that_frees_it():
    assert recycle(net("x -> a", "a -> b", "b -> y", outputs=("y",))) == {}
    assert set(recycle(net("x -> a", "a -> b", "b -> c", "c -> y", outputs=("y",)))) == {"a", "c"}


def test_an_input_of_the_net_that_several_ops_read_is_no_blob_to_share():
    told = net("x -> a", "x -> b", "a b x -> c", "c -> d", "x d -> y", outputs=("y",))
    names = recycle(told)
    assert "x" not in names
    assert names["d"] in {names.get("a"), names.get("b")}
    shared_right(told, names)


def test_an_op_waits_for_all_its_producers_before_it_takes_a_blob():
    told = net("x -> a", "x -> b", "b -> c", "a c -> d", "d -> e", "e -> y", outputs=("y",))
    names = recycle(told)
    assert names["e"] in {names.get(one) for one in "abc"}
    shared_right(told, names)


def test_names_begin_with_the_scope_and_an_empty_scope_takes_all():
    steps = [f"{scope}{i} -> {scope}{i + 1}" for scope in ("gpu_0/", "gpu_1/") for i in range(5)]
    told = net(*steps, inputs=("gpu_0/0", "gpu_1/0"), outputs=("gpu_0/5", "gpu_1/5"))
    first = recycle(told, scope="gpu_0/")
    assert {*map(str, first)} == {f"gpu_0/{i}" for i in range(1, 5)}
    assert all(name.startswith("gpu_0/" + PREFIX) for name in first.values())
    second = recycle(renamed(told, first), scope="gpu_1/")
    assert len(blobs(renamed(told, first), second)) == len(blobs(told, recycle(told))) == 8
    assert set(recycle(told)) == {*first, *second}


def test_a_list_of_lengths_on_the_host_takes_no_buffer_of_the_gpu():
    concat = NetOp("concat", ("b", "x"), ("c", "sizes_grad"), "gpu", ("sizes_grad",))
    split = NetOp("split", ("c", "sizes_grad"), ("d",), "gpu")
    gpu = tuple(NetOp(op.kind, op.inputs, op.outputs, "gpu") for op in net("x -> a", "a -> b").ops)
    told = Net((*gpu, concat, split), ("x",), ("d",))
    names = recycle(told)
    assert "sizes_grad" not in names
    assert set(names) == {"a", "c"}


def test_a_mask_that_does_not_exist_is_neither_shared_nor_made():
    dropouts = [NetOp("dropout", (f"a{i}",), (f"a{i + 1}", "")) for i in range(5)]
    told = Net((*net("x -> a0").ops, *dropouts), ("x",), ("a5",))
    for names in (recycle(told), recycle_largest_first(told, dict.fromkeys(told.touched, 1))):
        assert "" not in names
        found = renamed(told, names)
        assert [op.outputs[1] for op in found.ops[1:]] == [""] * 5
        assert len(blobs(found)) < len(blobs(told))
        assert run(found) == run(told)
