"""Write the Python around a compiled graph as straight-line code, so that a call costs no loops.

`RuntimeCode` collects lines and the objects they name. `make_training_call` and
`make_inference_call` put the program's results together, `make_forward` and
`make_backward_inputs` are the two halves of the autograd function.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weft_aot.double_backward import generator_states, hold
from weft_aot.hook_order import reordering
from weft_aot.layout import memory_order
from weft_aot.records import (
    BackwardComponent,
    JointGraph,
    OutputPlan,
    SavedValue,
    ValueRef,
    ViewStep,
)
from weft_aot.walk import is_view


class RuntimeCode:
    """Lines of a function and the constants they use."""

    def __init__(self, header: str) -> None:
        self._lines = [header]
        self._scope: dict[str, Any] = {}
        self._names = itertools.count()

    def line(self, text: str) -> None:
        """Append one statement."""
        self._lines.append("    " + text)

    def constant(self, value: Any) -> str:
        """An expression for `value`: its literal if it has one, else a fresh global name."""
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        name = f"c{next(self._names)}"
        self._scope[name] = value
        return name

    def build(self) -> Callable[..., Any]:
        """Compile the lines and return the function."""
        text = "\n".join(self._lines) + "\n"
        exec(compile(text, "<weft_aot wrapper>", "exec"), self._scope)
        function: Callable[..., Any] = self._scope[
            self._lines[0].split("(")[0].removeprefix("def ")
        ]
        function.__doc__ = text
        return function


Node = tuple[Callable[..., Any], list[int], tuple[int, ...], set[int]]
"""The `apply` of an autograd function, the inputs and values that it makes gradients for, and those
of the inputs to hold."""
Links = Callable[[Sequence[Any]], list[torch.Tensor]]
"""What makes the links of a call's arguments (see `gradient_buckets`)."""


def make_inference_call(joint: JointGraph, run: Callable[..., Any]) -> Callable[..., Any]:
    """The callable of flat arguments: `run` makes the forward values, the rest is put together."""
    if not joint.mutations and _returns_values_as_they_are(joint):
        return run
    call = _wrapped(joint, "*args", [(run, "values = {}(*args)")])
    owning = getattr(run, "call_owning", None)
    given = any(plan.source is not None and plan.source.kind == "input" for plan in joint.plans)
    if owning is not None and not joint.mutations and not given:
        owned = _wrapped(joint, "args", [(owning, "values = {}(args)")])
        call.call_owning = owned  # type: ignore[attr-defined]
    return call


def make_training_call(
    joint: JointGraph,
    nodes: Sequence[Node],
    copied: Sequence[int],
    links: Links,
) -> Callable[..., Any]:
    """The callable of flat arguments: the first of `nodes` makes the forward values.

    Each node gives some of them their history. After the values come the `links` (see
    `gradient_buckets`), and a dict of copies of the arguments `copied`, in which the first node
    leaves what the program has drawn.
    """
    calls: list[tuple[Any, str]] = [(links, "values = {}(args)")]
    if copied or generator_states(joint):
        copy = lambda args: {index: _copy(args[index]) for index in copied}  # noqa: E731
        calls.append((copy, "values.append({}(args))"))
    seen = "args"
    if len(joint.order) > 1:
        calls.append((reordering(joint.order), "seen = {}(args)"))
        seen = "seen"
    for number, (apply, reached, linked, held) in enumerate(nodes):
        names = {index: f"h{number}_{index}" for index in held}
        calls += [(hold, f"{name} = {{}}({seen}[{index}])") for index, name in names.items()]
        given = "".join(f", {names.get(index, f'{seen}[{index}]')}" for index in reached)
        given += "".join(f", values[{index}]" for index in linked)
        calls.append((apply, f"{{}}(values, args{given})"))
    return _wrapped(joint, "*args", calls)


