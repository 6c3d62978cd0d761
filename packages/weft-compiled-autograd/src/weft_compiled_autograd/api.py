"""The public interface: `enable`, `enable_everywhere`, `disable`, `reset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from weft_core.events import counters

from weft_compiled_autograd import cache, engine, report
from weft_compiled_autograd.cache import Compiler


@contextmanager
def enable(compiler: Compiler) -> Iterator[None]:
    """Capture every backward that this thread runs in the block, and run it compiled.

    Args:
        compiler: `gm -> callable`, called once for each captured graph. The graph module takes
            `(inputs, sizes, scalars, hooks, packed_data)` and returns a tuple of tensors.
            `torch.compile`, `weft.compile(...)` and `lambda gm: gm` are compilers. With an
            attribute `dynamic`, True makes all sizes symbolic from the start, False none ever.

    Blocks nest; the innermost compiler is used. What cannot be captured runs on the eager engine,
    with the reason logged once.

    Raises:
        TypeError: when `compiler` is not callable.
    """
    _check(compiler)
    engine.install()
    with _innermost(compiler):
        yield


@contextmanager
def _innermost(compiler: Compiler | None) -> Iterator[None]:
    engine.thread.compilers.append(compiler)
    try:
        yield
    finally:
        engine.thread.compilers.pop()


def enable_everywhere(
    compiler: Compiler | None, choose: Callable[[], Compiler] | None = None
) -> None:
    """Capture the backwards of all threads, except in `enable` and `disable` blocks of their own.

    Args:
        compiler: as of `enable`; None ends it.
        choose: asked for the compiler of each backward, in its thread, instead.

    Raises:
        TypeError: when `compiler` is not callable.
    """
    if compiler is not None:
        _check(compiler)
        engine.install()
    chosen = compiler and choose
    engine.ProcessSession.choose = staticmethod(chosen or (lambda: compiler))


def is_enabled() -> bool:
    """Say whether a backward that this thread begins now is one to capture."""
    if engine.thread.session is not None:
        return False  # one inside of a captured backward runs on the eager engine
    compilers = engine.thread.compilers
    return (compilers[-1] if compilers else engine.ProcessSession.choose()) is not None


def _check(compiler: Compiler) -> None:
    if not callable(compiler):
        raise TypeError(
            f"enable() takes a function from graph module to callable, not {compiler!r}"
        )


def disable() -> AbstractContextManager[None]:
    """Run this thread's backwards on the eager engine in the block, also inside `enable`."""
    return _innermost(None)


def reset() -> None:
    """Forget all captured backwards, the sizes seen, the reasons told, and the counters."""
    engine.clear_cache()
    cache.forget()
    report.report_once.cache_clear()
    counters.pop("compiled_autograd", None)
