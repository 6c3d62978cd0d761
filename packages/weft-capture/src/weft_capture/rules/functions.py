"""Function objects as descriptors."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from weft_capture.rules.table import rule
from weft_capture.values.base import Value, method
from weft_capture.values.constant import NONE
from weft_capture.values.functions import FunctionValue

if TYPE_CHECKING:
    from weft_capture.tracer import Tracer


@method(FunctionValue, "__get__")
def _bind(tx: Tracer, self: FunctionValue, instance: Value, owner: Value = NONE) -> Value:
    return self if instance is NONE else tx.bound_method(self, instance)


@rule(types.FunctionType.__get__)
def _bind_by_type(tx: Tracer, function: Value, instance: Value, owner: Value = NONE) -> Value:
    return function.call_method(tx, "__get__", [instance, owner], {})
