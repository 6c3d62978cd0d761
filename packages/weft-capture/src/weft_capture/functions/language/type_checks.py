"""Identity and equality, `isinstance` and `issubclass`, and conversions to a number."""

from __future__ import annotations

import abc
import operator
from typing import Any

import torch
from weft_guards import WeakIdentity
from weft_guards.sources import CallSource, ConstSource, ProgramSource, Source

from weft_capture.breaks import Break, NotConstant
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.model.attributes import MroEntry, is_fixed, is_python_code, is_user_code, lookup
from weft_capture.model.constant import TRUE, Constant, constant, is_shared, real_call
from weft_capture.model.containers import TupleValue
from weft_capture.model.exceptions import ExceptionValue
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Tracer, Value
from weft_capture.model.slots import compare, one_object
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.runtime_values import RuntimeValue, is_runtime
from weft_capture.tensors.tensor import SymValue, TensorValue


def identical(tx: Tracer, left: Value, right: Value) -> bool:
    """Evaluate `left is right`; the result for two objects of the program is guarded.

    Raises:
        Break: for two equal constants, which may be one object or two.
    """
    data = Constant | SymValue | symbolic_scalars.SymFloatValue | RuntimeValue
    runtime = any(isinstance(o, RuntimeValue) and is_runtime(o) for o in (left, right))
    if isinstance(left, data) and isinstance(right, data) and not (runtime or left is right):
        return _one_number(tx, left, right)
    return one_object(tx, left, right)


def equal(tx: Tracer, left: Value, right: Value) -> bool:
    """Evaluate `left is right or left == right` as a Python bool, as containers do."""
    if one_object(tx, left, right) or compare(tx, "==", left, right).nb_bool(tx):
        return True
    hint = getattr(left, "hint", None)
    return hint != hint and identical(tx, left, right)  # NaN


def _one_number(tx: Tracer, left: Value, right: Value) -> bool:
    varies = any(
        isinstance(o, symbolic_scalars.SymFloatValue | RuntimeValue) for o in (left, right)
    )
    if left.python_type() is not right.python_type():
        return False
    same_payload = getattr(left, "value", left) is getattr(right, "value", right)  # NaN, say
    if not (varies or same_payload or tx.builtin(operator.eq, left, right).nb_bool(tx)):
        return False
    (source, first), (origin, other) = (_origin_object(tx, each) for each in (left, right))
    if source is None and origin is None:
        if not (varies or first is other or is_shared(first)):
            raise Break("object-identity", f"whether two objects {left.describe()} are one")
        return not varies
    if source != origin:
        tx.process_bound = "whether two numbers or texts are one object"
        sources = (source or ConstSource(first), origin or ConstSource(other))
        tx.guard(CallSource(operator.is_, sources), "CONST", first is other)
    return first is other


def _origin_object(tx: Tracer, value: Any) -> tuple[Source | None, object]:
    """Return the source of a number or string, and the object."""
    if isinstance(value, Constant):
        return value.origin, value.value
    if isinstance(value, symbolic_scalars.SymFloatValue | RuntimeValue):
        return value.source, value.hint
    entry, number = tx.graph.input_at.get(value.node), value.as_constant()
    return value.source, number if entry is None else entry.example


@rule(isinstance)
def _isinstance(tx: Tracer, value: Value, classes: Value) -> Value:
    targets = _classes(tx, classes, "__instancecheck__")
    plain: list[type] = []
    for target in targets:
        check = _check_of(target)
        if check is None or value.python_type() is target:
            plain.append(target)
        elif _is_plain_instance(tx, value, tuple(plain)) or _asked(tx, check, target, value):
            return TRUE
        else:
            plain.clear()
    return constant(_is_plain_instance(tx, value, tuple(plain)))


def _check_of(target: type) -> Any:
    """Return the `__instancecheck__` in Python of a class's metaclass, if it has one."""
    hook = lookup(type(target), "__instancecheck__")
    traced = hook is not None and (is_user_code(hook) or hook[0].__module__ == "typing")
    return hook[1] if hook is not None and traced and is_python_code(hook[1]) else None


def _asked(tx: Tracer, check: Any, target: type, value: Value) -> bool:
    answer = tx.const_object(check).tp_call(tx, [tx.const_object(target), value], {})
    return tx.builtin(bool, answer).nb_bool(tx)


@rule_of_each(abc.ABCMeta.__instancecheck__, type.__instancecheck__)
def _inherited_check(_: object, tx: Tracer, target: Value, value: Value) -> Value:
    return constant(_is_plain_instance(tx, value, (target.as_constant(),)))


def _is_plain_instance(tx: Tracer, value: Value, targets: tuple[type, ...]) -> bool:
    """Say whether a value is an instance as `type.__instancecheck__` tells."""
    cls = value.python_type()
    if isinstance(value, Constant):
        return bool(real_call(tx, isinstance, value.value, targets))
    result = any(_has_class(tx, value, cls, candidate) for candidate in targets)
    if not result and isinstance(value, UserObject | TensorValue) and issubclass(cls, torch.Tensor):
        for marked, name in _MARKS.items():
            mark = value.own_attribute(tx, name) if marked in targets else None
            if mark is not None and mark.nb_bool(tx):
                return True
    if not result and isinstance(value, UserObject) and cls is torch.TypedStorage:
        if any(type(candidate) is type(torch.FloatStorage) for candidate in targets):
            raise Break("unsupported-tensor", "the dtype of a storage")
    typed = tuple(candidate for candidate in targets if type(candidate) is _TYPED)
    if typed and not result and issubclass(cls, torch.Tensor):
        plain = value.base if isinstance(value, UserObject) else value
        if not isinstance(plain, TensorValue):
            raise Break("unsupported-tensor", "isinstance on a tensor that is not in the graph")
        result = isinstance(plain.fake, typed)
    return result


