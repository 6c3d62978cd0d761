"""Values of a captured graph that depend on nothing but the program's text: masks and scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from weft_aot.rewrites.match import call_name, example, writes

_MAKERS = frozenset("ones zeros full arange linspace tensor eye scalar_tensor".split())  # noqa: SIM905
_CHANGES = frozenset(
    """
    tril triu eq ne lt le gt ge add sub mul div neg bool float half bfloat16 double to type int long
    logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or invert and_ or_ inv not_
    __invert__ __and__ __or__ view reshape unsqueeze squeeze expand getitem transpose t T mT
    masked_fill where sqrt pow permute rsub rsqrt cumsum diff new_ones new_zeros new_full
    zeros_like ones_like full_like
    """.split()  # noqa: SIM905
)
_LARGEST = 1 << 24
"""Elements of a mask that is computed while compiling."""


class Constants:
    """Computes constants of a graph, each once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, torch.Tensor | None] = {}

    def tensor(self, node: Any) -> torch.Tensor | None:
        """Return the value of a node on the CPU; None where inputs or random numbers decide it."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def number(self, value: Any) -> float | None:
        """Return the value of a number, or of a node that is a constant of one element."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        found = self.tensor(value)
        return float(found) if found is not None and found.numel() == 1 else None

    def _compute(self, node: fx.Node) -> torch.Tensor | None:
        fake = example(node)
        name = call_name(node) or getattr(node.target, "__name__", None)
        if fake is None or name not in _MAKERS | _CHANGES or _is_mutated(node):
            return None
        if not all(type(size) is int for size in fake.shape) or fake.numel() > _LARGEST:
            return None
        sources = {source: self.tensor(source) for source in node.all_input_nodes}
        if any(value is None for value in sources.values()):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        args = tuple(arg for arg in args if not isinstance(arg, torch.device))
        if name == "to" and len(args) + len(kwargs) == 1:  # only the device changed
            return sources[node.all_input_nodes[0]]
        try:
            with torch.device("cpu"):
                found = (
                    getattr(args[0], str(node.target))(*args[1:], **kwargs)
                    if node.op == "call_method"
                    else node.target(*args, **kwargs)  # type: ignore[operator]
                )
        except (TypeError, RuntimeError):
            return None
        return found if isinstance(found, torch.Tensor) and found.shape == fake.shape else None


def _is_mutated(node: fx.Node) -> bool:
    return writes(node) or any(writes(user) for user in node.users)
