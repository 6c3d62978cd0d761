"""In which order a compiled backward gives leaves their gradients, where hooks can see it.

The engine takes leaves out of its queue in no order that it promises, but nodes made later first.
So a node that does nothing is made between each leaf and the graph.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

_HOOKS = operator.attrgetter("_backward_hooks")
_LATER_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


def arranged(order: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What autograd is to see of a call's arguments; `order` are the leaves, first to last."""
    pick: Callable[[Sequence[Any]], Sequence[Any]] = operator.itemgetter(*order)

    def arrange(args: Sequence[Any]) -> Sequence[Any]:
        leaves = pick(args) if RemovableHandle.next_id else ()  # 0: nothing ever had a hook
        if not any(map(_HOOKS, leaves)) and not any(map(_LATER_HOOKS, leaves)):
            return args
        seen = list(args)
        for index in reversed(order):
            seen[index] = args[index][...]  # of all views, one that hands on the very gradient
        return seen

    return arrange
