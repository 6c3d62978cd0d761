"""Where a value came from; docs/architecture/guards.md has a table of all sources.

Each source answers three questions: `render` (a Python expression, for the printed name and for
the compiled check), `emit` (bytecode that loads the value again, through a `Builder`) and `base`
(the source it is read from, so that a check reads a shared base once).
Sources are immutable, compare by structure, and remember their hash, since they nest deeply.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch


class Builder(Protocol):
    """What a source needs of a bytecode writer; values go through the operand stack."""

    def load_local(self, name: str, /) -> object:
        """Push an argument of the frame."""

    def load_global(self, name: str, /) -> object:
        """Push a global of the function."""

    def load_cell(self, name: str, /) -> object:
        """Push the contents of a closure cell."""

    def load_const(self, value: Any, /) -> object:
        """Push any object as a constant."""

    def load_attr(self, name: str, /) -> object:
        """Replace the top of the stack by one of its attributes."""

    def binary_subscr(self) -> object:
        """Replace container and key by the item."""

    def begin_call(self) -> object:
        """Announce a call; comes before the callable is pushed."""

    def call(self, count: int, /) -> object:
        """Replace a callable and `count` arguments by the result."""


class Names(Protocol):
    """How an expression names what it reads from: one way when printed, another in a check."""

    def root(self, kind: str, name: str | None = None) -> str:
        """Name an argument "L", global "G", cell's contents "C", cell or module "M", or all."""

    def const(self, value: object) -> str:
        """Name an object."""


class PrintedNames:
    """Names for people: `L['x']`, `G['g']`, `C['c']`."""

    def root(self, kind: str, name: str | None = None) -> str:
        """Print a root by its letter."""
        return kind if name is None else f"{kind}[{name!r}]"

    def const(self, value: object) -> str:
        """Print a class or function by its qualified name, anything else by its repr."""
        name = getattr(value, "__qualname__", None)
        return name if isinstance(name, str) else repr(value)


PRINTED = PrintedNames()

# Types whose values hold no references and print as themselves.
_LITERAL_TYPES = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def is_literal(value: object) -> bool:
    """Say whether a value is an immutable literal, or a tuple of those."""
    if type(value) is tuple:
        return all(map(is_literal, value))
    return type(value) in _LITERAL_TYPES


class Source:
    """Base of all sources."""

    base: Any  # the source this one is read from; None for a root
    text: ClassVar[str]  # an expression for the value, of that for the base's and of the fields
    _hash: int
    _parts: tuple[Any, ...]  # kept with the hash
    __match_args__: ClassVar[tuple[str, ...]]  # the names of the fields; dataclasses set it

    def render(self, base: str, names: Names) -> str:
        """Return an expression for the value, given one for the base's value ("" for a root)."""
        return self.text.format(self, base=base)

    def emit(self, builder: Builder) -> None:
        """Write bytecode that pushes the value."""
        raise NotImplementedError(f"{self} can be guarded but not rebuilt")

    def expr(self) -> str:
        """Return the printed name."""
        return self.render(self.base.expr() if self.base is not None else "", PRINTED)

    def chain(self) -> Iterator[Source]:
        """Yield this source and all that it is read from."""
        yield self
        for source in getattr(self, "arguments", (self.base,)):
            if source is not None:
                yield from source.chain()

    def parts(self) -> tuple[Any, ...]:
        """Return what distinguishes this source from others of its class."""
        return tuple([getattr(self, name) for name in self.__match_args__])

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            parts = self.parts()
            object.__setattr__(self, "_parts", parts)
            object.__setattr__(self, "_hash", hash((type(self).__name__, parts)))
            return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or hash(self) != hash(other):
            return False
        assert isinstance(other, Source)
        return self._parts == other._parts

    def __str__(self) -> str:
        return self.expr()


class RootSource(Source):
    """Base of the sources that are read from no other."""

    base: ClassVar[None] = None  # type: ignore[misc]


def _call(builder: Builder, function: Callable[..., Any], *arguments: Source) -> None:
    """Push the result of calling a function on sources."""
    builder.begin_call()
    builder.load_const(function)
    for argument in arguments:
        argument.emit(builder)
    builder.call(len(arguments))


def _item(builder: Builder, key: object) -> None:
    """Replace a container by its item."""
    builder.load_const(key)
    builder.binary_subscr()


# ---- roots


@dataclass(frozen=True, eq=False)
class NamedSource(RootSource):
    """Base of the sources that are a name of one kind."""

    name: str
    kind: ClassVar[str]

    def render(self, base: str, names: Names) -> str:
        return names.root(self.kind, self.name)


class LocalSource(NamedSource):
    """An argument of the frame."""

    kind = "L"

    def emit(self, builder: Builder) -> None:
        builder.load_local(self.name)


class GlobalSource(NamedSource):
    """A global of the function."""

    kind = "G"

    def emit(self, builder: Builder) -> None:
        builder.load_global(self.name)


