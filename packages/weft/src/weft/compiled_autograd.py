"""`weft.compiled_autograd`: capture what the autograd engine runs in `backward()`.

    with weft.compiled_autograd.enable(weft.compile):
        loss.backward()

`weft.config.compiled_autograd = True` does the same, with the code generator, for every backward
of every thread, until it is set to False.
"""

from __future__ import annotations

from weft_compiled_autograd import disable, enable, enable_everywhere, graph_compiler

from weft import pipeline

__all__ = ["disable", "enable"]

# A captured backward is aten ops already: the backend takes it without a second capture.
_compile = graph_compiler(pipeline.graph_compiler(pipeline.Request()))


def switch(on: bool) -> None:
    """Follow `config.compiled_autograd`."""
    enable_everywhere(_compile if on else None)
