"""NumPy: arrays become tensors of the graph, and functions those of `torch._numpy`.

A call first runs on sample arrays of the same shapes, strides and dtypes, in NumPy and in
`torch._numpy`. This shows what NumPy returns: an array or a scalar, its dtype, whether it shares
memory with an argument. Where torch's result differs, the graph breaks; a copy that torch omits is
added. The functions in the tables agree on special values, too, except for the sign of a zero.
Warnings about values (a division by zero) are omitted.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only
from weft_core.tensor_versions import version_of
from weft_core.warnings_capture import suppress_warnings
from weft_guards.sources import CallSource, Source

from weft_capture.breaks import Break
from weft_capture.functions.table import decline, find_row, pure, rule
from weft_capture.functions.torch.calls import DATA_VALUES
from weft_capture.functions.torch.randomness import DRAWN, before_graph, draw
from weft_capture.functions.torch.tensors import AS_INDEX
from weft_capture.functions.wrap import EXACT, wrap
from weft_capture.libraries.numpy_scalars import numpy_is_quiet, numpy_scalar
from weft_capture.libraries.numpy_versions import target_of
from weft_capture.model.constant import (
    CONSTANT_TYPES,
    NONE,
    VARYING_TYPES,
    constant,
    real_call,
)
from weft_capture.model.containers import ListValue, SequenceValue, TupleValue
from weft_capture.model.iterators import ExternalIterator
from weft_capture.model.protocol import Kwargs, Operator, Output, Tracer, Value, method
from weft_capture.model.slots import binary, combined
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.symbolic_scalars import SymFloatValue
from weft_capture.tensors.tensor import SymValue, TensorValue

np: Any = sys.modules.get("numpy")  # torch loads it where it is installed

_FUNCTIONS = """
    array asarray zeros ones full eye arange linspace zeros_like ones_like full_like
    tril triu copy add subtract multiply divide true_divide floor_divide remainder mod
    power negative positive absolute abs fabs exp exp2 expm1 log log2 log10 log1p sqrt square
    sin cos tan arcsin arccos arctan arctan2 sinh cosh tanh arcsinh arccosh arctanh
    hypot deg2rad rad2deg floor ceil trunc rint maximum minimum fmax fmin logical_and logical_or
    logical_xor logical_not isfinite isinf isnan greater greater_equal less less_equal equal
    not_equal bitwise_and bitwise_or bitwise_xor invert clip where real imag sum prod mean std var
    max min amax amin argmax argmin any all cumsum cumprod count_nonzero reshape ravel transpose
    swapaxes moveaxis expand_dims squeeze broadcast_to concatenate stack vstack hstack dstack
    column_stack split tile repeat roll atleast_1d atleast_2d dot matmul meshgrid take_along_axis
    vdot outer tensordot einsum kron trace diagonal sort round average linalg.det
    linalg.norm linalg.matrix_power linalg.inv linalg.solve linalg.cholesky linalg.pinv
    linalg.multi_dot linalg.matrix_rank linalg.cond linalg.eigvalsh
    angle sign conj conjugate around array_split hsplit vsplit dsplit ascontiguousarray atleast_3d
    bitwise_not broadcast_arrays copysign correlate cross degrees radians diagflat diff float_power
    fmod gcd lcm gradient bartlett blackman hamming hanning kaiser i0 indices inner isclose
    iscomplex isreal isneginf isposinf logaddexp logaddexp2 median percentile quantile nan_to_num
    pad ptp reciprocal signbit sinc take nextafter ldexp
    fft.fft fft.ifft fft.rfft fft.irfft fft.fft2 fft.ifft2 fft.fftn fft.ifftn fft.rfft2 fft.irfft2
    fft.rfftn fft.irfftn
    fft.fftfreq fft.rfftfreq fft.fftshift fft.ifftshift
"""
_METHODS = """
    sum prod mean std var max min any all argmax argmin cumsum cumprod reshape ravel flatten
    transpose swapaxes squeeze copy astype clip dot trace diagonal repeat round conj conjugate take
