"""What the rewrites ask of a captured graph: what a node calls, and who else sees its value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

_HOMES = (torch, F, torch._C._nn, torch._C, operator)
_NAMES = """
    matmul mm bmm addmm baddbmm einsum linear softmax log_softmax cross_entropy nll_loss dropout
    mul div truediv add sub neg tanh pow masked_fill where sigmoid tril triu
    view reshape flatten unflatten squeeze unsqueeze transpose permute contiguous clone t movedim
    swapaxes expand repeat_interleave getitem float half bfloat16 double to type type_as full
    mT mH T scaled_dot_product_attention sqrt ones zeros ones_like zeros_like arange
""".split()  # noqa: SIM905
_FUNCTIONS: dict[Any, str] = {
    getattr(home, name): name for name in _NAMES for home in _HOMES if hasattr(home, name)
}
_IN_PLACE: dict[Any, str] = {
    operator.iadd: "add", operator.isub: "sub", operator.imul: "mul", operator.itruediv: "div",
}  # fmt: skip
_WRITING = frozenset({"setitem", "delitem", "iand", "ior"}).union(
    name for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])
)
_SAME = {"truediv": "div", "swapaxes": "transpose", "multiply": "mul", "divide": "div"}
_SAME.update(subtract="sub", swapdims="transpose")
_FUNCTIONS |= {getattr(torch, name): name for name in _SAME if hasattr(torch, name)}
_PURE = frozenset(_NAMES)


def call_name(node: fx.Node) -> str | None:
    """Return the canonical name of what a node calls, as a method or as a function.

    Writes (`mul_`, `*=`) have the name of the pure function; see `writes`.
    """
    if node.op == "call_method":
        name = str(node.target)
        name = name.removesuffix("_") if not name.endswith("__") else name
    elif node.op == "call_function":
        if node.target is getattr:
            name = str(node.args[1])
        else:
            name = _FUNCTIONS.get(node.target) or _IN_PLACE.get(node.target, "")
    else:
        return None
    return _SAME.get(name, name) or None


def writes(node: fx.Node) -> bool:
    """Whether a node may write to a tensor, or change a state that later nodes depend on."""
    target = node.target
    if node.op == "call_method":
        name = str(target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return node.op == "call_module"
    if "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    if target in _FUNCTIONS:
        return False
    name, home = getattr(target, "__name__", "_"), getattr(target, "__module__", None) or "torch"
    if home == "_operator":
        return name in _WRITING
    switched_on = any(arg is True for arg in node.args)  # which may be `inplace`
    if name.startswith("_") or name.endswith("_") or switched_on:
        return True
    schema = getattr(target, "_schema", None)
    if schema is not None or isinstance(target, OpOverloadPacket):
        return schema is None or bool(schema.is_mutable)
    return not home.startswith(("torch", "_operator", "builtins", "math"))


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Return an argument that is given by position or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def example(node: Any) -> torch.Tensor | None:
    """Return the fake of a node that is a plain tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if type(value) is FakeTensor and _is_plain(value) else None


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(
        value
    )


def live_users(node: fx.Node) -> list[fx.Node]:
    """Return the users of a node, without calls of pure functions whose result nobody uses."""
    return [user for user in node.users if user.users or not _is_dead(user)]


def _is_dead(node: fx.Node) -> bool:
    return node.op.startswith("call") and call_name(node) in _PURE and not writes(node)


def is_private(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` alone sees what a node gives."""
    return live_users(node) == [user]


def has_transforms(graph: fx.Graph) -> bool:
    """Whether a part of the graph runs under `vmap`, `grad` or forward mode."""
    names = (getattr(node.target, "__name__", "") for node in graph.nodes)
    return any("increment_nesting" in name or "enter_dual_level" in name for name in names)


def is_quiet(first: fx.Node, last: fx.Node, matched: Collection[fx.Node]) -> bool:
    """Whether moving `matched` to `last` changes nothing: no write or state change on the way."""
    node = first
    while node is not last:
        if node not in matched and writes(node):
            return False
        node = node.next
    return True


def erase(nodes: Iterable[fx.Node]) -> None:
    """Erase nodes that nobody needs any more, users before what they use."""
    for node in nodes:
        for user in list(node.users):
            if not user.users and _is_dead(user):
                user.graph.erase_node(user)
        if not node.users:
            node.graph.erase_node(node)
