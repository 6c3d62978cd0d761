"""Trace a program's forward and backward into one functional aten graph.

The program runs once on functional fakes, so autograd builds its usual graph over them; then
`torch.autograd.grad` runs inside the same trace and its ops are recorded too. Everything the
run-time wrapper must know (which inputs are written, which results alias what) is read off the
fakes between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from weft_core.errors import Unsupported
from weft_core.fake import detect_mode, fake_mode, to_fake
from weft_core.tracing import Decompositions, Tracer, write_back

from weft_aot.cleanup import clean
from weft_aot.layout import memory_order
from weft_aot.outputs import OutputPlanner, ValueTable
from weft_aot.records import JointGraph, Mutation


def trace_joint(
    fn: Callable[..., Any],
    args: Sequence[Any],
    decompositions: Decompositions | None = None,
    *,
    same_as: Sequence[int] | None = None,
) -> JointGraph:
    """Trace `fn` at `args` under the current grad mode.

    Args:
        fn: fx.GraphModule or function of positional arguments; results are flattened.
        args: tensors (real, or fake in one mode), SymInts and Python numbers. Gradients are made
            for those that require grad.
        decompositions: op overload -> Python function, used in forward and backward.
        same_as: for each argument the index of the first one that is the same object, where the
            caller knows better than the identity of `args`.

    Raises:
        Unsupported: the program changes the shape of an input or does something with it that a
            functional graph cannot express.
    """
    mode = detect_mode(args) or fake_mode()
    if same_as is None:
        first = {id(arg): i for i, arg in reversed(list(enumerate(args)))}
        same_as = [
            first[id(arg)] if isinstance(arg, torch.Tensor) else i for i, arg in enumerate(args)
        ]
    fakes = [to_fake(mode, arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    return _JointTrace(fn, fakes, list(same_as), mode, decompositions or {}).run()


class _JointTrace:
    """One run of `trace_joint`, step by step in `run`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        fakes: list[Any],
        same_as: list[int],
        mode: FakeTensorMode,
        decompositions: Decompositions,
    ) -> None:
        self.fn, self.fakes, self.same_as, self.mode = fn, fakes, same_as, mode
        self.tracer = Tracer(mode, decompositions)
        self.leaves: list[Any] = []
        self.inputs: list[Any] = []
        self.starts: list[Any] = []
        self.histories: list[Any] = []
        self.storages: list[int] = []
        self.values = ValueTable()

    def run(self) -> JointGraph:
        with self.tracer.active():
            for index in range(len(self.fakes)):
                self._add_input(index)
            results = self._run_program()
        with self.tracer.active():
            mutations = self._find_mutations()
            planner = OutputPlanner(self.tracer, self.inputs, self.starts, self.values)
            plans = planner.plan(results)
        tangents = self._tangent_indices()
        fake_tangents = [_tangent_like(self.mode, self.values.pures[k]) for k in tangents]
        with self.tracer.active():
            gradients = self._differentiate(tangents, fake_tangents)
        write_back(
            self.tracer.recorder,
            [
                (self.fakes[m.index], self.tracer.value(self.inputs[m.index]))
                for m in mutations
                if m.value is None
            ],
        )
        module = self.tracer.finish(self.values.pures + [grad for _, grad in gradients])
        clean(module, len(self.values.pures))
        return JointGraph(
            module,
            num_inputs=len(self.fakes),
            num_values=len(self.values.pures),
            tangents=tuple(tangents) if gradients else (),
            gradients=tuple(index for index, _ in gradients),
            plans=plans,
            mutations=tuple(mutations),
        )

    def _add_input(self, index: int) -> None:
        fake, first = self.fakes[index], self.same_as[index]
        leaf = self.tracer.input(fake)
        if first != index:
            self.leaves.append(self.leaves[first])
            self.inputs.append(self.inputs[first])
            self.starts.append(self.starts[first])
            self.histories.append(self.histories[first])
            self.storages.append(self.storages[first])
            return
        program = leaf
        if isinstance(fake, torch.Tensor) and fake.requires_grad and not fake.is_leaf:
            # In-place ops are legal on an intermediate but not on a leaf, so give the program a
            # copy; in the graph the copy is the input itself.
            with torch.enable_grad():
                program = leaf.clone()
            self.tracer.recorder.alias(self.tracer.value(program), fake)
        self.leaves.append(leaf)
        self.inputs.append(program)
        self.starts.append(self.tracer.value(program))
        self.histories.append(getattr(program, "grad_fn", None))
        is_tensor = isinstance(program, torch.Tensor)
        self.storages.append(program.untyped_storage()._cdata if is_tensor else 0)

    def _run_program(self) -> list[Any]:
        try:
            if isinstance(self.fn, fx.GraphModule):
                results = self.tracer.interpret(self.fn, self.inputs)
            else:
                results = self.fn(*self.inputs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise Unsupported(
                "data-dependent-graph",
                f"{error.func} makes a result whose shape or value depends on data",
                "keep it out of the compiled graph, or make a size dynamic",
            ) from error
        except RuntimeError as error:
            if not str(error).startswith("Found a custom (non-ATen) operator"):
                raise
            raise Unsupported(
                "mutating-custom-op",
                str(error),
                "give the operator a variant that returns its result",
            ) from error
        leaves = pytree.tree_leaves(results, lambda value: value is None)
        return [self.tracer.wrap(leaf) for leaf in leaves]

    def _find_mutations(self) -> list[Mutation]:
        found = []
        for index, program in enumerate(self.inputs):
            if self.same_as[index] != index or not isinstance(program, torch.Tensor):
                continue
            self._refuse_rebinding(index)
            final, start = self.tracer.value(program), self.starts[index]
            if final is start:
                continue
            if final.shape != start.shape or final.stride() != start.stride():
                raise Unsupported(
                    "input-metadata-mutation",
                    f"the program changes the shape or strides of its input {index} in place",
                    "return the reshaped tensor instead of changing the argument",
                )
            if program.grad_fn is self.histories[index]:
                # Autograd saw nothing of the write: a buffer, or done under no_grad or detached.
                found.append(Mutation(index, None))
            else:
                found.append(Mutation(index, self.values.add(program, final)))
        return found

    def _refuse_rebinding(self, index: int) -> None:
        """Changes of an input that are neither its contents nor its shape have no graph form."""
        program = self.inputs[index]
        marked = (
            program.grad_fn is None and program.requires_grad != self.fakes[index].requires_grad
        )
        if marked or program.untyped_storage()._cdata != self.storages[index]:
            raise Unsupported(
                "input-rebinding",
                f"the program sets .data or .requires_grad of its input {index}",
                "do it outside the compiled function",
            )

    def _tangent_indices(self) -> list[int]:
        if not torch.is_grad_enabled():
            return []
        return [
            k
            for k, program in enumerate(self.values.programs)
            if isinstance(program, torch.Tensor) and program.requires_grad
        ]

    def _differentiate(
        self, tangents: list[int], fake_tangents: list[torch.Tensor]
    ) -> list[tuple[int, Any]]:
        """Run autograd in the trace: (input index, pure gradient or None) per input."""
        wanted = [
            i
            for i, fake in enumerate(self.fakes)
            if isinstance(fake, FakeTensor) and fake.requires_grad and self.same_as[i] == i
        ]
        if not tangents or not wanted:
            return []
        seeds = [
            self.tracer.input(fake, f"tangents_{i + 1}") for i, fake in enumerate(fake_tangents)
        ]
        # The engine does not restore the forward's autocast in the backward; neither do we.
        try:
            with torch._C._DisableAutocast():
                grads = torch.autograd.grad(
                    [self.values.programs[k] for k in tangents],
                    [self.leaves[i] for i in wanted],
                    seeds,
                    allow_unused=True,
                )
        except RuntimeError as error:
            # Eager would say so when, and only if, the program's backward is called.
            raise Unsupported(
                "backward-fails",
                f"the program's backward raises: {error}",
                "call it without compiling to see where",
            ) from error
        return [(i, self.tracer.value(grad)) for i, grad in zip(wanted, grads, strict=True)]


def _tangent_like(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    """A fake gradient of `value`, in the layout that the run-time wrapper will give it."""
    order = memory_order(value)
    back = [order.index(dim) for dim in range(len(order))]
    with mode, torch.no_grad():
        shape = [value.shape[dim] for dim in order]
        return torch.empty(shape, dtype=value.dtype, device=value.device).permute(back)
