"""The levels of torch's transforms: vmap, grad, forward mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._C import _functorch as functorch
from torch.autograd import forward_ad


@contextlib.contextmanager
def preserve_transform_levels() -> Iterator[None]:
    """Leave the levels that a graph which raises leaves open."""
    level, dual = functorch.maybe_current_level() or 0, forward_ad._current_level
    try:
        yield
    finally:
        while (functorch.maybe_current_level() or 0) > level:
            functorch.pop_dynamic_layer_stack()
        while forward_ad._current_level > dual:
            forward_ad.exit_dual_level()
