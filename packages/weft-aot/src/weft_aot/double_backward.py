"""Gradients that can be differentiated again: the captured program runs once more, under autograd.

Inputs are kept as cheaply as possible: saved for the compiled backward anyway, kept alive by
autograd anyway (leaves), else weakly. One that is gone, and came from another compiled graph, is
computed again by that one's program. Where a second run could differ from the first (random
numbers, an input that is gone or was written), the compiled backward makes the gradients, and
differentiating those is an error. What no gradient depends on may have changed since.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from weft_core.tensor_versions import version_of

from weft_aot.records import BackwardComponent, JointGraph
from weft_aot.walk import copied_inputs, inputs_of, leaves_of, needed_inputs, random_op


class _NotReplayable(Exception):
    """Why the program cannot run again as it ran before."""


class DoubleBackward:
    """Makes the differentiable gradients of one part of a compiled program.

    Args:
        program: the captured program, of flat inputs.
        joint: its trace, made under the autocast state that is active now.
        part: the results to differentiate, and what its backward saves.

    Attributes:
        kept: the inputs that the forward has to leave in ``ctx.kept``, each with the function to
            pass it through, if any.
    """

    def __init__(
        self, program: Callable[..., Any], joint: JointGraph, part: BackwardComponent
    ) -> None:
        self._program = program
        self._joint, self._part = joint, part
        self._autocast = _autocast_state()
        self._written = {mutation.index for mutation in joint.mutations}
        self._needed = set() if part.chained else needed_inputs(joint, part)
        tensors = [saved.source for saved in part.saved if not saved.symbolic]
        self._saved = {s.index: place for place, s in enumerate(tensors) if s.kind != "value"}
        self._refusal = refusal(joint, copied_inputs(joint) - self._saved.keys())
        if part.chained:
            self._refusal = "its gradients come in buckets; set weft.config.optimize_ddp = False"
        self.kept = [] if self._refusal else self._plan_kept()

    def _plan_kept(self) -> list[tuple[int, Callable[[Any], Any] | None]]:
        kept: list[tuple[int, Callable[[Any], Any] | None]] = []
        for index, holder in enumerate(self._joint.placeholders()[: self._joint.num_inputs]):
            if index in self._saved or self._joint.same_as[index] != index:
                continue
            if not isinstance(holder.meta.get("val"), torch.Tensor):
                kept.append((index, None))
            else:
                kept.append((index, _strong if index in self._joint.leaves else _weak))
        return kept

    def gradients(
        self, ctx: Any, grads: Sequence[Any], compiled: Callable[[], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """A gradient or None per argument of the part's forward, recorded by autograd.

        Args:
            ctx: context of the forward call.
            grads: gradients of the part's forward values.
            compiled: makes the same gradients by the compiled backward.
        """
        pairs = zip(self._part.tangents, grads, strict=True)
        seeds = {k: grad for k, grad in pairs if grad is not None}
        try:
            starts = self._inputs(ctx, self._needed)
            values = self._run(starts, list(seeds))
        except _NotReplayable as reason:
            with torch.no_grad():
                return _differentiable_once(compiled(), str(reason), self._anchors(ctx))
        wanted = [starts[index] for index in self._part.gradients if index is not None]
        if not wanted:
            return (None, None, None)
        found = torch.autograd.grad(
            values, wanted, list(seeds.values()), create_graph=True, allow_unused=True
        )
        return (None, None, *found)

    def _inputs(self, ctx: Any, needed: set[int]) -> list[Any]:
        """Inputs for the program: aliases of the forward call's, so that gradients stop there.

        Those that are not `needed` may have changed, or be zeros.
        """
        if self._refusal:
            raise _NotReplayable(self._refusal)
        found: dict[int, Any] = {}
        if self._saved:
            tensors = ctx.saved_tensors
            found = {index: tensors[place] for index, place in self._saved.items()}
        for (index, function), value in zip(self.kept, getattr(ctx, "kept", ()), strict=True):
            known = value if function is None else self._recall(ctx, index, value, needed)
            found[index] = known
        inputs: list[Any] = []
        for index, first in enumerate(self._joint.same_as):
            value = inputs[first] if first != index else found[index]
            if first == index and isinstance(value, torch.Tensor):
                value = value.view_as(value)
            inputs.append(value)
        return inputs

    def _anchors(self, ctx: Any) -> list[torch.Tensor]:
        """Tensors that lead to what the program was called with: its inputs, and their leaves.

        The engine skips a node that leads to nothing that gradients are asked of.
        """
        held = [value[0] if type(value) is tuple else value for value in getattr(ctx, "kept", ())]
        held = [value() if isinstance(value, weakref.ref) else value for value in held]
        found = [one for one in held if isinstance(one, torch.Tensor) and one.requires_grad]
        return [*found, *leaves_of([ctx])]

    def inner(self, ctx: Any, place: int, grads: dict[int, Any]) -> torch.Tensor:
        """What one of the part's values gets of gradients of others, by their places.

        Raises:
            RuntimeError: the program cannot run again.
        """
        create, given = torch.is_grad_enabled(), {p: g for p, g in grads.items() if g is not None}
        try:
            with torch.enable_grad():
                wanted = [self._part.tangents[p] for p in (place, *given)]
                value, *others = self._run(self._inputs(ctx, self._needed), wanted)
                seeds = [*given.values()]
                return torch.autograd.grad(others, value, seeds, create_graph=create)[0]
        except _NotReplayable as reason:
            raise RuntimeError(
                "retain_grad() of a result of a compiled graph that makes another result of it "
                f"takes running the graph again: {reason}"
            ) from None

    def value(self, ctx: Any, number: int) -> torch.Tensor:
        """The `number`-th result of the part, computed again, with its history."""
        index = self._part.tangents[number]
        needed = inputs_of(self._joint, [self._joint.results()[index]])
        return self._run(self._inputs(ctx, needed), [index])[0]

    def _recall(self, ctx: Any, index: int, kept: Any, needed: set[int]) -> Any:
        tensor, version = kept
        tensor = tensor() if isinstance(tensor, weakref.ref) else tensor
        if index not in needed:
            return self._stand_in(index) if tensor is None else tensor
        reached = [i for i in self._part.gradients if i is not None]
        if tensor is None and version == 0 and index in reached:
            node, number = ctx.next_functions[reached.index(index)]
            maker = getattr(getattr(node, "_forward_cls", None), "weft_replay", None)
            if maker is not None:
                return maker.value(node, number)
        if tensor is None:
            raise _NotReplayable(f"its input {index} is no longer alive")
        if version_of(tensor) != version or index in self._written:
            raise _NotReplayable(f"its input {index} was written since")
        return tensor

    def _stand_in(self, index: int) -> torch.Tensor:
        """Zeros for an input that no gradient depends on."""
        like = self._joint.placeholders()[index].meta["val"]
        if not all(isinstance(size, int) for size in like.shape):
            raise _NotReplayable(f"its input {index} is no longer alive")
        zeros = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return zeros.requires_grad_(index in self._joint.gradients)

    def _run(self, starts: list[Any], wanted: list[int]) -> list[torch.Tensor]:
        """Run the program, on copies of what it writes; return those of its forward values."""
        copies = {index: starts[index].clone() for index in self._written}
        inputs = [copies.get(i, starts[i]) for i in self._joint.same_as]
        with self._under_autocast():
            results = pytree.tree_leaves(self._program(*inputs), lambda value: value is None)
        found = {m.value: inputs[m.index] for m in self._joint.mutations if m.value is not None}
        for plan, result in zip(self._joint.plans, results, strict=True):
            if plan.source is not None and plan.source.kind == "value":
                base = result if plan.steps is None else result._base
                if base is not None:
                    found.setdefault(plan.source.index, base)
        if not all(k in found for k in wanted):
            raise _NotReplayable("its results are views of a tensor that it hides")
        return [found[k] for k in wanted]

    @contextlib.contextmanager
    def _under_autocast(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._C._DisableAutocast())
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield


def _strong(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, 0 if tensor.is_inference() else tensor._version


def _weak(tensor: torch.Tensor) -> tuple[weakref.ref[torch.Tensor], int]:
    return weakref.ref(tensor), version_of(tensor)


def _autocast_state() -> list[tuple[str, torch.dtype]]:
    return [
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]


def refusal(joint: JointGraph, written: set[int]) -> str | None:
    """Why a program, which writes these of its inputs, cannot run again; None if it can."""
    if written:
        return f"the program writes its input {min(written)}, which its gradients depend on"
    random = random_op(joint)
    return None if random is None else f"the program draws random numbers ({random})"


class _Once(torch.autograd.Function):
    """Identity on gradients whose own backward is an error."""

    @staticmethod
    def forward(ctx: Any, reason: str, anchors: int, *tensors: Any) -> Any:
        ctx.reason = reason
        gradients = tensors[anchors:]
        return tuple(g.detach() if isinstance(g, torch.Tensor) else g for g in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"a compiled graph can be differentiated only once here: {ctx.reason}. For second "
            "derivatives run this part uncompiled (weft.disable), or compile a function that "
            "calls torch.autograd.grad itself."
        )


def _differentiable_once(
    gradients: tuple[Any, ...], reason: str, anchors: list[torch.Tensor]
) -> tuple[Any, ...]:
    anchors = anchors or [torch.empty(0, requires_grad=True)]
    with torch.enable_grad():
        start = (reason, len(anchors), *anchors)
        if any(g is not None and not torch._C._has_storage(g) for g in gradients):
            # Of what vmap batches (is_grads_batched), only the tensors inside keep a history.
            (zero,) = _Once.apply(*start, torch.zeros(()))  # type: ignore[no-untyped-call]
            return tuple(None if g is None else g + zero.to(g.dtype) for g in gradients)
        results: tuple[Any, ...] = _Once.apply(*start, *gradients)  # type: ignore[no-untyped-call]
    return results