"""
_DRAWS = """
    random rand randn randint random_sample uniform normal beta exponential gamma binomial choice
    permutation
"""
_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor"
_DUNDERS = {f"__{prefix}{name}__" for name in _OPERATORS.split() for prefix in ("", "r", "i")}
_DUNDERS |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__pos__"}
_DUNDERS |= {"__abs__", "__invert__", "__getitem__", "__setitem__"}
_KNOWN_METHODS = {*_METHODS.split(), *_DUNDERS}
_INDEXED = ("ndarray.__getitem__", "ndarray.__setitem__", "take_along_axis")
_MOST_KEPT = 1 << 16
_BY_ZERO = ("div", "mod", "remainder", "pow")
"""Parts of the names of functions that torch refuses for some integers, unlike NumPy."""


class ArrayValue(Value):
    """An array, or a scalar of NumPy where `cls` is such a class; `tensor` holds its memory.

    `known` is its content when capture made it, where that depends on constants alone.
    """

    def __init__(
        self, tensor: Value, cls: type, source: Source | None = None, known: Any = None
    ) -> None:
        assert isinstance(tensor, TensorValue)
        self.tensor = tensor
        self.cls = cls
        self.source = source
        self.known = None
        if isinstance(known, np.ndarray) and known.size <= _MOST_KEPT:
            self.known = known
            known.setflags(write=False)
        self.made_at = self._writes(tensor.fake)

    def content(self) -> Any:
        """Return what the array holds, if that follows from constants alone."""
        return self.known if self._writes(self.tensor.fake) == self.made_at else None

    @staticmethod
    def _writes(fake: Any) -> int:
        writes: int = fake.fake_mode.writes if fake.is_inference() else version_of(fake)
        return writes

    def nb_bool(self, tx: Tracer) -> bool:
        content = self.content()
        if content is None or content.size != 1:
            raise Break("data-dependent-branch", "truth of an array")
        return bool(content)

    def reconstruct(self, out: Output) -> None:
        scalar = issubclass(self.cls, np.generic)
        out.call(numpy_scalar if scalar else torch.Tensor.numpy, [self.tensor])

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        if name in ("item", "tolist", "__float__", "__int__", "__len__") and not args:
            content = self.content()
            if content is not None:
                return tx.literal(getattr(content, name)())
            return self.tensor.call_method(tx, name, [], {})
        if name == "argsort" and self.cls is np.ndarray:
            return tx.call_builtin(np.argsort, [self, *args], kwargs)
        if name not in _KNOWN_METHODS:
            raise Break("numpy", f"{self.cls.__name__}.{name}")
        element = self.element(tx, args[0]) if name == "__getitem__" else None
        if element is not None:
            return element
        if name == "__setitem__" and isinstance(args[1], ArrayValue):
            args = [args[0], args[1].call_method(tx, "copy", [], {})]  # as they may overlap
        return apply(tx, f"ndarray.{name}", [self, *args], kwargs)

    def element(self, tx: Tracer, key: Value) -> Value | None:
        """Read an element of an input array before the graph; None where that is impossible."""
        fake, entry = self.tensor.fake, tx.graph.input_at.get(self.tensor.node)
        if self.source is None or entry is None or entry.version != version_of(fake):
            return None
        keys = map(tx.force, [key] if key.python_type() is not tuple else key.unpack(tx))
        sourced = [symbolic_scalars.pregraph_value(tx, item) for item in keys]
        indices = [pair for pair in sourced if pair and hasattr(pair[1], "__index__")]
        if not len(sourced) == len(indices) == fake.dim():
            return None
        at = CallSource(_index, tuple(source for source, _ in indices))
        index = tuple(number for _, number in indices)
        array: Any = entry.example
        with unset_fake_temporarily():
            number = real_call(tx, operator.getitem, array.numpy(), index)
        return wrap(tx, number, CallSource(operator.getitem, (self.source, at)))

    def nb_binary(
        self, tx: Tracer, op: Operator, left: Value, right: Value, inplace: bool
    ) -> Value | None:
        operands = [
            value.as_float(tx, other) if isinstance(value, ArrayValue) else value
            for value, other in ((left, right), (right, left))
        ]
        if operands == [left, right]:
            return None
        return binary(tx, f"{op.symbol}=" if inplace else op.symbol, *operands)

    def as_float(self, tx: Tracer, other: Value) -> Value:
        """Return a scalar as a number for arithmetic with a tensor or another scalar."""
        wide = self.cls is np.float64 and isinstance(other, SymFloatValue)
        if not wide and not (issubclass(self.cls, np.floating) and isinstance(other, TensorValue)):
            return self
        return symbolic_scalars.computed(tx, self.tensor, example=np.float64())

    def tp_iter(self, tx: Tracer) -> Value:
        content = self.content()
        if content is not None and content.ndim == 1 and content.dtype.type in CONSTANT_TYPES:
            return tx.iterator_over(list(map(constant, content)))
        count = self.tensor.call_method(tx, "__len__", [], {}).as_constant()
        return tx.iterator_over([self.mp_subscript(tx, constant(i)) for i in range(count)])


ArrayValue.methods = {
    "get:shape": lambda tx, self: tx.tuple_of(self.tensor.tp_getattro(tx, "shape").unpack(tx)),
    "get:ndim": lambda tx, self: self.tensor.tp_getattro(tx, "ndim"),
    "get:nbytes": lambda tx, self: self.tensor.tp_getattro(tx, "nbytes"),
    "get:itemsize": lambda tx, self: self.tensor.tp_getattro(tx, "itemsize"),
    "get:dtype": lambda tx, self: constant(_example(self).dtype),
    "get:size": lambda tx, self: self.tensor.call_method(tx, "numel", [], {}),
    "get:T": lambda tx, self: self.call_method(tx, "transpose", [], {}),
    "get:real": lambda tx, self: apply(tx, "real", [self], {}),
    "get:imag": lambda tx, self: apply(tx, "imag", [self], {}),
    "get:strides": lambda tx, self: tx.tuple_of(
        [
            combined(tx, "*", n, TupleValue([self.tensor.tp_getattro(tx, "itemsize")]))
            for n in self.tensor.call_method(tx, "stride", [], {}).unpack(tx)
        ]
    ),
}


def shared(array: Any) -> torch.Tensor:
    """Return a tensor with the memory of a writable array.

    Raises:
        ValueError: the array must not be written to, or torch has no tensors like it.
    """
    if not array.flags.writeable:
        raise ValueError("an array that is read-only")
    return torch.from_numpy(array)


def _index(*indices: Any) -> tuple[Any, ...]:
    return indices


# ---- calls


def _plain(tx: Tracer, value: Value) -> Any:
    """Return an argument as a tree whose leaves are arrays; a dtype becomes its name."""
    value = tx.force(value)
    if isinstance(value, ArrayValue):
        return value
    if type(value) in (ListValue, TupleValue):
        return value.python_type()([_plain(tx, item) for item in value.unpack(tx)])
    if isinstance(value, TensorValue):
        raise Break("numpy", "a tensor as an argument of NumPy")
    literal = value.as_constant()
    return np.dtype(literal).name if isinstance(literal, type | np.dtype) else literal


def _in_graph(tx: Tracer, plain: Any, to_float: bool) -> Value:
    if isinstance(plain, ArrayValue):
        wide = constant(torch.float64)
        return plain.tensor.call_method(tx, "to", [wide], {}) if to_float else plain.tensor
    if type(plain) in (list, tuple):
        items = [_in_graph(tx, item, to_float) for item in plain]
        return ListValue(items) if type(plain) is list else TupleValue(items)
    return tx.literal(plain.item() if isinstance(plain, np.generic) else plain)


def _example(value: ArrayValue, as_index: bool = False, scalar: bool = True) -> Any:
    """Return a sample array (or scalar) of the same shape, strides and dtype, of numbers near 1.

    One that is a `as_index` in another one is of zeros.
    """
    fake = value.tensor.fake
    layout = [[int(n) for n in numbers] for numbers in (fake.shape, fake.stride())]
    with unset_fake_temporarily():
        example = torch.empty_strided(*layout, dtype=fake.dtype).numpy()
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, example.shape)
    example[...] = numbers * (1 + 2j) if example.dtype.kind == "c" else numbers
    if as_index and example.dtype.kind in "iu":
        example[...] = 0
    return example[()] if scalar and value.cls is not np.ndarray else example


def apply(tx: Tracer, path: str, args: list[Value], kwargs: Kwargs) -> Value:
    """Call a function of NumPy, or a method of its arrays.

    Raises:
        Break: where the graph's result would not be what NumPy returns.
    """
    tx.guard(CallSource(numpy_is_quiet, ()), "CONST", numpy_is_quiet())
    arguments = (
        [_plain(tx, arg) for arg in args],
        {name: _plain(tx, v) for name, v in kwargs.items()},
    )
    leaves = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, ArrayValue)]
    index_arrays = set(leaves) - {arguments[0][0]} if path in _INDEXED else set()
    arrays = {leaf: _example(leaf, leaf in index_arrays) for leaf in leaves}
    if path in ("array", "asarray") and type(arguments[0][0]) in (list, tuple) and arrays:
        if any(type(row) in (list, tuple) for row in arguments[0][0]):
            raise Break("numpy", f"numpy.{path} of rows of arrays")
        path = "stack"
    with unset_fake_temporarily():
        expected, to_float = _rehearse(path, arguments, arrays, index_arrays)
    known = expected if not arrays else _known(tx, path, arguments, leaves)
    if expected is NotImplemented or (known is not None and type(known) in CONSTANT_TYPES):
        return constant(expected if known is None else known)
    node_args = [_in_graph(tx, arg, to_float) for arg in arguments[0]]
    node_kwargs = {name: _in_graph(tx, arg, to_float) for name, arg in arguments[1].items()}
    result = tx.graph.emit("call_function", target_of(path), node_args, node_kwargs)
    return _result(tx, path, arrays, result, expected, known)


def _known(tx: Tracer, path: str, arguments: Any, arrays: list[ArrayValue]) -> Any:
    """Return NumPy's result for arrays whose content is known, else None."""
    contents = {array: array.content() for array in arrays}
    if any(content is None for content in contents.values()):
        return None
    args, kwargs = tree_map_only(ArrayValue, contents.__getitem__, arguments)
    of_array = path.startswith("ndarray.")
    function = operator.attrgetter(path.removeprefix("ndarray."))(type(args[0]) if of_array else np)
    try:
        with unset_fake_temporarily(), np.errstate(all="raise"), suppress_warnings("error"):
            return function(*args, **kwargs)
    except Exception:  # among them a write: the contents are read-only
        return None


