"""Dictionaries (dict, OrderedDict, defaultdict), their views, and lazily wrapped values.

A dict from outside may hold hundreds of entries of which a program reads three; its values are
wrapped, and guarded, when they are first read.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from weft_guards.sources import CallSource, ConstSource, ItemSource, Source, is_literal

from weft_capture.breaks import Break
from weft_capture.model.constant import NONE, VARYING_TYPES, Varying
from weft_capture.model.containers import Container, check_keys, refill, truth_now
from weft_capture.model.protocol import (
    MutableValue,
    Output,
    Tracer,
    Value,
    current_tracer,
    identity_key,
    key_in,
)
from weft_capture.model.proxy import Proxy


@dataclass(eq=False)
class LazyValue(Value):
    """An input object that has not been read yet; `tx.force` makes it a value."""

    obj: object
    source: Source
    forced: Value | None = None

    def data(self, tx: Tracer) -> Any:
        return tx.force(self).data(tx)

    def graph_arg(self) -> Any:
        return current_tracer().force(self).graph_arg()

    def example(self) -> Any:
        return current_tracer().force(self).example()

    def describe(self) -> str:
        return f"unread {type(self.obj).__name__}"

    def tp_hash(self) -> object:
        return identity_key(self, self.obj)


_BY_IDENTITY = (object, torch.Tensor)
_COMPARING = ("__hash__", "__eq__")


def _key_placeholder(key: Value) -> object:
    """Return a placeholder of a key that varies: its source, or the value."""
    if isinstance(key, Varying):
        number_types = {int, float} | VARYING_TYPES
        if type(key).tp_hash is not Varying.tp_hash or key.python_type() not in number_types:
            return None
    elif key.python_type() not in (tuple, torch.Size):
        # An object from outside, which is found by its identity.
        return key if key.source is not None and _by_identity(key.python_type()) else None
    elif all(current_tracer().force(item).is_constant() for item in key.unpack(current_tracer())):
        return None
    pregraph = current_tracer().pregraph_value(key)
    return key if pregraph is None and isinstance(key, Varying) else pregraph and pregraph[0]


def _by_identity(cls: type) -> bool:
    hashes, equals = ([getattr(base, name) for base in _BY_IDENTITY] for name in _COMPARING)
    return cls.__hash__ in hashes and cls.__eq__ in equals


class DictValue(Container, MutableValue):
    """A dict: hash key -> (key, value).

    `log` has the changes of an input dict since the first one, as hash keys in order: (key, True)
    for a write, (key, False) for a removal. The same changes of the real dict keep its live
    iterators right. `metadata` is the attribute that torch sets on a state dict.

    An input dict, `real`, is read when the program needs more than single keys. Entries that are
    read or written before that are in `own`, so that code which only adds entries works for all
    dicts; a key that varies is its own hash key, as its value is not needed.
    """

    changing = ("own", "log", "metadata", "read")
    several = True

    real: Any = None
    read: Callable[[], dict[object, tuple[Value, Value]]] | None = None

    def __init__(
        self,
        pairs: Iterable[tuple[Value, Value]] | None = None,
        source: Source | None = None,
        cls: type = dict,
        default_factory: Value = NONE,
    ) -> None:
        super().__init__()
        self.source = source
        self.cls = cls
        self.default_factory = default_factory
        self.log: list[tuple[object, Value, bool]] | None = None
        self.removals = 0  # ever, taken back or not
        self.metadata: Value | None = None
        self.own: dict[object, tuple[Value, Value]] = {}
        for key, value in pairs or ():
            self.put(key, value)

    @property
    def entries(self) -> dict[object, tuple[Value, Value]]:
        """The entries, read from the real dict if need be."""
        if self.read is not None:
            resolved = {
                mark: key.tp_hash() if isinstance(mark, Value | Source) else mark
                for mark, (key, _) in self.own.items()
            }
            entries = self.read()
            for key, (name, value) in self.own.items():
                entries[resolved[key]] = (entries.get(resolved[key], (name,))[0], value)
            self.own, self.read = entries, None
            self.log = self.log and [(resolved[m], key, writes) for m, key, writes in self.log]
        return self.own

    def key(self, key: Value) -> object:
        """Return a hash key; the errors of an OrderedDict do not name its use."""
        return key.tp_hash() if self.cls is OrderedDict else key_in(dict, key)

    def slot(self, key: Value, writes: bool = False) -> object:
        """Return a hash key, or the key itself for a write of a key that varies."""
        if self.read is None:
            return self.key(key)
        log, name = self.log or [], _key_placeholder(key)
        varying = bool(log) and isinstance(log[0][0], Value | Source)  # then all keys vary
        fresh = name not in self.own or all(mark != name for mark, *_ in log[:-1])
        if writes and name is not None and (varying or not log) and fresh:
            return name
        hashed = self.key(key)
        if varying or not is_literal(hashed) or hashed != hashed:
            self.entries  # noqa: B018 - is read
        return hashed

    def find(self, tx: Tracer, key: Value) -> tuple[Value, Value] | None:
        """Return an entry; in a dict that was not read, only this entry is guarded."""
        mark = _key_placeholder(key) if self.read is not None else None
        alone = mark is not None and all(changed == mark for changed, *_ in self.log or ())
        pregraph = tx.pregraph_value(key) if alone else None
        hashed = mark if pregraph or (alone and mark in self.own) else self.slot(key)
        if self.read is None or hashed in self.own:
            return (self.entries if self.read is None else self.own).get(hashed)
        name, key_value = pregraph or (ConstSource(hashed), hashed)
        assert self.source is not None
        if key_value not in self.real:
            contains = CallSource(operator.contains, (self.source, name))
            tx.guard(
                *(
                    (contains, "CONST", False)
                    if pregraph
                    else (self.source, "KEY_ABSENT", key_value)
                )
            )
            return None
        item = self.real[key_value]
        source: Source = ItemSource(self.source, key_value)
        if pregraph or type(self.real) is defaultdict:  # it creates missing items
            if item is None:
                return self.entries[key.tp_hash()]
            source = CallSource(dict.get, (self.source, name))
        tx.guard(source, "TYPE", type(item))
        self.own[hashed] = key, LazyValue(item, source)
        return self.own[hashed]

    def put(self, key: Value, value: Value) -> None:
        """Set an entry without recording it; the first of equal keys stays the key."""
        hashed = self.slot(key, writes=True)
        old = self.own.get(hashed) if self.read is None else self.own.pop(hashed, None)
        self.own[hashed] = (key if old is None else old[0], value)
        if self.log is not None:
            self.log.append((hashed, key, True))

    def undo_put(self, hashed: object) -> Callable[[], object] | None:
        """Return the undo function of `put`; None for a dict with a log."""
        if self.source is not None or self.log is not None:
            return None
        old = self.entries.get(hashed)
        if old is None:
            return lambda: self.entries.pop(hashed)
        return lambda: self.entries.update({hashed: old})

    def drop(self, hashed: object) -> tuple[Value, Value]:
        """Remove the entry of a hash key without recording it in the journal; returns it."""
        entry = self.entries.pop(hashed)
        self.removals += 1
        if self.log is not None:
            self.log.append((hashed, entry[0], False))
        return entry

    def get(self, tx: Tracer, key: Value) -> Value | None:
        """Return an entry's value, or None."""
        entry = self.find(tx, key)
        if entry is None:
            return None
        known_key, value = entry
        if isinstance(known_key, LazyValue) and isinstance(value, LazyValue) and key.source:
            # Reading by key is cheaper than by position, once the key is known by another way.
            if value.forced is None and self.source is not None:
                value.source = CallSource(operator.getitem, (self.source, key.source))
        return tx.force(value)

    def pairs(self, tx: Tracer) -> Iterator[tuple[Value, Value]]:
        """Iterate over entries with their values forced."""
        for key, value in list(self.entries.values()):
            yield tx.force(key), tx.force(value)

    def keys(self) -> list[Value]:
        """Return the keys in order."""
        return [key for key, _ in self.entries.values()]

    def _read_metadata(self, tx: Tracer) -> Value | None:
        if self.metadata is None and self.cls is OrderedDict and self.source is not None:
            tx.guard(self.source, "ATTR_ABSENT", "_metadata")
        return self.metadata and tx.force(self.metadata)

    def tp_setattro(self, tx: Tracer, name: str, value: Value) -> None:
        if name != "_metadata" or self.cls is not OrderedDict or self.source is not None:
            super().tp_setattro(tx, name, value)
        tx.mutate(self)
        self.metadata = value

    def call_base_method(
        self, tx: Tracer, base_class: type, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        if base_class is dict and self.cls is not dict:
            raise Break("c-function", f"dict.{name} of a {self.cls.__name__}")
        return super().call_base_method(tx, base_class, name, args, kwargs)

    def build(self, each: Callable[[Value], Any], key: Callable[[Value], Any] | None = None) -> Any:
        pairs = [((key or each)(k), each(v)) for k, v in self.entries.values()]
        if self.cls is defaultdict:
            factory = each(self.default_factory)
            return defaultdict(factory if callable(factory) else None, pairs)  # the graph's is text
        return self.cls(pairs)

    def with_proxies(self, tx: Tracer) -> Any:
        return self.build(functools.partial(Proxy, tx), key=lambda key: key.tp_hash())

    def snapshot(self) -> Callable[[], None]:
        if self.log is None and self.source is not None:
            self.log = []
        return super().snapshot()

    def reconstruct(self, out: Output) -> None:
        check_keys(self.entries)
        if self.cls is dict and not out.is_cyclic(self):
            for pair in self.entries.values():
                out.load_all(pair)
            out.writer.build_map(len(self.entries))
            return
        out.call(self.cls, [self.default_factory] if self.cls is defaultdict else [])
        out.remember(self)
        if self.entries:
            plain = DictValue()
            plain.own = self.entries
            out.do(refill, self, plain)
        if self.metadata is not None:
            out.fill_attributes(self, {"_metadata": self.metadata})

    def replay(self, out: Output) -> None:
        written: set[object] = set()
        check_keys(hashed for hashed, _, _ in self.log or ())
        for hashed, key, writes in self.log or ():
            if not writes:
                written.discard(hashed)
                out.later(operator.delitem, self, key)
            elif hashed not in written:  # an entry that remains
                written.add(hashed)
                out.later(operator.setitem, self, key, self.own.get(hashed, (NONE, NONE))[1])

    def nb_bool(self, tx: Tracer) -> bool:
        return truth_now(tx, self) if self.is_untouched() else bool(self.entries)

    def tp_traverse(self) -> Iterable[Value]:
        return itertools.chain.from_iterable((self.own if self.read else self.entries).values())

    def is_untouched(self) -> bool:
        return not (self.read is None or self.own or self.log)

    def unpack(self, tx: Tracer) -> list[Value]:
        return [tx.force(key) for key in self.keys()]

    def tp_iter(self, tx: Tracer) -> Value:
        return tx.dict_iterator(self)

    def copy(self) -> DictValue:
        """Return a new dict with the same entries."""
        fresh = DictValue(None, None, self.cls, self.default_factory)
        fresh.own = dict(self.entries)
        return fresh


DictValue.methods = {
    "get:_metadata": lambda tx, self: self._read_metadata(tx),
    "get:default_factory": lambda tx, self: (
        tx.force(self.default_factory) if self.cls is defaultdict else None
    ),
}


class MappingProxy(DictValue):
    """A read-only live view of a dict."""

    def __init__(self, inner: DictValue, source: Source | None = None) -> None:
        self.inner = inner
        super().__init__(None, source, MappingProxyType)

    @property
    def entries(self) -> dict[object, tuple[Value, Value]]:
        """Those of the dict."""
        return self.inner.entries

    def build(self, each: Callable[[Value], Any], key: Callable[[Value], Any] | None = None) -> Any:
        return MappingProxyType(self.inner.build(each, key))

    def mp_ass_subscript(self, tx: Tracer, key: Value, value: Value) -> None:
        tx.raise_(TypeError, "'mappingproxy' object does not support item assignment")

    def mp_del_subscript(self, tx: Tracer, key: Value) -> None:
        tx.raise_(TypeError, "'mappingproxy' object doesn't support item deletion")

    def reconstruct(self, out: Output) -> None:
        out.call(MappingProxyType, [self.inner])

    def tp_iter(self, tx: Tracer) -> Value:
        return self.inner.tp_iter(tx)

    def copy(self) -> DictValue:
        return self.inner.copy()


class DictView(Value):
    """The result of keys, values or items of a dict; `holder` is the object of the base dict."""

    def __init__(self, owner: DictValue, view_name: str) -> None:
        self.owner = owner
        self.view_name = view_name
        self.cls: type = type(getattr({}, view_name)())
        self.holder: Value = owner

    def unpack(self, tx: Tracer) -> list[Value]:
        if self.view_name == "keys":
            return self.owner.unpack(tx)
        if self.view_name == "values":
            return [value for _, value in self.owner.pairs(tx)]
        return [tx.tuple_of(list(pair)) for pair in self.owner.pairs(tx)]

    def tp_iter(self, tx: Tracer) -> Value:
        return tx.dict_iterator(self)

    def reconstruct(self, out: Output) -> None:
        out.call(getattr(self.owner.cls, self.view_name), [self.holder])


DictView.methods = {
    "get:mapping": lambda tx, self: MappingProxy(self.owner) if self.holder is self.owner else None
}
