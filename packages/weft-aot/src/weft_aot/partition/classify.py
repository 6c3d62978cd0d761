"""Which side of the cut each node of a joint graph may live on.

    forward     needed for a forward value, or must run though unused (effects, errors)
    backward    depends on a tangent: must run in the backward
    free        neither: a value only the backward wants, computable on either side

A forward node may run a second time in the backward if the policy calls it cheap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import fx
from weft_core.node_effects import has_effect, must_run

from weft_aot.records import JointGraph
from weft_aot.walk import ancestors, copied_inputs


@dataclasses.dataclass(frozen=True)
class Classes:
    """The parts of a joint graph; every set is over `order`."""

    order: list[fx.Node]
    inputs: list[fx.Node]
    tangents: list[fx.Node]
    values: list[fx.Node | None]
    gradients: list[fx.Node | None]
    forward: set[fx.Node]
    backward: set[fx.Node]
    wanted: set[fx.Node]
    """Nodes that a gradient depends on."""
    copied: set[fx.Node]
    """Inputs that the program changes, of which a second derivative needs copies."""


def classify(joint: JointGraph) -> Classes:
    """Split the nodes of `joint` by what depends on what."""
    order = [node for node in joint.module.graph.nodes if node.op != "output"]
    placeholders = joint.placeholders()
    results = [value if isinstance(value, fx.Node) else None for value in joint.results()]
    inputs, tangents = placeholders[: joint.num_inputs], placeholders[joint.num_inputs :]
    values, gradients = results[: joint.num_values], results[joint.num_values :]
    backward = _descendants(order, tangents)
    effects = [
        node
        for node in order
        if node not in backward and (has_effect(node) or (not node.users and must_run(node)))
    ]
    return Classes(
        order,
        inputs,
        tangents,
        values,
        gradients,
        forward=ancestors([*values, *effects]) - backward,
        backward=backward,
        wanted=ancestors(gradients),
        copied={inputs[index] for index in copied_inputs(joint)},
    )


def _descendants(order: list[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(nodes)
    for node in order:
        if node not in found and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
