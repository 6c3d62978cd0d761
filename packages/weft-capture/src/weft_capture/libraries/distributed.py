"""Collectives of torch.distributed: functional operators of the graph, each followed by a wait.

Collectives that write to tensors are captured for dense tensors without gradients, in a group that
contains this process. The `Work` of an asynchronous collective is complete at once. Collectives of
lists of equal tensors become one of a single tensor, and copies. Methods of DTensors are nodes, in
which later stages find the collectives; placements are constants.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from weft_core.inlinable import inlinable
from weft_guards.sources import AttrSource, CallSource, ConstSource

from weft_capture.breaks import Break
from weft_capture.functions.language.polyfilled import polyfill
from weft_capture.functions.table import decline, rule, rule_of_each
from weft_capture.model.constant import FALSE, NONE, PLACEMENTS, constant, fold, real_call
from weft_capture.model.containers import SequenceValue
from weft_capture.model.protocol import Kwargs, Output, Tracer, Value
from weft_capture.tensors.subclass import WrapperValue
from weft_capture.tensors.tensor import TensorValue

_HOME = "torch.distributed.distributed_c10d."
_FUNCTIONAL = "torch.distributed._functional_collectives."
_ASKED = "get_rank get_world_size get_backend is_initialized get_group_rank get_global_rank"
_REDUCTIONS = frozenset("SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split())  # noqa: SIM905
_c10d: Any = getattr(distributed, "distributed_c10d", None)
_SUM: Any = getattr(getattr(distributed, "ReduceOp", None), "SUM", None)
_ops: Any = torch.ops._c10d_functional
_WAITS = [_ops.wait_tensor, _ops.wait_tensor.default] if distributed.is_available() else []
_ORDERED = """
    send recv isend irecv batch_isend_irecv barrier monitored_barrier reduce gather scatter
    all_gather_object gather_object scatter_object_list broadcast_object_list
    send_object_list recv_object_list
