"""Custom operators that write to their arguments, as operators that return what they would write.

C++ functionalisation refuses such operators. For each there is a twin in the namespace
`weft_functional`, which copies what is written, calls the operator on the copies and returns its
results and the copies.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import torch
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import OpOverload, OpOverloadPacket

from weft_core.errors import Unsupported

_NAMESPACE = "weft_functional"
_COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor")
_IMPLICIT = "CompositeImplicitAutograd"
_KINDS = {"Tensor": False, "Optional[Tensor]": False, "List[Tensor]": True}


def mutating(func: Any) -> OpOverload | None:
    """Return the custom operator that a call of `func` is, if that writes to its arguments."""
    if isinstance(func, OpOverloadPacket) and len(func.overloads()) == 1:
        func = getattr(func, func.overloads()[0])
    known = isinstance(func, OpOverload) and func._schema.is_mutable
    return func if known and _is_custom(func) else None


@functools.cache
def _is_custom(op: OpOverload) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("Functionalize", _IMPLICIT)
    return op.namespace not in _COLLECTIVES and not any(has_kernel(op.name(), k) for k in keys)


def call(op: OpOverload, args: Any, kwargs: dict[str, Any], mode: Any) -> Any:
    """Call a mutating custom operator by its twin, and write what that returns, under `mode`.

    Raises:
        Unsupported: autograd follows an argument, or the operator returns an argument.
    """
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _requires_grad(t)]
    returned = len(op._schema.returns)
    hidden = bool(tensors) and torch.is_grad_enabled()
    if hidden and (returned or not _maybe_get_opdef(op)):
        _refuse(op, "writes to its arguments, of which one requires grad")
    twin, written = _twin(op)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not hidden):
        results = twin(*args, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    given = _named(op, args, kwargs)
    for name, new in zip(written, results[returned:], strict=True):
        old = given.get(name)
        pairs = zip(old, new, strict=True) if isinstance(old, list | tuple) else [(old, new)]
        for destination, value in pairs:
            if destination is not None:
                with mode:  # what `torch.library.custom_op` makes writes past autograd's history
                    (destination.detach() if hidden else destination).copy_(value)
    if not returned:
        return None
    return results[0] if returned == 1 else results[:returned]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _refuse(op: OpOverload, what: str) -> None:
    remedy = "give the operator a variant that returns its result"
    raise Unsupported("mutating-custom-op", f"{op} {what}", remedy)


def _named(op: OpOverload, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in op._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


_numbers = itertools.count(1)


@functools.cache
def _library() -> Any:
    """What holds the twins: their registrations live as long as it does."""
    return torch.library.Library(_NAMESPACE, "FRAGMENT")


@functools.cache
def _twin(op: OpOverload) -> tuple[Any, tuple[str, ...]]:
    """The twin of an operator, and the names of the arguments that the operator writes."""
    schema = op._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if any(one.alias_info is not None for one in schema.returns):
        _refuse(op, "returns an argument")
    if any(str(a.type) not in _KINDS for a in written):
        _refuse(op, "writes to arguments of an unknown type")
    library = _library()
    name = f"{op.namespace}_{op._schema.name.split('::')[1]}_{op._overloadname}"
    if torch._C._dispatch_has_kernel(f"{_NAMESPACE}::{name}"):
        name = f"{name}_{next(_numbers)}"
    returns = [str(one.type) for one in schema.returns]
    returns += ["Tensor[]" if _KINDS[str(a.type)] else "Tensor" for a in written]
    library.define(f"{name}({_parameters(schema)}) -> ({', '.join(map(_type, returns))})")
    names = tuple(a.name for a in written)
    library.impl(name, functools.partial(_run, op, names), "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, _NAMESPACE), name).default, names


def _type(text: str) -> str:
    """A type of a schema as schemas are written, not as Python has it."""
    for name in ("List", "Optional"):
        if text.startswith(f"{name}["):
            return _type(text[len(name) + 1 : -1]) + ("[]" if name == "List" else "?")
    return text


def _parameters(schema: Any) -> str:
    """The parameters of a schema, without what is said of aliases."""
    text = str(schema)
    text = text[text.index("(") : text.rindex("->")].strip()[1:-1]
    return re.sub(r"\(\w+(\|\w+)*( ?-> ?[^)]*|!)?\)", "", text)


def _run(op: OpOverload, written: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    given = _named(op, args, kwargs)
    copies = {name: _copied(given.get(name)) for name in written}
    results = op(**{**given, **copies})
    whole = results if isinstance(results, tuple) else () if results is None else (results,)
    like = next(t for t in torch.utils._pytree.tree_leaves(given) if isinstance(t, torch.Tensor))
    made = [like.new_empty(0) if copy is None else copy for copy in copies.values()]
    together = (*whole, *made)
    return together[0] if len(together) == 1 else together


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return None if value is None else [one.clone() for one in value]
