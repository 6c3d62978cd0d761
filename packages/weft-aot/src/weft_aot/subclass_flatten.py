"""Programs with tensors of wrapper classes, as programs of the plain tensors inside.

`FlatProgram` takes the inner tensors, builds the arguments of them, runs the program and flattens
its results. It is traced and compiled like any other program. Autograd wants one gradient for an
argument, which may be of another class. So each argument has *carriers*: empty tensors with the
shapes of the inner tensors of its gradient, whose gradients the backward computes. The first trace
finds these shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree
from weft_core import jagged
from weft_core.errors import Unsupported
from weft_core.fake import detect_mode
from weft_core.jagged import is_jagged
from weft_core.symnodes import SymValue
from weft_core.tensor_subclass import SubclassLayout, is_wrapper_subclass, leaves
from weft_core.tensor_versions import version_of

from weft_aot.double_backward import refusal
from weft_aot.records import JointGraph
from weft_aot.subclass_tracing import FunctionalTensor, storage_of

Tensors = Sequence[Any]


def has_subclasses(gm: fx.GraphModule, fakes: Sequence[Any]) -> bool:
    """Whether a program takes tensors of wrapper classes, or makes some."""
    made = (node.meta.get("example_value") for node in gm.graph.nodes)
    return any(is_wrapper_subclass(type(value)) for value in (*fakes, *made))


class _Step(torch.autograd.Function):
    """What `make` makes, as if of `inputs`, to which `back` leads its gradients."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Any], back: Callable[..., Any], *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.back, made = back, make()
        whole = [made] if isinstance(made, torch.Tensor) else made
        ctx.likes = [(one.shape, one.dtype, one.device) for one in whole]
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        rows = zip(grads, ctx.likes, strict=True)
        full = [torch.zeros(n, dtype=t, device=d) if g is None else g for g, (n, t, d) in rows]
        return None, None, *ctx.back(*full)


def _step(make: Callable[[], Any], back: Callable[..., Any], inputs: Tensors) -> Any:
    return _Step.apply(make, back, *inputs)  # type: ignore[no-untyped-call]


def _inside(tensor: Any) -> Tensors:
    """What is inside of a tensor, for autograd, too."""
    layout = SubclassLayout.of(tensor)
    if layout is None:
        return [tensor]
    inside, moving, whole = leaves(tensor), layout.moving(), layout.for_gradients()
    aliases = [leaf.detach() for leaf in compress(inside, moving)]

    def back(*grads: Any) -> Tensors:
        return [_put(whole, _merge(inside, moving, grads))]

    return _merge(inside, moving, _step(lambda: tuple(aliases), back, [tensor]))


def _merge(inside: Tensors, moving: Sequence[bool], given: Tensors) -> Tensors:
    """What is inside of a tensor, with given ones in the place of those that move."""
    rest = iter(given)
    return [next(rest) if one else leaf for leaf, one in zip(inside, moving, strict=True)]


def _refuse(grad: Any) -> Any:
    raise RuntimeError(
        f"the gradient of a compiled function's result is a {type(grad).__name__} that is not put "
        "together like the result, and the program cannot run again: run this part uncompiled"
    )


def _put(
    layout: SubclassLayout | None, inner: Tensors, others: Tensors = (), again: Any = None
) -> Any:
    """A tensor of what is inside, for autograd, too.

    Of a gradient that is not put together like the tensor `again` makes those of `others`.
    """
    if layout is None:
        return inner[0]

    def back(grad: Any) -> Tensors:
        whole = layout.for_gradients()
        grad = grad if again else whole.fitted(grad)
        if not whole.matches(SubclassLayout.of(grad)):
            return [*[None] * len(inner), *(again or _refuse)(grad)]
        moving = layout.moving()
        found = _merge([None] * len(moving), moving, [*compress(_inside(grad), _which(grad))])
        return [*found, *[None] * len(others)]

    return _step(lambda: _build(layout, inner), back, [*inner, *others])


def _which(tensor: Any) -> Sequence[bool]:
    """For what is inside of a tensor, whether it is data."""
    layout = SubclassLayout.of(tensor)
    return [True] if layout is None else layout.moving()


def _build(layout: SubclassLayout | None, inner: Tensors) -> Any:
    with torch.no_grad():
        aliases = [tensor.detach() if tensor.requires_grad else tensor for tensor in inner]
        return aliases[0].detach() if layout is None else layout.build(iter(aliases))


