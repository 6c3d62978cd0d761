"""Modules of `torch.distributed.fsdp.fully_shard`: their parameters are gathered in the graph.

The hooks that such a module runs before and after its forward gather its parameters, register
hooks that reduce gradients, and free the parameters. The graph has one node instead: an autograd
function from the sharded parameters to the whole ones, with a reduce-scatter as its backward.
Between the two hooks the program reads the results in place of the parameters. The partitioner
gathers again in the backward, unless the module keeps its parameters.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from weft_core.collectives import REGATHER
from weft_guards.sources import AttrSource, CallSource, ItemSource, Source

from weft_capture.breaks import Break
from weft_capture.functions.table import rule
from weft_capture.model.containers import SequenceValue, TupleValue
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.tensor import TensorValue

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState."
_HELPERS = ("utils", "fsdp._fully_shard._fsdp_common")
_ops: Any = torch.ops._c10d_functional
_COMMS = ("_all_gather_comm", "_reduce_scatter_comm")
_PLAIN = ("Default", "NoneType")
_DEFAULTS = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reduce_scatter_unused_params": False,
    "force_sum_reduction_for_comms": False,
    "gradient_divide_factor": None,
    "_all_reduce_hook": None,
    "_all_gather_result": None,
}
"""Attributes of a group of parameters, and the values that the graph stands for."""


@dataclass(frozen=True)
class _Parameter:
    """A parameter's rows (its first size): all of them, and those on each process, padded."""

    rows: int
    padded: int
    local: int
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None


@dataclass(frozen=True)
class _Group:
    """Parameters that are gathered together, and the process group.

    `flat`: they are sent as one tensor. gloo takes as long for each tensor as for all of them;
    NCCL sends a list at once, and each parameter arrives where it is used.
    """

    name: str
    size: int
    flat: bool
    parameters: tuple[_Parameter, ...]


