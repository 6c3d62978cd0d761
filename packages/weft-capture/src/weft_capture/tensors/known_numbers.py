"""Values of tensors that capture knows without a guard on them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from weft_core.tensor_versions import version_of
from weft_guards.sources import CallSource, ConstSource

from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.tensor import SymValue, TensorValue

_TELLING = frozenset((
    torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.stack, torch.arange, torch.sort,
    torch.argsort,
    operator.getitem, operator.lt, "to", "cpu", "unbind",
))  # fmt: skip


def numbers(tensor: Value, fix: bool = False) -> Any:
    """Return what `tolist` gives for a tensor that is built from constants, else None.

    `fix`: ints that vary from call to call are fixed with a guard.
    """

    def tells(node: Node) -> bool:
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            return fix and not SymValue(node, example).is_data()
        written = isinstance(example, torch.Tensor) and (example.is_inference() or example._version)
        return node.target in _TELLING and not written and all(map(tells, node.all_input_nodes))

    def evaluate(node: Node) -> Any:
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt):
            return SymValue(node, example).as_constant()
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), evaluate)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    if not isinstance(tensor, TensorValue) or not tells(tensor.node):
        return None
    with unset_fake_temporarily(), torch.no_grad():
        return evaluate(tensor.node).tolist()


def before_graph(tx: Tracer, tensor: TensorValue) -> symbolic_scalars.PregraphValue | None:
    """Return the source of an optimizer's step counter, plus what the graph has added to it.

    Only for a 0-dim tensor on the CPU that nothing but additions of 1 has written to.
    """
    entry, node, fake = tx.graph.input_at.get(tensor.node), tensor.node, tensor.fake
    origin: symbolic_scalars.PregraphValue | None = None
    if fake.dim() or fake.device.type != "cpu":
        return None
    if entry is not None and isinstance(entry.example, torch.Tensor):
        with unset_fake_temporarily():
            origin = CallSource(torch.Tensor.item, (entry.source,)), entry.example.item()
    elif node.target in _MAKERS:
        number = _MAKERS[node.target](*node.args)
        origin = (ConstSource(number), number) if number.is_integer() else None  # in any dtype
    added = [user for user in node.users if user.target in ("add_", operator.iadd)]
    written = version_of(fake) - (entry.version if entry is not None else 0)
    if origin is None or written != len(added) or not all(_adds_one(user, node) for user in added):
        return None
    for _ in added:
        origin = CallSource(operator.add, (origin[0], ConstSource(1.0))), origin[1] + 1.0
    return origin


_MAKERS: dict[Any, Any] = {
    torch.zeros: lambda *size: 0.0,
    torch.ones: lambda *size: 1.0,
    torch.tensor: float,
}


def _adds_one(user: Any, node: Any) -> bool:
    addend = user.args[1]
    if getattr(addend, "target", None) is torch.tensor:
        addend = addend.args[0]
    return user.args[0] is node and addend == 1 and user.kwargs.get("alpha", 1) == 1