def _wrapped(joint: JointGraph, args: str, calls: Iterable[tuple[Any, str]]) -> Callable[..., Any]:
    """Write what makes the `values` of `args`, and the results of these."""
    source = RuntimeCode(f"def call({args}):")
    silent = [mutation.index for mutation in joint.mutations if mutation.silent]
    for index in silent:
        source.line(f"v{index} = args[{index}]._version")
    for function, text in calls:
        source.line(text.format(source.constant(function)))
    for index in silent:
        restore = source.constant(torch._C._autograd._unsafe_set_version_counter)
        source.line(f"{restore}((args[{index}],), (v{index},))")
    names: dict[int, str] = {}
    _make_results(source, [plan for plan in joint.plans if plan.early], names)
    for mutation in joint.mutations:
        argument = f"args[{mutation.index}]"
        if mutation.layout is not None:
            source.line(_replay(source, mutation.layout, argument))
        if mutation.value is not None and not mutation.silent:
            source.line(f"{argument}.copy_(values[{mutation.value}])")
    _make_results(source, joint.plans, names)
    source.line(f"return ({''.join(f'{names[id(plan)]}, ' for plan in joint.plans)})")
    return source.build()


def _returns_values_as_they_are(joint: JointGraph) -> bool:
    return len(joint.plans) == joint.num_values and all(
        plan.source == ValueRef("value", i) and plan.steps is None
        for i, plan in enumerate(joint.plans)
    )


def _make_results(source: RuntimeCode, plans: Iterable[OutputPlan], names: dict[int, str]) -> None:
    """Emit code for each plan without a name; equal plan objects are one result object."""
    for plan in plans:
        if id(plan) not in names:
            names[id(plan)] = _result(source, plan, f"r{len(names)}")


def _result(source: RuntimeCode, plan: OutputPlan, name: str) -> str:
    origin = source.constant(plan.constant) if plan.source is None else _expression(plan.source)
    if plan.steps is None:
        return origin
    origin += plan.apart
    if not plan.steps and not plan.apart:
        origin = f"{origin}.view_as({origin})"
    for step in plan.steps:
        origin = _replay(source, step, origin)
    source.line(f"{name} = {origin}")
    if plan.creation not in (None, torch._C._autograd.CreationMeta.DEFAULT):
        remember = source.constant(torch._C._autograd._set_creation_meta)
        source.line(f"{remember}({name}, {source.constant(plan.creation)})")
    return name


def _replay(source: RuntimeCode, step: ViewStep, origin: str) -> str:
    arguments = "".join(f", {_argument(source, argument)}" for argument in step.args)
    arguments += "".join(f", {k}={_argument(source, v)}" for k, v in step.kwargs.items())
    item = "" if step.item is None else f"[{step.item}]"
    return f"{source.constant(step.op)}({origin}{arguments}){item}"


def _argument(source: RuntimeCode, argument: Any) -> str:
    if isinstance(argument, ValueRef):
        return _expression(argument)
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_argument(source, element) for element in argument) + "]"
    return source.constant(argument)