"""
decline("collective", "a block of collectives", _HOME + "_coalescing_manager")
for _name in _ORDERED.split():
    decline("communication", _name, _HOME + _name)


def _state(group: Any) -> Any:
    """Return the identity of a group, also one given by name; None is the default group."""
    real = _c10d._resolve_process_group(group) if isinstance(group, str) else group
    real = distributed.group.WORLD if real is None else real
    identity = real and (real.group_name, real.rank(), real.size())
    return identity, bool(_c10d._world.pg_coalesce_state)


def _process_group(tx: Tracer, group: Value) -> Any:
    """Return a process group, or its name, and guard its identity."""
    group = tx.force(group)
    real = getattr(group, "obj", None) or group.as_constant()
    if not isinstance(real, distributed.ProcessGroup | str | None):
        raise Break("collective", "a process group without this process")
    source, world = group.source, real is distributed.group.WORLD
    if isinstance(real, str) or source is None or isinstance(source, ConstSource):
        source = ConstSource(None if world else real)
    tx.process_bound = tx.process_bound if world or real is None else "a process group"
    tx.guard(CallSource(_state, (source,)), "CONST", _state(real))
    return real


def _bind(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise Break("collective", f"arguments that do not fit: {error}") from None


@rule_of_each(*(_HOME + name for name in (*_ASKED.split(), "_get_group_size_by_name")))
def _query(name: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    function = getattr(_c10d, name.removeprefix(_HOME))
    bound = _bind(function, args, kwargs)
    key = "group_name" if "group_name" in bound else "group"
    real = _process_group(tx, bound.pop(key, NONE))
    keywords = {name: value.as_constant() for name, value in bound.items()}
    return tx.literal(real_call(tx, function, **keywords, **({} if real is None else {key: real})))


@rule(_FUNCTIONAL + "_resolve_group_name", _FUNCTIONAL + "_resolve_group")
def _group_name(tx: Tracer, group: Value, tag: Value = NONE) -> Value:
    real = _process_group(tx, group)
    return constant(getattr(real, "group_name", real))


@rule(_HOME + "_find_pg_by_ranks_and_tag")
def _group_of_ranks(tx: Tracer, tag: Value, ranks: Value) -> Value:
    """Look for a group that exists; creating one is left to the program."""
    members = [rank.as_constant() for rank in ranks.unpack(tx)]
    found = real_call(tx, _c10d._find_pg_by_ranks_and_tag, tag.as_constant(), members)
    tx.process_bound = "a process group"
    return tx.const_object(found)


@rule(_FUNCTIONAL + "_maybe_wrap_tensor", *_WAITS)
def _wait(tx: Tracer, tensor: Value) -> Any:
    """Wait for a collective; the result replaces the tensor, whose memory it shares."""
    tensor = tx.force(tensor)
    producer: Any = tensor.node if isinstance(tensor, TensorValue) else None
    if producer is not None and producer.target is operator.getitem:
        producer = producer.args[0]
    collective = str(getattr(producer, "target", None)).startswith("_c10d_functional.")
    if (
        not isinstance(tensor, TensorValue)
        or not collective
        or (tensor.fake.requires_grad and not _NEW)
    ):
        raise Break("collective", "waiting for a tensor that is no result of a collective")
    tx.graph.replace(tensor, tx.graph.emit_plain("call_function", _WAITS[1], [tensor], {}))
    return tensor


# ---- collectives that write to tensors: what they write, and the functional one with arguments


_GATHER, _SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
_SPLITS = ("output_split_sizes", "input_split_sizes")
_NEW = hasattr(distributed, "all_gather_single")  # then the older names are deprecated aliases
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda size, x, op: (x, "all_reduce", x, op),
    "broadcast": lambda size, x, src: (x, "broadcast", x, src),
    "all_gather_single" if _NEW else _GATHER: lambda size, y, x: (y, _GATHER, x, size),
    "reduce_scatter_single" if _NEW else _SCATTER: lambda n, y, x, op: (y, _SCATTER, x, op, n),
    "all_to_all_single": lambda n, y, x, *sizes: (y, "all_to_all_single", x, *sizes),
}


@dataclass(eq=False)
class Work(Value):
    """The `Work` of an asynchronous collective, which is complete."""

    def python_type(self) -> type:
        return distributed.Work

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        if name == "wait":  # not is_completed, which gloo denies even then
            return constant(True)
        raise Break("collective", f"{name} of a collective's work")

    def reconstruct(self, out: Output) -> None:
        raise Break("collective", "the work of a collective that leaves the graph")


@rule_of_each(*(_HOME + name for name in _IN_PLACE))
def _write(name: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    name = name.removeprefix(_HOME)
    bound = _bind(getattr(_c10d, name), args, kwargs)
    bound = {key: tx.force(value) for key, value in bound.items()}
    more = [] if bound.pop("group_src", NONE) is NONE else ["a group's source"]
    later = bound.pop("async_op", FALSE).as_constant()
    group, world = _process_group(tx, bound.pop("group", NONE)), distributed.group.WORLD
    more += ["a group"] if name == "broadcast" and group not in (None, world) else []
    group = group or world
    if more or tx.transforms or group is None or _state(group)[1]:
        raise Break("collective", f"{name} with {more}, in a coalescing block or a transform")
    if "reduce" in name:
        bound["op"] = _reduction(tx, bound.get("op"))
    if "src" in bound:
        bound["src"] = bound["src"].as_constant()
    if name == "all_to_all_single":
        for key, side in zip(_SPLITS, ("output", "input"), strict=True):
            bound[key] = _sizes(tx, bound.pop(key, NONE), bound[side], group.size())
    operands = [_plain(name, a) if isinstance(a, Value) else a for a in bound.values()]
    into, target, *rest_args = _IN_PLACE[name](group.size(), *operands)
    tx.graph.collectives += 1
    rest_args = [tx.literal(argument) for argument in (*rest_args, group.group_name)]
    target = getattr(_ops, target).default
    result = _wait(tx, tx.graph.emit_plain("call_function", target, rest_args, {}))
    if (into.fake.dtype, into.fake.shape) != (result.fake.dtype, result.fake.shape):
        raise Break("collective", f"{name} whose result does not fit")
    tx.graph.emit_plain("call_method", "copy_", [into, result], {})
    return Work() if later else NONE


def _sizes(tx: Tracer, sizes: Value, tensor: Value, count: int) -> list[int]:
    """Return how many rows of a tensor come from, or go to, each process."""
    rows = len(_plain("all_to_all_single", tensor).fake)
    lengths = [size.as_constant() for size in sizes.unpack(tx)] if sizes is not NONE else []
    lengths = lengths or [rows // count] * count
    if len(lengths) != count or sum(lengths) != rows:
        raise Break("collective", "all_to_all_single with sizes that do not fit")
    return lengths


def _reduction(tx: Tracer, value: Value | None) -> str:
    """Return the name of a reduction in functional collectives."""
    real: Any = getattr(value, "obj", None) if value else _SUM
    if not isinstance(real, distributed.ReduceOp.RedOpType) or real.name not in _REDUCTIONS:
        raise Break("collective", "an unknown reduction")
    if value and value.source is not None and not isinstance(value.source, ConstSource):
        tx.guard_same(operator.eq, value.source, real)
    return real.name.lower()


def _plain(name: str, tensor: Value) -> TensorValue:
    """Break for a tensor with which a functional collective may behave differently."""
    fake: Any = tensor.fake if type(tensor) is TensorValue else None
    followed = fake is not None and torch.is_grad_enabled() and fake.requires_grad
    if fake is None or followed or fake.is_complex() or not fake.is_contiguous():
        raise Break("collective", f"{name} of a tensor with a gradient, or of another kind")
    return tensor  # type: ignore[return-value]


# ---- collectives of lists


def _refuse_different() -> None:
    """Break where the tensors of a list differ."""


@inlinable
def _flat(tensors: Any, template: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return the tensors, one for each process, as rows."""
    if len(tensors) != distributed.get_world_size(group):
        _refuse_different()
    for tensor in tensors:
        followed = tensor.requires_grad and torch.is_grad_enabled()
        same = (
            tensor.shape == template.shape
            and tensor.dtype == template.dtype
            and tensor.device == template.device
        )
        if not same or followed or not tensor.is_contiguous():
            _refuse_different()
    return [tensor.view(-1) for tensor in tensors]


