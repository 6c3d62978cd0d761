"""Numbers and tensors: symbolic floats as arguments of operations, and known values of tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from weft_core.tensor_versions import version_of
from weft_guards.sources import CallSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.model.constant import constant, plain_scalar
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.symbolic_scalars import (
    SymFloatValue,
    computed,
    is_whole,
    operands,
    symbol,
    symbols,
)
from weft_capture.tensors.tensor import SymValue, TensorValue

_SCALES = ("alpha", "value")


def concern(args: list[Value], kwargs: Kwargs) -> bool:
    """Say whether `emit` handles these arguments: a symbolic float, or a tensor as a scale."""
    return _any_varies([*args, *kwargs.values()]) or any(
        isinstance(kwargs.get(name), TensorValue) for name in _SCALES
    )


def _any_varies(values: list[Value]) -> bool:
    return any(
        isinstance(value, SymFloatValue)
        or (isinstance(items := getattr(value, "items", None), list) and _any_varies(items))
        for value in values
    )


def emit(tx: Tracer, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
    """Emit an operation that has symbolic floats among its arguments.

    `alpha=` and `value=` scale the second argument, so they are multiplied into it; elsewhere a
    0-dim tensor replaces the number. Where that is not the same operation, the number is fixed with
    a guard.
    """
    rate = kwargs.get("lr")
    if isinstance(rate, SymFloatValue) and _name(target).startswith("fused_"):
        return tx.graph.emit(op, target, args, {**kwargs, "lr": rate.tensor()})
    data, last = (args[0], args[-1]) if args else (None, None)
    if target in (torch.tensor, torch.as_tensor) and isinstance(data, SymFloatValue):
        if not (kwargs.keys() - {"dtype", "device"} or data.python_type() is bool):
            default = torch.int64 if is_whole(data.hint) else torch.get_default_dtype()
            how = {"dtype": constant(default), **kwargs, "copy": constant(True)}
            return tx.graph.emit("call_method", "to", [data.tensor()], how)
    number = kwargs.get("fill_value", last)
    fills = isinstance(number, SymFloatValue) and not is_whole(number.hint)
    if _name(target) in _FILLED and fills and "requires_grad" not in kwargs:
        return _full(tx, op, target, args, dict(kwargs))
    scaled = _scale_second(tx, target, args, kwargs)
    if scaled is not None:
        return tx.graph.emit(op, target, *scaled)
    example = next((a.fake for a in args if isinstance(a, TensorValue)), None)
    fixed = example is None or _any_varies([*kwargs.values()])
    dtype = None if fixed else _result_dtype(target, args)
    if dtype is not None:
        assert example is not None
        swapped = [_at_dtype(tx, arg, dtype, example.device) for arg in args]
        try:
            result = tx.graph.emit(op, target, swapped, kwargs)
        except Break:
            result = None
        if isinstance(result, TensorValue) and result.fake.dtype is dtype:
            return result
    keywords = {name: symbol(tx, value) for name, value in kwargs.items()}
    return tx.graph.emit_plain(op, target, symbols(tx, args), keywords)


_FILLED = {"full": "empty", "full_like": "empty_like", "new_full": "new_empty"}


def _full(tx: Tracer, op: str, target: Any, args: list[Value], kwargs: Kwargs) -> Value:
    number = kwargs.pop("fill_value", None) or args[-1]
    maker = getattr(torch, _FILLED[target.__name__]) if callable(target) else _FILLED[target]
    if target is torch.full:
        kwargs.setdefault("dtype", constant(torch.get_default_dtype()))
    full = tx.graph.emit(op, maker, [arg for arg in args if arg is not number], kwargs)
    return tx.graph.emit("call_method", "fill_", [full, *operands(number)], {})


def _scale_second(
    tx: Tracer, target: Any, args: list[Value], kwargs: Kwargs
) -> tuple[list[Value], Kwargs] | None:
    name = next(
        (n for n in _SCALES if isinstance(kwargs.get(n), SymFloatValue | TensorValue)), None
    )
    if name is None or len(args) < 2 or not isinstance(args[1], TensorValue):
        return None
    if _name(target) not in ("add", "sub", "addcmul", "addcdiv"):
        return None
    scale = kwargs[name]
    if isinstance(scale, TensorValue):  # torch reads its value
        scale = computed(tx, scale)
    moved = tx.graph.emit("call_function", operator.mul, [args[1], scale], {})
    rest = {key: value for key, value in kwargs.items() if key != name}
    return [args[0], moved, *args[2:]], rest


_NUMBER_OPERATORS = frozenset(("add", "sub", "mul", "truediv", "div", "pow", "rsub", "lerp"))


def _name(target: Any) -> str:
    """The name of the out-of-place operation: `add` for `add_` and `iadd`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name.strip("_")
    return name[1:] if name[:1] == "i" and name[1:] in _NUMBER_OPERATORS else name


def _result_dtype(target: Any, args: list[Value]) -> torch.dtype | None:
    """The result's dtype with a Python float among the operands; None where a tensor changes it."""
    if _name(target) not in _NUMBER_OPERATORS or len(args) < 2:
        return None
    return torch.result_type(
        *(
            type(plain_scalar(arg.hint))(1) if isinstance(arg, SymFloatValue) else arg.example()
            for arg in args[:2]
        )
    )


def _at_dtype(tx: Tracer, value: Value, dtype: torch.dtype, device: torch.device) -> Value:
    if not isinstance(value, SymFloatValue):
        return value
    # As a Python float the number would be used at the operation's own precision.
    precision = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    tensor: Value = value.tensor()
    if not dtype.is_floating_point and dtype is not torch.int64:
        value.as_constant()
    if precision is not tensor.example().dtype:
        tensor = tx.graph.emit("call_method", "to", [tensor, constant(precision)], {})
    if device.type != "cpu":
        tensor = tx.graph.emit("call_method", "to", [tensor, constant(device)], {})
    return tensor


# ---- values of tensors that capture knows without a guard on them


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