class _Gather(torch.autograd.Function):
    """Whole parameters of the parts that each process has."""

    @staticmethod
    def forward(ctx: Any, group: _Group, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.dtypes = group, [part.dtype for part in parts]
        ctx.set_materialize_grads(False)
        pairs = list(zip(group.parameters, parts, strict=True))
        equal = [_padded(part.to(p.dtype or part.dtype), p.padded) for p, part in pairs]
        if group.flat and len({part.dtype for part in equal}) == 1:
            waited = _gather_flat(group, equal)
        else:
            gathered = _ops.all_gather_into_tensor_coalesced(equal, group.size, group.name)
            waited = [_ops.wait_tensor(result) for result in gathered]
        results = [_rows(whole, p.rows) for whole, (p, _) in zip(waited, pairs, strict=True)]
        needs = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(r for r, need in zip(results, needs, strict=True) if not need)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        group: _Group = ctx.group
        there = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        results: list[torch.Tensor | None] = [None] * len(grads)
        if there:
            whole = []
            for index, grad in there:
                p = group.parameters[index]
                grad = grad.to(p.reduce_dtype or grad.dtype)
                whole.append(_padded(grad.contiguous(), p.padded * group.size))
            if group.flat and len({grad.dtype for grad in whole}) == 1:
                reduced = _reduce_flat(group, whole)
            else:
                scatter = _ops.reduce_scatter_tensor_coalesced
                sent = scatter(whole, "avg", group.size, group.name)
                reduced = [_ops.wait_tensor(result) for result in sent]
            for (index, _), part in zip(there, reduced, strict=True):
                local = _rows(part, group.parameters[index].local)
                results[index] = local.to(ctx.dtypes[index])
        return (None, *results)


def _gather_flat(group: _Group, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gather tensors as one; they follow each other in the part of each process."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(sent, group.size, group.name))
    columns = whole.view(group.size, -1).split([part.numel() for part in parts], 1)
    shapes = [(group.size * len(part), *part.shape[1:]) for part in parts]
    return [column.reshape(shape) for column, shape in zip(columns, shapes, strict=True)]


def _reduce_flat(group: _Group, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """Reduce and scatter tensors as one."""
    sent = torch.cat([tensor.view(group.size, -1) for tensor in whole], 1).view(-1)
    part = _ops.wait_tensor(_ops.reduce_scatter_tensor(sent, "avg", group.size, group.name))
    columns = part.split([tensor.numel() // group.size for tensor in whole])
    shapes = [(len(tensor) // group.size, *tensor.shape[1:]) for tensor in whole]
    return [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - len(tensor)
    return pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor


def _rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor if len(tensor) == rows else tensor[:rows]


def _groups(state: Any) -> list[Any]:
    """Return a state's groups of parameters; before torch 2.12 there is one or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g] if groups is None else groups


def _source_of_group(state: Any, source: Source, index: int) -> Source:
    if hasattr(state, "_fsdp_param_groups"):
        return ItemSource(AttrSource(source, "_fsdp_param_groups"), index)
    return AttrSource(source, "_fsdp_param_group")


def _is_plain(state: Any) -> bool:
    """Say whether the hooks of a state do in this call nothing but what the graph does."""
    resting = state._training_state.name == "IDLE" and len(state._modules) == 1
    return resting and all(map(_is_plain_group, _groups(state)))


def _is_plain_group(group: Any) -> bool:
    after = group.post_forward_mesh_info
    return (
        all(getattr(group, name, value) is value for name, value in _DEFAULTS.items())
        and (group._training_state.name, group._sharded_state.name) == ("IDLE", "SHARDED")
        and type(group.mesh_info).__name__ == "FSDPMeshInfo"
        and after in (None, group.mesh_info)
        and type(group.offload_policy).__name__ == "OffloadPolicy"
        and all(type(getattr(group, c, None)).__name__.startswith(_PLAIN) for c in _COMMS)
        and not any(map(_has_unreduced_gradient, group.fsdp_params))
    )


def _has_unreduced_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    unreduced = parameter.unsharded_accumulated_grad is not None
    return unreduced or (whole is not None and whole.grad is not None)


def _is_supported(parameter: Any) -> bool:
    """Say whether the graph can gather a parameter; that never changes."""
    return (
        not parameter.is_dtensor
        and parameter.fsdp_placement.dim == 0
        and torch.float16 not in (parameter.reduce_dtype, parameter.param_dtype)
        and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    )


def _description(group: Any) -> _Group:
    process_group = group.mesh_info.shard_process_group
    parameters = tuple(
        _Parameter(
            p._orig_size[0],
            p.padded_sharded_param_size[0],
            p.sharded_size[0],
            p.param_dtype,
            p.reduce_dtype,
        )
        for p in group.fsdp_params
    )
    flat = group.device.type == "cpu"
    return _Group(process_group.group_name, process_group.size(), flat, parameters)


@rule(_STATE + "_pre_forward")
def _pre_forward(tx: Tracer, state: Any, module: Value, args: Value, kwargs: Value) -> Value:
    real = getattr(state, "obj", None)
    if real is None or state.source is None or tx.frame is None or tx.transforms:
        raise Break("fully-shard", "hooks of an object that is made in the graph")
    real._lazy_init()  # as the first forward does
    tx.guard_identity(state.source, real)
    plain = _is_plain(real)
    tx.guard(CallSource(_is_plain, (state.source,)), "CONST", plain)
    parameters = [p for group in _groups(real) for p in group.fsdp_params]
    if not plain or not all(map(_is_supported, parameters)):
        raise Break("fully-shard", "settings or a state that only the hooks know")
    policy = real._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype:
        args, kwargs = (_cast(tx, policy.param_dtype, values) for values in (args, kwargs))
    _check_devices(real, [*args.unpack(tx), *tx.keyword_arguments(kwargs).values()])
    replaced: dict[int, Any] = {}
    for index, group in enumerate(_groups(real)):
        replaced |= _gather(tx, group, _source_of_group(real, state.source, index))
    frame, before = tx.frame, tx.frame.replaced
    tx.journal.on_rollback(functools.partial(setattr, frame, "replaced", before))
    frame.replaced = {**(before or {}), **replaced}
    return TupleValue([args, kwargs])


def _check_devices(state: Any, values: list[Value]) -> None:
    """Break where the hook moves arguments to the parameters' device."""
    for value in values:
        tensors = value.items if isinstance(value, SequenceValue) else [value]
        for tensor in tensors:
            if isinstance(tensor, TensorValue) and tensor.fake.device.type != state._device.type:
                raise Break("fully-shard", "arguments on another device")


def _gather(tx: Tracer, group: Any, source: Source) -> dict[int, Any]:
    """Replace a group's parameters by whole ones; returns what they were, by id."""
    parameters: list[Value] = []
    for index, parameter in enumerate(group.fsdp_params):
        where = ItemSource(AttrSource(source, "fsdp_params"), index)
        parameters.append(tx.wrap(parameter.sharded_param, AttrSource(where, "sharded_param")))
    description = _description(group)
    apply: Any = _Gather.apply

    def all_gather_parameters(*parameters: Any) -> Any:
        return apply(description, *(p.to_local() for p in parameters))

    whole = tx.graph.emit_plain("call_function", all_gather_parameters, parameters, {}).unpack(tx)
    made = whole[0]
    assert isinstance(made, TensorValue)
    node: Any = made.node.args[0]
    node.meta.pop("recompute", None)
    if group._reshard_after_forward:
        node.meta[REGATHER] = True
    before = {}
    for parameter, value in zip(group.fsdp_params, whole, strict=True):
        key = id(parameter.sharded_param)
        before[key] = tx.values_by_id[key]
        _replace(tx, key, (value, before[key][1]))
    return before


def _replace(tx: Tracer, key: int, entry: Any) -> None:
    undo = functools.partial(tx.values_by_id.__setitem__, key, tx.values_by_id[key])
    tx.journal.on_rollback(undo)
    tx.values_by_id[key] = entry


@rule(_STATE + "_post_forward")
def _post_forward(tx: Tracer, state: Any, module: Value, inputs: Value, output: Value) -> Value:
    frame = tx.frame
    if frame is None or frame.replaced is None:
        raise Break("fully-shard", "a hook without the one before the forward")
    for key, entry in frame.replaced.items():
        _replace(tx, key, entry)
    tx.journal.on_rollback(functools.partial(setattr, frame, "replaced", frame.replaced))
    frame.replaced = None
    dtype = state.obj._mp_policy.output_dtype
    return output if dtype is None else _cast(tx, dtype, output)


def _cast(tx: Tracer, dtype: torch.dtype, values: Value) -> Value:
    """Cast all tensors of floating point in a structure, as the hooks do."""
    torch_utils, common = (sys.modules[f"torch.distributed.{name}"] for name in _HELPERS)
    cast = functools.partial(common._cast_fp_tensor, dtype)
    return tx.trace_body(torch_utils._apply_to_tensors, [tx.const_object(cast), values], {})
