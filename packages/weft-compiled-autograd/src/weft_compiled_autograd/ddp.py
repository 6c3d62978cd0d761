"""DistributedDataParallel: its reducer's hooks, moved to where a capture can see them.

The C++ hooks on the AccumulateGrad nodes tell the reducer that a gradient is there; node hooks that
call the same entry from Python take their place, in captured and in eager backwards. The reducer
may ask the engine for a final callback, so a captured backward runs in a hook of an eager one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

REFUSAL = "C++ DDP Reducer"
"""In the engine's message when it meets a reducer's hook."""

_MARK = "_weft_reducer_hooks"


class RedirectedReducers:
    """Whether any reducer's hooks were replaced in this process."""

    any: bool = False


def redirect_reducer_hooks() -> bool:
    """Replace the hooks of every DistributedDataParallel module; False if there is none to do."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415 (0.1 s to import)

    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), DistributedDataParallel) and _replaceable(thing)
    ]
    for module in found:
        _replace(module)
    RedirectedReducers.any |= bool(found)
    return bool(found)


def _replaceable(module: Any) -> bool:
    """Not a module that is half made, of mixed precision, or with another set of parameters now."""
    state = module.__dict__
    if _MARK in state or "reducer" not in state or state.get("mixed_precision") is not None:
        return False
    known = module.logger._get_ddp_logging_data().ints_map["num_parameter_tensors"]
    return len(module._build_params_for_reducer()[0]) == int(known)


def _replace(module: Any) -> None:
    parameters, _ = module._build_params_for_reducer()
    module.reducer._remove_autograd_hooks()
    handles = [_tell(module.reducer, index, p) for index, p in enumerate(parameters)]
    setattr(module, _MARK, handles)


def _tell(reducer: Any, index: int, parameter: torch.Tensor) -> Any:
    """Hook on a parameter's AccumulateGrad node, which the reducer keeps alive."""

    def ddp_reducer_hook(outputs: Any, inputs: Any) -> None:
        reducer._autograd_hook(index)

    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    return node.register_hook(ddp_reducer_hook)


def in_backward(engine: Any, run: Callable[[], T]) -> T:
    """Call `run` inside a backward of `engine`, whose final callbacks run at its end."""
    results: list[T] = []
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True).view(1)
    root.register_hook(lambda grad: results.append(run()))
    engine.run_backward((root,), (torch.zeros(1),), False, False, (), True, accumulate_grad=True)
    return results[0]
