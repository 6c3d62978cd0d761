"""What passes between the steps of weft_aot: read this file first.

    trace_joint -> JointGraph -> partition -> Partition -> split_backward -> build_* -> callable

A joint graph takes the program's inputs and one tangent per differentiable forward value, and
returns the forward values followed by one gradient per input that needs it. `OutputPlan` says how
the program's own results are put together from inputs and forward values after the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import fx


@dataclasses.dataclass(frozen=True)
class ValueRef:
    """Where a run-time value is found: the `index`-th call argument or forward value.

    A copy is that of the `index`-th argument, made before the call, with its history.
    """

    kind: Literal["input", "value", "copy"]
    index: int


@dataclasses.dataclass(frozen=True)
class ViewStep:
    """One view op of a chain: ``op(previous, *args, **kwargs)``, then ``[item]`` if it is a list.

    Symbolic sizes in `args` are `ValueRef`s.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None


@dataclasses.dataclass(frozen=True)
class OutputPlan:
    """How one result of the program is made after the call.

    Attributes:
        source: the value it starts from; None for a constant.
        constant: the result itself where `source` is None.
        steps: views to replay on the source; None returns the source as the same object, an empty
            tuple a new alias of it.
        apart: how it is cut from its source's history: ".detach()", ".data" (which counts writes
            by itself) or "".
        creation: how the view was made, where the steps do not tell autograd themselves.
        recorded: it has a history.
        early: it is made before inputs get another layout.
    """

    source: ValueRef | None
    constant: Any = None
    steps: tuple[ViewStep, ...] | None = None
    apart: Literal["", ".detach()", ".data"] = ""
    creation: Any = None
    recorded: bool = False
    early: bool = False


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Input `index` ends the call with other contents, or another layout.

    Attributes:
        value: forward value to copy into it with autograd recording; None where the graph itself
            ends with the `copy_`, which is so whenever autograd need not know.
        silent: the write is through `.data`, which leaves the input's version as it is.
        written: its contents change.
        layout: what changes its sizes, strides and offset in place (`t_`), before `value` is
            copied into it; None where they stay.
    """

    index: int
    value: int | None
    silent: bool = False
    written: bool = True
    layout: ViewStep | None = None


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """Forward and backward of one program as one functional aten graph.

    Attributes:
        module: placeholders are the inputs, then the tangents; outputs are the forward values,
            then the gradients (a node or None each). ``copy_`` nodes into inputs end the forward.
        num_inputs: how many placeholders are inputs.
        num_values: how many outputs are forward values.
        tangents: for each tangent placeholder, the index of its forward value.
        gradients: for each gradient output, the index of its input. Empty: inference only.
        plans: one per flat result of the program.
        mutations: inputs that the program writes.
        same_as: for each input the first one that is the same object.
        leaves: inputs that require grad and are leaves, so autograd keeps them alive anyway.
        order: those of them that get gradients, in the order in which eager's backward has them.
        made_of: for each tangent those of which its value is made: ``(2, (0, 1))``; if any.
    """

    module: fx.GraphModule
    num_inputs: int
    num_values: int
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    plans: tuple[OutputPlan, ...]
    mutations: tuple[Mutation, ...]
    same_as: tuple[int, ...]
    leaves: frozenset[int]
    order: tuple[int, ...]
    made_of: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def placeholders(self) -> list[fx.Node]:
        """The nodes of the inputs, then of the tangents."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    def results(self) -> list[Any]:
        """What the graph returns: forward values, then gradients."""
        results: Any = self.module.graph.output_node().args[0]
        return list(results)


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A node of the joint graph that the backward takes, and where the forward leaves it."""

    name: str
    source: ValueRef
    symbolic: bool


@dataclasses.dataclass(frozen=True)
class BackwardComponent:
    """Results that have history in common, and their backward: one node for autograd.

    Attributes:
        backward: saved symbolic sizes, saved tensors, tangents -> gradients.
        saved: in the order of the backward's placeholders.
        tangents: for each tangent the index of its forward value.
        gradients: for each gradient the index of its input; None where there is no gradient.
        behind: for each gradient the places of the tangents that it depends on.
        inner: the places of values of which others are made, each with the places of those.
        links: forward values for whose gradients the backward has results after `gradients`.
        chained: it is a piece of a backward (see `gradient_buckets`).
    """

    backward: fx.GraphModule
    saved: tuple[SavedValue, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int | None, ...]
    behind: tuple[tuple[int, ...], ...]
    inner: tuple[tuple[int, tuple[int, ...]], ...]
    links: tuple[int, ...] = ()
    chained: bool = False


@dataclasses.dataclass(frozen=True)
class Partition:
    """A joint graph cut in two.

    Attributes:
        forward: inputs -> forward values, then what is saved and is neither input nor value.
        backward: saved symbolic sizes, saved tensors, tangents -> gradients.
        saved: in the order of the backward's placeholders.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[SavedValue, ...]
