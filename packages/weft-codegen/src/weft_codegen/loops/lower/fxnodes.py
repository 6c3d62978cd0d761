"""What the walk over an fx graph asks of its nodes: uses, effects, arithmetic on sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from weft_core.launches import LAUNCH_
from weft_core.node_effects import is_effect

from weft_codegen.loops.expr import apply
from weft_codegen.loops.lower.lazy_tensor import contiguous_strides
from weft_codegen.loops.lower.shapes import NoLowering, number, to_index

_aten = torch.ops.aten


def count_uses(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Consumers of each node, counted through views, which recompute their base."""
    uses: dict[fx.Node, int] = {}
    for node in reversed(gm.graph.nodes):
        total = 0
        for user in node.users:
            total += uses.get(user, 1) if is_view(user.target) else 1
        uses[node] = total
    return uses


def is_view(target: Any) -> bool:
    """Whether a call only renames what it is given: a view, or one of several results."""
    if target is operator.getitem or target is _aten._unsafe_view.default:
        return True
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


_COMPARISONS = """
    eq ne lt le gt ge max min amax amin argmax argmin cummax cummin _unique2 unique_dim
    unique_consecutive sort argsort topk kthvalue mode searchsorted bucketize isin
"""
_COMPARING = frozenset("aten::" + name for name in _COMPARISONS.split())


def compared(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose elements a user, or a user of a view of them, compares."""
    found: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        for user in node.users:
            name = str(getattr(getattr(user.target, "_schema", None), "name", ""))
            if name in _COMPARING or (user in found and is_view(user.target)):
                found.add(node)
    return found


def added_product(node: fx.Node, sums: set[fx.Node]) -> tuple[Any, ...] | None:
    """The arguments (total, a, b) of an addmm that does what `node`, total + a @ b, does.

    Only where `total` is a sum of products too and neither has another use: so autograd adds up
    the gradient of a weight that is used more than once, and all products would be in memory.
    `sums` collects what is such a sum. Not for 16-bit floats, whose sums eager rounds each time.
    """
    if getattr(node.meta.get("val"), "dtype", None) not in (torch.float32, torch.float64):
        return None
    if node.target is _aten.mm.default and len(node.users) == 1:
        sums.add(node)
    terms: Any = node.args
    if node.target is not _aten.add.Tensor or node.kwargs or not sums.issuperset(terms):
        return None
    total, product = sorted(terms, key=lambda term: term.target is _aten.mm.default)
    if total is product or product.target is not _aten.mm.default:
        return None
    sums.update([node] if len(node.users) == 1 else ())
    return (total, *product.args)


def symbolic(node: fx.Node, args: Any) -> Any:
    """The value of Python arithmetic on sizes: an index expression, or a float64 Expr."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | int):
        return to_index(value)
    if isinstance(value, torch.SymFloat):
        numbers = [number(arg, torch.float64) for arg in args]
        if node.target is torch.sym_float:
            return numbers[0]
        if node.target in (pow, operator.pow):
            return apply("pow", *numbers)
        if node.target in _FLOAT_ARITHMETIC:
            return node.target(*numbers)
        if node.target in _FLOAT_FUNCTIONS:
            return apply(_FLOAT_FUNCTIONS[node.target], *numbers)
    raise NoLowering(f"call of {node.target}")


_FLOAT_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg}
_FLOAT_FUNCTIONS: dict[Any, str] = {
    getattr(torch, f"_sym_{name}"): name
    for names in (("sqrt", "log2", "sin", "cos", "tan"), ("asin", "acos", "atan"))
    for name in (*names, "sinh", "cosh", "tanh")
}
_FLOAT_FUNCTIONS.update(
    [
        (torch.sym_min, "minimum"), (torch.sym_max, "maximum"), (abs, "abs"),
        (operator.abs, "abs"), (operator.mod, "remainder"), (operator.floordiv, "floordiv"),
    ]
)  # fmt: skip


def attribute(node: fx.Node) -> Any:
    """What a `get_attr` node names."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def fake_call(node: fx.Node) -> Any:
    """The fake of a call, from those of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_pure(target: Any) -> bool:
    """Whether a call only computes: an operator of torch's own without writes or random numbers."""
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") == "_operator"
    return target.namespace in ("aten", "prims") and not is_effect(target)


def written_by(target: Any, args: Any) -> list[Any]:
    """The arguments that an operator updates, although its schema does not say so."""
    if target is torch.ops.aten.native_batch_norm.default and args[5]:
        return [args[position] for position in (3, 4) if args[position] is not None]
    return [args[1][position] for position in args[3]] if target is LAUNCH_ else []


def replaces_its_input(node: fx.Node) -> bool:
    """Whether the first argument of `node` is an input that nothing else reads, and that the graph
    overwrites with the result."""
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or base.op != "placeholder" or len(base.users) != 2:
        return False
    reads = sum(leaf is base for leaf in pytree.tree_leaves((node.args, node.kwargs)))
    copies = (user for user in base.users if user.target is _aten.copy_.default)
    return reads == 1 and any(copy.args[:2] == (base, node) for copy in copies)


def without_unused(results: Sequence[Any], node: Any, target: Any) -> list[Any]:
    """The results of a node that calls `target`, None for those that nothing uses.

    Such a one may be undefined, as the gradient of a bias that is not there, where a fake one is
    a tensor.
    """
    users: list[Any] = [None]
    if node is not None and node.target is target:
        users = [*node.users]
    if not all(getattr(user, "target", None) is operator.getitem for user in users):
        return [*results]
    used = {user.args[1] for user in users}
    return [result if at in used else None for at, result in enumerate(results)]


def _misleads(target: Any, args: Any) -> bool:
    """Whether fake results, of the operator or of its backward, are laid out as no real ones are.

    max_unpool2d's real result follows an input in channels last, the fake one does not;
    embedding_bag's bookkeeping results have other sizes for bfloat16.
    """
    if target._opname == "max_unpool2d":
        return bool(args[0].strides != contiguous_strides(args[0].shape))
    if target._opname.startswith("_embedding_bag"):
        return any(getattr(arg, "dtype", None) is torch.bfloat16 for arg in args)
    return bool(target._opname == "ormqr")


def without_alias(target: Any, args: Any) -> Any:
    """A view operator's copying twin: an extern result must own its memory.

    Raises NoLowering for what has none, and for operators whose fake tensors mislead.
    """
    if _misleads(target, args):
        raise NoLowering(f"torch's fake {target} is laid out otherwise than the real one")
    if not any(result.alias_info is not None for result in target._schema.returns):
        return target
    if target is torch.ops.aten.as_strided.default:
        raise NoLowering("as_strided may reach memory outside its argument")
    copy = getattr(getattr(torch.ops, target.namespace), f"{target._opname}_copy", None)
    if copy is None or target._overloadname not in copy.overloads():
        raise NoLowering(f"{target} returns a view")
    return getattr(copy, target._overloadname)
