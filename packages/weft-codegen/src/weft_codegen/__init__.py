"""weft_codegen: compiles an aten graph to one fused native function.

compile_graph(gm, inputs) is the door; compile.py names the steps behind it.  backend.py is the same
as a torch.compile backend.  loops/program.py defines the IR between graph and code.
"""

from weft_codegen.compile import compile_graph, decompositions, make_program
from weft_codegen.config import Options
from weft_codegen.cudagraphs import with_cudagraphs
from weft_codegen.freezing import frozen_inputs
from weft_codegen.kernels.build import INCLUDE
from weft_codegen.measure import Eager

__all__ = [
    "Eager",
    "Options",
    "compile_graph",
    "decompositions",
    "frozen_inputs",
    "get_include",
    "make_program",
    "with_cudagraphs",
]


def get_include() -> str:
    """The folder of weft.h, with which C programs call generated libraries."""
    return str(INCLUDE)
