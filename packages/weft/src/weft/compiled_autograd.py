"""`weft.compiled_autograd`: capture what the autograd engine runs in `backward()`.

    with weft.compiled_autograd.enable(weft.compile):
        loss.backward()

`weft.config.compiled_autograd = True` does the same, with the code generator, for every backward
of the thread that sets it, until it is set to False.
"""

from __future__ import annotations

from contextlib import ExitStack

from weft_compiled_autograd import disable, enable, graph_compiler

from weft import pipeline

__all__ = ["disable", "enable"]

_switched_on = ExitStack()


# A captured backward is aten ops already: the backend takes it without a second capture.
_compile = graph_compiler(pipeline.graph_compiler(pipeline.Request()))


def switch(on: bool) -> None:
    """Follow `config.compiled_autograd`."""
    if on:
        _switched_on.enter_context(enable(_compile))
    else:
        _switched_on.close()
