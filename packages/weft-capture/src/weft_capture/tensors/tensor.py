"""Tensors and symbolic numbers: the values that are nodes of the graph.

`TensorValue` pairs an fx node with the fake tensor that has its shape, dtype and device.
`SymValue` pairs an fx node with a SymInt, SymFloat or SymBool of the shape environment.
Operations on both end in `tx.graph.emit`, which adds a node and runs it on the fakes.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from weft_guards.sources import AttrSource, CallSource, Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.model.attributes import bind, lookup
from weft_capture.model.constant import Constant, Varying, constant, fits_graph, fold, is_stable
from weft_capture.model.protocol import (
    Handler,
    InstanceValue,
    Kwargs,
    MethodOf,
    MutableValue,
    Operator,
    Output,
    Tracer,
    Value,
    identity_key,
)
from weft_capture.model.slots import binary, unary

_METADATA = """
    dtype device layout requires_grad ndim is_cuda is_cpu is_sparse is_quantized is_meta
    is_mps is_xpu is_nested is_mkldnn is_ipu is_vulkan itemsize nbytes names is_sparse_csr
    retains_grad output_nr
"""
METADATA_ATTRIBUTES = frozenset(_METADATA.split())
"""Read from the fake tensor and known while capturing."""

GRAPH_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag"])
"""Become a getattr node."""

_OF_C = vars(torch._C.TensorBase).items()
READERS = frozenset(
    name for name, attribute in _OF_C if isinstance(attribute, types.GetSetDescriptorType)
)
"""Attributes that C computes: reading one calls the program's `__torch_function__` handlers."""

_STORAGE_OR_VALUE = """
    numpy data_ptr register_post_accumulate_grad_hook storage
    untyped_storage __array__ __dlpack__ cpu_numpy share_memory_ pin_memory
    __contains__ __index__ __complex__ __format__ __repr__ __str__ set_ __cuda_array_interface__
    is_shared __reduce_ex__ __deepcopy__ storage_offset unsafe_chunk unsafe_split
    unsafe_split_with_sizes
"""
REAL_ONLY = frozenset(_STORAGE_OR_VALUE.split())
"""Methods that need the tensor's storage or value; some have a rule all the same."""


def _is_of_torch(attribute: object) -> bool:
    inner: Any = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    if not isinstance(inner, types.FunctionType):
        return True
    return str(inner.__globals__.get("__name__")).startswith("torch.")


_OWN = {
    name: attribute
    for base in (object, torch._C.TensorBase, torch.Tensor)
    for name, attribute in vars(base).items()
    if _is_of_torch(attribute)
}
"""Attributes of `torch.Tensor` and its bases that torch defined."""


def check_attributes(*names: str) -> None:
    """Note that code depends on attributes of the class of tensors.

    Raises:
        Break: when the program has replaced one.
    """
    for name in names:
        mro_entry = lookup(torch.Tensor, name)
        if name in _OWN and (mro_entry is None or mro_entry[1] is not _OWN[name]):
            raise Break("builtins", f"Tensor.{name}, which the program replaced")


def check_operator(function: Any) -> None:
    """Do the same for the special methods behind a function of module `operator`."""
    name = function.__name__.strip("_")
    check_attributes(f"__{name}__", f"__r{name}__", f"__{name.removeprefix('i')}__")


class GraphValue(Value):
    """A tensor or symbolic number: operators on it are nodes of the graph."""

    in_graph = True

    def nb_binary(
        self, tx: Tracer, op: Operator, left: Value, right: Value, inplace: bool
    ) -> Value | None:
        left, right = _as_ints(left, right)
        if not _is_node(left, right):
            return None
        if (
            op.function in _POWERS
            and type(right) is SymValue
            and type(left) in (SymValue, Constant)
        ):
            number = tx.by_python(op.function, [left, right])  # which no size expression has
            if number is not None:
                return number
        # A number on the left makes `+=` an ordinary addition.
        target = op.inplace if inplace and isinstance(left, TensorValue) else op.function
        return tx.graph.emit("call_function", target, [left, right], {})

    def nb_unary(self, tx: Tracer, symbol: str, function: Callable[[Any], Any]) -> Value | None:
        if symbol == "~" and isinstance(self, SymValue):  # torch.SymInt has no `~`
            return binary(tx, "-", unary(tx, "-", self), constant(1))
        return tx.graph.emit("call_function", function, [self], {})

    def tp_richcompare(self, tx: Tracer, op: Operator, left: Value, right: Value) -> Value | None:
        left, right = _as_ints(left, right)
        if not _is_node(left, right):  # inf, NaN and large ints are no operands of the graph's
            numbers = all(type(v) is SymValue or _is_real(v) for v in (left, right))
            return fold(tx, op.function, [left, right], {}) if numbers else None
        none = any(isinstance(value, Constant) and value.value is None for value in (left, right))
        if none and op.symbol in ("==", "!="):
            return constant(op.symbol == "!=")
        return tx.graph.emit("call_function", op.function, [left, right], {})


