import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.predict.min_cut import UNCUTTABLE, Network


def cost(edges: list[tuple[int, int, int]], side: tuple[bool, ...]) -> int:
    return sum(capacity for tail, head, capacity in edges if side[tail] and not side[head])


def test_a_chain_is_cut_at_its_thinnest_edge_the_last_of_equals():
    network = Network()
    a, b = network.add_node(), network.add_node()
    for tail, head, capacity in [(0, a, 3), (a, b, 2), (b, 1, 2)]:
        network.add_edge(tail, head, capacity)
    assert network.min_cut() == [True, False, True, True]


def test_an_edge_that_no_cut_may_take_binds_its_ends():
    network = Network()
    a, b = network.add_node(), network.add_node()
    for tail, head, capacity in [(0, a, 3), (a, b, UNCUTTABLE), (b, 1, 4)]:
        network.add_edge(tail, head, capacity)
    assert network.min_cut() == [True, False, False, False]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_no_other_cut_is_cheaper_and_of_the_cheapest_it_holds_all(rng: random.Random):
    count = rng.randint(2, 7)
    network = Network()
    for _ in range(count - 2):
        network.add_node()
    edges = []
    for _ in range(rng.randint(0, 14)):
        tail, head = rng.sample(range(count), 2)
        edges.append((tail, head, rng.choice([0, 1, 2, 5])))
        network.add_edge(*edges[-1])
    sides = network.min_cut()
    every = [(True, False, *rest) for rest in itertools.product([True, False], repeat=count - 2)]
    least = min(cost(edges, side) for side in every)
    assert cost(edges, tuple(sides)) == least
    cheapest = [side for side in every if cost(edges, side) == least]
    assert sides == [any(side[node] for side in cheapest) for node in range(count)]


def test_one_round_fills_all_paths_through_a_shared_node(monkeypatch: pytest.MonkeyPatch):
    network = Network()
    middle = network.add_node()
    for capacity in range(1, 201):
        node = network.add_node()
        network.add_edge(0, node, capacity)
        network.add_edge(node, middle, UNCUTTABLE)
    network.add_edge(middle, 1, UNCUTTABLE)
    rounds: list[list[int]] = []
    levels = Network._levels
    monkeypatch.setattr(Network, "_levels", lambda self: (rounds.append(levels(self)), rounds[-1])[1])
    assert network.min_cut().count(True) == 1
    assert len(rounds) == 2, "the second one finds no path"
