"""Decide how each result of a traced program is put together at run time.

An autograd function must not return views of its inputs, nor several views of one hidden tensor:
autograd could not see that they share memory. So such results are left out of the graph's values
and are replayed as views after the call, from the input or from the hidden base, by the same view
ops that the program used. Results that are inputs are returned as the same objects.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from weft_core.errors import Unsupported
from weft_core.symnodes import SymValue, equal_sizes
from weft_core.tracing import AtenTracer

from weft_aot.inputs import (
    TracedInput,
    ValueTable,
    final_contents,
    find_symbol,
    restride,
    same_layout,
)
from weft_aot.records import OutputPlan, ValueRef, ViewStep
from weft_aot.subclass_tracing import storage_of
from weft_aot.walk import is_view, view_chain, view_root


class OutputPlanner:
    """Makes one `OutputPlan` per program result, inside an active trace.

    Args:
        tracer: the trace.
        inputs: the inputs of the program.
        values: table that receives the forward values.
    """

    def __init__(
        self, tracer: AtenTracer, inputs: Sequence[TracedInput], values: ValueTable
    ) -> None:
        self._tracer = tracer
        self._inputs = inputs
        self._values = values
        self._bases: dict[fx.Node, int] = {}
        self._lone: set[int] = set()
        tensors = [given for given in inputs if isinstance(given.fake, torch.Tensor)]
        self._input_at = {id(given.program): given.same_as for given in tensors}
        self._owners: dict[int, Any] = {
            storage_of(given.program): given.program for given in tensors
        }
        self._input_storage = {storage_of(given.program): given.same_as for given in tensors}

    def plan(self, results: Sequence[Any]) -> tuple[OutputPlan, ...]:
        """Plan all results; tensors among them are the program's own (functional wrappers)."""
        distinct = {id(result): result for result in results if isinstance(result, torch.Tensor)}
        sharing = Counter(map(storage_of, distinct.values()))
        self._lone = {storage for storage, count in sharing.items() if count == 1}
        if any(result.requires_grad for result in distinct.values()):
            # What a view was made of may be saved: they must count writes together.
            sharing.update(storage_of(t) for t in distinct.values() if t._base is not None)
        for result in sorted(distinct.values(), key=lambda t: not t.requires_grad):
            base: Any = result if result._base is None else result._base
            self._owners.setdefault(storage_of(result), base)
        for result in distinct.values():
            self._own_literal(result, sharing)
        plans: dict[int, OutputPlan] = {}
        for result in results:
            if id(result) not in plans:
                plans[id(result)] = self._plan_one(result, sharing)
        return tuple(plans[id(result)] for result in results)

    def _own_literal(self, result: torch.Tensor, sharing: Counter[int]) -> None:
        """Copy the literal that `result` shares memory with: each call makes a new one."""
        recorder = self._tracer.recorder
        node = recorder.node_of(self._tracer.value(result))
        root = view_root(node)
        if str(root.target) not in recorder.literals:
            return
        if node is root and sharing[storage_of(result)] == 1:
            return
        fake = root.meta["val"]
        copy = recorder.node_of(fake)
        if copy is root:
            with recorder.graph.inserting_after(root):
                copy = recorder.graph.call_function(torch.ops.aten.clone.default, (root,))
            root.replace_all_uses_with(copy, lambda user: user is not copy)
            recorder.bind(copy, fake)
        for tensor in (result, result if result._base is None else result._base):
            pure = self._tracer.value(tensor)
            if recorder.node_of(pure) is root:
                recorder.alias(pure, fake)

    def _plan_one(self, result: Any, sharing: Counter[int]) -> OutputPlan:
        if isinstance(result, SymValue):
            return OutputPlan(find_symbol(result, self._inputs, self._values))
        if not isinstance(result, torch.Tensor):
            return OutputPlan(None, constant=result)
        if id(result) in self._input_at:
            return OutputPlan(ValueRef("input", self._input_at[id(result)]))
        pure = self._tracer.value(result)
        node = self._tracer.recorder.node_of(pure)
        if node.op == "get_attr":
            return self._constant(str(node.target))
        owner = self._input_storage.get(storage_of(result))
        if owner is not None:
            return self._view_of_input(result, node, owner)
        if sharing[storage_of(result)] > 1:
            return self._view_of_hidden_base(result, node)
        return OutputPlan(ValueRef("value", self._values.add(result, pure)))

    def _constant(self, name: str) -> OutputPlan:
        recorder = self._tracer.recorder
        # A tensor literal is a new tensor on every call; an attribute is always the same one.
        steps = (
            (ViewStep(torch.ops.aten.clone.default, (), {}),) if name in recorder.literals else None
        )
        return OutputPlan(None, recorder.constants[name], steps)

    def _view_of_input(self, result: torch.Tensor, node: fx.Node, owner: int) -> OutputPlan:
        node_of, base = self._tracer.recorder.node_of, self._inputs[owner]
        _refuse_function(result, base.history, f"input {owner}")
        if result.requires_grad and result._base is not base.program:
            raise Unsupported(
                "history-apart",
                f"a result in the memory of input {owner} has a history of its own (`.data`)",
                "write to the argument itself, or to a tensor with memory of its own",
            )
        whole = final_contents(self._tracer, base)
        if not same_layout(whole, base.start):
            raise Unsupported(
                "input-relaid",
                f"functionalisation lays the written input {owner} out anew",
                "write to a tensor without gaps or overlap",
            )
        chain = [node_of(base.start), *view_chain(node_of(whole))]
        roots = {one for one in chain if same_layout(one.meta["val"], base.start)}
        steps = self._chain(node, roots.__contains__)
        if steps is None:
            pure = self._tracer.value(result)
            steps = (restride(pure, whole, self._inputs, self._values),)
        view, early = self._view(result, ValueRef("input", owner), steps), base.whole is not None
        if early and result.requires_grad and _is_one_of_many(result):
            raise Unsupported(
                "view-refused",
                f"one of several views of input {owner}, which gets another layout in place",
                "index or slice it instead of splitting it",
            )
        return dataclasses.replace(view, early=early)

    def _view_of_hidden_base(self, result: torch.Tensor, node: fx.Node) -> OutputPlan:
        root = view_root(node)
        base: Any = root.meta["val"]
        if result.requires_grad:
            base = result if result._base is None else result._base
            if storage_of(result) in self._lone and _by_function(result.grad_fn, base.grad_fn):
                return self._view_by_function(result)
            _refuse_function(result, base.grad_fn, "what it is called with")
            root = self._tracer.recorder.node_of(self._tracer.value(base))
        index = self._base_index(root, base)
        steps = self._chain(node, lambda candidate: candidate is root)
        if steps is None:
            pure = self._tracer.value
            steps = (restride(pure(result), pure(base), self._inputs, self._values),)
        if result is base:
            return OutputPlan(ValueRef("value", index))
        return self._view(result, ValueRef("value", index), steps)

    def _view_by_function(self, result: torch.Tensor) -> OutputPlan:
        """Copy a lone view that an autograd.Function gives, so that nothing shares its memory.

        The gradient of the view is not that of its base. Writes to it are refused as in eager.
        """
        pure = self._tracer.value(result)
        copy = pure.clone()
        if not equal_sizes(copy.stride(), pure.stride()):
            _refuse_function(result, None, "what it is called with")
        creation = torch._C._autograd._get_creation_meta(result)
        return OutputPlan(
            ValueRef("value", self._values.add(result, copy)), None, (), "", creation, True
        )

    def _view(
        self, result: torch.Tensor, source: ValueRef, steps: tuple[ViewStep, ...]
    ) -> OutputPlan:
        owner: torch.Tensor = self._owners[storage_of(result)]
        known = not owner.requires_grad and result._base is owner
        apart: Any = ""
        if not result.requires_grad and not known:
            apart = ".detach()" if _counted_together(result, owner) else ".data"
        told = bool(steps) and (steps[-1].item is not None or not torch.is_grad_enabled())
        untold = result._is_view() and not told
        creation = torch._C._autograd._get_creation_meta(result) if untold else None
        return OutputPlan(source, None, steps, apart, creation, result.grad_fn is not None)

    def _base_index(self, root: fx.Node, base: Any) -> int:
        """The forward value of a shared base; the tensor that autograd knows takes precedence."""
        if root not in self._bases:
            self._bases[root] = self._values.add(base, self._tracer.value(base))
        elif base.requires_grad:
            self._values.programs[self._bases[root]] = base
        return self._bases[root]

    def _chain(
        self, node: fx.Node, is_root: Callable[[fx.Node], bool]
    ) -> tuple[ViewStep, ...] | None:
        """The views from a root to `node`, outermost last; None when they are not all views."""
        steps: list[ViewStep] = []
        while not is_root(node):
            item: Any = None
            if node.target is operator.getitem:
                node, item = node.args  # type: ignore[assignment]
            if not is_view(node):
                return None
            arguments: Any = fx.map_arg(node.args[1:], self._symbol_of_node)
            kwargs: Any = fx.map_arg(dict(node.kwargs), self._symbol_of_node)
            steps.append(ViewStep(node.target, arguments, kwargs, item))
            node = node.args[0]  # type: ignore[assignment]
        return tuple(reversed(steps))

    def _symbol_of_node(self, node: fx.Node) -> Any:
        return find_symbol(node.meta["val"], self._inputs, self._values)