def _rehearse(
    path: str, arguments: Any, arrays: dict[ArrayValue, Any], index_arrays: set[Any]
) -> tuple[Any, bool]:
    """Return NumPy's result for sample arrays, and whether torch needs the integers as floats.

    Raises:
        Break: where NumPy or torch fails, or their results differ.
    """
    tensors = {
        array: torch.from_numpy(_example(array, array in index_arrays, False)) for array in arrays
    }
    args, kwargs = tree_map_only(ArrayValue, arrays.__getitem__, arguments)
    of_array = path.startswith("ndarray.")
    function = operator.attrgetter(path.removeprefix("ndarray."))(type(args[0]) if of_array else np)
    with_scalar = path.endswith("dot") and not all(map(np.ndim, args))  # NaN times zero is zero
    try:
        quiet = np.errstate(all="ignore" if arrays else "raise")
        with quiet, suppress_warnings("error"):  # what warns has to warn in each call
            expected = function(*args, **kwargs)
        if expected is NotImplemented or (not arrays and type(expected) in CONSTANT_TYPES):
            return expected, False
        result_dtype = getattr(expected, "dtype", None)
        fakes = [array.tensor.fake for array in arrays]
        inexact = any(fake.is_floating_point() or fake.is_complex() for fake in fakes)
        integral = bool(fakes) and not inexact
        to_float = integral and result_dtype in (np.float64, np.complex128)
        args, kwargs = tree_map_only(
            ArrayValue,
            lambda array: tensors[array].double() if to_float else tensors[array],
            arguments,
        )
        args, kwargs = tree_map_only(np.generic, np.generic.item, (args, kwargs))  # as in the graph
        actual = target_of(path)(*args, **kwargs)
    except Exception as error:
        raise Break("operator-error", f"{path}: {error}") from None
    whole_result = result_dtype is not None and result_dtype.kind in "iub"
    divisor = arguments[0][1] if len(arguments[0]) > 1 and "__r" not in path else None
    by_more = type(divisor) is int and divisor > 0
    divides = arrays and whole_result and not by_more and any(o in path for o in _BY_ZERO)
    agree = all(_agree(arrays[array], tensors[array]) for array in arrays) and _agree(
        expected, actual
    )
    if not agree or divides or with_scalar or not numpy_is_quiet():
        raise Break("numpy", f"{path}, where torch's result differs")
    return expected, to_float


