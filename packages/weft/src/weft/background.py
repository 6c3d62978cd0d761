"""Compile graphs in a thread while they run eagerly (`config.background_compile`).

Capture and guards are made at the first call, as ever; what takes long is the backend. Until it is
done, the captured graph runs operator by operator. A graph whose compilation depends on what only
the calling thread has (modes, transforms, hooks of saved tensors), or that could add guards
(symbolic sizes), is compiled at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from weft_core import events

from weft.backends import Compiled

_DEVICES = ("cpu", "cuda")
_pending: set[Future[Compiled]] = set()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """The thread that compiles: one, so that the program keeps the other cores."""
    return ThreadPoolExecutor(1, "weft-compile")


def can_wait(gm: fx.GraphModule, example_inputs: list[Any]) -> bool:
    """Whether another thread may compile a graph, which runs eagerly until then."""
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    leaves = pytree.tree_leaves([values, example_inputs])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt | torch.SymFloat)]
    sizes = (size for tensor in tensors for size in tensor.shape)
    return (
        not numbers
        and all(isinstance(size, int) for size in sizes)
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


class Background:
    """A captured graph: it runs eagerly until the thread has compiled it."""

    def __init__(self, gm: fx.GraphModule, compile_graph: Callable[[], Compiled]) -> None:
        self._run: Compiled = gm.forward
        state = contextvars.copy_context()
        modes = _modes()

        def compile_there() -> Compiled:
            with modes():
                return compile_graph()

        future = _thread().submit(state.run, compile_there)
        self._future: Future[Compiled] | None = future
        _pending.add(future)
        future.add_done_callback(_pending.discard)
        events.counters["background"]["graphs"] += 1

    def __call__(self, *args: Any) -> Any:
        """The graph's results.

        Raises:
            BackendCompilerError: the backend failed, and `config.on_compile_error` is `"raise"`.
        """
        future = self._future
        if future is not None:
            if future.done():
                self._run, self._future = future.result(), None
            else:
                events.counters["background"]["eager_calls"] += 1
        return self._run(*args)


def _modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What puts another thread into this one's modes of autograd and autocast."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _DEVICES
    ]
    cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for device, enabled, dtype in casts:
                if enabled:
                    stack.enter_context(torch.autocast(device, dtype, cache_enabled=cache))
            yield

    return entered


def wait_for_compilation(timeout: float | None = None) -> bool:
    """Wait until no graph is being compiled in the background; whether that came to be.

    Args:
        timeout: the most seconds to wait; None for as long as it takes.
    """
    return not wait(set(_pending), timeout).not_done
