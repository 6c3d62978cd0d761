"""Setting and deleting attributes of instances as the interpreter does it, on values."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from weft_capture.attributes import (
    bind,
    is_data_descriptor,
    is_python_code,
    lookup,
)
from weft_capture.breaks import Break
from weft_capture.values.base import Value
from weft_capture.values.constant import constant

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer
    from weft_capture.values.objects import UserObject


def set_object_attribute(tx: Tracer, self: UserObject, name: str, value: Value) -> None:
    """Write an attribute of an instance."""
    custom = lookup(self.cls, "__setattr__")
    if custom is not None and is_python_code(custom[1]):
        tx.const_object(custom[1]).call(tx, [self, constant(name), value], {})
        return
    if custom is not None and custom[1].__name__ != "__setattr__":
        raise Break("unsupported-method", f"{self.cls.__name__}.__setattr__")
    plain_set_attribute(tx, self, name, value)


def plain_set_attribute(tx: Tracer, self: UserObject, name: str, value: Value) -> None:
    """Do what `object.__setattr__` does."""
    found = lookup(self.cls, name)
    if found is not None and is_data_descriptor(found[1]):
        attribute = found[1]
        if isinstance(attribute, property):
            if attribute.fset is None:
                tx.raise_(
                    AttributeError,
                    f"property '{name}' of '{self.cls.__name__}' object has no setter",
                )
            tx.const_object(attribute.fset).call(tx, [self, value], {})
            return
        if not isinstance(attribute, types.MemberDescriptorType):
            _set_by_descriptor(tx, self, attribute, value, name)
            return
    elif not _has_dict(self.cls):
        try:
            object.__setattr__(object.__new__(self.cls), name, None)
        except AttributeError as error:
            tx.raise_real(error)
        except TypeError:
            pass
    self.store(tx, name, value)


def delete_object_attribute(tx: Tracer, self: UserObject, name: str) -> None:
    """Delete an attribute of an instance."""
    custom = lookup(self.cls, "__delattr__")
    if custom is not None and custom[1] is not object.__delattr__:
        if not is_python_code(custom[1]):
            raise Break("unsupported-method", f"{self.cls.__name__}.__delattr__")
        tx.const_object(custom[1]).call(tx, [self, constant(name)], {})
        return
    plain_delete_attribute(tx, self, name)


def plain_delete_attribute(tx: Tracer, self: UserObject, name: str) -> None:
    """Do what `object.__delattr__` does."""
    found = lookup(self.cls, name)
    if found is not None and is_data_descriptor(found[1]):
        if isinstance(found[1], property) and found[1].fdel is not None:
            tx.const_object(found[1].fdel).call(tx, [self], {})
            return
        if not isinstance(found[1], types.MemberDescriptorType):
            raise Break("unsupported-value", f"deleting {name} of {self.describe()}")
        bind(tx, found, name, self, self.cls)  # raises where it is not set
    elif self.own_attribute(tx, name) is None:
        tx.raise_(AttributeError, f"'{self.cls.__name__}' object has no attribute '{name}'")
    self.drop(tx, name)


def _has_dict(cls: type) -> bool:
    return bool(cls.__dictoffset__)


def _set_by_descriptor(
    tx: Tracer, self: UserObject, attribute: Any, value: Value, name: str
) -> None:
    setter = lookup(type(attribute), "__set__")
    is_class = issubclass(value.python_type(), type)
    if name == "__class__" and is_class and self.obj is None:
        try:
            object.__new__(self.cls).__class__ = value.as_constant()
        except TypeError:
            raise Break("unsupported-value", f"setting {name} of {self.describe()}") from None
        tx.journal.on_rollback(functools.partial(setattr, self, "cls", self.cls))
        self.cls = value.as_constant()
        return
    if setter is None or not is_python_code(setter[1]):
        raise Break("unsupported-value", f"setting {name} of {self.describe()}")
    tx.const_object(setter[1]).call(tx, [tx.const_object(attribute), self, value], {})
