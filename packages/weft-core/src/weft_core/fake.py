"""Fake tensors without torch's own compiler: the file that knows how torch builds its fake mode.

Constructing `FakeTensorMode`, converting a real tensor with it, or running almost any reference
implementation imports that compiler for a setting or a marker (0.9 s). Here is a mode that reads
those from a placeholder (`weft_core.torch_compiler_shim`), a converter and a `ShapeEnv` that need
none. What differs between torch versions about fake tensors belongs in this file and nowhere else.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from weft_core import _python_kernels, eager_error_probe, jagged, static_shapes, torch_compiler_shim
from weft_core._fake_strides import strides_of
from weft_core.symbolic_sizes import SizeSource, limit, new_symint, symbolic_layout
from weft_core.tensor_subclass import SubclassLayout, leaves

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "SizeSource",
    "detect_mode",
    "fake_inputs",
    "fake_mode",
    "fresh_fake",
    "limit",
    "make_shape_env",
    "mode_for",
    "new_symint",
    "to_fake",
]

_dispatch_impl = torch_compiler_shim.rebind(FakeTensorMode._dispatch_impl)
_aten = torch.ops.aten
_UNIQUE = _aten._unique.default
# Results sized by data, which torch 2.11 does not say: it would take the sizes of zeros.
_UNTAGGED = () if torch.Tag.dynamic_output_shape in _UNIQUE.tags else (_UNIQUE,)
_NORM = _aten.linalg_vector_norm.default
# Which argument gives a result its dtype; the references promote.
_DTYPE_OF = {
    _aten.binary_cross_entropy_with_logits.default: 1,
    _aten.soft_margin_loss.default: 0,
    _aten.soft_margin_loss_backward.default: 1,
    _aten.mv.default: 1,
}
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default


class _Mode(FakeTensorMode):
    """While it is entered, and sizes may be symbolic, torch chooses its Python kernels.

    C++ kernels of composite operators (`upsample_nearest2d.vec`), and meta kernels that call other
    operators, read sizes as plain ints.
    """

    __init__ = torch_compiler_shim.rebind(FakeTensorMode.__init__)
    _python_kernels: list[Any]  # a guard for each time it was entered
    writes = 0  # of operators in place: a tensor of inference mode does not count its own
    drawn = 0  # how often random numbers were
    is_checked = False  # for what a real operator would raise or warn of, and a fake does not

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = isinstance(func, torch._ops.OpOverload)
        # The values of jagged ones come here by themselves.
        checked = known and self.is_checked and not any(map(jagged.is_jagged, types))
        if known and func._schema.is_mutable:
            self.writes += 1
        if known and torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += 1
        if checked:
            eager_error_probe.check(func, args, kwargs or {})
        if self.is_checked and func in _WARNING and _WARNING[func](*args, **kwargs or {}):
            warnings.warn(f"{func} may warn", stacklevel=2)
        if (product := jagged.product(func, args)) is not None:
            with self:
                return product()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        return jagged.new_ragged_size()

    def __enter__(self) -> Self:
        if self.shape_env is not None:
            guard = enable_python_dispatcher()
            guard.__enter__()
            self._python_kernels.append(guard)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self.shape_env is not None:
            self._python_kernels.pop().__exit__(*raised)

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _UNTAGGED:
            raise DynamicOutputShapeException(func)
        if func is _NORM:
            args = _counted_from_start(*args)
        crops = func is torch.ops.aten.constant_pad_nd.default and self.shape_env is not None
        if crops and all(_holds(p <= 0) for p in args[1]):
            with self:
                return _cropped(args[0], args[1])
        if func in _FAKES:
            with self:
                return _FAKES[func](*args, **kwargs)
        result = _dispatch_impl(self, func, types, args, kwargs)
        if func in _DTYPE_OF and result.dtype != args[_DTYPE_OF[func]].dtype:
            with self:
                result = result.to(args[_DTYPE_OF[func]].dtype)
        if func is _FLASH and result[0].dtype is torch.float64:  # which torch 2.11 takes for float
            with self:
                result = result[0], result[1].double()
        strides = strides_of(func, args, result)
        if strides is None:
            return result
        first, *rest = result if isinstance(result, tuple) else (result,)
        if strides != first.stride():
            with self:
                first = first.new_empty_strided(first.shape, strides)
        return (first, *rest) if isinstance(result, tuple) else first


def _counted_from_start(
    tensor: torch.Tensor, order: Any = 2, dims: Any = None, *rest: Any
) -> tuple[Any, ...]:
    """Arguments of a norm: of one element, torch 2.11 takes a negative dimension for another."""
    dims = dims and [dim + tensor.dim() if dim < 0 else dim for dim in dims]
    return tensor, order, dims, *rest


def _without_generator(draw: Any) -> Any:
    return lambda *args, generator, **kwargs: draw(*args, **kwargs)


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.device.type == "cpu":
        return x.new_empty(x.shape), x.new_empty(x.shape)
    return torch.empty_like(x), x.new_empty(0)


def _block_diag(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference takes a number's dtype for as strong as a matrix's."""
    strong, weak = (
        [t.dtype for t in tensors if bool(t.dim()) is shaped] for shaped in (True, False)
    )
    dtype = functools.reduce(torch.promote_types, strong or weak)
    if strong and weak:
        number = torch.empty((), dtype=functools.reduce(torch.promote_types, weak))
        dtype = torch.result_type(torch.empty(1, dtype=dtype), number)
    rows = sum(t.shape[0] if t.dim() == 2 else 1 for t in tensors)
    columns = sum(t.shape[-1] if t.dim() else 1 for t in tensors)
    return tensors[0].new_empty((rows, columns), dtype=dtype)


