"""Functions of torch that are evaluated, declined or handled while capturing."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NoReturn

import torch
from weft_core import torch_compiler_shim
from weft_core.tracing import ASSERT

from weft_capture.breaks import Break
from weft_capture.effects.runtime_asserts import emit_check
from weft_capture.functions.table import code_rule, decline, pure, rule, rule_of_each
from weft_capture.model import attributes
from weft_capture.model.constant import FALSE, NONE, TRUE, constant
from weft_capture.model.containers import ListValue, SequenceValue, SizeValue, TupleValue
from weft_capture.model.objects import ModuleValue
from weft_capture.model.protocol import Kwargs, Tracer, Value
from weft_capture.model.slots import compare
from weft_capture.tensors.tensor import SymValue, TensorValue, is_data

_VALUES = (torch.equal, torch.allclose, torch.is_nonzero)
# Functionalisation treats these as copies, too.
_UNKNOWN_VIEWS = (torch.unsafe_chunk, torch.unsafe_split, torch.unsafe_split_with_sizes)

pure(torch.finfo, torch.iinfo, torch.device, torch.promote_types, torch.can_cast)
pure(torch.get_default_dtype, torch.result_type, torch.broadcast_shapes)
pure(torch.backends.cuda.is_built, torch.cuda.is_available, torch.cuda.device_count)
pure(torch.accelerator.current_accelerator)


@rule(torch.nn.modules.activation._is_make_fx_tracing)
def _is_traced(tx: Tracer) -> Value:
    return TRUE  # attention then calls separate operators, which can be fused


# Declined: the result is not known while capturing.


decline("random-state", "a seed of the operating system", torch.seed)
decline("data-dependent-value", "a comparison of the values of tensors", *_VALUES)
decline(
    "autograd-mode", "hooks on saved tensors",
    torch._C._autograd._push_saved_tensors_default_hooks,
    torch._C._autograd._pop_saved_tensors_default_hooks,
)  # fmt: skip
decline("side-effect", "a file", open, torch.load, torch.save)
decline(
    "loop", "a DataLoader, whose batches are loaded eagerly",
    "torch.utils.data.dataloader.DataLoader.__iter__",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
)  # fmt: skip
decline("autograd-state", "a view that autograd takes for a copy", *_UNKNOWN_VIEWS)


@rule(torch.Size)
def _size(tx: Tracer, items: Value | None = None) -> Value:
    sizes = [] if items is None else items.unpack(tx)
    if not all(issubclass(size.python_type(), int) for size in sizes):
        raise Break("builtin-error", "a torch.Size of other objects than ints")
    return SizeValue(sizes)


def _always(result: Value, *functions: object) -> None:
    @rule(*functions)
    def answer(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
        return result


_no = functools.partial(_always, FALSE)
_no(torch._jit_internal.is_scripting, torch.jit._trace.is_tracing, torch._C._is_tracing)
_no(torch.fx._symbolic_trace.is_fx_tracing)
_no("torch.onnx.is_in_onnx_export", torch.compiler.is_exporting)


_always(TRUE, torch.compiler.is_dynamo_compiling)
_always(NONE, *torch_compiler_shim.MARKS)
_always(NONE, torch._C._get_tracing_state, torch._C._log_api_usage_once)


rule(torch.jit.ignore, torch.jit.unused, torch.compiler.disable)(lambda tx, function: function)


@rule(torch._check_is_size)
def _check_is_size(tx: Tracer, i: Value, message: Value = NONE, *, max: Value = NONE) -> Value:
    _check(tx, compare(tx, ">=", i, constant(0)), message)
    if max is not NONE:
        _check(tx, compare(tx, "<=", i, max), message)
    return NONE


# Runtime assertions: known now, or checked by the graph where they are about a tensor's numbers.

_FAILED = (
    "Expected cond to be True, but got False. (Could this error message be improved? If so, "
    "please report an enhancement request to PyTorch.)"
)


@rule(torch._assert)
def _assert(tx: Tracer, condition: Value, message: Value) -> Value:
    if isinstance(condition, TensorValue):
        if condition.fake.numel() == 1 and emit_check(tx, condition, True):
            return NONE
        raise Break("data-dependent-value", "torch._assert on a tensor")
    if not condition.nb_bool(tx):
        tx.raise_(AssertionError, message.as_constant())
    return NONE


rule("torch.fx.experimental.symbolic_shapes.expect_true", "weft_core.static_shapes.expect_true")(
    lambda tx, condition: constant(condition.nb_bool(tx))
)


def _either(name: str) -> tuple[str, str]:
    return f"torch.fx.experimental.symbolic_shapes.{name}", f"weft_core.static_shapes.{name}"


@rule_of_each(*_either("guard_or_true"), *_either("guard_or_false"))
def _guard_or(name: Any, tx: Tracer, condition: Value) -> Value:
    """Evaluate a condition on sizes; one on a tensor's numbers has the answer of the name."""
    unknown = isinstance(condition, SymValue) and condition.is_data()
    return constant(name.endswith("true") if unknown else condition.nb_bool(tx))


