"""Ranks that compile together: a call whose guards fail on one rank fails them on all.

While it is on, every call of compiled code asks the other ranks, which costs a collective. Then no
rank runs compiled code while another compiles, or has given up at the recompile limit, and starts
collectives in eager's order.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.utils.weak import WeakIdKeyDictionary
from weft_guards import CodeCache

from weft_capture import frame

T = TypeVar("T")
_group: Any = None  # of all ranks, while they have to agree
_codes: Any = WeakIdKeyDictionary()  # code objects with a lookup of their own


def agree_on_guards(enabled: bool) -> bool:
    """Let ranks agree on guards in every call from here on, or no more; returns what held before.

    All ranks have to call it, and then to make the same calls of compiled functions.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    global _group
    before = _group is not None
    if enabled and not before:
        _group = distributed.new_group(backend="gloo")  # not among the program's collectives
        for code in list(_codes):
            frame.forget(code)  # its next call asks
    elif not enabled:
        _group = None
    return before


def set_lookup(code: types.CodeType, cache: CodeCache, capture: Any) -> None:
    """Let frames of a code object find their entries without asking, if they may."""
    if _group is None:
        _codes[code] = None
        frame.set_lookup(code, cache.lookup, capture)


def agreed(cache: CodeCache, found: T | None) -> T | None:
    """Return what a lookup found if all ranks found something; else None, for all of them."""
    if _group is None or not cache.entries:
        return found
    hit = torch.tensor(int(found is not None), dtype=torch.int32)
    distributed.all_reduce(hit, distributed.ReduceOp.MIN, _group)
    return found if hit.item() else None
