"""What compiled code depends on: sources, guards, compiled checks, the code cache, dynamic shapes.

Read in this order: `sources` (where a value came from), `guards` (what must hold of it), `check`
(one function that tests it all), `explain` (why it fails), `cache`, `dynamic`, `shapes`, `filters`.
"""

from weft_guards.cache import CacheEntry as CacheEntry
from weft_guards.cache import CacheRules as CacheRules
from weft_guards.cache import CodeCache as CodeCache
from weft_guards.cache import skip_guards as skip_guards
from weft_guards.check import Check as Check
from weft_guards.check import arg_names_of as arg_names_of
from weft_guards.check import compile_check as compile_check
from weft_guards.dimension_marks import mark_dynamic as mark_dynamic
from weft_guards.dimension_marks import mark_static as mark_static
from weft_guards.dimension_marks import mark_unbacked as mark_unbacked
from weft_guards.dimension_marks import maybe_mark_dynamic as maybe_mark_dynamic
from weft_guards.dimension_marks import varying as varying
from weft_guards.dynamic import DynamicPolicy as DynamicPolicy
from weft_guards.explain import Miss as Miss
from weft_guards.explain import explain_miss as explain_miss
from weft_guards.guards import KINDS as KINDS
from weft_guards.guards import Guard as Guard
from weft_guards.guards import GuardSet as GuardSet
from weft_guards.native import call_with as call_with
from weft_guards.payloads import ClassUse as ClassUse
from weft_guards.payloads import DictKeys as DictKeys
from weft_guards.payloads import MemoryUse as MemoryUse
from weft_guards.payloads import ShapeExpr as ShapeExpr
from weft_guards.payloads import TensorSpec as TensorSpec
from weft_guards.payloads import WeakIdentity as WeakIdentity
from weft_guards.sources import Source as Source
from weft_guards.spec import ShapesSpec as ShapesSpec
from weft_guards.state import TorchState as TorchState