@rule(
    "torch.fx.experimental.symbolic_shapes.has_free_unbacked_symbols",
    "weft_core.static_shapes.has_free_unbacked_symbols",
)
def _reads_data(tx: Tracer, value: Value) -> Value:
    """Say whether a number, or a size or stride of a tensor, was read from a tensor."""
    if isinstance(value, TensorValue):
        sizes = (*value.fake.shape, *value.fake.stride(), value.fake.storage_offset())
        return constant(any(isinstance(n, torch.SymInt) and is_data(n) for n in sizes))
    if isinstance(value, SequenceValue):
        return TRUE if any(_reads_data(tx, item) is TRUE for item in value.items) else FALSE
    return constant(isinstance(value, SymValue) and value.is_data())


@rule("torch.distributions.distribution._all_true_or_runtime_assert")
def _is_valid(tx: Tracer, valid: Value, message: Value) -> Value:
    """The truth is left to the branch on it, which raises; torch 2.15 has this function."""
    return tx.call_builtin(torch._is_all_true, [valid], {})


@rule(torch._check)
def _check(tx: Tracer, condition: Value, message: Value = NONE) -> Value:
    if isinstance(condition, TensorValue):
        raise Break("data-dependent-value", "torch._check on a tensor")
    if isinstance(condition, SymValue) and condition.is_data():
        reason = _FAILED if message is NONE else message.tp_call(tx, [], {}).as_constant()
        return tx.graph.emit("call_function", ASSERT, [condition, constant(str(reason))], {})
    if not condition.nb_bool(tx):
        text = "Expected cond to be True" if message is NONE else message.tp_call(tx, [], {})
        tx.raise_(RuntimeError, text if isinstance(text, str) else text.as_constant())
    return NONE


# `torch.Tensor([...])`: classes from before torch 0.4, which programs still call.

_LEGACY = (torch.Tensor, *(
    getattr(torch, f"{name}Tensor") for name in
    "Float Double Half BFloat16 Long Int Short Char Byte Bool".split()  # noqa: SIM905
))  # fmt: skip


DATA_VALUES: set[type[Value]] = set()
"""Values from which `torch.Tensor` creates a tensor of numbers."""


@rule_of_each(*_LEGACY)
def _legacy(tensor_type: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    """Create a tensor from a sequence or an array, or an uninitialised one from a size."""
    plain = not kwargs and torch._C._get_default_device() == "cpu"
    dtype = torch.get_default_dtype() if tensor_type is torch.Tensor else tensor_type.dtype
    how: Kwargs = {"dtype": constant(dtype), "device": constant("cpu")}
    if plain and len(args) == 1 and (type(args[0]) in DATA_VALUES or _is_data(args[0])):
        return tx.call_builtin(torch.tensor, list(args), how)
    if plain and all(arg.python_type() is int for arg in args):
        return tx.call_builtin(torch.empty, list(args) or [constant(0)], how)
    raise Break("object-creation", f"making a {tensor_type.__qualname__}")


def _is_data(value: Value) -> bool:
    if isinstance(value, SequenceValue) and type(value) in (ListValue, TupleValue):
        return all(_is_data(item) or item.python_type() in _NUMBERS for item in value.items)
    return False


_NUMBERS = (int, float, bool)


# ---- attributes of `torch.nn.Module`: parameters, buffers and submodules


_MEMBERS = (torch.nn.Parameter, torch.nn.Module, torch.nn.Buffer)
_SETATTR = torch.nn.Module.__setattr__


def _module_getattr(tx: Tracer, function: Value, args: list[Value], kwargs: Kwargs) -> Value | None:
    """Read a member of an input module; for a new module, `__getattr__` is inlined."""
    owner, name = args
    if not isinstance(owner, ModuleValue) or owner.source is None:
        return None
    member = attributes.module_member(tx, owner, name.as_constant())
    if member is None:
        text = f"'{owner.cls.__name__}' object has no attribute '{name.as_constant()}'"
        tx.raise_(AttributeError, text)
    return member


code_rule(torch.nn.Module.__getattr__.__code__)(_module_getattr)


@code_rule(torch.nn.modules.lazy.LazyModuleMixin._infer_parameters.__code__)
def _infer_parameters(tx: Tracer, function: Value, args: list[Value], kwargs: Kwargs) -> NoReturn:
    error = Break("lazy-module", args[0].describe())
    error.eager_frame = tx.frames[0]
    raise error


@rule(_SETATTR)
def _module_setattr(tx: Tracer, owner: Value, name: Value, value: Value) -> Value:
    if isinstance(owner, ModuleValue) and not issubclass(value.python_type(), _MEMBERS):
        if attributes.module_member(tx, owner, name.as_constant()) is None:
            return tx.builtin(object.__setattr__, owner, name, value)
    return tx.trace_body(_SETATTR, [owner, name, value], {})


@rule(torch_compiler_shim.MODULE_INIT)
def _module_init(tx: Tracer, owner: Value, *args: Value, **kwargs: Value) -> Value:
    """Skip the marker that torch's compiler, once loaded, sets on modules."""
    init = inspect.getclosurevars(torch.nn.Module.__init__).nonlocals["init"]
    return tx.const_object(init).tp_call(tx, [owner, *args], kwargs)