_POWERS = (operator.pow, operator.lshift, operator.rshift)


def _is_node(left: Value, right: Value) -> bool:
    """Say whether an operator is a node: no operand is an object that may take it over."""
    if not isinstance(left, TensorValue) and not isinstance(right, TensorValue):
        return all(value.in_graph or _is_number(value) for value in (left, right))
    if issubclass(left.python_type(), str | bytes):  # their `%` has precedence
        return False
    return all(value.in_graph or value.is_constant() or value.is_scalar for value in (left, right))


def _is_real(value: Value) -> bool:
    return isinstance(value, Constant) and type(value.value) in (int, float)


def _is_number(value: Value) -> bool:
    """Say whether a symbolic number computes with a constant as Python does: not so with inf."""
    number = value.value if isinstance(value, Constant) else None
    if isinstance(number, int):
        return fits_graph(number)
    return isinstance(number, complex) or (isinstance(number, float) and math.isfinite(number))


def _as_ints(left: Value, right: Value) -> tuple[Value, Value]:
    """Return bools beside a symbolic number as the ints that they are: sympy refuses them."""
    if not any(isinstance(v, SymValue) and v.python_type() is not bool for v in (left, right)):
        return left, right
    return _as_int(left), _as_int(right)


def _as_int(value: Value) -> Value:
    is_bool = isinstance(value, Constant | SymValue) and value.python_type() is bool
    return constant(int(value.as_constant())) if is_bool else value


