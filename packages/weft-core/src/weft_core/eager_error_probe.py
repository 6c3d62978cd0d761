"""Errors that real operators raise and fake ones do not: `check` runs the real operators.

A pointwise operator runs for real on single elements, once for each combination of dtypes and
numbers. Of others, the numbers must fit the dtype, and with dtypes that many of them do not take
they run on zeros of the same shapes. None may write over itself or an operand.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

_NUMBERS = (bool, int, float, complex)
_PLAIN = (*_NUMBERS, str, type(None), torch.dtype, torch.memory_format)
# With a float tensor, these compute with what is beyond its dtype, or take it for infinite.
_WIDE = frozenset(("add", "sub", "rsub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"))


def check(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where the real operator would, or may take its operands otherwise.

    Raises:
        RuntimeError: with what the real operator said.
    """
    if func._schema.is_mutable and torch.Tag.inplace_view not in func.tags:
        _check_overlap(func, args, kwargs)
    refusal = None
    if torch.Tag.pointwise not in func.tags:
        refusal = _refused_number(func, args, kwargs) or _refused_dtypes(func, args, kwargs)
    elif torch.Tag.nondeterministic_seeded not in func.tags:
        given = (*args, *kwargs.values())
        if all(isinstance(one, torch.Tensor) or type(one) in _PLAIN for one in given):
            specs = tuple(map(_spec, given))
            refusal = None if None in specs else _refusal(func, specs, len(args), tuple(kwargs))
    if refusal is not None:
        raise RuntimeError(refusal)


def _spec(value: Any) -> Any:
    """What tells operands apart; None for what is not probed."""
    if isinstance(value, torch.memory_format):  # which asks for a rank
        value = torch.contiguous_format
    if not isinstance(value, torch.Tensor):
        return type(value), value
    plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
    return (torch.Tensor, value.dtype, value.dim() > 0) if plain else None


@functools.lru_cache(4096)
def _refusal(func: Any, specs: Any, count: int, names: tuple[str, ...]) -> str | None:
    dtypes = [spec[1] for spec in specs if spec[0] is torch.Tensor]
    wide = func._schema.name.partition("::")[2].rstrip("_") in _WIDE
    for spec in specs:
        if spec[0] in (int, float) and any(_is_beyond(spec[1], dtype, wide) for dtype in dtypes):
            return f"{func}: {spec[1]} is beyond the dtype of a tensor"
    given = [torch.ones([1] * s[2], dtype=s[1]) if len(s) == 3 else s[1] for s in specs]
    return _said(func, *given[:count], **dict(zip(names, given[count:], strict=True)))


def _is_beyond(number: float, dtype: torch.dtype, wide: bool) -> bool:
    if dtype.is_floating_point:
        return not wide and torch.finfo(dtype).max < abs(number) < float("inf")
    limits = torch.iinfo(dtype) if dtype is not torch.bool and not dtype.is_complex else None
    whole = isinstance(number, int) and not -(2**31) <= number < 2**31
    return whole and limits is not None and not limits.min <= number <= limits.max


@functools.cache
def _number_names(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((index, one.name) for index, one in arguments if str(one.type) == "number")


_RANGES = frozenset(getattr(torch.ops.aten.arange, n) for n in ("default", "start", "start_step"))


def _refused_number(func: Any, args: Any, kwargs: Any) -> str | None:
    for index, name in _number_names(func):
        number = args[index] if index < len(args) else kwargs.get(name)
        if type(number) in _NUMBERS:
            if func in _RANGES and abs(number) > 2**53:
                return f"{func}: the length is computed in floats"
            known = getattr(kwargs.get("out", (*args, None)[0]), "dtype", None)
            dtype = kwargs.get("dtype") or known
            refusal = _said(torch.full, (2,), number, dtype=dtype, device="cpu")
            if refusal is not None:
                return refusal
    return None


_ARGUMENTS = frozenset((*_PLAIN, torch.device, torch.layout, torch.Tensor, FakeTensor))
_LARGE = 1 << 20
"""Elements from which an operator is not asked about dtypes."""


def _refused_dtypes(func: Any, args: Any, kwargs: Any) -> str | None:
    """Ask about unlike and complex floats, integers alone, and indices of other dtypes."""
    leaves = tree_leaves((args, kwargs))
    given = [one for one in leaves if isinstance(one, torch.Tensor)]
    dtypes = {one.dtype for one in given if one.dim()}
    floats = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    real = len(floats) == 1 and not any(dtype.is_complex for dtype in floats)
    usual = real and not dtypes - floats - {torch.int64, torch.bool}
    if func in _PRODUCTS:  # whose operands are not converted
        usual = len(dtypes) == 1 and bool(floats)
    if usual or not dtypes or func.namespace != "aten" or not _can_run(func):
        return None
    plain = all(map(_spec, given)) and all(type(one) in _ARGUMENTS for one in leaves)
    sizes = [one.numel() for one in given]
    if not plain or not all(type(size) is int for size in sizes) or not 0 < sum(sizes) < _LARGE:
        return None
    key = tree_map_only(torch.Tensor, lambda one: (one.dtype, *one.shape), (args, kwargs))
    known = (func, str(key))
    if len(_ASKED) > 4096:
        _ASKED.clear()
    if known not in _ASKED:
        made = tree_map_only(
            torch.Tensor, lambda one: torch.zeros(one.shape, dtype=one.dtype), (args, kwargs)
        )
        _ASKED[known] = _said(func, *made[0], **made[1])
    return _ASKED[known]


_ASKED: dict[Any, str | None] = {}
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)


