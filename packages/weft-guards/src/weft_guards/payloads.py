"""What a guard remembers of the value it saw: small immutable records that keep no user object.

`WeakIdentity` refers to an object weakly (so a guard cannot keep it alive), `TensorSpec` is what
must hold of a tensor, `DictKeys` of a dict, `ClassUse` of a class, `ShapeExpr` of several sizes;
`state` has that of the process.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from weft_core.memory import are_disjoint

from weft_guards.abi import dispatch_keys, extension
from weft_guards.sources import Source, is_literal

# Objects of these types live as long as the process, or hold nothing that a user would miss.
_IMMORTAL_TYPES = (
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.device,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes made at run time; static ones never die


def _is_immortal(value: object) -> bool:
    if is_literal(value) or isinstance(value, _IMMORTAL_TYPES):
        return True
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    if isinstance(value, type):
        root = value.__module__.partition(".")[0]
        return not value.__flags__ & _HEAP_TYPE or root in ("torch", "builtins", "collections")
    return False


class WeakIdentity:
    """An object to be recognised by identity, held weakly unless it never dies anyway.

    `handle` is the object itself where it never dies, else the weak reference.

    Raises:
        TypeError: when the object can neither be held weakly nor safely kept alive, such as a list
            or a bound method (guard its parts instead).
    """

    __slots__ = ("get", "handle", "immortal", "key", "text")

    def __init__(self, value: object) -> None:
        self.immortal = _is_immortal(value)
        self.key = id(value)
        self.text = name_of(value)
        self.get: Callable[[], object | None]
        if self.immortal:
            self.get = lambda: value
            self.handle = value
            return
        if isinstance(value, types.MethodType | types.BuiltinFunctionType):
            raise TypeError("a bound method is made anew at each read: guard __self__ and __func__")
        try:
            self.get = self.handle = weakref.ref(value)
        except TypeError:
            raise TypeError(
                f"cannot guard the identity of a {type(value).__name__}: it takes no weak reference"
            ) from None

    def __eq__(self, other: object) -> bool:
        # A dead object's id may be another's now; such guards belong to entries about to be evicted
        return (
            isinstance(other, WeakIdentity) and self.get() is other.get() and self.key == other.key
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.text


def name_of(value: object) -> str:
    """Name an object without running the user's code (no user `__repr__`)."""
    if isinstance(value, WeakIdentity):
        return value.text
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value._name_}"
    if isinstance(value, types.CodeType):
        return f"code of {value.co_qualname} at {value.co_filename}:{value.co_firstlineno}"
    if type(value) is tuple and not _is_immortal(value):
        return f"({', '.join(map(name_of, value))})"
    if _is_immortal(value) or type(value) in (range, torch.Size, frozenset):
        try:
            return repr(value)
        except ValueError as error:  # CPython prints no int of more than 4300 digits
            return f"<{type(value).__qualname__}: {error}>"
    return f"<{type(value).__qualname__} object at {id(value):#x}>"


