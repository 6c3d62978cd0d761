"""The public interface: `enable`, `disable`, `reset`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft_core.events import counters

from weft_compiled_autograd import cache, engine, report
from weft_compiled_autograd.cache import Compiler


@contextmanager
def enable(compiler: Compiler) -> Iterator[None]:
    """Capture every backward that this thread runs in the block, and run it compiled.

    Args:
        compiler: `gm -> callable`, called once for each captured graph. The graph module takes
            `(inputs, sizes, scalars, hooks, packed_data)` and returns a tuple of tensors.
            `torch.compile`, `weft.compile(...)` and `lambda gm: gm` are compilers.

    Blocks nest; the innermost compiler is used. What cannot be captured runs on the eager engine,
    with the reason logged once.

    Raises:
        TypeError: when `compiler` is not callable.
    """
    if not callable(compiler):
        raise TypeError(
            f"enable() takes a function from graph module to callable, not {compiler!r}"
        )
    engine.install()
    engine.thread.compilers.append(compiler)
    try:
        yield
    finally:
        engine.thread.compilers.pop()


@contextmanager
def disable() -> Iterator[None]:
    """Run this thread's backwards on the eager engine in the block, also inside `enable`."""
    engine.thread.compilers.append(None)
    try:
        yield
    finally:
        engine.thread.compilers.pop()


def reset() -> None:
    """Forget all captured backwards, the sizes seen, the reasons told, and the counters."""
    engine.clear_cache()
    cache.forget()
    report.forget()
    counters.pop("compiled_autograd", None)
