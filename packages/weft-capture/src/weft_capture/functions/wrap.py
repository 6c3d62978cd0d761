"""Wrap a Python object and its source in a value, with guards.

`wrap` looks the object's exact type up in `EXACT`, then tries the classes and predicates of
`FAMILIES` in order. A row's function gets (tx, obj, source) and returns the value.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import operator
import random
import re
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from weft_core.fake import is_plain
from weft_core.tensor_subclass import is_wrapper_subclass
from weft_guards.payloads import TensorSpec
from weft_guards.sources import (
    AttrSource,
    CallSource,
    ConstSource,
    DictKeySource,
    ItemSource,
    LocalSource,
    Source,
)

from weft_capture.breaks import Break
from weft_capture.functions.classes import ClassValue
from weft_capture.functions.language.cached_functions import CachedFunction
from weft_capture.functions.table import find, is_leaf, is_pure
from weft_capture.functions.torch.interception import OverridingTensor, has_handler
from weft_capture.model.attributes import (
    C_DESCRIPTORS,
    check_hashes,
    lookup,
    metadata_of,
    read_past,
)
from weft_capture.model.constant import (
    NONE,
    Constant,
    fits_graph,
    is_constant_object,
    plain_scalar,
    sourced,
)
from weft_capture.model.containers import (
    ListValue,
    RangeValue,
    SetValue,
    SliceValue,
    TupleValue,
    gives_others,
    is_element,
    is_named,
    plain_items,
    sequence_of,
)
from weft_capture.model.contexts import AutocastContext, InferenceContext
from weft_capture.model.dicts import DictValue, LazyValue, MappingProxy
from weft_capture.model.exceptions import wrap_exception
from weft_capture.model.functions import (
    BoundMethod,
    BuiltinValue,
    CellValue,
    ObjectConstant,
    PartialValue,
    ScriptedFunction,
    TypeHint,
    function_value,
)
from weft_capture.model.iterators import DequeValue, ExternalIterator
from weft_capture.model.objects import (
    ModuleValue,
    StreamValue,
    UserObject,
    as_kind,
    is_plain_stream,
)
from weft_capture.model.protocol import MethodOf, Tracer, Value
from weft_capture.model.proxy import Proxy
from weft_capture.model.scope import ModuleObject
from weft_capture.model.thread_locals import ThreadLocal
from weft_capture.model.weakrefs import WeakRefValue, holds_finalizer
from weft_capture.tensors import symbolic_scalars
from weft_capture.tensors.runtime_values import RandomValue, RuntimeValue
from weft_capture.tensors.subclass import wrap_wrapper

Wrapper = Callable[[Any, Any, Source], Value]


def wrap(tx: Tracer, obj: Any, source: Source) -> Value:
    """Return the value of an input object; the same object gives the same value.

    Args:
        obj: the object.
        source: its source, for the guards.
    """
    if is_constant_object(obj):
        return _wrap_constant(tx, obj, source)
    existing = tx.values_by_id.get(id(obj))
    if existing is not None:
        value, first = existing
        tx.guard_alias(first, source, obj)
        return value
    tx.finalizes |= hasattr(type(obj), "__del__") and not isinstance(source, ConstSource)
    wrapper = EXACT.get(type(obj)) or next(row[1] for row in FAMILIES if _belongs_to(row[0], obj))
    value = wrapper(tx, obj, source)
    tx.values_by_id[id(obj)] = (value, source)
    tx.keep_alive.append(obj)
    return value


def _belongs_to(family: Any, obj: Any) -> bool:
    plain = isinstance(family, types.FunctionType)
    return family(obj) if plain else issubclass(type(obj), family)


def literal(tx: Tracer, obj: Any) -> Value:
    """Convert new Python data into values, and proxies into their values."""
    cls = type(obj)
    if isinstance(obj, Value | Proxy):
        return obj if isinstance(obj, Value) else obj.value
    if cls in (dict, collections.OrderedDict, collections.defaultdict):
        pairs = [(literal(tx, k), literal(tx, v)) for k, v in obj.items()]
        factory = tx.const_object(getattr(obj, "default_factory", None))
        return DictValue(pairs, cls=cls, default_factory=factory)
    if cls is slice:
        return SliceValue(*(literal(tx, bound) for bound in (obj.start, obj.stop, obj.step)))
    if cls in (set, frozenset):
        return SetValue([literal(tx, item) for item in obj], None, cls, obj)
    if is_named(cls) or cls in (tuple, list, torch.Size):
        return sequence_of(cls, [literal(tx, item) for item in obj])
    return RangeValue(obj) if cls is range else tx.const_object(obj)


def _typed(make: Wrapper) -> Wrapper:
    """Guard the exact type first."""

    def wrapper(tx: Tracer, obj: Any, source: Source) -> Value:
        tx.guard(source, "TYPE", type(obj))
        return make(tx, obj, source)

    return wrapper


def _identical(make: Callable[[Any, Source], Value]) -> Wrapper:
    """Wrap an object that is guarded by identity."""

    def wrapper(tx: Tracer, obj: Any, source: Source) -> Value:
        tx.guard_identity(source, obj)
        return make(obj, source)

    return wrapper


def _items(tx: Tracer, obj: Iterable[Any], source: Source) -> list[Value]:
    return [wrap(tx, item, ItemSource(source, i)) for i, item in enumerate(obj)]


def _wrap_constant(tx: Tracer, obj: Any, source: Source) -> Value:
    if type(obj) is int and fits_graph(obj) and not isinstance(source, ConstSource):
        symbolic = tx.dynamic_int(obj, source)
        if symbolic is not None:
            return symbolic
    varying = symbolic_scalars.vary(tx, obj, source)
    if varying is not None:
        return varying
    if obj is None:
        tx.guard(source, "NONE", None)
        return NONE
    tx.guard_constant(source, obj)
    return sourced(obj, source)


def _wrap_tensor(tx: Tracer, obj: torch.Tensor, source: Source) -> Value:
    if has_handler(type(obj)):
        tx.guard(source, "TYPE", type(obj))
        with unset_fake_temporarily():
            plain = as_kind(obj)
        base = wrap(tx, plain, CallSource(as_kind, (source,)))
        return OverridingTensor(type(obj), base, obj, source)
    if not is_plain(type(obj)):
        raise Break("tensor-subclass", f"tensor subclass {type(obj).__name__}")
    if obj.layout is not torch.strided or obj.is_nested or obj.is_conj() or obj.is_neg():
        raise Break("unsupported-tensor", f"a tensor {obj.layout}, or to be conjugated or negated")
    value = tx.graph.tensor_input(obj, source, *tx.dynamic_layout(obj, source))
    if not isinstance(source, ConstSource):
        tx.guard(source, "TENSOR", TensorSpec.of(obj, like=value.fake))
    return value


def _wrap_list(tx: Tracer, obj: list[Any], source: Source) -> Value:
    if id(obj) in tx.calls.written:
        raise Break("side-effect", "a list of recorded warnings")
    tx.guard(source, "TYPE", list)
    result = ListValue([], source)
    result.real, result.read = obj, functools.partial(_read_list, tx, obj, source)
    return result


def _read_list(tx: Tracer, obj: Any, source: Source) -> list[Value]:
    tx.guard(source, "LEN", len(obj))
    return _items(tx, obj, source)


def _wrap_tuple(tx: Tracer, obj: tuple[Any, ...], source: Source) -> Value:
    tx.guard(source, "TYPE", type(obj))
    if type(obj) in EXACT:
        tx.guard(source, "LEN", len(obj))
    return sequence_of(type(obj), _items(tx, obj, source), source)


def _wrap_dict(tx: Tracer, obj: dict[Any, Any], source: Source) -> Value:
    metadata = metadata_of(obj, source)
    value = _dict_entries(tx, obj, source)
    value.cls, value.metadata = type(obj), metadata
    return value


def _dict_entries(tx: Tracer, obj: dict[Any, Any], source: Source) -> DictValue:
    if id(obj) in tx.namespaces:
        raise Break("namespace-dict", "a dict that is also the namespace of an object")
    value = DictValue(None, source, next(cls for cls in type(obj).__mro__ if cls in _DICTS))
    if issubclass(type(obj), collections.defaultdict):  # isinstance would ask for `__class__`
        factory = object.__getattribute__(obj, "default_factory")
        value.default_factory = wrap(tx, factory, read_past(source, obj, "default_factory"))
    tx.values_by_id[id(obj)] = (value, source)
    value.real, value.read = obj, functools.partial(_read_dict, tx, obj, source, value.cls)
    if type(obj) not in EXACT or isinstance(source, ConstSource) or holds_finalizer(obj):
        value.own, value.read = value.read(), None
    return value


def _read_dict(
    tx: Tracer, obj: dict[Any, Any], source: Source, plain: Any
) -> dict[object, tuple[Value, Value]]:
    check_hashes(plain.keys(obj))
    methods = type(obj).__iter__, type(obj).__len__  # by `list`
    keys = (
        source if methods == (plain.__iter__, plain.__len__) else CallSource(plain.keys, (source,))
    )
    tx.guard_keys(keys, plain.keys(obj))
    entries: dict[object, tuple[Value, Value]] = {}
    for index, (key, item) in enumerate(plain.items(obj)):
        if is_constant_object(key) and type(obj) in EXACT:
            item_source: Source = ItemSource(source, key)
        elif is_constant_object(key):  # bypassing the `__getitem__` of a subclass
            item_source = CallSource(dict.__getitem__, (source, ConstSource(key)))
        else:  # an OrderedDict has a separate order
            item_source = CallSource(dict.__getitem__, (source, DictKeySource(keys, index)))
        key_source: Source = DictKeySource(keys, index)
        if isinstance(source, ConstSource):
            item_source, key_source = ConstSource(item), ConstSource(key)
        lazy = isinstance(key, torch.Tensor)
        name = LazyValue(key, key_source) if lazy else wrap_key(tx, key)
        entries[name.tp_hash()] = (name, LazyValue(item, item_source))
    return entries


def _wrap_mapping_proxy(tx: Tracer, obj: Any, source: Source) -> Value:
    proxy_source = ConstSource(mapping_behind(obj)) if isinstance(source, ConstSource) else None
    inner = wrap(tx, mapping_behind(obj), proxy_source or CallSource(mapping_behind, (source,)))
    if not isinstance(inner, DictValue):
        raise Break("unsupported-arguments", f"a mappingproxy of {inner.describe()}")
    return MappingProxy(inner, source)


def _wrap_module_subclass(tx: Tracer, obj: Any, source: Source) -> Value:
    if isinstance(lookup(type(obj), "__getattribute__")[1], types.FunctionType):  # type: ignore[index]
        raise Break("special-method", "a module with a custom __getattribute__")
    return _identical(ModuleObject)(tx, obj, source)


def mapping_behind(proxy: types.MappingProxyType[Any, Any]) -> Any:
    """Return the mapping behind a mappingproxy."""
    return gc.get_referents(proxy)[0]


def wrap_key(tx: Tracer, key: Any) -> Value:
    """Return the value of a dict key, whose identity or value the guard on the keys fixes."""
    if isinstance(key, tuple):
        return TupleValue([wrap_key(tx, item) for item in key])
    return wrap(tx, key, ConstSource(key))


def _wrap_set(tx: Tracer, obj: Any, source: Source) -> Value:
    tx.guard(source, "TYPE", type(obj))
    if not all(map(is_element, obj)):
        return ExternalIterator(obj, source)  # each operation on it breaks
    tx.guard_set(source, obj)
    return SetValue([wrap_key(tx, item) for item in obj], source, type(obj), obj)


def _wrap_set_subclass(tx: Tracer, obj: Any, source: Source) -> Value:
    set_class = set if issubclass(type(obj), set) else frozenset
    base = _wrap_set(tx, set_class(obj), CallSource(set_class, (source,)))
    base.source = None
    return UserObject(type(obj), obj, source, base)


def _wrap_range(tx: Tracer, obj: range, source: Source) -> Value:
    value = RuntimeValue(obj, source)
    return value if symbolic_scalars.varies(tx, obj, source) else RangeValue(value.as_constant())


def _wrap_function(tx: Tracer, obj: types.FunctionType, source: Source) -> Value:
    if is_leaf(obj) or is_pure(obj):
        tx.guard_identity(source, obj)
        return BuiltinValue(obj, source)
    if isinstance(source, LocalSource) or symbolic_scalars.varies(tx, id(obj), source):
        # A new function of the same code is as good: guard what it is made of instead.
        tx.guard(source, "TYPE", types.FunctionType)
        tx.guard_identity(AttrSource(source, "__code__"), obj.__code__)
    else:
        tx.guard_identity(source, obj)
    return function_value(tx, obj, source)


def _wrap_cell(tx: Tracer, obj: types.CellType, source: Source) -> Value:
    try:
        contents = obj.cell_contents
    except ValueError:
        tx.guard(source, "CELL_EMPTY", None)
        return CellValue(None, source)
    return CellValue(LazyValue(contents, AttrSource(source, "cell_contents")), source)


def _wrap_method(tx: Tracer, obj: types.MethodType, source: Source) -> Value:
    owner = wrap(tx, obj.__self__, AttrSource(source, "__self__"))
    if isinstance(owner, InferenceContext | RandomValue) and owner.find_method(obj.__name__):
        tx.guard_identity(AttrSource(source, "__func__"), obj.__func__)
        return MethodOf(owner, obj.__name__)  # the __exit__ of a block around a graph break
    function = wrap(tx, obj.__func__, AttrSource(source, "__func__"))
    return BoundMethod(function, owner, source)


def _wrap_builtin(tx: Tracer, obj: Any, source: Source) -> Value:
    owner = obj.__self__
    record = lookup(type(owner), obj.__name__) is None  # functions of pybind11 have it
    of_torch = type(owner).__module__.startswith("torch") and not isinstance(owner, torch.Tensor)
    fixed = owner is None or record or isinstance(owner, types.ModuleType | type)
    if fixed or of_torch or find(obj) is not None:
        tx.guard_identity(source, obj)
        return BuiltinValue(obj, source)
    tx.guard(source, "TYPE", type(obj))
    tx.guard_constant(AttrSource(source, "__name__"), obj.__name__)
    return MethodOf(wrap(tx, owner, AttrSource(source, "__self__")), obj.__name__, source)


def _wrap_deque(tx: Tracer, obj: Any, source: Source) -> Value:
    tx.guard_constant(AttrSource(source, "maxlen"), obj.maxlen)
    result = DequeValue([], source, obj.maxlen)
    result.real, result.read = obj, functools.partial(_read_list, tx, obj, source)
    if obj.maxlen is not None and holds_finalizer(obj):
        result.items  # noqa: B018 - is read at once
    return result


def _wrap_getter(tx: Tracer, obj: Any, source: Source) -> Value:
    tx.guard_identity(source, obj)
    make = functools.partial(obj.__reduce__()[0], *obj.__reduce__()[1])  # flat, with keywords
    keywords = {name: tx.literal(item) for name, item in make.keywords.items()}
    value = tx.const_object(type(obj)).tp_call(tx, list(map(tx.literal, make.args)), keywords)
    value.source = source
    return value


def _wrap_partial(tx: Tracer, obj: Any, source: Source) -> Value:
    function = wrap(tx, obj.func, AttrSource(source, "func"))
    args = wrap(tx, obj.args, AttrSource(source, "args")).unpack(tx)
    keywords = tx.keyword_arguments(wrap(tx, obj.keywords, AttrSource(source, "keywords")))
    return PartialValue(function, args, keywords, source)


def _wrap_mode(tx: Tracer, obj: Any, source: Source) -> Value:
    context_class = AutocastContext if isinstance(obj, torch.autocast) else InferenceContext
    return context_class.of(tx, obj, source)


def _wrap_stream(tx: Tracer, obj: Any, source: Source) -> Value:
    tx.guard(CallSource(is_plain_stream, (source,)), "CONST", True)
    return StreamValue(type(obj), obj, source)


def _wrap_dict_subclass(tx: Tracer, obj: Any, source: Source) -> Value:
    value = UserObject(type(obj), obj, source)
    tx.values_by_id[id(obj)] = (value, source)
    value.base = _dict_entries(tx, obj, source)
    value.base.source = None
    tx.values_by_id[id(obj)] = (value, source)
    return value


def _wrap_sequence_subclass(tx: Tracer, obj: Any, source: Source) -> Value:
    items = plain_items(obj)
    items_source = CallSource(plain_items, (source,)) if gives_others(type(obj)) else source
    tx.guard(items_source, "LEN", len(items))
    value_class = ListValue if issubclass(type(obj), list) else TupleValue
    return UserObject(type(obj), obj, source, value_class(_items(tx, items, items_source)))


def _wrap_scalar_subclass(tx: Tracer, obj: Any, source: Source) -> Value:
    if isinstance(source, ConstSource):
        return Constant(obj)
    tx.guard(source, "TYPE", type(obj))
    plain = CallSource(plain_scalar, (source,))
    tx.guard_constant(plain, plain_scalar(obj))
    return UserObject(type(obj), obj, source, Constant(plain_scalar(obj)))


def _wrap_ref(tx: Tracer, obj: Any, source: Source) -> Value:
    if type(obj) in weakref.ProxyTypes:
        raise Break("weak-reference", "a weak proxy")
    tx.guard(source, "TYPE", type(obj))
    reference = WeakRefValue(tx, obj, source)
    return reference if type(obj) is weakref.ref else UserObject(type(obj), obj, source, reference)


# ---- the table

_ITERATORS: tuple[Any, ...] = (
    iter([]), iter(()), iter(range(0)), iter({}), iter({}.values()), iter({}.items()), iter(set()),
    iter(""), zip(), enumerate(()), map(str, ()), filter(None, ()), reversed([]), (_ for _ in ()),
    iter(b""), iter(collections.OrderedDict()), iter(collections.deque()), iter(int, 0),
)  # fmt: skip
_OF_ITERTOOLS = (cls for cls in vars(itertools).values() if hasattr(cls, "__next__"))
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
_DESCRIPTORS = (*C_DESCRIPTORS, types.MethodWrapperType, types.GetSetDescriptorType)
_HINTS = typing._BaseGenericAlias | typing._SpecialForm | typing.NewType  # type: ignore[attr-defined]
_OPERATORS = torch._ops.OpOverload | torch._ops.OpOverloadPacket

EXACT: dict[type, Wrapper] = {
    list: _wrap_list,
    tuple: _wrap_tuple,
    torch.Size: _wrap_tuple,
    **dict.fromkeys(_DICTS, _typed(_wrap_dict)),
    types.MappingProxyType: _wrap_mapping_proxy,
    set: _wrap_set,
    frozenset: _wrap_set,
    collections.deque: _typed(_wrap_deque),
    range: _typed(_wrap_range),
    slice: _typed(
        lambda tx, obj, source: SliceValue(
            *(wrap(tx, getattr(obj, n), AttrSource(source, n)) for n in ("start", "stop", "step"))
        )
    ),
    object: _identical(ObjectConstant),
    types.FunctionType: _wrap_function,
    types.CellType: _wrap_cell,
    types.MethodType: _typed(_wrap_method),
    **dict.fromkeys((types.BuiltinFunctionType, type(re.compile("").match)), _wrap_builtin),
    **dict.fromkeys(_DESCRIPTORS, _identical(BuiltinValue)),
    functools._lru_cache_wrapper: _identical(CachedFunction),
    torch.jit.ScriptFunction: _identical(ScriptedFunction),
    functools.partial: _typed(_wrap_partial),
    **dict.fromkeys(_GETTERS, _wrap_getter),
    **dict.fromkeys((types.UnionType, types.GenericAlias), _identical(TypeHint)),
    types.ModuleType: _identical(ModuleObject),
    **dict.fromkeys(
        (*map(type, _ITERATORS), *_OF_ITERTOOLS), _typed(lambda _, *args: ExternalIterator(*args))
    ),
    threading.local: _typed(lambda tx, obj, source: ThreadLocal(obj, source)),
    random.Random: _typed(lambda tx, obj, source: RandomValue(source)),
    **dict.fromkeys((weakref.ref, weakref.KeyedRef, *weakref.ProxyTypes), _wrap_ref),
}

_Family = type | types.UnionType | Callable[[Any], bool]
FAMILIES: tuple[tuple[_Family, Wrapper], ...] = (
    (lambda obj: is_wrapper_subclass(type(obj)), _typed(wrap_wrapper)),
    (torch.Tensor, _wrap_tensor),
    (lambda obj: is_named(type(obj)), _wrap_tuple),
    (_HINTS, _identical(TypeHint)),
    (types.ModuleType, _wrap_module_subclass),
    (type, _identical(ClassValue)),
    (torch.nn.Module, _typed(lambda tx, obj, source: ModuleValue(type(obj), obj, source))),
    (torch.autocast | torch.inference_mode, _typed(_wrap_mode)),
    (is_plain_stream, _typed(_wrap_stream)),
    (BaseException, _typed(wrap_exception)),
    (lambda obj: callable(obj) and find(obj) is not None, _identical(BuiltinValue)),
    (_OPERATORS, _identical(BuiltinValue)),
    (property | classmethod | staticmethod, _identical(ObjectConstant)),
    (dict, _typed(_wrap_dict_subclass)),
    (list | tuple, _typed(_wrap_sequence_subclass)),
    (set | frozenset, _typed(_wrap_set_subclass)),
    (int | float | str | bytes, _wrap_scalar_subclass),
    (object, _typed(lambda tx, obj, source: UserObject(type(obj), obj, source))),
)
