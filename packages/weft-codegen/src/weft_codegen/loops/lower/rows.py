"""The lowering table with all its rows: each module that is imported here adds its own."""

from weft_codegen.loops.lower import indexing as indexing
from weft_codegen.loops.lower import pointwise as pointwise
from weft_codegen.loops.lower import pooling as pooling
from weft_codegen.loops.lower import random as random
from weft_codegen.loops.lower import reductions as reductions
from weft_codegen.loops.lower import resample as resample
from weft_codegen.loops.lower import views as views
from weft_codegen.loops.lower.lowering import LOWERINGS as LOWERINGS
