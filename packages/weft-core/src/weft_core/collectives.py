"""Operators that wait for other processes, and marks on graph nodes that concern them."""

from __future__ import annotations

from typing import Any

REGATHER = "regather"
"""In the `meta` of a node that gathers parameters: the backward gathers them again."""


def is_collective(target: Any) -> bool:
    """Whether a call of `target`, an operator, waits for other processes."""
    return str(target).startswith(("_c10d_functional", "c10d", "_dtensor."))


def is_wait(target: Any) -> bool:
    """Whether `target` waits for the result of a collective that was started before."""
    return str(target) == "_c10d_functional.wait_tensor.default"