@dataclass(eq=False)
class TensorValue(GraphValue):
    """A tensor in the graph; `real` is the tensor at capture, for an input of the graph."""

    node: Node
    fake: torch.Tensor
    source: Source | None = None
    cls: type = torch.Tensor
    real: torch.Tensor | None = None
    owner: Value | None = None  # the subclass instance that shares this memory
    overlay: TensorAttributes | None = None
    hooked_at: int = -1  # the step that registered a hook in the graph

    def describe(self) -> str:
        return f"Tensor({self.fake.dtype}, {tuple(self.fake.shape)})"

    def as_constant(self) -> Any:
        code = "constant-required" if self.fake.dim() else "data-dependent-value"
        raise NotConstant(self.describe(), code)

    def graph_arg(self) -> Any:
        if self.overlay is not None and "data" in self.overlay.attrs and self.fake.requires_grad:
            raise Break("tensor-storage", "an input tensor whose data were replaced")
        return self.node

    def example(self) -> Any:
        return self.fake

    def reconstruct(self, out: Output) -> None:
        out.load_graph_output(self)

    def is_new_leaf(self) -> bool:
        """Say whether the graph creates this tensor as a leaf that requires grad."""
        try:
            leaf = self.fake.requires_grad and self.fake.is_leaf
        except RuntimeError as error:  # a view that autograd no longer follows
            raise Break("autograd-state", str(error)[:200]) from None
        return self.real is None and (leaf or self.cls is torch.nn.Parameter)

    def tp_hash(self) -> object:
        return identity_key(self, self.real)

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        check_attributes(name)
        if tx.overrides.modes and name in READERS:
            handled = tx.overrides.dispatch(getattr, [self, constant(name)], {})
            if handled is not None:
                return handled
        if self.overlay is not None and name in self.overlay.attrs:
            return tx.force(self.overlay.attrs[name])
        getter = self.find_method(f"get:{name}")
        value = None if getter is None else getter(tx, self)
        if value is not None:
            return value
        if name in METADATA_ATTRIBUTES:
            return tx.literal(getattr(self.fake, name))
        if name in GRAPH_ATTRIBUTES:
            return tx.graph.emit("call_function", getattr, [self, constant(name)], {})
        return self.getattr_fallback(tx, name)

    def getattr_fallback(self, tx: Tracer, name: str) -> Value:
        attribute = self.own_attribute(tx, name)
        if attribute is not None:
            return attribute
        static = getattr(self.cls, name, None)
        if static is None and not hasattr(self.cls, name):
            tx.raise_(AttributeError, f"'{self.cls.__name__}' object has no attribute '{name}'")
        mro_entry = lookup(torch.Tensor, name)
        if mro_entry is None:
            return self._of_class(tx, name)
        if name not in _OWN:
            return bind(tx, mro_entry, name, self, torch.Tensor)
        if callable(static):
            return MethodOf(self, name)
        raise Break("c-attribute", f"attribute {name} of a tensor")

    def own_attribute(self, tx: Tracer, name: str) -> Value | None:
        """Read an attribute that the program stored on the tensor, in the frame or before."""
        if self.overlay is not None and name in self.overlay.attrs:
            return tx.force(self.overlay.attrs[name])
        return tx.tensor_dict_attribute(self, name)

    def _of_class(self, tx: Tracer, name: str) -> Value:
        """Read an attribute that the class of an input adds: a method, property or constant."""
        static = inspect.getattr_static(self.cls, name)
        assert self.source is not None
        source = AttrSource(AttrSource(self.source, "__class__"), name)
        if isinstance(static, property) and static.fget is not None:
            return tx.wrap(static.fget, AttrSource(source, "fget")).tp_call(tx, [self], {})
        plain = isinstance(static, types.FunctionType)
        if not plain and not isinstance(static, bool | int | float | str | None):
            raise Break("tensor-subclass", f"attribute {name} of a {self.cls.__name__}")
        value = tx.wrap(static, source)
        return tx.bound_method(value, self) if plain else value

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        handler: Handler | None = self.find_method(f"set:{name}")
        if tx.overrides.modes and name in READERS:
            raise Break("torch-function", f"setting {name} of a tensor under a function mode")
        if handler is not None:
            handler(tx, self, value)
        elif hasattr(self.cls, name):
            raise Break("c-attribute", f"setting {name} of a tensor")
        else:
            self.store(tx, name, value)

    def store(self, tx: Tracer, name: str, value: Value) -> None:
        """Record that the program set an attribute; generated code sets it after the graph."""
        if self.overlay is None:
            self.overlay = TensorAttributes(self)
        tx.mutate(self.overlay)
        if not self.is_new_leaf():  # a new leaf stays in the graph
            tx.effects.note(self.overlay)
        self.overlay.attrs[name] = value

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        check_attributes(name)
        handler = self.find_method(name)
        if handler is not None:

            def plainly(args: list[Value], kwargs: Kwargs) -> Value:
                return tx.apply(handler, args, kwargs)

            function = getattr(torch.Tensor, name, None)
            return tx.overrides.evaluate(function, [self, *args], kwargs, plainly)
        if name in REAL_ONLY:
            raise Break("tensor-storage", f"Tensor.{name}")
        if name not in _OWN:
            return self.tp_getattro(tx, name).tp_call(tx, args, kwargs)
        return tx.graph.emit("call_method", name, [self, *args], kwargs)

    def sq_length(self, tx: Tracer) -> Value:
        check_attributes("__len__")
        if self.fake.dim() == 0:
            tx.raise_(TypeError, "len() of a 0-d tensor")
        return self.tp_getattro(tx, "shape").unpack(tx)[0]

    def nb_bool(self, tx: Tracer) -> bool:
        raise Break("data-dependent-branch", "truth of a tensor")

    def declines(self, name: str, argument: Value) -> bool:
        cls = argument.python_type()
        known = hasattr(cls, "__torch_function__") or issubclass(cls, int | float | complex)
        return isinstance(argument, InstanceValue) and not known

    def tp_iter(self, tx: Tracer) -> Value:
        check_attributes("__iter__")
        if tx.overrides.modes:
            return tx.const_object(torch.Tensor.__iter__).tp_call(tx, [self], {})
        if self.fake.dim() == 0:
            tx.raise_(TypeError, "iteration over a 0-d tensor")
        rows = self.call_method(tx, "unbind", [constant(0)], {})
        return rows.tp_iter(tx)


def selected(tx: Tracer, result: Value, tensors: list[Value]) -> Value:
    """Note that eager's result is one of `tensors` itself, which the graph's is not.

    The graph breaks where the program could tell: the result and memory of one of them leave the
    graph, or one of them is written to later.
    """
    assert isinstance(result, TensorValue)
    group = [tensor for tensor in tensors if isinstance(tensor, TensorValue)]
    if len(group) > 1:
        versions = [(t.fake, t.fake._version) for t in (*group, result)]
        memory = {memory_of(tensor.fake) for tensor in group} - {None}
        tx.watch(_Selection(tx.steps.now, memory_of(result.fake), memory, versions))
    return result


