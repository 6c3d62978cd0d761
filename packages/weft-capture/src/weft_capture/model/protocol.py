"""`Value`: the symbolic executor's representation of Python objects.

Every value on the executor's stack is a `Value`. Operations take the tracer `tx` first and return a
value, raise `Break` (cannot be captured) or `Raised` (the program raises). A value from before the
frame has a `source`, from which generated code loads it; `reconstruct` rebuilds others.

Classes extend the defaults by overriding, and by rows of their method table:

    @method(ListValue, "append")
    def _(tx, self, item): ...
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from weft_guards.payloads import find_in_class
from weft_guards.sources import Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.library_traits import scalar_library
from weft_capture.python_compat import HASH_NAMES_CONTAINER, type_name, unhashable, unhashable_in

if TYPE_CHECKING:
    from weft_capture.execution.frames import Frame as Frame
    from weft_capture.execution.tracer import Tracer as Tracer
    from weft_capture.model.slots import Operator as Operator
    from weft_capture.output.reconstruct import Output as Output
else:  # only names for annotations, here and elsewhere: these modules import all the others
    Frame = Operator = Output = Tracer = Any

Handler = Callable[..., "Value | None"]
"""Of a rule or method; one that returns nothing gives the program's None."""
H = TypeVar("H", bound=Handler)
Kwargs = dict[str, "Value"]
Call = tuple["Value", list["Value"], Kwargs]
"""A callee with its arguments."""
# What torch takes for a dtype. The text of a graph cannot name a class.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_TENSOR_TYPE = type(torch.FloatTensor)  # the metaclass of torch.FloatTensor and the like


