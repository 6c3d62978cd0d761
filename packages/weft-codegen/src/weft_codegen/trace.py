"""Every stage of one compilation as files: `trace.enabled`, `trace.graph_diagram`, `WEFT_DUMP`.

The aten graph as a program that runs, loop nodes, kernels and steps, what the compiler gets and
how, and a diagram. `WEFT_DUMP` names the folder, and then the other stages of weft write there too;
the option alone writes to ./weft_trace.
"""

from __future__ import annotations

from weft_core.dumps import Dump, environment_dump

from weft_codegen.config import Options
from weft_codegen.diagram import svg_of
from weft_codegen.kernels import build_script, emit_program
from weft_codegen.loops.printer import program_text
from weft_codegen.loops.program import Program

_FOLDER = "weft_trace"
_without_environment = Dump(_FOLDER)


def dump_of(options: Options) -> Dump | None:
    """Where the stages of a compilation are written; None if nowhere."""
    wanted = options.trace_enabled or options.trace_graph_diagram
    return environment_dump() or (_without_environment if wanted else None)


def write_program(dump: Dump, program: Program, *, diagram: bool) -> None:
    """Write the scheduled program, its C, and what builds it."""
    dump.write("codegen.program.txt", program_text(program) + "\n")
    if diagram:
        dump.write("codegen.diagram.svg", svg_of(program))
    sources, _ = emit_program(program)
    kernels = dump.write("codegen.kernels.c", sources.kernel_unit())
    host = dump.write("codegen.host.c", sources.host_unit())
    dump.write("codegen.build.sh", build_script(kernels, host))
