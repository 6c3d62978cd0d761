"""The order in which leaves get gradients from a compiled backward, where hooks see it.

The engine takes leaves out of its queue in no order that it promises, but nodes made later first.
So a node that does nothing is made between each leaf and the graph.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

_HOOKS = operator.attrgetter("_backward_hooks")
_LATER_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


class _Defined:
    """A hook that is called for gradients only, not where there is none."""

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self.hook = hook

    def __call__(self, grad: Any) -> Any:
        return None if grad is None else self.hook(grad)


def skip_unreached_hooks(ctx: Any, reached: Iterable[bool]) -> None:
    """Keep the hooks of leaves from being called for gradients that a backward does not make.

    The engine comes to them all the same, with None; in eager nothing leads there. `reached` says
    for each tensor given to the autograd function whether it gets a gradient.
    """
    edges = zip(ctx.next_functions, reached, strict=False)
    pending = [node for (node, _), there in edges if not there]
    seen = set()
    while RemovableHandle.next_id and pending:  # 0: nothing ever had a hook
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += (edge[0] for edge in node.next_functions)
        hooks = getattr(getattr(node, "variable", None), "_backward_hooks", None) or {}
        hooks.update((k, h if type(h) is _Defined else _Defined(h)) for k, h in hooks.items())


def reordering(order: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
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