def _has_class(tx: Tracer, value: Value, cls: type, target: type) -> bool:
    if isinstance(target, abc.ABCMeta) and cls is not target:  # it reads `__class__` first
        return _class_attribute_is(tx, value, target) or _subclass(tx, cls, (target,))
    return _subclass(tx, cls, (target,)) or _class_attribute_is(tx, value, target)


def _class_attribute_is(tx: Tracer, value: Value, target: type) -> bool:
    """Say whether an object's `__class__` is this class, where the program overrides it."""
    if isinstance(value, ExceptionValue):
        value.refuse("__getattribute__")
    if not isinstance(value, UserObject):
        return False
    claim = lookup(value.cls, "__class__")
    plain = claim is None or claim[0] is object
    if plain and not value.has_special("__getattribute__"):
        return False
    claimed = value.tp_getattro(tx, "__class__").as_constant()
    if isinstance(target, abc.ABCMeta) and not isinstance(claimed, type):
        tx.raise_(TypeError, "issubclass() arg 1 must be a class")
    return isinstance(claimed, type) and _subclass(tx, claimed, (target,))


_TYPED: type = type(torch.FloatTensor)
"""The metaclass of classes whose instances are all tensors of one dtype, device and layout."""


_MARKS = {torch.nn.Parameter: "_is_param", torch.nn.Buffer: "_is_buffer"}
"""The attributes that make a tensor an instance of these classes, as their metaclasses do."""


@rule(issubclass)
def _issubclass(tx: Tracer, cls: Value, classes: Value) -> Value:
    return constant(_subclass(tx, cls.as_constant(), _classes(tx, classes, "__subclasscheck__")))


def _classes(tx: Tracer, classes: Value, name: str) -> tuple[type, ...]:
    """Return the classes to compare with, in order.

    Raises:
        Break: where the metaclass of one looks at more than classes, or runs the program's code.
    """
    if isinstance(classes, TupleValue):
        return tuple(candidate for item in classes.items for candidate in _classes(tx, item, name))
    try:
        class_info = classes.as_constant()
    except NotConstant:
        raise Break("constant-required", f"isinstance with {classes.describe()}") from None
    union = type(class_info).__name__ in ("UnionType", "Union", "_UnionGenericAlias")
    candidates = getattr(class_info, "__args__", class_info) if union else (class_info,)
    checks = [lookup(type(candidate), name) for candidate in candidates]
    look = any(check is not None and check[0].__module__ in _LOOKING for check in checks)
    hooks = [lookup(type(candidate), "__subclasscheck__") for candidate in candidates]
    hooks += [lookup(c, "__subclasshook__") for c in candidates if isinstance(c, type)]
    look |= not all(isinstance(candidate, type) for candidate in candidates)
    if look or any(hook is not None and _runs_code(hook) for hook in hooks):
        raise Break("special-method", "isinstance with a class that overrides __instancecheck__")
    return tuple(candidates)


def _runs_code(hook: MroEntry) -> bool:
    """Say whether a class method is the program's; that of a protocol is the library's."""
    function = getattr(hook[1], "__func__", hook[1])
    return is_user_code(hook) and getattr(function, "__module__", None) != "typing"


_LOOKING = ("ast", "collections.abc")
"""Modules whose metaclasses inspect the instance, or warn."""


def _subclass(tx: Tracer, cls: type, targets: tuple[type, ...]) -> bool:
    for candidate in targets:
        result: bool = real_call(tx, issubclass, cls, candidate)
        if isinstance(candidate, abc.ABCMeta) and not is_fixed(cls):  # it may be registered later
            pair = (ProgramSource(WeakIdentity(cls)), ProgramSource(WeakIdentity(candidate)))
            tx.guard(CallSource(issubclass, pair), "CONST", result)
        if result:
            return True
    return False


def converted(tx: Tracer, obj: UserObject, name: str, result_class: type = int) -> Value:
    """Call a special method that returns a number.

    Raises:
        Break: when it returns an instance of another class, which warns or fails.
    """
    result = obj.call_method(tx, name, [], {})
    if result.python_type() is not (int if name == "__index__" else result_class):
        raise Break("builtin-error", f"{name} that gives a {result.python_type().__name__}")
    if result_class is float and name == "__index__":
        return tx.const_object(float).tp_call(tx, [result], {})
    return result


def indexed(tx: Tracer, value: Value) -> Value:
    """Return what stands for a value as an index (PyNumber_Index, which asks no integer)."""
    if not isinstance(value, UserObject) or issubclass(value.cls, int):
        return value
    return converted(tx, value, "__index__") if value.has_special("__index__") else value
