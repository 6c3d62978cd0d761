"""An instance's `__dict__`, a live view; only plain writes are supported."""

from __future__ import annotations

from weft_capture.breaks import Break
from weft_capture.model.attributes import dict_of, is_slot, read_past
from weft_capture.model.constant import constant
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import FunctionValue
from weft_capture.model.objects import DELETED, UserObject
from weft_capture.model.protocol import Output, Tracer, Value, current_tracer, method


class InstanceDict(DictValue):
    """The `__dict__` of an instance or function, a live view."""

    def __init__(self, owner: UserObject | FunctionValue) -> None:
        self.owner = owner
        super().__init__()

    @property
    def entries(self) -> dict[object, tuple[Value, Value]]:
        """The attributes as they are now."""
        members = _members(current_tracer(), self.owner)
        return {name: (constant(name), value) for name, value in members.items()}

    def same_object(self, other: Value) -> bool:
        return isinstance(other, InstanceDict) and other.owner is self.owner

    def get(self, tx: Tracer, key: Value) -> Value | None:
        owner, name = self.owner, key.tp_hash()
        if isinstance(owner, UserObject) and isinstance(name, str):  # no other is read, or guarded
            exists = name in owner.attrs or name in dict_of(owner.obj)
            return owner.own_attribute(tx, name) if exists else None
        return super().get(tx, key)

    def put(self, key: Value, value: Value) -> None:
        self.owner.store(current_tracer(), self._name(key), value)

    def undo_put(self, hashed: object) -> None:
        """Return nothing: the owner undoes it."""

    def slot(self, key: Value, writes: bool = False) -> object:
        return self._name(key) if writes else super().slot(key)

    def _name(self, key: Value) -> str:
        name = key.as_constant()
        if not isinstance(name, str) or is_slot(self.owner.python_type(), name):
            raise Break("namespace-dict", f"{name} in the __dict__ of {self.owner.describe()}")
        return name

    def copy(self) -> DictValue:
        return DictValue(list(self.entries.values()))

    def reconstruct(self, out: Output) -> None:
        out.call(object.__getattribute__, [self.owner, constant("__dict__")])


def instance_dict(tx: Tracer, owner: Value) -> Value:
    """Return the `__dict__` of an instance or function."""
    if not isinstance(owner, UserObject | FunctionValue):
        raise Break("namespace-dict", f"__dict__ of {owner.describe()}")
    if owner.obj is not None and owner.source is not None:
        tx.check_namespace(dict_of(owner.obj))
        source = read_past(owner.source, owner.obj, "__dict__")
        tx.guard_keys(source, dict_of(owner.obj))
    return InstanceDict(owner)


def _members(tx: Tracer, owner: UserObject | FunctionValue) -> dict[str, Value]:
    members: dict[str, Value] = {}
    read = owner.tp_getattro if isinstance(owner, FunctionValue) else owner.own_attribute
    for name in dict_of(owner.obj):
        current = read(tx, name)
        if current is not None:
            members[name] = current
    written = owner.attributes if isinstance(owner, FunctionValue) else owner.attrs
    for name, value in written.items():
        if value is not DELETED and not is_slot(owner.python_type(), name):
            members[name] = value
    return members


@method(InstanceDict, "pop")
def _pop(tx: Tracer, self: InstanceDict, key: Value, *default: Value) -> Value:
    if key.as_constant() in self.entries or not default:
        _other_writes(tx, self)
    return default[0]


@method(InstanceDict, "popitem", "clear", "setdefault", "__delitem__", "__ior__")
def _other_writes(tx: Tracer, self: InstanceDict, *args: Value) -> Value:
    raise Break("namespace-dict", "removing from an instance's __dict__")