def _huber_loss(
    tensor: torch.Tensor, target: torch.Tensor, reduction: int = 1, delta: float = 1.0
) -> torch.Tensor:
    """The reference takes the common dtype of both, the kernels take the first's."""
    if reduction:
        return tensor.new_empty(())
    apart = tensor - target.to(tensor.dtype)
    alike = tensor.device.type == "cpu" and apart.shape == tensor.shape
    return torch.empty_like(tensor) if alike else apart


def _roll(tensor: torch.Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> torch.Tensor:
    """A CPU's kernel joins two slices for each dimension, in the memory format of these."""
    if not dims or tensor.device.type != "cpu" or not _holds(tensor.numel() > 0):
        return tensor.new_empty(tensor.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = tensor.size(dim)
        start = (size - shift) % size
        halves = tensor.narrow(dim, start, size - start), tensor.narrow(dim, 0, start)
        tensor = torch.cat(halves, dim)
    return tensor


def _group_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: Any, rstd: Any, gamma: Any, *sizes: Any
) -> tuple[torch.Tensor | None, ...]:
    *_, channels, _, _, mask = sizes
    order = suggest_memory_format(x) if x.device.type == "cpu" else torch.contiguous_format
    like = (torch.empty_like(x, memory_format=order), x.new_empty(channels), x.new_empty(channels))
    return tuple(one if wanted else None for one, wanted in zip(like, mask, strict=True))


# Operators without meta kernels, or with one that is wrong, divides by the number of elements, or
# reads sizes as plain ints.
_FAKES: dict[Any, Callable[..., Any]] = {
    _aten.native_group_norm_backward.default: _group_norm_backward,
    **dict.fromkeys(
        (_aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default,
         _aten.huber_loss_backward.default),
        lambda _, x, *__: x.new_empty(x.shape),
    ),
    **dict.fromkeys(
        (_aten.hardshrink_backward.default, _aten.softshrink_backward.default),
        lambda grad, x, _: grad * x,
    ),
    _aten.block_diag.default: _block_diag,
    _aten.huber_loss.default: _huber_loss,
    _aten.roll.default: _roll,
    _aten._upsample_bicubic2d_aa_backward.default: lambda grad, _, size, *__: grad.new_empty(size),
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten.rand.generator: _without_generator(_aten.rand.default),
    _aten.randn.generator: _without_generator(_aten.randn.default),
    _aten.randint.generator: _without_generator(_aten.randint.default),
    _aten.randint.low_generator: _without_generator(_aten.randint.low),
    **dict.fromkeys(
        (_aten._sample_dirichlet.default, _aten._dirichlet_grad.default, _aten.binomial.default,
         _aten._standard_gamma_grad.default),
        lambda first, *_, **__: first.new_empty(first.shape),
    ),
}  # fmt: skip


def _lacks_freedom(tensor: Any, dim: Any = None, *, correction: Any = 1, **_: Any) -> bool:
    count = math.prod([tensor.shape[d] for d in dim or range(tensor.dim())] if tensor.dim() else ())
    return not _holds(count > (1 if correction is None else correction))


def _loses_imaginary(one: Any, other: Any = None, *_: Any, dtype: Any = None, **__: Any) -> bool:
    given, wanted = (one, dtype) if other is None else (other, one.dtype)
    complex_ = isinstance(given, torch.Tensor) and given.is_complex()
    return complex_ and wanted is not None and not wanted.is_complex


def _is_slow(*operands: Any, **_: Any) -> bool:
    return not all(t.is_contiguous() for t in operands if isinstance(t, torch.Tensor))


def _says_nondeterministic(*_: Any, **__: Any) -> bool:
    return torch.are_deterministic_algorithms_enabled()  # or raises


def _says_nondeterministic_elsewhere(tensor: torch.Tensor, *_: Any, **__: Any) -> bool:
    return tensor.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()


_VARIES_ELSEWHERE = (
    _aten.nll_loss2d_forward.default, _aten.histc.default, _aten.median.dim,
    _aten.cumsum.default, _aten.scatter_reduce.two,
)  # fmt: skip
_SPREADS = [getattr(_aten, name).correction for name in ("var", "std", "var_mean", "std_mean")]
# Whose kernels may warn, though fake ones do not.
_WARNING: dict[Any, Any] = {
    **dict.fromkeys(_SPREADS, _lacks_freedom),
    _aten._to_copy.default: _loses_imaginary,
    _aten.copy_.default: _loses_imaginary,
    _aten.put_.default: _says_nondeterministic,
    _aten.put.default: _says_nondeterministic,
    _aten.max_unpool2d.default: _says_nondeterministic,
    _aten.max_unpool3d.default: _says_nondeterministic,
    **dict.fromkeys(_VARIES_ELSEWHERE, _says_nondeterministic_elsewhere),
    _aten.searchsorted.Tensor: _is_slow,
    _aten.bucketize.Tensor: _is_slow,
}


def _holds(condition: Any) -> bool:
    """Say whether a condition holds; False where a number out of a tensor decides it."""
    if isinstance(condition, bool):
        return condition
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")  # imports sympy
    data = shapes.has_free_unbacked_symbols(condition)
    return bool(shapes.statically_known_true(condition) if data else condition)


def _cropped(tensor: torch.Tensor, pads: Any) -> torch.Tensor:
    """constant_pad_nd that adds nothing: a copy that keeps the layout, unlike torch's reference."""
    for dim, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        at = tensor.dim() - 1 - dim
        tensor = tensor.narrow(at, -before, tensor.shape[at] + before + after)
    return tensor.clone()


# Functions of torch._prims_common that import sympy for values that need not be symbolic.
_SYMPY_IMPORTERS = ("elementwise_dtypes", "_is_non_overlapping_and_dense_or_false")


@functools.cache
def _prepare_torch() -> None:
    """Once a process: placeholders for foreign modules, functions that would import them."""
    static_shapes.install()
    _python_kernels.correct_python_kernels()
    torch_compiler_shim.defer_compiler_import()
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.")]
    scopes = [vars(module) for module in modules if isinstance(module, types.ModuleType)]
    for name in _SYMPY_IMPORTERS:
        function = getattr(torch._prims_common, name, None)
        copy = function and torch_compiler_shim.rebind(function)
        for scope in scopes:
            if name in scope and scope[name] is function:
                scope[name] = copy
    torch_compiler_shim.install_placeholders()


def fake_mode(shape_env: ShapeEnv | None = None) -> _Mode:
    """A fresh fake mode; with `shape_env` (see `make_shape_env`) sizes may be symbolic."""
    _prepare_torch()
    mode: _Mode = _Mode(shape_env=shape_env, allow_non_fake_inputs=True)
    mode._python_kernels = []
    # With a shape environment, `.item()` and friends yield unbacked symbols instead of an error.
    mode.allow_scalar_outputs = shape_env is not None
    return mode


def _names(function: types.FunctionType | None) -> tuple[str, ...]:
    return function.__code__.co_names if function else ()


@functools.cache
def _shape_env_class() -> type[ShapeEnv]:
    # Imports sympy, 0.35 s.
    from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415

    no_stack = symbolic_shapes.SLoc("", None)  # type: ignore[attr-defined]

    class WeftShapeEnv(symbolic_shapes.ShapeEnv):
        """A ShapeEnv that does not look up user frames through torch's skip lists."""

        def _get_sloc(self, framework_loc: Any = None) -> Any:
            return no_stack

        def _get_stack_summary(self, *args: Any, **kwargs: Any) -> Any:
            return no_stack, ""

    for name, method in vars(symbolic_shapes.ShapeEnv).items():
        function = inspect.unwrap(method) if isinstance(method, types.FunctionType) else None
        if name in ("__init__", "_init") or "trace_structured" in _names(function):
            setattr(WeftShapeEnv, name, torch_compiler_shim.rebind(function))

    return WeftShapeEnv


def make_shape_env() -> ShapeEnv:
    """A shape environment for dynamic sizes. Imports sympy on first use (0.35 s)."""
    from torch.fx.experimental.symbolic_shapes import TLS  # noqa: PLC0415 - sympy

    # A stack that overflows while torch leaves `suppress_guards` would lose all later guards.
    TLS.suppress_guards = False
    return _shape_env_class()()


# What a subclass may define for itself without a difference to what operations do.
_HARMLESS = frozenset(
    """
    __new__ __init__ __repr__ __doc__ __module__ __dict__ __weakref__ __annotations__ __slots__
    __firstlineno__ __static_attributes__ __annotate__ __annotate_func__ __deepcopy__
    __reduce_ex__ __setstate__ __torch_function__ __torch_dispatch__
    """.split()  # noqa: SIM905 - easier to read
)


def is_plain(kind: type[torch.Tensor]) -> bool:
    """Say whether operations treat tensors of a type as plain ones, as they do parameters."""
    if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return True
    own = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    names = {name for cls in own if cls.__module__ != "torch.nn.parameter" for name in vars(cls)}
    return (
        kind.__torch_function__ is torch._C._disabled_torch_function_impl
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not any(hasattr(torch.Tensor, name) for name in names - _HARMLESS)
    )


def to_fake(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    dynamic_dims: Iterable[int] | None = None,
    source_name: str = "input",
    unbacked: Collection[int] = (),
    inner: dict[str, Any] | None = None,
    free_strides: Collection[int] = (),
) -> torch.Tensor:
    """A fake of `tensor`: size, stride, dtype, device, requires_grad, leaf or not, Parameter.

    `dynamic_dims` names the dimensions that become symbolic (the mode needs a shape environment),
    `unbacked` those among them whose symbols have no example value;
    strides that are products of sizes become the same products of symbols, and those of the
    dimensions `free_strides` symbols of their own. Tensors of wrapper
    classes are put together around fakes (`inner`, else made here); other subclasses go
    through torch's converter. A tensor that already is fake in `mode` is returned as it is.
    """
    if isinstance(tensor, FakeTensor):
        if tensor.fake_mode is mode:
            return tensor
        raise ValueError("to_fake was given a tensor of another fake mode; pass the real tensor")
    layout = SubclassLayout.of(tensor)
    if layout and detect_mode([tensor]) is mode:
        return tensor
    if not layout and (not is_plain(type(tensor)) or tensor.layout is not torch.strided):
        return mode.from_tensor(tensor, source=SizeSource(source_name), static_shapes=True)
    sizes: Any = tensor.shape
    strides: Any = tensor.stride()
    if dynamic_dims or free_strides:
        if mode.shape_env is None:
            raise ValueError("dynamic dimensions need a fake mode made with a shape environment")
        sizes, strides = symbolic_layout(
            tensor, mode.shape_env, dynamic_dims or (), free_strides, source_name, unbacked
        )
    if layout and inner is None:
        inner = {name: to_fake(mode, getattr(tensor, name)) for name in layout.parts}
    with mode, torch.inference_mode(tensor.is_inference()), torch.no_grad():
        fake: Any = (
            layout.join(inner or {}, sizes, strides)
            if layout
            else torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        )
    return _followed(mode, fake, tensor)


def fresh_fake(fake: Any, layout: Any = None) -> torch.Tensor:
    """A fake like another one, or laid out otherwise, with memory and history of its own."""
    shape, strides = layout[:2] if layout else (fake.shape, fake.stride())
    with fake.fake_mode, torch.inference_mode(fake.is_inference()), torch.no_grad():
        made = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
    return _followed(fake.fake_mode, made, fake)


class Intermediate(torch.autograd.Function):
    """What a function makes, with a history that begins at a leaf: neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _followed(mode: FakeTensorMode, fake: Any, tensor: torch.Tensor) -> torch.Tensor:
    """`fake` as something that autograd follows as it does `tensor`."""
    if isinstance(tensor, torch.nn.Parameter):
        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        fake.requires_grad_()
        if not tensor.is_leaf:
            with mode, torch.enable_grad():
                fake = Intermediate.apply(fake, fake.detach)  # type: ignore[no-untyped-call]
    return fake  # type: ignore[no-any-return]


def detect_mode(values: Iterable[object]) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among `values` or inside of them, or None."""
    found = (leaf for value in values for leaf in leaves(value))
    return next((leaf.fake_mode for leaf in found if isinstance(leaf, FakeTensor)), None)


def mode_for(values: Sequence[object]) -> FakeTensorMode:
    """The fake mode of `values`; else a new one, in which sizes may be of symbols among them."""
    envs = (one.node.shape_env for one in values if isinstance(one, torch.SymInt | torch.SymFloat))
    return detect_mode(values) or fake_mode(next(envs, None))


def fake_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """One fake per input: the one that capture made where there is one, else a new one.

    Args:
        gm: a captured graph; ``meta["example_value"]`` of a placeholder, if there, is its fake.
        inputs: real (or fake) tensors and numbers.

    Raises:
        ValueError: the graph takes another number of inputs.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise ValueError(f"the graph takes {len(placeholders)} inputs, got {len(inputs)} examples")
    known = [node.meta.get("example_value") for node in placeholders]
    mode = mode_for([*known, *inputs])
    return [_fake_input(mode, example, given) for example, given in zip(known, inputs, strict=True)]


def _fake_input(mode: FakeTensorMode, example: Any, given: Any) -> Any:
    if not isinstance(given, torch.Tensor):
        return given if example is None else example
    if detect_mode([example]) is None:
        return to_fake(mode, given)
    if example.requires_grad == given.requires_grad and example.is_leaf == given.is_leaf:
        return example
    return _followed(mode, example.detach(), given)