class ClosureSource(NamedSource):
    """The contents of a closure cell, by the free variable's name."""

    kind = "C"

    def emit(self, builder: Builder) -> None:
        builder.load_cell(self.name)


class CellSource(NamedSource):
    """A closure cell itself, to guard that it is empty."""

    kind = "cell"


class ModuleSource(NamedSource):
    """An imported module, by its name in `sys.modules`."""

    kind = "M"

    def emit(self, builder: Builder) -> None:
        builder.load_const(sys.modules)
        _item(builder, self.name)


@dataclass(frozen=True, eq=False)
class GlobalsSource(RootSource):
    """The function's globals dict itself."""

    def render(self, base: str, names: Names) -> str:
        return names.root("G")

    def emit(self, builder: Builder) -> None:
        builder.begin_call()
        builder.load_const(globals)
        builder.call(0)


@dataclass(frozen=True, eq=False)
class ConstSource(RootSource):
    """An object that capture itself holds; compared by identity, and kept alive."""

    value: Any

    def render(self, base: str, names: Names) -> str:
        return names.const(self.value)

    def emit(self, builder: Builder) -> None:
        builder.load_const(self.value)

    def parts(self) -> tuple[Any, ...]:
        return (id(self.value),)


@dataclass(frozen=True, eq=False)
class TorchStateSource(RootSource):
    """Settings of the process or thread, such as grad mode; no object to read."""

    def render(self, base: str, names: Names) -> str:
        return "torch" if names is PRINTED else names.const(torch)


@dataclass(frozen=True, eq=False)
class ProgramSource(RootSource):
    """A class or function of the program, by weak reference: None once it is gone."""

    identity: Any  # payloads.WeakIdentity

    def render(self, base: str, names: Names) -> str:
        return str(self.identity) if names is PRINTED else f"{names.const(self.identity.get)}()"


# ---- read from another source


@dataclass(frozen=True, eq=False)
class AttrSource(Source):
    """An attribute, read the ordinary way: only where no user code can run."""

    base: Source
    name: str

    text = "{base}.{0.name}"

    def emit(self, builder: Builder) -> None:
        self.base.emit(builder)
        builder.load_attr(self.name)


@dataclass(frozen=True, eq=False)
class DictSource(Source):
    """The `__dict__` of an instance."""

    base: Source

    text = "{base}.__dict__"

    def emit(self, builder: Builder) -> None:
        self.base.emit(builder)
        builder.load_attr("__dict__")


@dataclass(frozen=True, eq=False)
class ItemSource(Source):
    """An item of a list, tuple or dict by a literal index or key.

    The base's exact type must be guarded before: a subclass may run user code.
    """

    base: Source
    key: Any

    def render(self, base: str, names: Names) -> str:
        key = repr(self.key) if is_literal(self.key) else names.const(self.key)
        return f"{base}[{key}]"

    def emit(self, builder: Builder) -> None:
        self.base.emit(builder)
        _item(builder, self.key)


def InstanceAttrSource(base: Source, name: str) -> ItemSource:  # noqa: N802
    """Return the source of an instance attribute that runs no user code: an item of its dict."""
    return ItemSource(DictSource(base), name)


def DictKeySource(base: Source, index: int) -> ItemSource:  # noqa: N802
    """Return the source of the i-th key of a dict, in the dict's own order."""
    return ItemSource(CallSource(list, (base,)), index)


@dataclass(frozen=True, eq=False)
class TypeSource(Source):
    """The class of a value."""

    base: Source

    text = "type({base})"

    def emit(self, builder: Builder) -> None:
        _call(builder, type, self.base)


@dataclass(frozen=True, eq=False)
class TensorProperty(Source):
    """A size, stride or storage offset of a tensor, as an int."""

    base: Source
    prop: Literal["size", "stride", "storage_offset"]
    dim: int = 0

    def render(self, base: str, names: Names) -> str:
        return f"{base}.{self.prop}({'' if self.prop == 'storage_offset' else self.dim})"

    def emit(self, builder: Builder) -> None:
        dims = () if self.prop == "storage_offset" else (ConstSource(self.dim),)
        _call(builder, getattr(torch.Tensor, self.prop), self.base, *dims)


@dataclass(frozen=True, eq=False)
class CallSource(RootSource):
    """The result of a pure function on other sources; rebuilt by calling it again."""

    function: Callable[..., Any]
    arguments: tuple[Source, ...]

    def render(self, base: str, names: Names) -> str:
        arguments = ", ".join(render_source(argument, names) for argument in self.arguments)
        return f"{names.const(self.function)}({arguments})"

    def emit(self, builder: Builder) -> None:
        _call(builder, self.function, *self.arguments)


def render_source(source: Source, names: Names) -> str:
    """Return one expression for a source and all it is read from."""
    base = "" if source.base is None else render_source(source.base, names)
    return source.render(base, names)