def _can_run(func: Any) -> bool:
    """Say whether a call on zeros says something, here: views take all, random numbers count."""
    view = any(one.alias_info for one in func._schema.returns) and not func._schema.is_mutable
    random = torch.Tag.nondeterministic_seeded in func.tags
    return not (view or random or divides(func) or peek_interpreter_stack() is not None)


def _said(function: Any, *args: Any, **kwargs: Any) -> str | None:
    try:
        function(*args, **kwargs)
    except Exception as error:  # of any kind: it is raised again when the program comes to it
        return str(error) or type(error).__name__
    return None


def _check_overlap(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where a real operator writes over itself or an operand: the order then tells."""
    named = {one.name: one.alias_info for one in func._schema.arguments}
    given = [(t, named[name]) for name, t in {**dict(zip(named, args)), **kwargs}.items()]
    tensors = [(t, info) for t, info in given if getattr(t, "layout", None) is torch.strided]
    whole = torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default
    # What has a form in place may write its first operand: `addmm(x, a, b, out=x)` is `addmm_`.
    in_place = hasattr(torch.ops.aten, func._schema.name.split("::")[1] + "_")
    for index, (tensor, info) in enumerate(tensors):
        if info is not None and info.is_write:
            others = [(i, one) for i, (one, _) in enumerate(tensors) if i != index]
            inside = torch._debug_has_internal_overlap(tensor) and is_self_overlapping(tensor)
            if inside or any(_overlap(tensor, t, whole or (in_place and not i)) for i, t in others):
                raise RuntimeError(f"{func} writes to memory that it reads elsewhere")


def is_concrete(size: Any) -> bool:
    """Say whether a size is a number, or a symbol for one: those out of data are known later."""
    return type(size) is int or bool(size.node.has_hint())


def is_self_overlapping(tensor: torch.Tensor) -> bool:
    """Say whether two elements of a tensor may share memory.

    Of sizes out of data only what `expand` makes is known.
    """
    if not all(map(is_concrete, (*tensor.stride(), *tensor.shape))):
        return any(type(stride) is int and stride == 0 for stride in tensor.stride())
    reach: Any = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _overlap(one: torch.Tensor, other: torch.Tensor, whole: bool) -> bool:
    """Say whether tensors share an element; with `whole` they may be alike."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    alike = one.storage_offset() == other.storage_offset() and one.stride() == other.stride()
    if whole and alike and one.shape == other.shape:
        return False
    steps: dict[str, Any] = {}  # in bytes, by their text, for symbolic ones have no hash
    distance = cast(Any, 0)
    for tensor, sign in ((one, 1), (other, -1)):
        width = tensor.itemsize
        distance -= sign * tensor.storage_offset() * width
        rows = [(stride * width, size - 1) for stride, size in zip(tensor.stride(), tensor.shape)]
        for step, count in [(1, width - 1), *rows]:
            _, back, on = steps.get(str(step), (step, 0, 0))
            steps[str(step)] = (step, back, on + count) if sign > 0 else (step, back - count, on)
    steps.pop("0", None)
    return _meets(distance, sorted(steps.values()))


def _meets(distance: Any, steps: list[tuple[Any, Any, Any]]) -> bool:
    """Say whether a distance is made of steps, so many back or on of each; the last is the longest.

    The numbers of the longest may be symbolic: only their order is asked.
    """
    if not steps or distance % math.gcd(*(step for step, *_ in steps)):
        return bool(distance == 0)
    *rest, (step, back, on) = steps
    least = -((sum(one * most for one, _, most in rest) - distance) // step)
    greatest = (distance - sum(one * fewest for one, fewest, _ in rest)) // step
    tries = range(max(least, back), min(greatest, on) + 1)
    return any(_meets(distance - count * step, rest) for count in tries)


_FAILING = frozenset((
    "gather", "index", "index_select", "embedding", "take", "scatter", "scatter_add",
    "scatter_reduce", "index_put", "put", "index_add", "index_copy", "index_fill",
    "index_reduce", "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss",
    "multilabel_margin_loss_forward", "_ctc_loss", "binary_cross_entropy", "_embedding_bag",
    "_embedding_bag_forward_only", "max_unpool2d", "max_unpool3d", "segment_reduce", "histc",
    "_linalg_eigh", "_linalg_svd", "linalg_eig", "_linalg_eigvals", "linalg_pinv", "cholesky",
    "cholesky_inverse", "lu_unpack", "linalg_lu_solve", "linalg_ldl_solve", "searchsorted",
    "masked_scatter",
))  # fmt: skip
_DIVIDING = frozenset(("floor_divide", "div", "remainder", "fmod"))
_RAISING = _FAILING | _DIVIDING


def may_raise(target: Any) -> bool:
    """Whether a call of `target` may raise because of what its operands hold."""
    return _aten_name(target) in _RAISING


def divides(target: Any) -> bool:
    """Whether `target` divides, which raises for integers and zero."""
    return _aten_name(target) in _DIVIDING


def _aten_name(target: Any) -> str:
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return str(target._schema.name)[6:] if known else ""
