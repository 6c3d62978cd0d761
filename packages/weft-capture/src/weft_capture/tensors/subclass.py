"""Tensors of wrapper classes: those with a `__torch_dispatch__` that can be taken apart.

Such a tensor is one value of the graph. Its fake twin is put together by the class itself, around
the twins of the tensors inside, and operations on it run the class's own handlers on fakes. Later
stages run them again; what the handlers read is guarded by `handlers`.
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
"""What is of the object itself, or reads it: rules for plain tensors say nothing about it."""
_DRAWS = re.compile("dropout|rand|bernoulli|normal_|uniform|exponential")


class WrapperValue(TensorValue):
    """A tensor of a wrapper class in the graph."""

    def describe(self) -> str:
        return f"{self.cls.__name__}({self.fake.dtype}, {tuple(self.fake.shape)})"

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        found = self._class_attribute(tx, name)
        if found is None or not attributes.is_data_descriptor(found[1]):
            own = self.own_attribute(tx, name)
            if own is not None:
                return own
        if found is not None:
            return attributes.bind(tx, found, name, self, self.cls)
        if name in _ONLY_REAL and name != "requires_grad_":
            raise Break("tensor-subclass", f"attribute {name} of a {self.cls.__name__}")
        return super().tp_getattro(tx, name)

    def _class_attribute(self, tx: Tracer, name: str) -> attributes.Found | None:
        """Find what the class adds to tensors, or has in the place of something of theirs."""
        if tx.overrides.modes:
            raise Break("tensor-subclass", f"a {self.cls.__name__} under a function mode")
        found = attributes.lookup(self.cls, name)
        added = found is not None and not issubclass(torch.Tensor, found[0])
        return found if added and name != "__class__" else None

    def own_attribute(self, tx: Tracer, name: str) -> Value | None:
        if self.overlay is not None and name in self.overlay.attrs:
            return tx.force(self.overlay.attrs[name])
        own = vars(self.fake)
        if isinstance(own.get(name), torch.Tensor):
            return tx.graph.inside(self, name)
        if self.real is not None or name not in own:
            return tx.tensor_dict_attribute(self, name)
        if not is_constant_object(own[name]):
            raise Break("tensor-subclass", f"attribute {name} of a {self.cls.__name__}")
        return tx.literal(own[name])

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        if name != "grad":
            raise Break("tensor-subclass", f"setting {name} of a {self.cls.__name__}")
        super().tp_setattro(tx, name, value)

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        if self._class_attribute(tx, name) is not None:
            return self.tp_getattro(tx, name).tp_call(tx, args, kwargs)
        wish = args[0].as_constant() if name == "requires_grad_" and args else True
        if wish is False and not (self.fake.requires_grad or kwargs):
            return self  # as torch.nested.nested_tensor asks for
        if name in _ONLY_REAL:
            raise Break("tensor-subclass", f"{self.cls.__name__}.{name}")
        return super().call_method(tx, name, args, kwargs)


@dataclass(eq=False)
class RaggedSize(Value):
    """The size of a jagged tensor that is no number: it only equals itself; operations take it."""

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
    """Make an input of the graph of a tensor, and inputs of what is inside of it.

    Raises:
        Break: when the class cannot put together one like it around fakes.
    """
    kind = type(obj)
    handlers.guard_class(tx, kind)
    layout = SubclassLayout.of(obj)
    assert layout is not None
    tx.process_bound = "a device mesh" if is_distributed(kind) else tx.process_bound
    inner: dict[str, Any] = {}
    for name in layout.parts:
        part = getattr(obj, name)
        where = attribute(obj, source, name)
        value = tx.wrap(part, where) if isinstance(part, torch.Tensor) else None
        if not isinstance(value, TensorValue):
            raise Break("tensor-subclass", f"a {kind.__name__} whose {name} is no plain tensor")
        inner[name] = value.fake
    try:
        dims = () if is_jagged(kind) else tx.dynamic_layout(obj, source)[0]
        made = tx.graph.tensor_input(obj, source, dims, (), inner)
        kept = copy.deepcopy(layout)
        whole = is_whole(made.fake) and kept.fits(made.fake)
    except (Break, NeedsSymbols):
        raise
    except Exception as error:
        raise Break("tensor-subclass", f"{kind.__name__}: {error}") from error
    if not whole or made.fake.requires_grad != obj.requires_grad:
        raise Break("tensor-subclass", f"a {kind.__name__} holds more than it tells")
    tx.guard(source, "TENSOR", TensorSpec.of(obj, like=made.fake))
    tx.guard(CallSource(SubclassLayout.fits, (ConstSource(kept), source)), "CONST", True)
    return made


def attribute(obj: Any, source: Source, name: str) -> Source:
    """Return where a tensor inside of another one is read from."""
    if isinstance(source, ConstSource):
        return ConstSource(getattr(obj, name))
    return (InstanceAttrSource if name in vars(obj) else AttrSource)(source, name)


def inside(tensor: Any, source: Source) -> dict[Source, Any]:
    """Return the plain tensors of an input, itself or inside of it, by their sources."""
    layout, found = SubclassLayout.of(tensor), dict[Source, Any]()
    if layout is None:
        return {source: tensor}
    for name in layout.parts:
        found |= inside(getattr(tensor, name), attribute(tensor, source, name))
    return found


def is_whole(fake: Any) -> bool:
    """Say whether a class made a tensor with fakes inside: eager execution needs that, too."""
    try:
        return all(isinstance(leaf, FakeTensor) for leaf in leaves(fake))
    except AttributeError:
        return False


def made(tx: Tracer, kind: type, args: list[Value], kwargs: Kwargs) -> Value:
    """Make a tensor of a wrapper class in the graph, by calling the class.

    Raises:
        Break: when the call does more than that.
    """
    handlers.guard_class(tx, kind)

    def make(*args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    make.__name__ = make.__qualname__ = kind.__name__
    value = tx.graph.emit_plain("call_function", make, args, kwargs)
    if not isinstance(value, WrapperValue) or value.cls is not kind or value.is_new_leaf():
        raise Break("tensor-subclass", f"making a {kind.__qualname__}")
    return value


def check_call(tx: Tracer, target: Any, values: list[Value], varying: bool = False) -> None:
    """Break where an operation's handlers cannot be run on fakes.

    `varying`: a float among the arguments is a tensor in the graph, which handlers would see.
    """
    found = {one.cls for one in _among(values)}
    spread = any(is_distributed(x.cls) and x.fake.device.type != "cpu" for x in _among(values))
    if spread and _DRAWS.search(getattr(target, "__name__", str(target))):
        raise Break("tensor-subclass", "random numbers of a DTensor, whose state is sharded")
    off = torch._C._disabled_torch_function_impl
    handlers = [attributes.lookup(kind, "__torch_function__") for kind in found]
    own = any(one and one[0] is not torch.Tensor and one[1] is not off for one in handlers)
    if found and (varying or tx.transforms or (tx.overrides.level and own)):
        what = " and ".join(kind.__name__ for kind in found)
        raise Break("tensor-subclass", f"a {what} in a transform, or with a float that varies")


def _among(values: list[Value]) -> Iterator[WrapperValue]:
    for value in values:
        if isinstance(value, WrapperValue):
            yield value
        elif isinstance(items := getattr(value, "items", None), list):
            yield from _among(items)
