"""Gradients that can be differentiated again: the captured program runs once more, under autograd.

Inputs are kept as cheaply as possible: saved for the compiled backward anyway, kept alive by
autograd anyway (leaves), computed again by the compiled program that they came from, or weakly if
no gradient depends on them. Others are saved by a node of their own, `Held`. Random numbers are
drawn again from the state that the generators had. Where a second run could still differ from the
first (an input that was written), the compiled backward makes the gradients, and differentiating
those is an error.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from weft_core.reshaping import RESHAPE_ITSELF, take_reshaped
from weft_core.tensor_versions import version_of

from weft_aot.records import BackwardComponent, JointGraph
from weft_aot.walk import copied_inputs, inputs_of, leaves_of, needed_inputs, random_ops


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
        held: those that autograd is to see through `hold`.
    """

    def __init__(
        self, program: Callable[..., Any], joint: JointGraph, part: BackwardComponent
    ) -> None:
        self._program = _as_traced(program)
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
        kept = {index for index, function in self.kept if function is _weak}
        self.held = kept & self._needed.intersection(part.gradients)
        self._recomputed: dict[int, bool] = {}

    def _plan_kept(self) -> list[tuple[int, Callable[[Any], Any] | None]]:
        kept: list[tuple[int, Callable[[Any], Any] | None]] = []
        for index, holder in enumerate(self._joint.placeholders()[: self._joint.num_inputs]):
            if index in self._saved or self._joint.same_as[index] != index:
                continue
            if not isinstance(holder.meta.get("val"), torch.Tensor):
                kept.append((index, None))
            elif index in self._joint.leaves:
                kept.append((index, _strong))
            elif index in self._needed.difference(self._part.gradients):
                kept.append((index, _alias))
            else:
                kept.append((index, _weak))
        return kept

    def recomputes(self, number: int) -> bool:
        """Whether `value` can make the `number`-th result, whose inputs were not written since."""
        if number not in self._recomputed:
            held = self._needed | self._saved.keys() | self._joint.leaves
            result = [] if self._refusal else [self._joint.results()[self._part.tangents[number]]]
            self._recomputed[number] = bool(result) and inputs_of(self._joint, result) <= held
        return self._recomputed[number]

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
            if hasattr(ctx, "drawn") and not all(map(torch._C._has_storage, seeds.values())):
                raise _NotReplayable("the program draws random numbers, which vmap refuses")
            starts, values = self._run_again(ctx, self._needed, list(seeds))
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

    def _run_again(
        self, ctx: Any, needed: set[int], wanted: list[int]
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Inputs for the program, and what it makes of them: those of its values."""
        try:
            starts = self._inputs(ctx, needed, 0)
            return starts, self._run(ctx, starts, wanted)
        except RuntimeError:  # it may divide by what zeros stand for
            starts = self._inputs(ctx, needed, 1)
            return starts, self._run(ctx, starts, wanted)

    def _inputs(self, ctx: Any, needed: set[int], instead: int) -> list[Any]:
        """Inputs for the program: aliases of the forward call's, so that gradients stop there.

        Those that are not `needed` may have changed, or hold the number `instead`.
        """
        if self._refusal:
            raise _NotReplayable(self._refusal)
        found: dict[int, Any] = {}
        if self._saved:
            tensors = ctx.saved_tensors
            found = {index: tensors[place] for index, place in self._saved.items()}
        for (index, function), value in zip(self.kept, getattr(ctx, "kept", ()), strict=True):
            known = value if function is None else self._recall(ctx, index, value, needed, instead)
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
                _, (value, *others) = self._run_again(ctx, self._needed, wanted)
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
        return self._run_again(ctx, needed, [index])[1][0]

    def _recall(self, ctx: Any, index: int, kept: Any, needed: set[int], instead: int) -> Any:
        tensor, version, shape = kept
        tensor = tensor() if isinstance(tensor, weakref.ref) else tensor
        if index not in needed:
            return self._stand_in(index, shape, instead) if tensor is None else tensor
        reached = [i for i in self._part.gradients if i is not None]
        if index in reached:
            node, number = ctx.next_functions[reached.index(index)]
            maker: Any = getattr(node, "_forward_cls", None)
            if maker is Held:
                return _unpacked(node, index)
            if tensor is None and version == 0 and hasattr(maker, "weft_replay"):
                return maker.weft_replay.value(node, number)
        if tensor is None:
            raise _NotReplayable(f"its input {index} is no longer alive")
        if version_of(tensor) != version or index in self._written:
            raise _NotReplayable(f"its input {index} was written since")
        return tensor

    def _stand_in(self, index: int, shape: torch.Size, instead: int) -> torch.Tensor:
        """A number everywhere for an input that no gradient depends on."""
        like = self._joint.placeholders()[index].meta["val"]
        numbers = torch.full(shape, instead, dtype=like.dtype, device=like.device)
        return numbers.requires_grad_(index in self._joint.gradients)

    def _run(self, ctx: Any, starts: list[Any], wanted: list[int]) -> list[torch.Tensor]:
        """Run the program, on copies of what it writes; return those of its forward values."""
        copies = {index: starts[index].clone() for index in self._written}
        inputs = [copies.get(i, starts[i]) for i in self._joint.same_as]
        with self._under_autocast(), _drawing_again(getattr(ctx, "drawn", ())):
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


class _Replay(fx.Interpreter):
    """Runs a program as it was traced: where it changes a shape in place, results are views."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target in RESHAPE_ITSELF:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            given = self.graph.find_nodes(op="placeholder")
            if all(args[0] is not self.env.get(one) for one in given):
                return take_reshaped(self.env, n, args, kwargs)
        return super().run_node(n)


def _as_traced(program: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(program, fx.GraphModule):
        return program
    reshapes = any(node.target in RESHAPE_ITSELF for node in program.graph.nodes)
    # Inputs stay known to the end.
    return _Replay(program, garbage_collect_values=False).run if reshapes else program


Kept = tuple[Any, int, torch.Size]
"""A tensor or a weak reference to one, its version, and its sizes."""


def _strong(tensor: torch.Tensor) -> Kept:
    return tensor, version_of(tensor), tensor.shape


def _alias(tensor: torch.Tensor) -> Kept:
    """Of one without gradients; not itself, which may get a history that leads here."""
    return tensor.detach(), version_of(tensor), tensor.shape


def _weak(tensor: torch.Tensor) -> Kept:
    return weakref.ref(tensor), version_of(tensor), tensor.shape


class Held(torch.autograd.Function):
    """An alias of a tensor, which its node saves: as a result, so that it holds not the tensor.

    Its attributes tell compiled autograd that the gradient is handed on.
    """

    weft_aot_id, weft_dynamic = "held", False
    weft_backward_inputs = staticmethod(lambda ctx, *grads: [*grads])
    weft_backward_outputs = staticmethod(lambda ctx, outputs: tuple(outputs))
    weft_backward_graph = None
    weft_backward_graph_for = staticmethod(lambda grads: fx.symbolic_trace(lambda grad: (grad,)))
    weft_reached = staticmethod(lambda grads: [True])
    weft_watched = staticmethod(lambda ctx: False)

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.view_as(tensor)
        ctx.save_for_backward(alias)
        ctx.set_materialize_grads(False)
        return alias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or an alias that keeps it, if no compiled program can make it again."""
    replay = getattr(getattr(tensor.grad_fn, "_forward_cls", None), "weft_replay", None)
    if replay is not None and tensor._version == 0 and replay.recomputes(tensor.output_nr):
        return tensor
    if torch._C._are_functorch_transforms_active():  # which take no such function
        return tensor
    held: torch.Tensor = Held.apply(tensor)  # type: ignore[no-untyped-call]
    return held


def _unpacked(node: Any, index: int) -> torch.Tensor:
    try:
        (tensor,) = node.saved_tensors
    except RuntimeError:
        raise _NotReplayable(f"its input {index} was written since, or freed") from None
    return tensor  # type: ignore[no-any-return]


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
    if any("generator" in str(node.target) for node in random_ops(joint)):
        return "the program draws random numbers of a generator of its own"
    return None


States = dict[torch.device, torch.Tensor]


def generator_states(joint: JointGraph) -> Callable[[], States] | None:
    """A function that reads the states of the generators that a program draws from, if any."""
    drawn = pytree.tree_leaves([node.meta["val"] for node in random_ops(joint)])
    devices = {leaf.device for leaf in drawn if isinstance(leaf, torch.Tensor)}
    return functools.partial(_states, devices) if devices else None


def _states(devices: Iterable[torch.device]) -> States:
    on_cpu = torch.get_rng_state
    return {d: on_cpu() if d.type == "cpu" else torch.cuda.get_rng_state(d) for d in devices}


@contextlib.contextmanager
def _drawing_again(drawn: Sequence[States]) -> Iterator[None]:
    """Draw what was drawn between two states of the generators; then leave them as they are now.

    Raises:
        _NotReplayable: the compiled graph drew otherwise (`fallback_random=False`).
    """
    if not drawn:
        yield
        return
    before, after = drawn
    with torch.random.fork_rng([device for device in before if device.type != "cpu"]):
        for device, state in before.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        yield
        now = _states(before)
    if not all(torch.equal(now[device], after[device]) for device in now):
        raise _NotReplayable("the compiled graph draws random numbers in another way than eager")


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