@dataclass(eq=False)
class _Selection:
    """Tensors of which one is eager's result of a step; a result in turn may be among them."""

    step: int
    memory: object
    group: set[object]
    versions: list[tuple[torch.Tensor, int]]

    def check(self, tx: Tracer, out: Output) -> None:
        """Break at the step where the program could tell which one it is."""
        if any(fake._version != version for fake, version in self.versions):
            raise Break("data-dependent-branch", "a write to one of several tensors", self.step)
        selections = [watcher for watcher in tx.watched if isinstance(watcher, _Selection)]
        group = set(self.group)
        for _ in selections:  # one of them may be the result of another selection
            group = group.union(*(s.group for s in selections if s.memory in group))
        leaving = {memory_of(node.meta.get("example_value")) for node in out.graph_outputs}
        if self.memory in leaving and group & (leaving | tx.graph.input_memory()):
            detail = "one of several tensors leaves the graph, as the object that it is"
            raise Break("data-dependent-branch", detail, self.step)


def memory_of(tensor: object) -> object:
    """Return what identifies the memory of a node's tensor; None where it has none of its own."""
    if isinstance(tensor, torch.Tensor) and torch._C._has_storage(tensor):
        return tensor.untyped_storage()._cdata
    return None


@dataclass(eq=False)
class TensorAttributes(MutableValue):
    """Attributes of a tensor that the captured program wrote: `grad`, and the user's own."""

    changing = ("attrs",)

    owner: TensorValue
    attrs: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source, self.cls = self.owner.source, self.owner.cls

    def reconstruct(self, out: Output) -> None:
        out.load(self.owner)

    def replay(self, out: Output) -> None:
        out.replay_attributes(self, self.attrs)


@dataclass(eq=False)
class SymValue(GraphValue, Varying):
    """A symbolic number: a size or an int that the graph takes as an input."""

    several = True

    node: Node
    sym: Any
    source: Source | None = None

    def python_type(self) -> type:
        name = type(self.sym).__name__
        return {"SymInt": int, "SymFloat": float, "SymBool": bool}[name]

    def describe(self) -> str:
        return f"symbolic {self.python_type().__name__} {self.sym}"

    def graph_arg(self) -> Any:
        return self.as_constant() if self._is_flag() else self.node

    def example(self) -> Any:
        return self.as_constant() if self._is_flag() else self.sym

    def _is_flag(self) -> bool:
        """Say whether this compares sizes; operators accept the result only as a plain bool."""
        return isinstance(self.sym, torch.SymBool) and not self.is_data()

    def reconstruct(self, out: Output) -> None:
        from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415 - imports sympy

        if self.node.target in _GROWING:  # Python's ints have no end; the graph's have 64 bits
            before = out.tx.pregraph_value(self)
            if before is not None and _is_recomputable(before[0]):
                before[0].emit(out.writer)
                return
        if self._is_flag() and symbolic_shapes.has_static_value(self.sym):
            out.load(constant(self.as_constant()))
            return
        operands = None if isinstance(self.sym, torch.SymInt) else self._operands()
        if operands is None:
            out.load_graph_output(self)
        else:
            out.call(self.node.target, operands)

    def _operands(self) -> list[Value] | None:
        """Return the numbers that this one is computed from; None if it is read from a tensor."""
        found: list[Value] = []
        for arg in self.node.args if self.node.op == "call_function" else (self.node,):
            number = arg.meta.get("example_value") if isinstance(arg, Node) else arg
            if isinstance(arg, Node) and isinstance(number, _SYMBOLIC) and arg is not self.node:
                found.append(SymValue(arg, number))
            elif type(number) in (int, float, bool):
                found.append(constant(number))
            else:
                return None
        return found

    def inherits_comparison(self, name: str) -> bool:
        return True

    def is_data(self) -> bool:
        """Say whether the number depends on a value that was read from a tensor."""
        return is_data(self.sym)

    def as_constant(self) -> Any:
        """Fix the number to its present value with a guard, and return it."""
        if self.is_data():
            raise Break("data-dependent-value", f"{self.describe()} is needed here")
        return self.python_type()(self.sym)

    def nb_bool(self, tx: Tracer) -> bool:
        return bool(self.sym)  # torch raises for a value read from a tensor


SymValue.methods = {
    "get:real": lambda tx, self: self,
    "get:numerator": lambda tx, self: self if hasattr(self.python_type(), "numerator") else None,
}


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_GROWING = (operator.mul, operator.pow, operator.add, operator.sub)
"""Operators whose result may need more bits than their operands."""


def _is_recomputable(source: Source) -> bool:
    if isinstance(source, CallSource):
        return all(map(_is_recomputable, source.arguments))
    return is_stable(source)


def is_data(number: torch.SymInt | torch.SymFloat | torch.SymBool | torch.Tensor) -> bool:
    """Say whether a symbolic number, or a tensor's size, depends on a value read from a tensor."""
    from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415 - imports sympy

    return symbolic_shapes.has_free_unbacked_symbols(number)
