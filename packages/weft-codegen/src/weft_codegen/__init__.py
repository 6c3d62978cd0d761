"""weft_codegen: compiles an aten graph to one fused native function.

compile_graph(gm, inputs) is the door; compile.py names the steps behind it.  backend.py is the same
as a torch.compile backend.  loops/program.py defines the IR between graph and code.
"""

from typing import TYPE_CHECKING, Any

import weft_codegen.flex_dispatch  # noqa: F401  registers its kernels
from weft_codegen.compile import compile_graph, decompositions, make_program
from weft_codegen.config import Options
from weft_codegen.cudagraphs import with_cudagraphs
from weft_codegen.freezing import frozen_inputs
from weft_codegen.kernels.build import INCLUDE
from weft_codegen.layout import laid_out
from weft_codegen.measure import Eager
from weft_codegen.padded_products import pad_products

if TYPE_CHECKING:
    from weft_codegen.patterns import Patterns, fill_values

__all__ = [
    "Eager",
    "Options",
    "Patterns",
    "compile_graph",
    "decompositions",
    "fill_values",
    "frozen_inputs",
    "get_include",
    "laid_out",
    "make_program",
    "pad_products",
    "with_cudagraphs",
]


def get_include() -> str:
    """The folder of weft.h, with which C programs call generated libraries."""
    return str(INCLUDE)


def __getattr__(name: str) -> Any:
    """Load what few programs use when it is asked for."""
    if name not in ("Patterns", "fill_values"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weft_codegen import patterns  # noqa: PLC0415

    return getattr(patterns, name)