@dataclasses.dataclass(eq=False)
class _Argument:
    """One argument of a program.

    Attributes:
        fake: its fake.
        same_as: the index of the first one that is the same object.
        layout: None for one that is plain.
        gradient: the layout of its gradient; None for a plain one.
        carriers: tensors of which each has the shape, dtype and device.
    """

    fake: Any
    same_as: int
    layout: SubclassLayout | None
    gradient: SubclassLayout | None = None
    carriers: Sequence[torch.Tensor] = ()

    def expect(self, gradient: SubclassLayout | None, inside: Sequence[Any]) -> None:
        """Let the gradient be put together of tensors like these.

        Raises:
            Unsupported: where its sizes vary, and not as those of the argument.
        """
        moving = gradient.moving() if gradient else [True]
        self.gradient, self.carriers = gradient, [*compress(inside, moving)]
        alike = self.layout is not None and self.layout.matches(self.gradient)
        varies = any(isinstance(n, SymValue) for t in self.carriers for n in t.shape)
        varies = varies or not all(moving)
        if varies and self.gradient is not None and not alike:
            raise _refusal(self.fake, "has a gradient whose sizes vary")

    def carry(self, inner: Tensors, carriers: Tensors, others: list[Any]) -> Any:
        """The argument, carriers in its place for autograd; `others` gets odd gradients."""

        def back(grad: Any) -> Tensors:
            found = SubclassLayout.of(grad)
            if not (self.gradient.matches(found) if self.gradient else found is None):
                others.append((self, grad))
                return [None] * len(carriers)
            if not jagged.are_consistent([grad, made]):
                raise _refusal(self.fake, "has a gradient with offsets of its own")
            return [*compress(_inside(grad), _which(grad))]

        made = _step(lambda: _build(self.layout, inner), back, carriers)
        if isinstance(self.fake, torch.nn.Parameter):
            made._is_param = True
        return made

    def carriers_of(self, tensor: Any) -> Tensors:
        """The carriers for a call."""
        layout, inside = self.gradient, self.carriers
        if layout is None:
            inside = [tensor]
        elif self.layout is not None and self.layout.matches(layout):
            layout, inside = SubclassLayout.of(tensor), leaves(tensor)
        moving = layout.moving() if layout else [True]
        like = [*compress(inside, moving)]
        fixed = _merge(inside, moving, [None] * len(like))

        def back(*grads: Any) -> Tensors:
            return [_put(layout, _merge(fixed, moving, grads))]

        found: Tensors = _step(lambda: tuple(map(_empty, like)), back, [tensor])
        return found


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)


def _refusal(tensor: Any, what: str) -> Unsupported:
    name = type(tensor).__name__
    return Unsupported("wrapper-class", f"a {name} {what}", "run this part uncompiled")