def _agree(expected: Any, actual: Any) -> bool:
    """Say whether the results of NumPy and torch are equal up to rounding."""
    if isinstance(expected, list | tuple):
        several = isinstance(actual, list | tuple) and len(expected) == len(actual)
        return several and all(_agree(*pair) for pair in zip(expected, actual, strict=True))
    if not isinstance(actual, torch.Tensor):
        return expected is None and actual is None
    left, right = np.asarray(expected), actual.numpy()
    same = left.shape == right.shape and left.dtype == right.dtype
    return same and bool(np.allclose(left, right, 0.02, 0.02, equal_nan=True))


def _result(
    tx: Tracer,
    path: str,
    arrays: dict[ArrayValue, Any],
    result: Value,
    expected: Any,
    known: Any = None,
) -> Value:
    """Convert a result of the graph to what NumPy returns."""
    if expected is None:
        return NONE
    if isinstance(result, SequenceValue) and len(result.items) == len(expected):
        rows = zip(result.items, expected, known or itertools.repeat(None))
        values = [_result(tx, path, arrays, *row) for row in rows]
        return ListValue(values) if type(expected) is list else TupleValue(values)
    first, example = next(iter(arrays.items()), (NONE, None))
    if expected is example:
        return first
    aliases = any(np.may_share_memory(expected, example) for example in arrays.values())
    other = any(expected is example for example in arrays.values())
    if other or not isinstance(result, TensorValue):  # an `out`; as many arrays as the data decides
        raise Break("numpy", f"what {path} returns")
    bases = [t.fake.untyped_storage()._cdata for t in (result, *(a.tensor for a in arrays))]
    aliased = bases[0] in bases[1:]
    if aliases and not aliased:
        raise Break("numpy", f"{path}, where torch copies the array")
    copied = result.call_method(tx, "clone", [], {}) if aliased and not aliases else result
    return ArrayValue(copied, type(expected), known=known)


