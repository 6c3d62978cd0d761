"""The C of ten small graphs, kept to be read: tests/golden/*.c.

They hold the kernels; one of them, `linear`, all of a program: what is around kernels is alike.
After a wanted change run the tests with WEFT_UPDATE_GOLDEN=1 and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from codegen_check import with_lines
from golden_graphs import GRAPHS
from weft_codegen.compile import make_program
from weft_codegen.kernels import emit_program

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", GRAPHS)
def test_generated_c(name: str) -> None:
    function, inputs = GRAPHS[name]
    sources, text = emit_program(make_program(with_lines(function), inputs))
    if name != "linear":
        text = "\n\n".join(sources.kernels.values()) + "\n"
    path = GOLDEN / f"{name}.c"
    if os.environ.get("WEFT_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
