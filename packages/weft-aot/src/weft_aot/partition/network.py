"""The min-cut problem whose solution is what to save.

Picture a value's life as water running from the forward to the backward. The source stands for
"the forward has computed this", the sink for "the backward needs this". Every node that the
backward might want becomes two vertices, *in* and *out*, joined by an edge whose capacity is the
cost of saving the node: that edge is the node's only door. A node and each of its users are joined
by an edge of infinite capacity from the node's out to the user's in.

    source  --inf-->  in of every input, and of every node that must not be computed twice
    in(n)   --cost->  out(n)          cutting it = saving n
    out(n)  --inf-->  in(user)        the user is computed from n
    in(n)   --inf-->  sink            for every node that depends on a tangent

Only finite edges can be cut, so a minimum cut picks the cheapest set of values from which the
backward can compute everything else that it needs. A cheap op below the cut runs again in the
backward; an op tied to the source cannot, because water would flow around any cut below it, so
it or something computed from it is saved. Of the minimum cuts the one nearest to the source is
taken: a base rather than its views, the input of a cheap op rather than its output. Inputs that
are copied in any case cost nothing, so they are always cut.
"""

from __future__ import annotations

from torch import fx
from weft_core.tracing import IN_FORWARD

from weft_aot.partition.classify import Classes
from weft_aot.partition.maxflow import INFINITY, FlowNetwork
from weft_aot.partition.policy import Policy

_SOURCE, _SINK = 0, 1


def choose_saved(classes: Classes, policy: Policy) -> list[fx.Node]:
    """The nodes to save, in graph order.

    Raises:
        AssertionError: the cut would be infinite, which no joint graph allows.
    """
    found = classes.wanted - classes.backward | classes.copied
    wanted = [node for node in classes.order if node in found]
    vertex = {node: 2 + 2 * i for i, node in enumerate(wanted)}
    network = FlowNetwork(2 + 2 * len(wanted))
    inputs = set(classes.inputs)
    gradients = set(classes.gradients)
    for node in wanted:
        entry, leave = vertex[node], vertex[node] + 1
        cost = 0 if node in classes.copied else policy.cost(node)
        network.add_edge(entry, leave, INFINITY if cost is None else cost)
        once = IN_FORWARD in node.meta or (
            node in classes.forward and not policy.recomputable(node)
        )
        if node in inputs or once:
            network.add_edge(_SOURCE, entry, INFINITY)
        if node in gradients:
            network.add_edge(leave, _SINK, INFINITY)
        for user in node.users:
            if user in vertex:
                network.add_edge(leave, vertex[user], INFINITY)
            elif user in classes.backward and user in classes.wanted:
                network.add_edge(leave, _SINK, INFINITY)
    flow = network.max_flow(_SOURCE, _SINK)
    assert flow < INFINITY, "a value that cannot be saved is needed in the backward"
    reached = network.source_side(_SOURCE)
    return [node for node in wanted if reached[vertex[node]] and not reached[vertex[node] + 1]]
