"""`weft.compiled_autograd`: capture what the autograd engine runs in `backward()`.

    with weft.compiled_autograd.enable(weft.compile):
        loss.backward()

`weft.config.compiled_autograd = True` does the same, with the code generator, for every backward
of the thread that sets it, until it is set to False.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import fx
from weft_compiled_autograd import disable, enable

from weft import pipeline

__all__ = ["disable", "enable"]

_switched_on = ExitStack()


def _compile(gm: fx.GraphModule) -> Callable[..., Any]:
    return pipeline.compile_function(gm.forward, pipeline.Request())


def switch(on: bool) -> None:
    """Follow `config.compiled_autograd`."""
    if on:
        _switched_on.enter_context(enable(_compile))
    else:
        _switched_on.close()
