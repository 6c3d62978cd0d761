"""Wrapper subclasses: tensor classes with `__torch_dispatch__` and `__tensor_flatten__`.

Such a tensor is one value of the graph. The class builds its fake from the fakes of the inner
tensors, and operations on it run the class's handlers on fakes. Later stages run them again;
`handlers` guards what they read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from weft_core.jagged import is_jagged
from weft_core.tensor_subclass import SubclassLayout, is_distributed, leaves
from weft_guards.payloads import TensorSpec
from weft_guards.sources import AttrSource, CallSource, ConstSource, InstanceAttrSource, Source

from weft_capture.breaks import Break, NeedsSymbols
from weft_capture.model import attributes
from weft_capture.model.constant import Constant, constant, is_constant_object
from weft_capture.model.protocol import Kwargs, Output, Tracer, Value
from weft_capture.tensors import handlers
from weft_capture.tensors.tensor import TensorValue

_REAL = """
    data item tolist numpy as_subclass requires_grad_ detach_ register_hook retain_grad backward
    apply_ map_ map2_ set_ resize_ resize_as_ to_sparse share_memory_ __deepcopy__ __reduce_ex__
    __int__ __float__ __bool__ __index__ __complex__ __format__ __repr__ __str__ __array__
"""
_ONLY_REAL = frozenset(_REAL.split())
"""Methods that concern the object itself, for which the rules of plain tensors do not hold."""
_DRAWS = re.compile("dropout|rand|bernoulli|normal_|uniform|exponential")


class WrapperValue(TensorValue):
    """A tensor of a wrapper subclass in the graph."""

    def describe(self) -> str:
        return f"{self.cls.__name__}({self.fake.dtype}, {tuple(self.fake.shape)})"

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        mro_entry = self._class_attribute(tx, name)
        if mro_entry is None or not attributes.is_data_descriptor(mro_entry[1]):
            value = self.own_attribute(tx, name)
            if value is not None:
                return value
        if mro_entry is not None:
            return attributes.bind(tx, mro_entry, name, self, self.cls)
        if name in _ONLY_REAL and name != "requires_grad_":
            raise Break("tensor-subclass", f"attribute {name} of a {self.cls.__name__}")
        return super().tp_getattro(tx, name)

    def _class_attribute(self, tx: Tracer, name: str) -> attributes.MroEntry | None:
        """Look up an attribute that the class adds to `torch.Tensor` or overrides."""
        if tx.overrides.modes:
            raise Break("tensor-subclass", f"a {self.cls.__name__} under a function mode")
        mro_entry = attributes.lookup(self.cls, name)
        added = mro_entry is not None and not issubclass(torch.Tensor, mro_entry[0])
        return mro_entry if added and name != "__class__" else None

    def own_attribute(self, tx: Tracer, name: str) -> Value | None:
        if self.overlay is not None and name in self.overlay.attrs:
            return tx.force(self.overlay.attrs[name])
        variables = vars(self.fake)
        if isinstance(variables.get(name), torch.Tensor):
            return tx.graph.inside(self, name)
        if self.real is not None or name not in variables:
            return tx.tensor_dict_attribute(self, name)
        if not is_constant_object(variables[name]):
            raise Break("tensor-subclass", f"attribute {name} of a {self.cls.__name__}")
        return tx.literal(variables[name])

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        if name != "grad":
            raise Break("tensor-subclass", f"setting {name} of a {self.cls.__name__}")
        super().tp_setattro(tx, name, value)

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        if self._class_attribute(tx, name) is not None:
            return self.tp_getattro(tx, name).tp_call(tx, args, kwargs)
        flag = args[0].as_constant() if name == "requires_grad_" and args else True
        if flag is False and not (self.fake.requires_grad or kwargs):
            return self  # as torch.nested.nested_tensor asks for
        if name in _ONLY_REAL:
            raise Break("tensor-subclass", f"{self.cls.__name__}.{name}")
        return super().call_method(tx, name, args, kwargs)


@dataclass(eq=False)
class RaggedSize(Value):
    """The ragged size of a jagged tensor, a nested int: it only equals itself."""

    tensor: TensorValue
    dim: int
    node: Node
    size: torch.SymInt

    def python_type(self) -> type:
        return torch.SymInt

    def graph_arg(self) -> Any:
        return self.node

    def example(self) -> Any:
        return self.size

    def reconstruct(self, out: Output) -> None:
        out.call(torch.Tensor.size, [self.tensor, constant(self.dim)])

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        other = args[0] if args else self
        same = isinstance(other, RaggedSize) and bool(self.size == other.size)
        if name in ("__eq__", "__ne__") and (same or isinstance(other, Constant)):
            return constant(same is (name == "__eq__"))
        raise Break("tensor-subclass", f"{name} of a ragged size")


def wrap_wrapper(tx: Tracer, obj: Any, source: Source) -> Value:
    """Make a wrapper tensor an input of the graph, and its inner tensors, too.

    Raises:
        Break: when the class cannot build an equal tensor from fakes.
    """
    cls = type(obj)
    handlers.guard_class(tx, cls)
    layout = SubclassLayout.of(obj)
    assert layout is not None
    tx.process_bound = "a device mesh" if is_distributed(cls) else tx.process_bound
    inner: dict[str, Any] = {}
    for name in layout.parts:
        inner_tensor = getattr(obj, name)
        where = attribute(obj, source, name)
        value = tx.wrap(inner_tensor, where) if isinstance(inner_tensor, torch.Tensor) else None
        if not isinstance(value, TensorValue):
            raise Break("tensor-subclass", f"a {cls.__name__} whose {name} is no plain tensor")
        inner[name] = value.fake
    try:
        dims = () if is_jagged(cls) else tx.dynamic_layout(obj, source)[0]
        result = tx.graph.tensor_input(obj, source, dims, (), inner)
        kept = copy.deepcopy(layout)
        complete = is_whole(result.fake) and kept.fits(result.fake)
    except (Break, NeedsSymbols):
        raise
    except Exception as error:
        raise Break("tensor-subclass", f"{cls.__name__}: {error}") from error
    if not complete or result.fake.requires_grad != obj.requires_grad:
        raise Break("tensor-subclass", f"a {cls.__name__} has state outside of its inner tensors")
    tx.guard(source, "TENSOR", TensorSpec.of(obj, like=result.fake))
    tx.guard(CallSource(SubclassLayout.fits, (ConstSource(kept), source)), "CONST", True)
    return result


def attribute(obj: Any, source: Source, name: str) -> Source:
    """Return the source of an inner tensor."""
    if isinstance(source, ConstSource):
        return ConstSource(getattr(obj, name))
    return (InstanceAttrSource if name in vars(obj) else AttrSource)(source, name)


def inside(tensor: Any, source: Source) -> dict[Source, Any]:
    """Return the plain tensors of an input, itself or its inner tensors, by their sources."""
    layout, tensors = SubclassLayout.of(tensor), dict[Source, Any]()
    if layout is None:
        return {source: tensor}
    for name in layout.parts:
        tensors |= inside(getattr(tensor, name), attribute(tensor, source, name))
    return tensors


def is_whole(fake: Any) -> bool:
    """Say whether a tensor of the class has all its inner tensors."""
    try:
        return all(isinstance(leaf, FakeTensor) for leaf in leaves(fake))
    except AttributeError:
        return False


def construct_wrapper(tx: Tracer, cls: type, args: list[Value], kwargs: Kwargs) -> Value:
    """Create a tensor of a wrapper subclass in the graph, by calling the class.

    Raises:
        Break: when the call does not only create a tensor.
    """
    handlers.guard_class(tx, cls)

    def make(*args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)

    make.__name__ = make.__qualname__ = cls.__name__
    value = tx.graph.emit_plain("call_function", make, args, kwargs)
    if not isinstance(value, WrapperValue) or value.cls is not cls or value.is_new_leaf():
        raise Break("tensor-subclass", f"making a {cls.__qualname__}")
    return value


def check_call(tx: Tracer, target: Any, values: list[Value], varying: bool = False) -> None:
    """Break where an operation's handlers cannot be run on fakes.

    `varying`: a float among the arguments is a tensor in the graph, which handlers would see.
    """
    classes = {tensor.cls for tensor in _among(values)}
    spread = any(is_distributed(x.cls) and x.fake.device.type != "cpu" for x in _among(values))
    if spread and _DRAWS.search(getattr(target, "__name__", str(target))):
        raise Break("tensor-subclass", "random numbers of a DTensor, whose state is sharded")
    off = torch._C._disabled_torch_function_impl
    handlers = [attributes.lookup(cls, "__torch_function__") for cls in classes]
    handled = any(h and h[0] is not torch.Tensor and h[1] is not off for h in handlers)
    if classes and (varying or tx.transforms or (tx.overrides.level and handled)):
        names = " and ".join(cls.__name__ for cls in classes)
        raise Break("tensor-subclass", f"a {names} in a transform, or with a float that varies")


def _among(values: list[Value]) -> Iterator[WrapperValue]:
    for value in values:
        if isinstance(value, WrapperValue):
            yield value
        elif isinstance(items := getattr(value, "items", None), list):
            yield from _among(items)
