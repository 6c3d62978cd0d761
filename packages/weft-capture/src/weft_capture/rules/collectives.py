"""Collectives of torch.distributed: functional operators of the graph, waited for at once.

Those that write to tensors are captured where that is all they do: of dense tensors that autograd
does not follow, in a group that this process is a member of, and not asynchronously.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from weft_guards.sources import CallSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.rules.table import decline, rule, rule_of_each
from weft_capture.values.base import Tracer, Value
from weft_capture.values.constant import NONE, constant, real_call
from weft_capture.values.tensor import TensorValue

_HOME = "torch.distributed.distributed_c10d."
_FUNCTIONAL = "torch.distributed._functional_collectives."
_ASKED = """
    get_rank get_world_size get_backend is_initialized get_group_rank get_global_rank
    get_process_group_ranks _get_group_size_by_name
"""
_REDUCTIONS = frozenset("SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split())  # noqa: SIM905
_c10d: Any = getattr(distributed, "distributed_c10d", None)
_ops: Any = torch.ops._c10d_functional
_WAITS = [_ops.wait_tensor, _ops.wait_tensor.default] if distributed.is_available() else []
decline("a block of collectives", _HOME + "_coalescing_manager")


def _state(group: Any) -> Any:
    """Return what tells one group, or the one of a name, from another; None is the default one."""
    real = _c10d._resolve_process_group(group) if isinstance(group, str) else group
    real = distributed.group.WORLD if real is None else real
    known = real and (real.group_name, real.rank(), real.size())
    return known, bool(_c10d._world.pg_coalesce_state)


def known_group(tx: Tracer, group: Value) -> Any:
    """Return a real group, or the name of one, and guard which it is.

    Raises:
        Break: when it is none that this process is a member of.
    """
    group = tx.force(group)
    real = getattr(group, "obj", None) or group.as_constant()
    if not isinstance(real, distributed.ProcessGroup | str | None):
        raise Break("unknown-call", "a group that this process is no member of")
    source, world = group.source, real is distributed.group.WORLD
    if isinstance(real, str) or source is None or isinstance(source, ConstSource):
        source = ConstSource(None if world else real)
    tx.guard(CallSource(_state, (source,)), "CONST", _state(real))
    return real


def _bind(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise Break("unknown-call", f"arguments that do not fit: {error}") from None


@rule_of_each(*(_HOME + name for name in _ASKED.split()))
def _ask(name: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    function = getattr(_c10d, name.removeprefix(_HOME))
    given = _bind(function, args, kwargs)
    key = "group_name" if "group_name" in given else "group"
    real = known_group(tx, given.pop(key, NONE))
    words = {name: value.as_constant() for name, value in given.items()}
    return tx.literal(real_call(tx, function, **words, **({} if real is None else {key: real})))


@rule(_FUNCTIONAL + "_resolve_group_name", _FUNCTIONAL + "_resolve_group")
def _group_name(tx: Tracer, group: Value, tag: Value = NONE) -> Value:
    real = known_group(tx, group)
    return constant(getattr(real, "group_name", real))


@rule(_FUNCTIONAL + "_maybe_wrap_tensor", *_WAITS)
def _wait(tx: Tracer, tensor: Value) -> Any:
    """Wait for a collective; its result stands for the tensor, which is the same memory."""
    tensor = tx.force(tensor)
    made: Any = tensor.node if isinstance(tensor, TensorValue) else None
    if made is not None and made.target is operator.getitem:
        made = made.args[0]
    if not str(getattr(made, "target", None)).startswith("_c10d_functional."):
        raise Break("unknown-call", "waiting for a tensor that no collective of the graph made")
    assert isinstance(tensor, TensorValue)
    tx.graph.replace(tensor, tx.graph.emit_plain("call_function", _WAITS[1], [tensor], {}))
    return tensor


# ---- collectives that write to tensors: what they write, and the functional one with arguments


def _scattered(size: int, output: Any, input: Any, *lengths: Any) -> tuple[Any, ...]:
    sizes = []
    for tensor, given in zip((output, input), (*lengths, None, None), strict=False):
        rows = tensor.fake.shape[0]
        sizes.append(given or [rows // size] * size)
        if sum(sizes[-1]) != rows or len(lengths) == 1:
            raise Break("unknown-call", "an all_to_all_single that does not fit")
    return output, "all_to_all_single", input, *sizes


_GATHER = "all_gather_into_tensor"
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda size, x, op: (x, "all_reduce", x, op),
    "broadcast": lambda size, x, root: (x, "broadcast", x, root),
    "all_gather": lambda size, into, x: (into, _GATHER, x, size),
    "all_gather_single": lambda size, into, x: (into, _GATHER, x, size),
    "reduce_scatter_single": lambda size, y, x, op: (y, "reduce_scatter_tensor", x, op, size),
    "all_to_all_single": _scattered,
}
for _new, _old in (
    ("all_gather_single", _GATHER),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
):
    if not hasattr(distributed, _new):  # where there are both, the old one warns
        _IN_PLACE[_old] = _IN_PLACE.pop(_new)


@rule_of_each(*(_HOME + name for name in _IN_PLACE))
def _write(name: Any, tx: Tracer, *args: Value, **kwargs: Value) -> None:
    name = name.removeprefix(_HOME)
    given = _bind(getattr(_c10d, name), args, kwargs)
    given = {key: tx.force(value) for key, value in given.items()}
    late = given.pop("async_op", NONE).truth(tx)
    group = known_group(tx, given.pop("group", NONE)) or distributed.group.WORLD
    if late or tx.transforms or group is None or _state(group)[1]:
        raise Break("unknown-call", f"{name} that is asynchronous, in a block or in a transform")
    if "reduce" in name:
        given["op"] = _reduction(tx, given.get("op"))
    if name == "broadcast":
        source = given.pop("src", NONE), given.pop("group_src", NONE)
        given["root"] = _root(group, *(one.as_constant() for one in source))
    found = list[Any]()
    for key, value in given.items():
        if key in ("op", "root"):
            found.append(value)
        elif "split" in key:
            found.append(value is not NONE and [n.as_constant() for n in value.unpack(tx)])
        elif key == "tensor_list":
            found.append([_plain(name, tx.force(one)) for one in value.unpack(tx)])
        else:
            found.append(_plain(name, value))
    into, target, *words = _IN_PLACE[name](group.size(), *found)
    tx.graph.collectives += 1
    _emit(tx, into, getattr(_ops, target).default, [*words, group.group_name])


def _emit(tx: Tracer, into: Any, target: Any, args: list[Any]) -> None:
    result = _wait(tx, tx.graph.emit_plain("call_function", target, [*map(tx.literal, args)], {}))
    parts = [(into, result)]
    if isinstance(into, list):
        rows = tx.graph.emit_plain("call_method", "chunk", [result, constant(len(into))], {})
        parts = list(zip(into, rows.unpack(tx), strict=True))
    for tensor, part in parts:
        if (tensor.fake.dtype, tensor.fake.shape) != (part.fake.dtype, part.fake.shape):
            raise Break("unknown-call", f"{target} whose result does not fit")
        tx.graph.emit_plain("call_method", "copy_", [tensor, part], {})


def _root(group: Any, src: int | None, group_src: int | None) -> Any:
    if (src is None) is (group_src is None):
        raise Break("unknown-call", "a broadcast from no place, or from two")
    return distributed.get_group_rank(group, src) if src is not None else group_src


def _reduction(tx: Tracer, value: Value | None) -> str:
    """Return how functional collectives call a reduction."""
    real: Any = getattr(value, "obj", None) if value else distributed.ReduceOp.SUM
    if not isinstance(real, distributed.ReduceOp.RedOpType) or real.name not in _REDUCTIONS:
        raise Break("unknown-call", "a reduction of another kind")
    if value and value.source is not None and not isinstance(value.source, ConstSource):
        tx.guard_same(operator.eq, value.source, real)
    return real.name.lower()


def _plain(name: str, tensor: Value) -> TensorValue:
    """Break for a tensor of which a functional collective might do more, or less."""
    fake: Any = tensor.fake if type(tensor) is TensorValue else None
    followed = fake is not None and torch.is_grad_enabled() and fake.requires_grad
    if fake is None or followed or fake.is_complex() or not fake.is_contiguous():
        raise Break("unknown-call", f"{name} of a tensor with a gradient, or of another kind")
    return tensor  # type: ignore[return-value]