@inlinable
def _spread(gathered: torch.Tensor, into: list[torch.Tensor]) -> None:
    for tensor, chunk in zip(into, gathered.chunk(len(into)), strict=True):
        tensor.copy_(chunk)


@inlinable
def _all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: Any = False) -> Any:
    into = _flat(tensor_list, tensor, group)
    gathered = torch.cat(into)
    work = _gather_single(gathered, tensor.view(-1), group, async_op)
    _spread(gathered, into)
    return work


@inlinable
def _reduce_scatter(
    output: Any, input_list: Any, op: Any = _SUM, group: Any = None, async_op: Any = False
) -> Any:
    flat_input = torch.cat(_flat(input_list, output, group))
    return _scatter_single(output.view(-1), flat_input, op, group, async_op)


@inlinable
def _all_to_all(
    output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: Any = False
) -> Any:
    into = _flat(output_tensor_list, input_tensor_list[0], group)
    flat_inputs, gathered = _flat(input_tensor_list, output_tensor_list[0], group), torch.cat(into)
    work = distributed.all_to_all_single(
        gathered, torch.cat(flat_inputs), None, None, group, async_op
    )
    _spread(gathered, into)
    return work


decline("collective", "tensors of a list that differ", _refuse_different)
if distributed.is_available():
    _gather_single = getattr(_c10d, "all_gather_single" if _NEW else _GATHER)
    _scatter_single = getattr(_c10d, "reduce_scatter_single" if _NEW else _SCATTER)
    for _version in (_all_gather, _reduce_scatter, _all_to_all):
        polyfill(getattr(distributed, _version.__name__[1:]), _version)


# ---- data parallel training

_PARALLEL = "torch.nn.parallel.distributed"


@rule(f"{_PARALLEL}.DistributedDataParallel._pre_forward")
def _data_parallel(tx: Tracer, module: Any, *args: Value, **kwargs: Value) -> Value:
    tx.bucket_bytes = getattr(module.obj, "bucket_bytes_cap", 0)
    return tx.trace_body(type(module.obj)._pre_forward, [module, *args], kwargs)


def bucket_bytes(tx: Tracer) -> int:
    """Return the size of the gradient buckets of the module in or around the graph; 0 for none."""
    parallel = getattr(sys.modules.get(_PARALLEL), "DistributedDataParallel", None)
    active = getattr(parallel, "_active_ddp_module", None)
    return tx.bucket_bytes or getattr(active, "bucket_bytes_cap", 0)


# ---- DTensors

_API = "torch.distributed.tensor._api."
_METHODS = [f"{_API}DTensor.{m}" for m in ("from_local", "to_local", "redistribute", "full_tensor")]
decline("collective", "loss_parallel", "torch.distributed.tensor.parallel.loss.loss_parallel")


def _real(tx: Tracer, value: Value) -> Any:
    """Return an argument that is no tensor; a mesh is guarded by identity."""
    value = tx.force(value)
    if isinstance(value, SequenceValue):
        return value.python_type()([_real(tx, item) for item in value.items])
    obj = getattr(value, "obj", None)
    if obj is not None and value.source is not None:
        tx.guard_identity(value.source, obj)
    return value.as_constant() if obj is None else obj


@rule_of_each(*_METHODS, "torch.distributed.tensor.distribute_tensor")
def _convert(name: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    name = name.removeprefix(_API).rpartition("tensor.")[2]
    function: Any = operator.attrgetter(name)(sys.modules[_API[:-1]])
    bound = _bind(function, args, kwargs)
    tensor = tx.force(bound.pop(next(iter(bound))))
    keywords = {key: _real(tx, value) for key, value in bound.items()}
    meshed = isinstance(tensor, WrapperValue) or keywords.get("device_mesh") is not None
    sent = name == "distribute_tensor" and keywords.get("src_data_rank", 0) is not None
    if not isinstance(tensor, TensorValue) or not meshed or keywords.get("run_check") or sent:
        raise Break("collective", f"{name} without a mesh, or with communication")

    def node(tensor: Any) -> Any:
        return function(tensor, **keywords)

    node.__name__ = node.__qualname__ = name.replace(".", "_")
    tx.process_bound = "a device mesh"
    result = tx.graph.emit_plain("call_function", node, [tensor], {})
    if isinstance(result, TensorValue) and result.is_new_leaf():
        raise Break("collective", f"{name} creates a leaf")
    return result


@rule_of_each(_API + "DTensor.device_mesh", _API + "DTensor.placements")
def _dtensor_query(name: Any, tx: Tracer, tensor: Any) -> Value:
    name = name.rpartition(".")[2]
    if tensor.real is None:
        return tx.literal(getattr(tensor.fake, name))
    return tx.wrap(getattr(tensor.real, name), AttrSource(tensor.source, name))


@rule_of_each(*(f"{PLACEMENTS}.{name}" for name in ("Shard", "Replicate", "Partial")))
def _placement(name: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    return fold(tx, getattr(sys.modules[PLACEMENTS], name.rpartition(".")[2]), list(args), kwargs)
