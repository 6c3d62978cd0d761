"""What compiled code depends on: sources, guards, compiled checks, the code cache, dynamic shapes.

Read in this order: `sources` (where a value came from), `guards` (what must hold of it), `check`
(one function that tests it all),
`explain` (why it fails), `cache`, `dynamic`, `shapes` and `filters`.
"""

from weft_guards.cache import CacheRules, CodeCache, Entry
from weft_guards.check import Check, arg_names_of, compile_check
from weft_guards.dynamic import (
    DynamicPolicy,
    mark_dynamic,
    mark_static,
    mark_unbacked,
    maybe_mark_dynamic,
    varying,
)
from weft_guards.explain import Miss, explain_miss
from weft_guards.guards import KINDS, Guard, GuardSet
from weft_guards.native import call_with
from weft_guards.payloads import ClassUse, DictKeys, Held, MemoryUse, ShapeExpr, TensorSpec
from weft_guards.sources import Source
from weft_guards.spec import ShapesSpec
from weft_guards.state import TorchState

__all__ = [
    "KINDS",
    "CacheRules",
    "Check",
    "ClassUse",
    "CodeCache",
    "DictKeys",
    "DynamicPolicy",
    "Entry",
    "Guard",
    "GuardSet",
    "Held",
    "MemoryUse",
    "Miss",
    "ShapeExpr",
    "ShapesSpec",
    "Source",
    "TensorSpec",
    "TorchState",
    "arg_names_of",
    "call_with",
    "compile_check",
    "explain_miss",
    "mark_dynamic",
    "mark_static",
    "mark_unbacked",
    "maybe_mark_dynamic",
    "varying",
]
