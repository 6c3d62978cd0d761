"""Dinic against two independent oracles on random networks."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow
from weft_aot.partition.maxflow import INFINITY, FlowNetwork


@st.composite
def networks(draw):
    count = draw(st.integers(2, 12))
    vertex = st.integers(0, count - 1)
    edges = draw(st.lists(st.tuples(vertex, vertex, st.integers(0, 20)), max_size=40))
    return count, [(a, b, c) for a, b, c in edges if a != b]


def build(count, edges):
    network = FlowNetwork(count)
    for tail, head, capacity in edges:
        network.add_edge(tail, head, capacity)
    return network


def merged(edges):
    total: dict[tuple[int, int], int] = {}
    for tail, head, capacity in edges:
        total[tail, head] = total.get((tail, head), 0) + capacity
    return total


@settings(max_examples=150, deadline=None)
@given(networks())
def test_flow_equals_networkx_and_scipy(problem):
    count, edges = problem
    ours = build(count, edges).max_flow(0, count - 1)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    matrix = np.zeros((count, count), dtype=np.int32)
    for (tail, head), capacity in merged(edges).items():
        graph.add_edge(tail, head, capacity=capacity)
        matrix[tail, head] = capacity
    assert ours == networkx.maximum_flow_value(graph, 0, count - 1)
    assert ours == maximum_flow(csr_matrix(matrix), 0, count - 1).flow_value


@settings(max_examples=150, deadline=None)
@given(networks())
def test_cut_has_the_value_of_the_flow(problem):
    count, edges = problem
    network = build(count, edges)
    flow = network.max_flow(0, count - 1)
    side = network.source_side(0)
    assert side[0]
    assert not side[count - 1]
    assert sum(c for a, b, c in edges if side[a] and not side[b]) == flow


def test_cut_nearest_to_the_source():
    network = build(4, [(0, 1, 5), (1, 2, 5), (2, 3, 5)])
    assert network.max_flow(0, 3) == 5
    assert network.source_side(0) == [True, False, False, False]


def test_long_chain_needs_no_recursion():
    network = build(20_000, [(i, i + 1, INFINITY if i % 2 else 7) for i in range(19_999)])
    assert network.max_flow(0, 19_999) == 7


def test_capacities_beyond_64_bits():
    network = build(2, [(0, 1, INFINITY)] * 5)
    assert network.max_flow(0, 1) == 5 * INFINITY


def test_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="negative"):
        FlowNetwork(2).add_edge(0, 1, -1)
