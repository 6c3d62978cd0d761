"""Loop programs to machine code: emit C, plan memory, call libtorch, build, load, cache."""

from weft_codegen.kernels.build import build_script
from weft_codegen.kernels.load import CompiledGraph, Loadable, compile_program, emit_program

__all__ = ["CompiledGraph", "Loadable", "build_script", "compile_program", "emit_program"]