# ---- between arrays and tensors


@method(TensorValue, "numpy")
def _numpy(tx: Tracer, self: TensorValue) -> Value:
    fake = self.fake
    lazy = fake.is_conj() or fake.is_neg()
    if np is None or fake.requires_grad or fake.device.type != "cpu" or tx.transforms or lazy:
        raise Break("numpy", "Tensor.numpy")
    array = ArrayValue(self.tp_getattro(tx, "data"), np.ndarray)
    try:
        _example(array)
    except TypeError as error:
        raise Break("operator-error", str(error)) from None
    return array


@rule(torch.from_numpy)
def _from_numpy(tx: Tracer, array: Value) -> Value:
    if not isinstance(array, ArrayValue) or array.cls is not np.ndarray:
        raise Break("numpy", "torch.from_numpy")
    return shared_tensor(tx, array)


def shared_tensor(tx: Tracer, array: ArrayValue) -> Value:
    """Return the tensor on the memory of an array."""
    return array.tensor if array.source is not None else array.tensor.tp_getattro(tx, "data")


def _wrap_array(tx: Tracer, obj: Any, source: Source) -> Value:
    tx.guard(source, "TYPE", np.ndarray)
    try:
        with unset_fake_temporarily():
            tensor = shared(obj)
    except (TypeError, ValueError):
        return ExternalIterator(obj, source)  # each operation on it breaks
    return ArrayValue(wrap(tx, tensor, CallSource(shared, (source,))), np.ndarray, source)