def same_constant(a: object, b: object) -> bool:
    """Say whether two constants cannot be told apart: types, signs of zero and NaNs included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, complex) and isinstance(b, complex):
        return same_constant((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_constant, a, b))
    if isinstance(a, range) and isinstance(b, range):
        return (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    if isinstance(a, frozenset) and isinstance(b, frozenset):
        return {(type(e), repr(e)) for e in a} == {(type(e), repr(e)) for e in b}
    return a == b


@dataclass(frozen=True)
class TensorSpec:
    """What must hold of a tensor; None in sizes or strides means that any value will do."""

    cls: WeakIdentity
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    requires_grad: bool
    keys: int  # the dispatch key set: layout, conj, neg, inference, functorch, ...

    @staticmethod
    def of(tensor: torch.Tensor, like: torch.Tensor | None = None) -> TensorSpec:
        """Take a real tensor's properties.

        Args:
            tensor: the real tensor.
            like: its fake twin; where that has symbolic sizes or strides, any value will do.
        """
        shape = tensor if like is None else like
        plain = tensor.layout is torch.strided
        return TensorSpec(
            WeakIdentity(type(tensor)),
            tensor.dtype,
            tensor.device,
            tuple(size if type(size) is int else None for size in shape.shape),
            tuple(s if type(s) is int else None for s in shape.stride()) if plain else (),
            tensor.requires_grad,
            dispatch_keys(tensor),
        )

    def holds(self, tensor: Any) -> bool:
        """Test a value, cheap and often failing properties first."""
        return (
            type(tensor) is self.cls.get()
            and _fits(tensor.shape, self.sizes)
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
            and (not self.strides or _fits(tensor.stride(), self.strides))
            and tensor.device == self.device
            and dispatch_keys(tensor) == self.keys
        )

    def __str__(self) -> str:
        sizes = ", ".join("*" if size is None else str(size) for size in self.sizes)
        strides = ", ".join("*" if stride is None else str(stride) for stride in self.strides)
        name = self.cls.text.rpartition(".")[2]
        grad = ", requires_grad" if self.requires_grad else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{name} {dtype}[{sizes}] strides [{strides}] on {self.device}{grad}"

    def differences(self, value: object) -> list[tuple[str, str, str]]:
        """Return (what, old, new) of each property in which a value differs."""
        if type(value) is not self.cls.get() or not isinstance(value, torch.Tensor):
            return [("class", self.cls.text, name_of(type(value)))]
        pairs = [
            ("dtype", self.dtype, value.dtype),
            ("device", self.device, value.device),
            ("number of dimensions", len(self.sizes), value.dim()),
            ("requires_grad", self.requires_grad, value.requires_grad),
        ]
        if len(self.sizes) == value.dim():
            dims = range(value.dim())
            pairs += [(f"size of dim {dim}", self.sizes[dim], value.size(dim)) for dim in dims]
            if value.layout is torch.strided and self.strides:
                now = value.stride()
                pairs += [(f"stride of dim {dim}", self.strides[dim], now[dim]) for dim in dims]
        old, new = map(torch._C.DispatchKeySet.from_raw_repr, (self.keys, dispatch_keys(value)))
        pairs.append(("dispatch keys", old, new))
        return [
            (what, str(old), str(new)) for what, old, new in pairs if old is not None and old != new
        ]


def _fits(now: Sequence[int], wanted: tuple[int | None, ...]) -> bool:
    """Compare ints with those wanted, of which None is any."""
    return now == wanted or (
        None in wanted
        and len(now) == len(wanted)
        and all(want is None or want == here for want, here in zip(wanted, now))
    )


def _is_value(key: object) -> bool:
    return is_literal(key) or isinstance(key, torch.device)  # of which each access makes another


@dataclass(frozen=True)
class DictKeys:
    """The keys of a dict in order: literals and devices by value, others by identity."""

    keys: tuple[Any, ...]

    @staticmethod
    def of(keys: Sequence[Any]) -> DictKeys:
        """Take the keys of a dict (or the dict)."""
        return DictKeys(tuple(map(_key, keys)))

    @property
    def identities(self) -> list[WeakIdentity]:
        """The keys, and what tuples among them hold, that are recognised by identity."""
        return list(_identities_in(self.keys))

    def holds(self, keys: Iterable[Any]) -> bool:
        """Say whether keys are the ones seen: values by value and type, others by `is`."""
        return _is_key(tuple(keys), self.keys)

    def __str__(self) -> str:
        return repr(list(self.keys))


def _key(key: Any) -> Any:
    if _is_value(key):
        return key
    return tuple(map(_key, key)) if type(key) is tuple else WeakIdentity(key)


def _is_key(now: Any, then: Any) -> bool:
    if isinstance(then, WeakIdentity):
        return now is then.get()
    if type(now) is tuple is type(then):
        return len(now) == len(then) and all(map(_is_key, now, then))
    return same_constant(now, then)


def _identities_in(keys: tuple[Any, ...]) -> Iterator[WeakIdentity]:
    for key in keys:
        if isinstance(key, WeakIdentity):
            yield key
        elif type(key) is tuple:
            yield from _identities_in(key)


_dict_of: Any = type.__dict__["__dict__"].__get__
"""Reads the dict of a class, past what its metaclass makes of `__dict__`."""


def find_in_class(cls: type, name: str) -> tuple[type, Any] | None:
    """Find a name in a class and its bases without running descriptors: (definer, attribute)."""
    for kind in cls.__mro__:
        if name in (held := _dict_of(kind)):
            return kind, held[name]
    return None


Wanted = WeakIdentity | int | Literal["plain"] | None


@dataclass(frozen=True)
class ClassUse:
    """What code took from a class and its bases.

    Args:
        names: (name, wanted), where wanted is None (found nowhere), "plain" (any object but a
            descriptor), a `WeakIdentity`, or the id of an object that cannot be held weakly, such
            as a property.
        version: CPython's version of the class at that time; 0 where it has none.
    """

    names: tuple[tuple[str, Wanted], ...]
    version: int

    @staticmethod
    def of(
        cls: type, names: Mapping[str, tuple[type, Any] | None], plain: Collection[str] = ()
    ) -> ClassUse:
        """Take a class, what `find_in_class` found for names, and those that may be `plain`."""
        native: Any = extension()
        version = native.class_version(cls) if native is not None else 0
        rows: list[tuple[str, Wanted]] = [
            (name, "plain" if name in plain else found and _identity_or_id(found[1]))
            for name, found in names.items()
        ]
        return ClassUse(tuple(rows), version)

    def changed(self, cls: type) -> list[str]:
        """Return the names that mean something else by now."""
        now = {name: find_in_class(cls, name) for name, _ in self.names}
        return [name for name, wanted in self.names if not _is_wanted(now[name], wanted)]

    def holds(self, cls: type | None) -> bool:
        """Say whether all names mean what they did; False for a class that is gone."""
        return cls is not None and not self.changed(cls)

    def __str__(self) -> str:
        return ", ".join(name for name, _ in self.names)


@dataclass(frozen=True, eq=False)
class NamespaceUse:
    """What code took from the globals of a library's module.

    Args:
        names: (name, reference), where the reference gives the object found, None once it is gone.
    """

    names: tuple[tuple[str, Callable[[], object | None]], ...]

    @staticmethod
    def of(found: Mapping[str, object]) -> NamespaceUse:
        """Take what was found under names."""
        return NamespaceUse(tuple((name, _reference(obj)) for name, obj in found.items()))

    def changed(self, module: types.ModuleType) -> list[str]:
        """Return the names that mean something else by now."""
        now = module.__dict__
        return [name for name, wanted in self.names if not _is_same(now.get(name), wanted())]

    def holds(self, module: types.ModuleType | None) -> bool:
        """Say whether all names mean what they did; False for a module that is gone."""
        return module is not None and not self.changed(module)

    def __str__(self) -> str:
        return ", ".join(name for name, _ in self.names)


def _is_same(now: object, then: object) -> bool:
    return now is then or (is_literal(then) and same_constant(now, then))


def _reference(value: object) -> Callable[[], object | None]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _identity_or_id(value: object) -> WeakIdentity | int:
    try:
        return WeakIdentity(value)
    except TypeError:
        return id(value)


def is_descriptor(value: object) -> bool:
    """Say whether an attribute of a class is read or written by methods of its own."""
    return any(hasattr(type(value), name) for name in ("__get__", "__set__", "__delete__"))


def _is_wanted(found: tuple[type, Any] | None, wanted: Wanted) -> bool:
    if found is None or wanted is None:
        return found is None and wanted is None
    if isinstance(wanted, str):
        return not is_descriptor(found[1])
    return id(found[1]) == wanted if isinstance(wanted, int) else found[1] is wanted.get()


@dataclass(frozen=True)
class MemoryUse:
    """Whether tensors that the code writes share memory with each other or with those it reads.

    Args:
        written: sources of the tensors that are written.
        read: sources of the others.
        shared: whether any of the first shares its storage with another tensor.
        apart: whether they share no elements although they share storages.
    """

    written: tuple[Source, ...]
    read: tuple[Source, ...]
    shared: bool = False
    apart: bool = False

    def holds(self, *tensors: torch.Tensor) -> bool:
        """Test the tensors of all sources, the written ones first."""
        written, read = tensors[: len(self.written)], tensors[len(self.written) :]
        if shares_memory(written, read) is not self.shared:
            return False
        return not self.shared or writes_are_disjoint(written, read) is self.apart

    def __str__(self) -> str:
        return ", ".join(source.expr() for source in self.written)


def shares_memory(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> bool:
    """Say whether a written tensor has the storage of another one, or is one object with it."""
    storages = [t.untyped_storage()._cdata for t in written]
    found = set(storages)
    return len(found) < len(storages) or any(t.untyped_storage()._cdata in found for t in read)


def writes_are_disjoint(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> bool:
    """Say whether no written tensor has an element of another one."""
    others = [*written, *read]
    return all(are_disjoint(t, other) for i, t in enumerate(written) for other in others[i + 1 :])


@dataclass(frozen=True)
class ShapeExpr:
    """A condition over sizes: Python text with {0}, {1}, ... for the sources, in order."""

    template: str
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        return self.template.format(*(source.expr() for source in self.sources))