def _counted_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to `other` counts as one to `one`."""
    if one.is_inference() or other.is_inference():
        return True
    before, set_version = other._version, torch._C._autograd._unsafe_set_version_counter
    set_version((other,), (before + one._version + 1,))
    together = one._version == other._version
    set_version((other,), (before,))
    return together


def _is_one_of_many(result: torch.Tensor) -> bool:
    """Say whether a view is of a split or the like: autograd refuses writes beside it."""
    meta = torch._C._autograd
    made = meta._get_creation_meta(result) if result._is_view() else None
    return made == meta.CreationMeta.MULTI_OUTPUT_NODE


def _refuse_function(result: torch.Tensor, history: Any, viewed: str) -> None:
    if _by_function(result.grad_fn, history):
        raise Unsupported(
            "function-of-views",
            f"an autograd.Function gives a view of {viewed}, with a gradient of its own",
            "return a tensor with memory of its own",
        )


def _by_function(grad_fn: Any, end: Any) -> bool:
    """Say whether a history leads through an autograd.Function before it ends."""
    while grad_fn is not None and grad_fn is not end:
        if isinstance(grad_fn, torch.autograd.function.BackwardCFunction):
            return True
        grad_fn = grad_fn.next_functions[0][0] if grad_fn.next_functions else None
    return False
