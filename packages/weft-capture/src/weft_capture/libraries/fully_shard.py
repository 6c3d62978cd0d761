"""Modules of `torch.distributed.fsdp.fully_shard`: their parameters are gathered in the graph.

The hooks that such a module runs before and after its forward gather its parameters, register
hooks that reduce gradients, and free the parameters. The graph has one node instead: an autograd
function from the sharded parameters to the whole ones. Between the two hooks the program reads the
results in place of the parameters. The partitioner gathers again in the backward, unless the module
keeps its parameters. Gradients go one of two ways:

    reduced      the backward of the node is a reduce-scatter; with replicas an all-reduce follows
    handed over  they arrive at leaf tensors without memory (links), whose hooks give them to the
                 module; its own code accumulates and reduces them at the end of the backward. So
                 it is where gradients stay unreduced (`set_requires_gradient_sync(False)`), where
                 such gradients wait, and where the program has set how to reduce.

Modules that were given to `fully_shard` together are gathered one by one.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import pad
from weft_core.collectives import REGATHER
from weft_guards.sources import AttrSource, CallSource, ItemSource, Source

from weft_capture import torch_compat
from weft_capture.breaks import Break
from weft_capture.functions.table import rule
from weft_capture.model.containers import SequenceValue, TupleValue
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.tensor import TensorValue

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState."
_HELPERS = ("utils", "fsdp._fully_shard._fsdp_common", "fsdp._fully_shard._fsdp_state")
_ops: Any = torch.ops._c10d_functional
_LINK = "_weft_link"
_REDUCTION = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reduce_scatter_unused_params": False,
    "force_sum_reduction_for_comms": False,
    "gradient_divide_factor": None,
    "_all_reduce_hook": None,
    "_partial_reduce_output": None,
}
"""Attributes of a group of parameters, and the values with which the graph reduces gradients."""


@dataclass(frozen=True)
class _Parameter:
    """A parameter's rows (its first size): all of them, and those on each process, padded.

    `dim` is the dimension that is split. If it is another than the first, the rows are those of the
    parts, one below the other. `layout`: mesh, placements, shape and strides of a DTensor.
    """

    rows: int
    padded: int
    local: int
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    dim: int = 0
    layout: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class _Group:
    """Parameters that are gathered together, and the process groups.

    `replicas`: name and size of the group whose processes have equal parts.
    `flat`: they are sent as one tensor. gloo takes as long for each tensor as for all of them;
    NCCL sends a list at once, and each parameter arrives where it is used.
    `linked`: the parameters whose gradients are handed over.
    """

    name: str
    size: int
    reducing: str
    replicas: tuple[str, int] | None
    flat: bool
    device: torch.device
    parameters: tuple[_Parameter, ...]
    linked: tuple[int, ...] = ()

    def scaling(self, dtype: torch.dtype) -> tuple[str, int, float]:
        """Return the reduction, and by what to divide before and after, as eager does."""
        if dtype != torch.float16:
            return "avg", 1, 1.0
        count, before = self.size * (self.replicas[1] if self.replicas else 1), 1
        while count % before == 0 and count / before > before:
            before *= 2
        return "sum", before, count / before


class _Gather(torch.autograd.Function):
    """Whole parameters of the parts that each process has; after the parts come the links."""

    @staticmethod
    def forward(ctx: Any, group: _Group, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = inputs[: len(group.parameters)]
        ctx.group, ctx.kinds = group, [(part.device, part.dtype) for part in parts]
        ctx.set_materialize_grads(False)
        pairs = list(zip(group.parameters, parts, strict=True))
        equal = [_padded(p.to(group.device, d.dtype or p.dtype), d.padded) for d, p in pairs]
        if group.flat and len({part.dtype for part in equal}) == 1:
            waited = _gather_flat(group, equal)
        else:
            gathered = _ops.all_gather_into_tensor_coalesced(equal, group.size, group.name)
            waited = [_ops.wait_tensor(result) for result in gathered]
        results = [_rows(whole, p.rows) for whole, (p, _) in zip(waited, pairs, strict=True)]
        results = [
            torch.cat(result.chunk(group.size), p.dim) if p.dim else result
            for result, (p, _) in zip(results, pairs, strict=True)
        ]
        needs = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(r for r, need in zip(results, needs, strict=False) if not need)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        group: _Group = ctx.group
        there = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        results: list[torch.Tensor | None] = [None] * len(grads)
        if group.linked:
            return (None, *results, *(grads[index] for index in group.linked))
        if there:
            whole = []
            for index, grad in there:
                p = group.parameters[index]
                grad = grad.to(p.reduce_dtype or grad.dtype)
                rows = torch.cat(grad.chunk(group.size, p.dim)) if p.dim else grad.contiguous()
                whole.append(_padded(rows, p.padded * group.size))
            for (index, _), part in zip(there, _reduced(group, whole), strict=True):
                local = _rows(part, group.parameters[index].local)
                results[index] = local.to(*ctx.kinds[index])
        return (None, *results)


def _gather_flat(group: _Group, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gather tensors as one; they follow each other in the part of each process."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(sent, group.size, group.name))
    columns = whole.view(group.size, -1).split([part.numel() for part in parts], 1)
    shapes = [(group.size * len(part), *part.shape[1:]) for part in parts]
    return [column.reshape(shape) for column, shape in zip(columns, shapes, strict=True)]


def _reduced(group: _Group, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """Reduce tensors over all processes, and return this one's rows of each."""
    shapes = [(len(tensor) // group.size, *tensor.shape[1:]) for tensor in whole]
    flat = group.flat and len({tensor.dtype for tensor in whole}) == 1
    if flat:
        whole = [torch.cat([tensor.view(group.size, -1) for tensor in whole], 1).view(-1)]
    operation, before, after = group.scaling(whole[0].dtype)
    if before > 1:
        whole = [tensor / before for tensor in whole]
    scatter = _ops.reduce_scatter_tensor_coalesced
    parts = _waited(scatter(whole, operation, group.size, group.reducing))
    if group.replicas:
        parts = _waited(_ops.all_reduce_coalesced(parts, operation, group.replicas[0]))
    if after > 1:
        parts = [part / after for part in parts]
    if flat:
        columns = parts[0].split([math.prod(shape) for shape in shapes])
        parts = [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]
    return parts


def _waited(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [_ops.wait_tensor(result) for result in results]


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


def _mode(state: Any) -> tuple[Any, ...] | None:
    """Say how the graph treats each group of a state in this call; None leaves it to the hooks.

    Of each group: whether it hands gradients over, whether parameters are freed after the forward,
    and the name of the process group that reduces.
    """
    if state._training_state.name != "IDLE" or getattr(state, "_modules_to_run_forward", None):
        return None
    groups = _groups(state)
    return tuple(map(_mode_of_group, groups)) if all(map(_is_plain_group, groups)) else None


def _is_plain_group(group: Any) -> bool:
    return (
        (group._training_state.name, group._sharded_state.name) == ("IDLE", "SHARDED")
        and type(group.mesh_info).__name__ in ("FSDPMeshInfo", "HSDPMeshInfo")
        and not getattr(group.mesh_info, "is_spmd_mesh", False)
        and getattr(group, "_all_gather_result", None) is None
        and _is_default(group, "_all_gather_comm")
    )


def _mode_of_group(group: Any) -> tuple[bool, bool, str]:
    plain = _is_default(group, "_reduce_scatter_comm") and all(
        getattr(group, name, value) is value for name, value in _REDUCTION.items()
    )
    linked = not plain or any(map(_has_unreduced_gradient, group.fsdp_params))
    return linked, bool(group._reshard_after_forward), _reducing(group)


def _is_default(group: Any, name: str) -> bool:
    return type(getattr(group, name, None)).__name__.startswith(("Default", "NoneType"))


def _reducing(group: Any) -> str:
    mesh = group.mesh_info
    own = getattr(mesh, "reduce_scatter_process_group", None)
    name: str = (own or mesh.shard_process_group).group_name
    return name


def _has_unreduced_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    unreduced = parameter.unsharded_accumulated_grad is not None
    return unreduced or (whole is not None and whole.grad is not None)


def _description(group: Any, parameters: list[Any]) -> _Group:
    mesh = group.mesh_info
    replicas = getattr(mesh, "replicate_process_group", None)
    return _Group(
        mesh.shard_process_group.group_name,
        mesh.shard_process_group.size(),
        _reducing(group),
        replicas and (replicas.group_name, replicas.size()),
        group.device.type == "cpu",
        group.device,
        tuple(map(_describe, parameters)),
    )


def _describe(parameter: Any) -> _Parameter:
    dim, spec = parameter.fsdp_placement.dim, torch_compat.whole_spec(parameter)
    local = parameter.sharded_size[0]
    padded = parameter.padded_sharded_param_size[0]
    rows = padded * parameter.mesh_info.shard_mesh_size if dim else parameter._orig_size[0]
    layout = spec and (spec.mesh, spec.placements, spec.shape, spec.stride)
    kinds = parameter.param_dtype, parameter.reduce_dtype
    return _Parameter(rows, padded, local, *kinds, dim, layout)


def _parameters_of(group: Any, module: Any) -> list[tuple[int, Any]]:
    """Return the parameters of a group that `module` has, with their places."""
    inside = set(map(id, module.modules()))
    numbered = list(enumerate(group.fsdp_params))
    infos = [p._module_info for _, p in numbered]
    owners = [(info.module, *info.shared_modules) for info in infos]
    return [
        pair
        for pair, modules in zip(numbered, owners, strict=True)
        if not inside.isdisjoint(map(id, modules))
    ]


# ---- gradients that are handed over


def _link(state: Any, parameter: Any) -> torch.Tensor:
    """Return the leaf at which the gradient of a whole parameter arrives."""
    dtype = parameter.param_dtype or parameter.orig_dtype
    link: torch.Tensor | None = getattr(parameter, _LINK, None)
    if link is None or link.dtype != dtype:
        size = parameter._orig_size
        link = torch.empty_strided(size, (0,) * len(size), dtype=dtype, device=parameter.device)
        link.requires_grad_().register_post_accumulate_grad_hook(
            functools.partial(_hand_over, state, parameter)
        )
        setattr(parameter, _LINK, link)
    return link


@torch.no_grad()
def _hand_over(state: Any, parameter: Any, link: torch.Tensor) -> None:
    """Give a gradient to the parameter as eager's backward does, which `state` then reduces."""
    grad, link.grad = link.grad, None
    if (spec := torch_compat.whole_spec(parameter, grad)) is not None:
        common = sys.modules["torch.distributed." + _HELPERS[1]]
        grad = common._from_local_no_grad(grad, spec)
    whole = parameter._unsharded_param
    whole.grad = grad if whole.grad is None else whole.grad + grad
    state._register_root_post_backward_final_callback()


def _prepare_whole(state: Any) -> None:
    """Make the whole parameters that eager makes at their first use, without memory."""
    for other in state._state_ctx.all_states:
        for group in _groups(other):
            for parameter in group.fsdp_params:
                if not hasattr(parameter, "_unsharded_param"):
                    count = parameter._sharded_param_data.numel()
                    dtype = parameter.param_dtype or parameter.orig_dtype
                    size = group.mesh_info.shard_mesh_size
                    parameter.init_all_gather_outputs([count], [dtype], size, group.device)
                    parameter.init_unsharded_param()
                    parameter.free_unsharded_param()


# ---- the two hooks


def _state_of(tx: Tracer, arguments: tuple[Value, ...]) -> tuple[Any, Source, list[Any]]:
    """Return the state of a hook, its source, and the hook's other arguments.

    The hooks of modules that are sharded together are functions of the module, not methods.
    """
    first, *others = arguments
    module, source = getattr(first, "obj", None), first.source
    if source is None or module is None or tx.frame is None or tx.transforms:
        raise Break("fully-shard", "hooks of an object that is made in the graph")
    if not isinstance(module, torch.nn.Module):
        return module, source, others
    state_of = sys.modules["torch.distributed." + _HELPERS[2]]._get_module_fsdp_state
    return state_of(module), CallSource(state_of, (source,)), [first, *others]


@rule(_STATE + "_pre_forward")
def _pre_forward(tx: Tracer, *arguments: Value) -> Value:
    real, source, (module, args, kwargs) = _state_of(tx, arguments)
    frame: Any = tx.frame
    real._lazy_init()  # as the first forward does
    tx.guard_identity(source, real)
    mode = _mode(real)
    tx.guard(CallSource(_mode, (source,)), "CONST", mode)
    groups = [(group, _parameters_of(group, module.obj)) for group in _groups(real)]
    parameters = [p for _, owned in groups for _, p in owned]
    if mode is None:
        raise Break("fully-shard", "settings or a state that only the hooks know")
    if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in parameters):
        raise Break("fully-shard", "parameters that gather themselves")
    policy = real._mp_policy
    if policy.cast_forward_inputs and policy.param_dtype:
        args, kwargs = (_cast(tx, policy.param_dtype, values) for values in (args, kwargs))
    _check_devices(real, [*args.unpack(tx), *tx.keyword_arguments(kwargs).values()])
    replaced: dict[int, Any] = {}
    for index, (group, owned) in enumerate(groups):
        if owned:
            linked = mode[index][0] and torch.is_grad_enabled()
            where = _source_of_group(real, source, index)
            replaced |= _gather(tx, real, group, owned, where, linked)
    before = frame.replaced
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


def _gather(
    tx: Tracer, state: Any, group: Any, owned: list[Any], source: Source, linked: bool
) -> dict[int, Any]:
    """Replace parameters of a group by whole ones; returns what they were, by id."""
    places = [ItemSource(AttrSource(source, "fsdp_params"), index) for index, _ in owned]
    reals = [parameter for _, parameter in owned]
    inputs: list[Value] = []
    for where, parameter in zip(places, reals, strict=True):
        inputs.append(tx.wrap(parameter.sharded_param, AttrSource(where, "sharded_param")))
    description = _description(group, reals)
    if linked:
        trained = [k for k, p in enumerate(reals) if p.sharded_param.requires_grad]
        description = replace(description, linked=tuple(trained))
        with unset_fake_temporarily():
            _prepare_whole(state)
            links = [(_link(state, reals[k]), AttrSource(places[k], _LINK)) for k in trained]
        inputs += [tx.wrap(link, where) for link, where in links]
    made: Any = _emit_gather(tx, description, inputs)
    before = {}
    for parameter, value in zip(reals, made, strict=True):
        key = id(parameter.sharded_param)
        before[key] = tx.values_by_id[key]
        _replace(tx, key, (value, before[key][1]))
    if group._reshard_after_forward:
        made[0].node.args[0].meta[REGATHER] = True
    return before


def _emit_gather(tx: Tracer, description: _Group, inputs: list[Value]) -> list[Value]:
    """Make the node that gathers; returns the whole parameters."""
    apply: Any = _Gather.apply
    layouts = [parameter.layout for parameter in description.parameters]

    def all_gather_parameters(*inputs: Any) -> Any:
        parts = [part.to_local() for part in inputs[: len(layouts)]]
        whole = apply(description, *parts, *inputs[len(layouts) :])
        return tuple(map(_with_layout, whole, layouts))

    whole = tx.graph.emit_plain("call_function", all_gather_parameters, inputs, {}).unpack(tx)
    node: Any = whole[0].node  # type: ignore[attr-defined]
    node.args[0].meta.pop("recompute", None)
    return whole


def _with_layout(local: torch.Tensor, layout: Any) -> Any:
    """Return a DTensor of its local part, if there is a layout."""
    if layout is None:
        return local
    mesh, placements, shape, stride = layout
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    return dtensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _replace(tx: Tracer, key: int, entry: Any) -> None:
    undo = functools.partial(tx.values_by_id.__setitem__, key, tx.values_by_id[key])
    tx.journal.on_rollback(undo)
    tx.values_by_id[key] = entry


@rule(_STATE + "_post_forward")
def _post_forward(tx: Tracer, *arguments: Value) -> Value:
    state, _, (_, _, output) = _state_of(tx, arguments)
    frame: Any = tx.frame
    if frame.replaced is None:
        raise Break("fully-shard", "a hook without the one before the forward")
    for key, entry in frame.replaced.items():
        _replace(tx, key, entry)
    tx.journal.on_rollback(functools.partial(setattr, frame, "replaced", frame.replaced))
    frame.replaced = None
    dtype = state._mp_policy.output_dtype
    return output if dtype is None else _cast(tx, dtype, output)


def _cast(tx: Tracer, dtype: torch.dtype, values: Value) -> Value:
    """Cast all tensors of floating point in a structure, as the hooks do."""
    torch_utils, common = (sys.modules[f"torch.distributed.{name}"] for name in _HELPERS[:2])
    cast = functools.partial(common._cast_fp_tensor, dtype)
    return tx.trace_body(torch_utils._apply_to_tensors, [tx.const_object(cast), values], {})