class FlatProgram:
    """A program of plain tensors that runs `gm`.

    Args:
        gm: the program.
        fakes: its arguments.
        same_as: for each argument the first one that is the same object.
    """

    def __init__(self, gm: fx.GraphModule, fakes: Sequence[Any], same_as: Sequence[int]) -> None:
        self._gm = gm
        rows = zip(fakes, same_as, strict=True)
        self._arguments = [_Argument(fake, first, SubclassLayout.of(fake)) for fake, first in rows]
        for arg in self._arguments:
            if arg.layout and arg.fake.requires_grad:
                inside = leaves(arg.fake)
                data = compress(inside, arg.layout.moving())
                floats = all(leaf.is_floating_point() for leaf in data)
                arg.expect(*((arg.layout, inside) if floats else (None, [arg.fake])))
        self._results: list[tuple[Any, int, bool]] = []
        self._written: list[int] = []
        self._others: list[tuple[_Argument, Any]] = []  # gradients of other layouts than expected

    def trace(self, trace: Callable[[list[Any]], Any]) -> Any:
        """Trace at flat fakes, until the gradients are as expected.

        Raises:
            Unsupported: the classes' handlers cannot be traced, or do what a graph cannot express.
        """
        mode = detect_mode([arg.fake for arg in self._arguments])
        while True:
            self._others.clear()
            try:
                flat, _ = self.flatten([arg.fake for arg in self._arguments])
                with mode or contextlib.nullcontext():
                    likes = [like for arg in self._arguments for like in arg.carriers]
                    flat += [_empty(like).requires_grad_() for like in likes]
                traced = trace(flat)
                if not self._others:
                    return traced
            except Exception as error:
                if not self._others and isinstance(error, Unsupported):
                    raise
                if not self._others:
                    raise Unsupported(
                        "wrapper-dispatch",
                        f"the program cannot be traced through its tensors' classes: {error}",
                        "let the classes handle what the program does on fake tensors, too",
                    ) from error
            for arg, gradient in self._others:
                arg.expect(SubclassLayout.of(gradient), leaves(gradient))

    def flatten(self, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What is inside of arguments: as the compiled program takes it, and as it is."""
        flat, own = list[Any](), list[Any]()
        for arg, value in zip(self._arguments, given, strict=True):
            inside = [value] if arg.layout is None else arg.layout.leaves(value)
            own += inside
            which = [True] if arg.layout is None else arg.layout.moving()
            moving = [one and bool(arg.carriers) for one in which]
            flat += _merge(inside, moving, [leaf.detach() for leaf in compress(inside, moving)])
        return flat, own

    def __call__(self, *flat: Any, run: Callable[..., Any] | None = None) -> list[Any]:
        """Run the program at flat arguments, then carriers; a result's numbers come behind it.

        Args:
            run: runs the graph module at arguments for a trace, which notes how results are made.
        """
        count, given = sum(len(leaves(arg.fake)) for arg in self._arguments), list[Any]()
        rest, behind = iter(flat[:count]), iter(flat[count:])
        for index, arg in enumerate(self._arguments):
            inner = [next(rest) for _ in leaves(arg.fake)]
            carriers = [next(behind) for _ in arg.carriers]
            if arg.same_as != index:
                given.append(given[arg.same_as])
            elif carriers:
                with torch.enable_grad():
                    given.append(arg.carry(inner, carriers, self._others))
            else:
                given.append(_build(arg.layout, inner) if arg.layout else inner[0])
        before = list(map(_state, given))
        results = run(self._gm, given) if run is not None else self._gm(*given)
        results = pytree.tree_leaves(results, lambda value: value is None)
        if run is not None:
            self._check(given, before, results)
        self._results, made = [], list[Any]()
        for result in results:
            made += self._take_apart(result, given)
        first: dict[int, int] = {}
        self._first = [first.setdefault(id(leaf), at) for at, leaf in enumerate(made)]
        return made

    def check_gradients(self, gradients: Iterable[tuple[int, Any]]) -> None:
        """Note plain arguments that have a gradient of a wrapper class: the trace begins again."""
        owners = [arg for arg in self._arguments for _ in leaves(arg.fake)]
        for index, gradient in gradients:
            if is_wrapper_subclass(type(gradient)):
                self._others.append((owners[index], gradient))

    def _take_apart(self, result: Any, given: list[Any]) -> Tensors:
        rows = enumerate(zip(self._arguments, given, strict=True))
        same = (i for i, (a, one) in rows if one is result and (a.layout or a.carriers))
        layout, index = SubclassLayout.of(result), next(same, None)
        if index is not None:
            self._results.append((index, 0, False))
            return []
        self._results.append((layout, len(leaves(result)), getattr(result, "requires_grad", False)))
        if layout is None:
            return [result]
        return [*(_inside(result) if result.requires_grad else leaves(result)), *layout.numbers()]

    def _check(self, given: list[Any], before: list[Any], results: list[Any]) -> None:
        """Note which versions changed.

        Raises:
            Unsupported: the program does with tensors of these classes what autograd or a class
                records, or results share memory in a way that autograd would know of.
        """
        self._written, taken = [], set[int]()
        for index, (arg, value, old) in enumerate(zip(self._arguments, given, before, strict=True)):
            if not (arg.layout or arg.carriers):
                continue
            (version, *now), (first, *state) = _state(value), old
            if not all(a is b for a, b in zip(now, state, strict=True)):
                raise _refusal(value, "is changed where autograd sees it, or its class")
            if arg.layout:
                taken |= set(map(storage_of, leaves(value)))
                self._written += [index] if version != first and arg.same_as == index else []
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        tensors = [r for r in tensors if not any(r is one for one in given)]
        inside = {id(leaf): leaf for r in tensors for leaf in leaves(r)}
        sharing = Counter(map(storage_of, inside.values()))
        if not jagged.are_consistent([*given, *results]) or jagged.has_fatal_backward(tensors):
            raise _refusal(tensors[0], "has the ragged size of other offsets, or was split")
        views = [r for r in tensors if r.requires_grad and isinstance(r, FunctionalTensor)]
        if any(storage_of(r) in taken for r in views):
            raise _refusal(views[0], "that is returned is a view of what is inside of an argument")
        plain = [value for value in given if isinstance(value, torch.Tensor)]
        outside = taken.union(*(map(storage_of, leaves(value)) for value in plain))
        for result in filter(lambda r: is_wrapper_subclass(type(r)), tensors):
            found, view = [*compress(leaves(result), _which(result))], is_jagged(type(result))
            memory = set(map(storage_of, found))
            shared: Any = memory & (outside if view else taken)
            shared = shared or any(sharing[storage] > 1 for storage in memory)
            known = view and result.requires_grad  # its values may have a history of their own
            history = (not known and any(leaf.requires_grad for leaf in found)) or (
                result.requires_grad and not all(leaf.is_floating_point() for leaf in found)
            )
            if shared or history or (result.requires_grad and result.is_leaf):
                raise _refusal(result, "that is returned shares memory or history with others")
            context: Any = pytree.tree_leaves(SubclassLayout.of(result).context)  # type: ignore[union-attr]
            if any(isinstance(one, SymValue | torch.Tensor) for one in context):
                raise _refusal(result, "has sizes that vary, or tensors, in its context")

    def _again(self, given: Sequence[Any], reached: Sequence[int], index: int, grad: Any) -> Any:
        """The gradients of arguments, by the program as it is, of that of a result."""
        with torch.enable_grad():
            same = {id(given[i]): given[i].view_as(given[i]) for i in reached}
            made = self._gm(*[same.get(id(one), one) for one in given])
            result = pytree.tree_leaves(made, lambda value: value is None)[index]
        wanted, create = [same[id(given[i])] for i in reached], torch.is_grad_enabled()
        return torch.autograd.grad(result, wanted, grad, create_graph=create, allow_unused=True)

    def wrap(self, compiled: Callable[..., Any], joint: JointGraph) -> Callable[..., Any]:
        """The callable of the program's own arguments, of one of the flat ones."""
        arguments, results, written = self._arguments, self._results, self._written
        first, rows = self._first, [*enumerate(arguments)]
        owners = [at for at, arg in rows for _ in leaves(arg.fake)]
        owners += [at for at, arg in rows for _ in arg.carriers]
        reached = sorted({owners[index] for index in joint.gradients})
        cast = torch._C._is_any_autocast_enabled()
        if cast or refusal(joint, {mutation.index for mutation in joint.mutations}):
            reached = []  # it cannot run again

        def call(*given: Any) -> list[Any]:
            flat, own = self.flatten(given)
            originals = {id(a): b for a, b in zip(flat, own, strict=True)}
            for arg, value in zip(arguments, given, strict=True):
                if arg.carriers:
                    flat += arg.carriers_of(value)
            found, made = compiled(*flat), list[Any]()
            rest = iter([found[at] for at in first])
            others = [given[index] for index in reached]
            versions = [version_of(one) for one in given if isinstance(one, torch.Tensor)]

            def again(index: int, grad: Any) -> Any:
                now = [version_of(one) for one in given if isinstance(one, torch.Tensor)]
                if now != versions:
                    _refuse(grad)
                return self._again(given, reached, index, grad)

            for place, (how, count, requires_grad) in enumerate(results):
                inner = [next(rest) for _ in range(count)]
                if isinstance(how, int):
                    made.append(given[how])
                elif how is None:
                    made.append(originals.get(id(inner[0]), inner[0]))
                else:
                    layout = how.at(iter([next(rest) for _ in how.numbers()]))
                    way = others, partial(again, place) if reached else None
                    made.append(
                        _put(layout, inner, *way) if requires_grad else _build(layout, inner)
                    )
            for index in written:
                increment_version(given[index])
            return made

        return call


def _state(value: Any) -> tuple[Any, ...]:
    """What a program may not change of an argument of a wrapper class, its version first."""
    if not isinstance(value, torch.Tensor):
        return ()
    return version_of(value), value.grad_fn, value.requires_grad, *leaves(value)
