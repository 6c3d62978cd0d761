"""torch.utils._pytree on values.

A tree of values is converted to a tree of real containers with values as leaves. torch's functions
work on that, and the result is converted back. So tree specifications are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from weft_capture.breaks import Break
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.model.constant import NONE, real_call
from weft_capture.model.containers import Container, NamedTupleValue, TupleValue
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import ObjectConstant
from weft_capture.model.objects import UserObject
from weft_capture.model.protocol import Tracer, Value

Stop = Callable[[Value], bool]


def real_tree(tx: Tracer, value: Value, stop: Stop | None) -> Any:
    """Return a tree of real containers whose leaves are values."""
    value = tx.force(value)
    if stop is not None and stop(value):
        return value
    cls = value.python_type()
    is_namedtuple = isinstance(value, NamedTupleValue) and hasattr(cls, "_make")
    if isinstance(value, DictValue) and cls in pytree.SUPPORTED_NODES:
        return value.build(lambda item: real_tree(tx, item, stop), lambda key: key.as_constant())
    if isinstance(value, Container) and (is_namedtuple or cls in pytree.SUPPORTED_NODES):
        return value.build(lambda item: real_tree(tx, item, stop))
    if isinstance(value, UserObject) and value.cls in pytree.SUPPORTED_NODES:
        raise Break("unsupported-arguments", f"a {value.cls.__name__} in a pytree")
    return value


def tree_value(tx: Tracer, tree: Any) -> Value:
    """Turn a tree of real containers back into values, with a specification beside it."""
    if isinstance(tree, pytree.TreeSpec):
        return ObjectConstant(tree)
    if type(tree) is tuple:
        return TupleValue([tree_value(tx, item) for item in tree])
    return tx.literal(tree)


@rule_of_each(
    pytree.tree_flatten,
    pytree.tree_unflatten,
    pytree.tree_leaves,
    pytree.tree_structure,
    pytree.tree_map,
    pytree._broadcast_to_and_flatten,
)
def _through(function: Any, tx: Tracer, /, *args: Value, **kwargs: Value) -> Value:
    """Run a function of pytree on trees of values; its callbacks are the program's."""
    stop = kwargs.pop("is_leaf", NONE)
    leaf: Stop | None = None
    if stop is not NONE:
        leaf = lambda value: stop.tp_call(tx, [value], {}).nb_bool(tx)  # noqa: E731
    real = [_argument(tx, arg, leaf) for arg in args]
    if function is pytree.tree_map:
        real[0] = lambda *leaves: args[0].tp_call(tx, [tree_value(tx, item) for item in leaves], {})
    keywords = {key: _argument(tx, arg, leaf) for key, arg in kwargs.items()}
    return tree_value(tx, real_call(tx, function, *real, **keywords))


def _argument(tx: Tracer, value: Value, leaf: Stop | None) -> Any:
    value = tx.force(value)
    if isinstance(value, ObjectConstant) and isinstance(value.obj, pytree.TreeSpec):
        return value.obj
    return real_tree(tx, value, leaf)


@rule(pytree.tree_map_)
def _tree_map_in_place(
    tx: Tracer, function: Value, tree: Value, *rests: Value, **kwargs: Value
) -> Value:
    tx.const_object(pytree.tree_map).tp_call(tx, [function, tree, *rests], kwargs)
    return tree
