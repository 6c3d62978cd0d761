"""Functions of torch that become nodes of the graph."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

F = torch.nn.functional

_NATIVE = (
    torch._C._VariableFunctions,
    torch._C._nn,
    *(getattr(torch._C, name) for name in ("_fft", "_linalg", "_special")),  # not in the stubs
)
"""Namespaces of C functions that compute on tensors."""

_PYTHON_MODULES = frozenset(("torch.nn.functional", "torch.functional"))
"""Python functions of these modules become nodes; AOT traces through them later."""

_INLINED: frozenset[object] = frozenset(
    (F.multi_head_attention_forward, torch.nn.functional._canonical_mask)
)
"""Exceptions: functions whose Python does more than call operators."""


def hashes_silently(obj: object) -> bool:
    """Say whether an object is hashable without running code of the program."""
    cls = type(obj)
    if cls.__module__ == "torch._ops":
        return True
    if not isinstance(cls.__hash__, types.WrapperDescriptorType):
        return False
    try:
        hash(obj)
    except TypeError:  # functions of ctypes, for example
        return False
    return True


@functools.cache
def _native_functions() -> frozenset[object]:
    functions = set()
    for namespace in _NATIVE:
        for name in dir(namespace):
            function = getattr(namespace, name)
            if callable(function) and not name.startswith("__"):
                functions.add(function)
    return frozenset(functions)


def is_graph_function(function: Any) -> bool:
    """Say whether calling `function` becomes one node of the graph."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if hashes_silently(function) and function in _native_functions():
        return True
    if not isinstance(function, types.FunctionType) or function in _INLINED:
        return False
    if function.__module__ == "torch._tensor":
        return function.__name__[0] != "_" and vars(torch.Tensor).get(function.__name__) is function
    # `boolean_dispatch` makes max_pool2d and its kind: nested functions.
    dispatches = function.__qualname__.startswith("boolean_dispatch.")
    of_torch = dispatches or function.__globals__.get("__name__") in _PYTHON_MODULES
    return of_torch and not function.__name__.startswith(("_", "has_torch_function"))