def _expression(ref: ValueRef) -> str:
    holder = {"input": "args", "value": "values", "copy": "values[-1]"}[ref.kind]
    return f"{holder}[{ref.index}]"


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the layout that the graph knows."""
    size, stride, kind = tensor.shape, tensor.stride(), tensor.dtype
    return torch.empty_strided(size, stride, dtype=kind, device=tensor.device).copy_(tensor)


def make_forward(
    joint: JointGraph,
    part: BackwardComponent,
    kept: Iterable[tuple[int, Callable[[Any], Any] | None]],
    compiled: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """`forward(ctx, values, args, *inputs)` of a part's autograd function.

    It saves what the part's backward needs of the forward values and of the call's arguments, and
    returns the values that are differentiable through it. The first part's fills the list of values
    by `compiled`. `kept` are arguments to leave in ``ctx.kept`` as well, each through a function if
    one is given.
    """
    source = RuntimeCode("def forward(ctx, values, args, *inputs):")
    states = generator_states(joint)
    if compiled is not None:
        if states:
            source.line(f"before = {source.constant(states)}()")
        source.line(f"values[:0] = {source.constant(compiled)}(*args)")
        if states:
            source.line(f"values[-1]['drawn'] = before, {source.constant(states)}()")
        nodes = joint.results()
        for k in filter(lambda k: is_view(nodes[k]), joint.tangents):
            # Of memory that nobody knows of; autograd refuses writes to views made in a function.
            source.line(f"if values[{k}]._is_view(): values[{k}] = values[{k}].detach()")
    # Of saved results only aliases are unpacked one by one (`_UsedSavedTensors`), where some of the
    # gradients are missing; and parts that save each other's would never die.
    others = set(joint.tangents) - set(part.tangents if len(part.tangents) == 1 else ())
    if tensors := _saved(joint, part.saved, False, others):
        source.line(f"ctx.save_for_backward({tensors})")
    if symbols := _saved(joint, part.saved, True, others):
        source.line(f"ctx.symbols = ({symbols})")
    if len(part.tangents) > 1:
        shapes = "".join(f"values[{k}].shape, " for k in part.tangents)
        source.line(f"ctx.shapes = ({shapes})")
    if part.inner:
        places = "".join(
            f"{source.constant(weakref.ref)}(values[{part.tangents[place]}]), "
            for place, _ in part.inner
        )
        source.line(f"ctx.inner = ({places})")
    items = [f"args[{i}]" if f is None else f"{source.constant(f)}(args[{i}])" for i, f in kept]
    if items:
        source.line(f"ctx.kept = ({', '.join(items)},)")
    if states:
        source.line("ctx.drawn = values[-1]['drawn']")
    source.line("ctx.set_materialize_grads(False)")
    source.line(f"return ({''.join(f'values[{k}], ' for k in part.tangents)})")
    return source.build()


def _saved(joint: JointGraph, saved: Iterable[SavedValue], symbolic: bool, others: set[int]) -> str:
    """What is saved; results of `others`, detached."""
    fakes = [node.meta.get("val") for node in joint.placeholders()]
    refused = [isinstance(fake, torch.Tensor) and fake.is_inference() for fake in fakes]
    how = {ValueRef("value", index): ".detach()" for index in others}
    how |= {ValueRef("input", index): ".clone()" for index, is_one in enumerate(refused) if is_one}
    sources = (one.source for one in saved if one.symbolic is symbolic)
    return "".join(f"{_expression(source)}{how.get(source, '')}, " for source in sources)


def make_backward_inputs(part: BackwardComponent) -> Callable[..., Any]:
    """`backward_inputs(ctx, *grads)`: the flat arguments of a part's backward graph.

    A gradient that nobody asked for becomes zeros; one of another layout than the trace assumed
    is copied into that layout.
    """
    source = RuntimeCode("def backward_inputs(ctx, *grads):")
    given = part.backward.graph.find_nodes(op="placeholder")[len(part.saved) :]
    for place, node in enumerate(given):
        value = node.meta["val"]
        source.line(f"t{place} = grads[{place}]")
        if len(part.tangents) > 1:
            zeros, options = source.constant(torch.zeros), (value.dtype, value.device)
            dtype, device = map(source.constant, options)
            source.line(f"if t{place} is None:")
            source.line(
                f"    t{place} = {zeros}(ctx.shapes[{place}], dtype={dtype}, device={device})"
            )
        order = memory_order(value)
        if order == list(range(len(order))):
            source.line(f"if not t{place}.is_contiguous(): t{place} = t{place}.contiguous()")
        else:
            back = [order.index(dim) for dim in range(len(order))]
            source.line(f"t{place} = t{place}.permute({order}).contiguous().permute({back})")
    symbols = "*ctx.symbols, " if any(saved.symbolic for saved in part.saved) else ""
    tensors = "*ctx.saved_tensors, " if not all(saved.symbolic for saved in part.saved) else ""
    tangents = ", ".join(f"t{place}" for place in range(len(part.tangents)))
    source.line(f"return [{symbols}{tensors}{tangents}]")
    return source.build()


def make_backward_outputs(part: BackwardComponent) -> Callable[..., Any]:
    """`backward_outputs(ctx, outs)`: a gradient or None per argument of the part's forward."""
    source = RuntimeCode("def backward_outputs(ctx, outs):")
    found = [f"outs[{k}]" for k, index in enumerate(part.gradients) if index is not None]
    found += [f"outs[{len(part.gradients) + k}]" for k in range(len(part.links))]
    source.line(f"return (None, None, {', '.join(found) or 'None'},)")
    return source.build()