def _as_index(tx: Tracer, tensor: TensorValue, key: ArrayValue) -> Value:
    """Return an array of integers, or a mask, as the tensor that indexes like it."""
    dtype = key.tensor.fake.dtype
    if key.tensor.fake.dim() != 1 and not issubclass(key.cls, np.integer):
        return key  # of more dimensions some are tuples of indices
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.uint8:
        return key
    to = torch.bool if dtype is torch.bool else torch.int64
    return key.tensor.call_method(tx, "to", [constant(tensor.fake.device), constant(to)], {})


AS_INDEX[ArrayValue] = _as_index
DATA_VALUES.add(ArrayValue)

_silent = functools.cache(lambda path: np.errstate(all="ignore")(operator.attrgetter(path)(np)))


def _named(path: str, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    varies = not kwargs and not all(arg.is_constant() for arg in args)
    number = symbolic_scalars.by_python(tx, _silent(path), list(args)) if varies else None
    if number is not None:
        return number
    return apply(tx, path, list(args), kwargs)


if np is not None:
    EXACT[np.ndarray] = _wrap_array
    for _dtype in map(np.dtype, "?bhilqBHILQefdDFUS"):
        CONSTANT_TYPES.update((type(_dtype), _dtype.type))
        VARYING_TYPES.update(() if _dtype.kind == "b" else (_dtype.type,))
        pure(_dtype.type)
    CONSTANT_TYPES.update((np.finfo, np.iinfo))
    pure(np.dtype, np.finfo, np.iinfo, np.issubdtype, np.result_type, np.promote_types)
    CONSTANT_TYPES.discard(np.complex64)  # torch drops its imaginary part
    for _path in _FUNCTIONS.split():
        rule(operator.attrgetter(_path)(np))(functools.partial(_named, _path))
    for _function in (*vars(np).values(), *vars(np.linalg).values(), *vars(np.fft).values()):
        if type(_function) is type(np.median) and find_row(_function) is None:
            decline("numpy", f"{_function.__module__}.{_function.__name__}", _function)

    def _draw_number(name: str, tx: Tracer, owner: Value, *args: Value, **kwargs: Value) -> Value:
        return draw(tx, owner, name, args, kwargs, np.random.RandomState)

    @functools.partial(DRAWN.__setitem__, np.ndarray)
    def _drawn_array(tx: Tracer, source: Source, hint: Any) -> Value:
        with unset_fake_temporarily():
            tensor = shared(hint)
        return ArrayValue(
            tx.graph.tensor_input(tensor, CallSource(shared, (source,)), ()), np.ndarray
        )

    for _name in _DRAWS.split():
        rule(getattr(np.random.RandomState, _name))(functools.partial(_draw_number, _name))

    @rule(np.random.seed)
    def _seed(tx: Tracer, seed: Value = NONE) -> None:
        if isinstance(seed, SymValue):
            tx.calls.add(np.random.seed, before_graph(tx, seed), early=True)
        else:
            draw(tx, constant(np.random), "seed", [seed], {}, np.random.RandomState)