class Value:
    """Base of all values; see the module docstring."""

    source: Source | None = None
    cls: type
    """The type that the user's program sees, where `python_type` says nothing else."""
    methods: ClassVar[dict[str, Handler]] = {}
    """Rows added by `method`: name -> handler(tx, self, *args, **kwargs).

    An attribute that is no method (CPython: `tp_getset`) has rows "get:name", which may return None
    where there is none now, and "set:name".
    """
    in_graph: ClassVar[bool] = False
    """Whether values of this class are nodes of the graph."""
    returned: Value | None = None
    """The value of the StopIteration with which an iterator ended just now; None for none."""
    is_scalar: ClassVar[bool] = False
    """Whether values of this class are numbers that the graph holds as 0-dim tensors."""
    several: ClassVar[bool] = False
    """Whether `cls` is one of several classes, each with some of these methods."""

    def __init_subclass__(cls) -> None:
        cls.methods = {}

    # What the value is.

    def python_type(self) -> type:
        """Return the type that the user's program would see."""
        return self.cls

    def as_constant(self) -> Any:
        """Return the Python object this value is known to equal.

        Raises:
            NotConstant: when it depends on tensors or is mutable.
        """
        raise NotConstant(self.describe())

    def data(self, tx: Tracer) -> Any:
        """Return the Python object this value equals now; a new one for a mutable container.

        Raises:
            NotConstant: when it holds tensors or objects of the program's classes.
        """
        return self.as_constant()

    def is_constant(self) -> bool:
        """Say whether `as_constant` succeeds."""
        try:
            self.as_constant()
        except NotConstant:
            return False
        return True

    def describe(self) -> str:
        """Name the value in messages."""
        return f"{type(self).__name__}({self.python_type().__name__})"

    # What the graph sees.

    def graph_arg(self) -> Any:
        """Return the value as an argument of an fx node."""
        try:
            literal = self.as_constant()
        except NotConstant:
            raise Break("graph-value", f"{self.describe()} as a graph argument") from None
        if isinstance(literal, type):
            if type(literal) is _TENSOR_TYPE:  # `x.type(torch.FloatTensor)` takes its name
                return f"{literal.__module__}.{literal.__name__}"
            return _DTYPES.get(literal, literal)
        if scalar_library(literal) is None:
            return literal
        number = literal.item()
        return float(number) if isinstance(number, bool) else number  # as torch does

    def example(self) -> Any:
        """Return the value as an argument for running an operation on fake tensors."""
        return self.graph_arg()

    # How generated code gets it.

    def reconstruct(self, out: Output) -> None:
        """Emit code that pushes an equal object; only asked of values without source."""
        try:
            constant = self.as_constant()
        except NotConstant:
            raise Break("cannot-rebuild", f"rebuilding {self.describe()}") from None
        out.writer.load_const(constant)

    # What the program does with it: slots by CPython's names. Of operators, one that returns None
    # leaves the operands to their special methods (see `slots`).

    compares_by_value: ClassVar[bool] = True
    """Whether constants of this kind are compared as the objects that they equal."""

    def nb_binary(
        self, tx: Tracer, op: Operator, left: Value, right: Value, inplace: bool
    ) -> Value | None:
        """Evaluate `left op right`, of which this value is one operand."""
        return None

    def nb_unary(self, tx: Tracer, symbol: str, function: Callable[[Any], Any]) -> Value | None:
        """Evaluate an operator of one operand."""
        return None

    def tp_richcompare(self, tx: Tracer, op: Operator, left: Value, right: Value) -> Value | None:
        """Evaluate a comparison, of which this value is one operand."""
        return None

    def declines(self, name: str, argument: Value) -> bool:
        """Say whether a special method of an operator surely returns NotImplemented."""
        return False

    def inherits_comparison(self, name: str) -> bool:
        """Say whether a comparison is the one that every object inherits."""
        return getattr(self.python_type(), name, None) is getattr(object, name, None)

    def forwards(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Call | None:
        """Return the call that a call of this value forwards to, if any."""
        return None

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        """Call the value."""
        forwarded = self.forwards(tx, args, kwargs)
        if forwarded is not None:
            callee, args, kwargs = forwarded
            return callee.tp_call(tx, args, kwargs)
        cls = self.python_type()
        if not any("__call__" in base.__dict__ for base in cls.__mro__):
            tx.raise_(TypeError, f"'{type_name(cls)}' object is not callable")
        raise Break("c-function", self.describe())

    def tp_getattro(self, tx: Tracer, name: str) -> Value:
        """Read an attribute by its row; a method becomes a `MethodOf`."""
        getter = self.find_method(f"get:{name}")
        value = None if getter is None else getter(tx, self)
        if value is not None:
            return value
        if self.find_method(name) is not None:
            return MethodOf(self, name)
        return self.getattr_fallback(tx, name)

    def getattr_fallback(self, tx: Tracer, name: str) -> Value:
        """Read an attribute that has no row."""
        if find_in_class(self.python_type(), name) is None:
            tx.raise_(
                AttributeError,
                f"'{type_name(self.python_type())}' object has no attribute '{name}'",
            )
        if callable(getattr(self.python_type(), name)):
            return MethodOf(self, name)
        raise Break("c-attribute", f"attribute {name} of {self.describe()}")

    def tp_member(self, tx: Tracer, definer: type, name: str) -> Value | None:
        """Read a field of a class in C, its `definer`; None where the object has another form."""
        return None

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        """Set an attribute."""
        raise Break("c-attribute", f"setting {name} of {self.describe()}")

    def tp_delattro(self, tx: Tracer, name: str) -> None:
        """Delete an attribute."""
        raise Break("c-attribute", f"deleting {name} of {self.describe()}")

    def call_method(self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs) -> Value:
        """Call `self.name(*args, **kwargs)`."""
        handler = self.find_method(name)
        if handler is not None:
            real = getattr(self.python_type(), name, None)
            return tx.apply(handler, [self, *args], kwargs, real)
        return self.call_method_fallback(tx, name, args, kwargs)

    def call_method_fallback(
        self, tx: Tracer, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        """Call a method that is not in the method table."""
        if name.startswith("__") and not hasattr(self.python_type(), name):
            raise Break("builtin-error", f"{self.python_type().__name__}.{name}")
        bound = self.tp_getattro(tx, name)
        if isinstance(bound, MethodOf):
            real = getattr(self.python_type(), name)
            if not isinstance(real, types.BuiltinMethodType):
                tx.check_call(real, [self, *args], kwargs)
            if self.python_type() in (tuple, range, slice, frozenset):
                return tx.call_builtin(getattr(self.data(tx), name), args, kwargs)
            raise Break("c-function", f"{self.python_type().__name__}.{name}")
        return bound.tp_call(tx, args, kwargs)

    def call_base_method(
        self, tx: Tracer, base_class: type, name: str, args: list[Value], kwargs: Kwargs
    ) -> Value:
        """Call `base_class.name(self, ...)`, the method of a builtin class, even if overridden."""
        return self.call_method(tx, name, args, kwargs)

    def find_method(self, name: str) -> Handler | None:
        """Return the handler of a method, also an inherited one."""
        if self.several and ":" not in name and not hasattr(self.python_type(), name):
            return None
        for base_class in type(self).__mro__:
            table: dict[str, Handler] | None = base_class.__dict__.get("methods")
            if table is not None and name in table:
                return table[name]
        return None

    def mp_subscript(self, tx: Tracer, key: Value) -> Value:
        """Evaluate `self[key]`."""
        return self.call_method(tx, "__getitem__", [key], {})

    def mp_ass_subscript(self, tx: Tracer, key: Value, value: Value) -> None:
        """Execute `self[key] = value`."""
        self._change_item(tx, "__setitem__", key, value)

    def mp_del_subscript(self, tx: Tracer, key: Value) -> None:
        """Execute `del self[key]`."""
        self._change_item(tx, "__delitem__", key)

    def _change_item(self, tx: Tracer, name: str, *args: Value) -> None:
        if find_in_class(self.python_type(), name) is None:  # the error differs
            raise Break("builtin-error", f"{self.describe()} without {name}")
        self.call_method(tx, name, list(args), {})

    def sq_length(self, tx: Tracer) -> Value:
        """Evaluate `len(self)` of an object whose class has a length."""
        return self.call_method(tx, "__len__", [], {})

    def nb_bool(self, tx: Tracer) -> bool:
        """Evaluate `bool(self)` (CPython: PyObject_IsTrue).

        Raises:
            Break: with code data-dependent-branch, when it depends on a tensor's value.
        """
        cls = self.python_type()
        if hasattr(cls, "__bool__"):
            raise Break("c-function", f"truth of {self.describe()}")
        return not hasattr(cls, "__len__") or self.sq_length(tx).nb_bool(tx)

    def tp_iter(self, tx: Tracer) -> Value:
        """Evaluate `iter(self)`: a value with `next`."""
        cls = self.python_type()
        own = find_in_class(cls, "__iter__")
        if own and hasattr(cls, "__next__") and not isinstance(own[1], types.FunctionType):
            return self
        if not own and not find_in_class(cls, "__getitem__"):
            tx.raise_(TypeError, f"'{type_name(cls)}' object is not iterable")
        return self.checked_iterator(tx, self.call_method(tx, "__iter__", [], {}))

    @staticmethod
    def checked_iterator(tx: Tracer, iterator: Value) -> Value:
        """Check the result of an `__iter__` of the program."""
        cls = iterator.python_type()
        if not hasattr(cls, "__next__"):
            tx.raise_(TypeError, f"iter() returned non-iterator of type '{cls.__name__}'")
        return iterator

    def tp_iternext(self, tx: Tracer) -> Value | None:
        """Evaluate `next(self)`; None at the end."""
        raise Break("c-function", f"iterating over {self.describe()}")

    def unpack(self, tx: Tracer) -> list[Value]:
        """Return all items, as `list(self)` would hold them."""
        return list(iter(functools.partial(self.tp_iter(tx).tp_iternext, tx), None))

    def tp_hash(self) -> object:
        """Return a hashable object equal for equal values; for dict keys and set elements."""
        hashes = getattr(self.python_type(), "__hash__", None)
        if hashes is None:
            current_tracer().raise_(TypeError, unhashable(self.python_type()))
        by_identity: Any = object.__hash__
        if hashes is by_identity:
            return identity_key(self)
        try:
            constant = self.as_constant()
            hash(constant)
        except (NotConstant, TypeError):
            raise Break("dict-key", f"{self.describe()} as a dict key") from None
        return constant

    def same_object(self, other: Value) -> bool:
        """Evaluate `self is other`."""
        return self is other

    def tp_traverse(self) -> Iterable[Value]:
        """Return the values that the object refers to, as far as capture knows."""
        return ()


Value.methods["get:__class__"] = lambda tx, self: tx.type_of(self)
BIRTHS = itertools.count()
"""Numbers values whose state changes, in the order in which they were made."""


@dataclass(eq=False)
class MutableValue(Value):
    """A value whose state changes; changes go through `tx.mutate(self)` first."""

    epoch: int = field(default=-1, init=False)
    saved: int = field(default=-1, init=False)
    born: int = field(default_factory=BIRTHS.__next__, init=False)
    changing: ClassVar[tuple[str, ...]] = ()
    """The attributes that change."""

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present state (see `journal`)."""
        saved = [(name, _copied(getattr(self, name))) for name in self.changing]

        def restore() -> None:
            for name, old in saved:
                setattr(self, name, old)

        return restore

    def replay(self, out: Output) -> None:
        """Write the final state to the existing object that `source` names, by `out.later`."""
        raise NotImplementedError(type(self).__name__)


class InstanceValue(MutableValue):
    """An instance of a class with attributes; `obj` is the real object, or None."""

    obj: Any

    def frozen(self, tx: Tracer) -> Any:
        """Return a real instance of a frozen dataclass whose fields are constants, else None."""
        return None

    def own_attribute(self, tx: Tracer, name: str) -> Value | None:
        """Read the instance dict."""
        raise NotImplementedError

    def special(self, tx: Tracer, name: str) -> Value:
        """Look up a special method, as the interpreter does: in the class."""
        raise NotImplementedError


def _copied(state: Any) -> Any:
    return state.copy() if type(state) in (list, dict, set, deque) else state


@dataclass(eq=False)
class MethodOf(Value):
    """A bound method of a value with a method table, such as `items.append`."""

    cls = types.BuiltinMethodType
    bound: ClassVar[dict[type, type]] = {
        types.WrapperDescriptorType: types.MethodWrapperType,
        types.FunctionType: types.MethodType,
    }
    owner: Value
    name: str
    source: Source | None = None

    def python_type(self) -> type:
        mro_entry = find_in_class(self.owner.python_type(), self.name)
        return self.bound.get(type(mro_entry[1]), self.cls) if mro_entry else self.cls

    def describe(self) -> str:
        return f"{self.owner.python_type().__name__}.{self.name}"

    def as_constant(self) -> Any:
        return getattr(self.owner.as_constant(), self.name)

    def tp_call(self, tx: Tracer, args: list[Value], kwargs: Kwargs) -> Value:
        if self.name == "__call__" and self.owner.python_type() is types.FunctionType:
            return self.owner.tp_call(tx, args, kwargs)
        return self.owner.call_method(tx, self.name, args, kwargs)

    def tp_traverse(self) -> Iterable[Value]:
        return (self.owner,)

    def reconstruct(self, out: Output) -> None:
        out.load(self.owner)
        out.writer.load_attr(self.name)


MethodOf.methods = {
    "get:__self__": lambda tx, self: self.owner,
    "get:__name__": lambda tx, self: tx.literal(self.name),
    "get:__qualname__": lambda tx, self: tx.literal(self.describe()),
}
_current = threading.local()


def set_tracer(tx: Tracer) -> None:
    """Set the current capture of this thread, by a weak reference."""
    _current.tracer = weakref.ref(tx)


def current_tracer() -> Tracer:
    """Return the current capture of this thread, for callbacks from Python."""
    current: Tracer | None = _current.tracer()
    assert current is not None
    return current


def key_in(container: type, item: Value) -> object:
    """Return an item's hash key for a dict or a set; errors name its use."""
    try:
        key = item.tp_hash()
        if HASH_NAMES_CONTAINER:
            hash(key)
        return key
    except Raised as raised:
        error = raised.value
        if not HASH_NAMES_CONTAINER or error.python_type() is not TypeError:
            raise
        text = current_tracer().builtin(str, error).as_constant()
    current_tracer().raise_(TypeError, unhashable_in(container, item.python_type(), text))


def method(value_class: type[Value], *names: str) -> Callable[[H], H]:
    """Add a row to the method table of a class: handler(tx, self, *args, **kwargs) -> Value."""

    def add(handler: H) -> H:
        for name in names:
            value_class.methods[name] = handler
        return handler

    return add


def method_of_each(value_class: type[Value], *names: str) -> Callable[[H], H]:
    """Add rows for several methods, whose handler gets the name first."""

    def add(handler: H) -> H:
        value_class.methods.update({name: functools.partial(handler, name) for name in names})
        return handler

    return add


AT_RUN = object()  # is in hash keys of what the program hashes otherwise


def identity_key(value: Value, obj: object = None) -> object:
    """Return the hash key of an object that is compared by identity, which is guarded.

    Args:
        obj: the real object, where several unread values may lead to it.
    """
    current_tracer().effects.keyed(value)
    return value if obj is None else (AT_RUN, id(obj))


class Raised(Exception):
    """The user's program raises `value`, an `exceptions.ExceptionValue`, here."""

    def __init__(self, value: Value) -> None:
        self.value = value
