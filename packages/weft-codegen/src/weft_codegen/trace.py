"""Every stage of one compilation as files: `trace.enabled`, `trace.graph_diagram`, `WEFT_DUMP`.

    codegen.graph.py       the aten graph, as a program that runs
    codegen.loops.txt      loop nodes, before any decision
    codegen.program.txt    kernels and steps
    codegen.kernels.c, codegen.host.c, codegen.build.sh     what the compiler gets, and how
    codegen.diagram.svg    the fused graph

`WEFT_DUMP` names the folder, and then the other stages of weft write there too; the option alone
writes to ./weft_trace.
"""

from __future__ import annotations

from torch import fx
from weft_core.dumps import Dump, environment_dump, graph_script

from weft_codegen.config import Options
from weft_codegen.diagram import svg_of
from weft_codegen.kernels import build_script, emit_program
from weft_codegen.loops.nodes import Lowered
from weft_codegen.loops.printer import lowered_text, program_text
from weft_codegen.loops.program import Program

_FOLDER = "weft_trace"
_without_environment = Dump(_FOLDER)


class Trace:
    """Writes the stages of one compilation, if they are wanted at all."""

    def __init__(self, options: Options | None = None) -> None:
        options = options or Options()
        self._diagram = options.trace_graph_diagram
        wanted = options.trace_enabled or options.trace_graph_diagram
        self._dump = environment_dump() or (_without_environment if wanted else None)

    @property
    def wanted(self) -> bool:
        """Whether anything is written."""
        return self._dump is not None

    def graph(self, gm: fx.GraphModule) -> None:
        """Write the graph that is lowered."""
        if self._dump is not None:
            self._dump.write("codegen.graph.py", graph_script(gm))

    def lowered(self, lowered: Lowered) -> None:
        """Write the loop nodes."""
        if self._dump is not None:
            self._dump.write("codegen.loops.txt", lowered_text(lowered) + "\n")

    def program(self, program: Program) -> None:
        """Write the scheduled program and its C."""
        if self._dump is None:
            return
        self._dump.write("codegen.program.txt", program_text(program) + "\n")
        if self._diagram:
            self._dump.write("codegen.diagram.svg", svg_of(program))
        sources, _ = emit_program(program)
        kernels = self._dump.write("codegen.kernels.c", sources.kernel_unit(readable=True))
        host = self._dump.write("codegen.host.c", sources.host_unit())
        self._dump.write("codegen.build.sh", build_script(kernels, host))
