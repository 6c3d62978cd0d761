"""Trace a program's forward and backward into one functional aten graph.

The program runs once on functional fakes, so autograd builds its usual graph over them; then
`torch.autograd.grad` runs inside the same trace and its ops are recorded too. Everything the
run-time wrapper must know (which inputs are written, which results alias what) is read off the
fakes between the two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from weft_core.errors import Unsupported
from weft_core.fake import mode_for, to_fake
from weft_core.tracing import AtenTracer, Decompositions, write_back

from weft_aot.cleanup import clean
from weft_aot.constant_gradients import follow_zeros, tie_constants
from weft_aot.inputs import (
    InputsReshaped,
    TracedInput,
    ValueTable,
    add_inputs,
    final_contents,
    find_mutations,
    refuse_reshaping,
)
from weft_aot.layout import memory_order
from weft_aot.outputs import OutputPlanner
from weft_aot.records import JointGraph
from weft_aot.subclass_flatten import FlatProgram
from weft_aot.subclass_tracing import SubclassTracer
from weft_aot.walk import reached


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
    mode = mode_for(args)
    same_as = first_occurrences(args) if same_as is None else same_as
    fakes = [to_fake(mode, arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    trace = functools.partial(_JointTrace, fn, mode, decompositions or {})
    # A trace counts its writes on the fakes, views of which the caller may look at later.
    counted = tuple(t for t in fakes if isinstance(t, torch.Tensor) and not t.is_inference())
    with torch.autograd._unsafe_preserve_version_counter(counted):  # type: ignore[attr-defined]
        return _trace(trace, fakes, same_as)


def _trace(
    trace: Callable[..., _JointTrace], fakes: Sequence[Any], same_as: Sequence[int]
) -> JointGraph:
    """Trace, in inference mode at last if the program writes to tensors of that."""
    try:
        return _trace_again_if_reshaped(trace, fakes, same_as)
    except RuntimeError as error:
        if str(error).startswith("A view was created in"):  # which eager need not come to say
            raise Unsupported("view-refused", str(error), "write where views are made") from error
        if not str(error).startswith("Inplace update to inference tensor"):
            raise
    trace = functools.partial(trace, block=contextlib.nullcontext)
    return _trace_again_if_reshaped(trace, fakes, same_as)


def _trace_again_if_reshaped(
    trace: Callable[..., _JointTrace], fakes: Sequence[Any], same_as: Sequence[int]
) -> JointGraph:
    """Trace; again, with aliases that keep their layout, if the program changes that of inputs."""
    try:
        return trace().run(fakes, same_as)
    except InputsReshaped as found:
        return trace(reshaped=found.indices).run(fakes, same_as)


def first_occurrences(values: Sequence[Any]) -> list[int]:
    """For each value the index of the first one that is the same tensor; its own for others."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(value), i) if isinstance(value, torch.Tensor) else i
        for i, value in enumerate(values)
    ]


_REFUSED = {
    "Found a custom (non-ATen) operator": (
        "mutating-custom-op", "give the operator a variant that returns its result",
    ),
    "Attempted to resize a view": ("resized-view", "make a tensor of the final size"),
    "Cannot set version_counter for inference tensor": (
        "inference-write", "write to tensors of inference mode alone, or to none of them",
    ),
    "encountered a mutation on a view chain": (
        "strided-write", "write through views that are made without as_strided",
    ),
    "a tensor being mutated that has internal overlap": (
        "overlapping-write", "clone the view before writing to it",
    ),
}  # what functionalisation says: code and remedy  # fmt: skip


class _JointTrace:
    """One run of `trace_joint`, step by step in `run`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mode: FakeTensorMode,
        decompositions: Decompositions,
        block: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
        reshaped: Collection[int] = (),
    ) -> None:
        self.fn, self.mode, self.block = fn, mode, block or _counting
        self.reshaped = reshaped
        make = SubclassTracer if isinstance(fn, FlatProgram) else AtenTracer
        self.tracer = make(mode, decompositions)
        self.inputs: list[TracedInput] = []
        self.values = ValueTable()

    def run(self, fakes: Sequence[Any], same_as: Sequence[int]) -> JointGraph:
        tracer, values = self.tracer, self.values
        with self.block(), tracer.active():
            self.inputs = add_inputs(tracer, fakes, same_as, self.reshaped)
            results = self._run_program()
        with self.block(), tracer.active():
            if isinstance(self.fn, FlatProgram):
                refuse_reshaping(tracer, self.inputs)
            mutations = find_mutations(tracer, self.inputs, values)
            plans = OutputPlanner(tracer, self.inputs, values).plan(results)
        tangents = self._tangent_indices()
        # The graph makes other writes itself, out of autograd's sight.
        seen = any(m.value is not None or m.layout is not None for m in mutations)
        if tangents and seen and not torch.is_grad_enabled():
            raise Unsupported(
                "hidden-parameter",
                "under no_grad, a block with gradients and a write to an input in one graph",
                "write the input outside of the compiled function",
            )
        fake_tangents = [_tangent_like(self.mode, values.pures[k]) for k in tangents]
        leaves = frozenset(i for i in self._wanted() if self.inputs[i].fake.is_leaf)
        results = [values.programs[k] for k in tangents]
        sources = reached(results, results) if len(results) > 1 else []
        order = self._follow([] if isinstance(self.fn, FlatProgram) else leaves)
        with tracer.active():
            gradients = self._differentiate(tangents, fake_tangents)
        written = [self.inputs[m.index] for m in mutations if m.written and m.value is None]
        write_back(tracer.recorder, [(i.fake, final_contents(tracer, i)) for i in written])
        module = tracer.finish(values.pures + [grad for _, grad in gradients])
        clean(module, len(values.pures))
        return JointGraph(
            module,
            num_inputs=len(fakes),
            num_values=len(values.pures),
            tangents=tuple(tangents),
            gradients=tuple(index for index, _ in gradients),
            plans=plans,
            mutations=tuple(mutations),
            same_as=tuple(same_as),
            leaves=leaves,
            order=tuple(order),
            made_of=tuple(
                (k, tuple(n for n in range(len(results)) if bits >> n & 1))
                for k, bits in enumerate(sources)
                if bits
            ),
        )

    def _run_program(self) -> list[Any]:
        """The program's flat results, as the program sees them."""
        programs = [given.program for given in self.inputs]
        try:
            if isinstance(self.fn, FlatProgram):
                results = self.fn(*programs, run=self.tracer.interpret)
            elif isinstance(self.fn, fx.GraphModule):
                results = self.tracer.interpret(self.fn, programs)
            else:
                results = self.fn(*programs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise Unsupported(
                "data-dependent-graph",
                f"{error.func} makes a result whose shape or value depends on data",
                "keep it out of the compiled graph, or make a size dynamic",
            ) from error
        except NotImplementedError as error:
            raise Unsupported(
                "no-fake-kernel",
                f"an operator cannot run on fake tensors: {error}",
                "register a fake kernel for it",
            ) from error
        except RuntimeError as error:
            for part, refusal in _REFUSED.items():
                if part in str(error):
                    raise Unsupported(refusal[0], str(error), refusal[1]) from error
            raise
        leaves = pytree.tree_leaves(results, lambda value: value is None)
        return [self.tracer.wrap(leaf) for leaf in leaves]

    def _tangent_indices(self) -> list[int]:
        """The forward values that need a gradient.

        Raises:
            Unsupported: something other than an input needs one.
        """
        # Also under no_grad: the program may hold an enable_grad block.
        found = [
            k
            for k, program in enumerate(self.values.programs)
            if isinstance(program, torch.Tensor) and program.requires_grad
        ]
        hidden = any(value.requires_grad for value in self.tracer.recorder.constants.values())
        if found and (hidden or not self._wanted()):
            raise Unsupported(
                "hidden-parameter",
                "a result needs gradients of a tensor that is not an input of the graph",
                "pass parameters as inputs",
            )
        return found

    def _wanted(self) -> list[int]:
        return [
            i
            for i, given in enumerate(self.inputs)
            if isinstance(given.fake, torch.Tensor)
            and given.fake.requires_grad
            and given.same_as == i
        ]

    def _follow(self, leaves: Iterable[int]) -> list[int]:
        """A list that autograd will fill with `leaves`, each when its gradient is complete."""
        order: list[int] = []
        for i in leaves:  # `register_hook` would count this as a hook of the program's
            self.inputs[i].leaf._backward_hooks = {0: lambda _, i=i: order.append(i)}
        return order

    def _differentiate(
        self, tangents: list[int], fake_tangents: list[torch.Tensor]
    ) -> list[tuple[int, Any]]:
        """Run autograd in the trace: (input index, pure gradient or None) per input."""
        if not tangents:
            return []
        wanted = self._wanted()
        seeds = [
            self.tracer.input(fake, f"tangents_{i + 1}") for i, fake in enumerate(fake_tangents)
        ]
        # The engine does not restore the forward's autocast in the backward; neither do we.
        outputs = [self.values.programs[k] for k in tangents]
        leaves = [self.inputs[i].leaf for i in wanted]
        follow_zeros(self.tracer, outputs, seeds)
        try:
            with torch._C._DisableAutocast():
                grads = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
        except RuntimeError as error:
            # Eager would say so when, and only if, the program's backward is called.
            raise Unsupported(
                "backward-fails",
                f"the program's backward raises: {error}",
                "call it without compiling to see where",
            ) from error
        if isinstance(self.fn, FlatProgram):
            self.fn.check_gradients(zip(wanted, grads, strict=True))
        tied = tie_constants(self.tracer, grads, leaves, outputs, seeds)
        return [(i, self.tracer.value(grad)) for i, grad in zip(wanted, tied, strict=True)]


@contextlib.contextmanager
def _counting() -> Iterator[None]:
    """Leave inference mode: tensors from outside of it count writes, and so must their views."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _tangent_like(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    """A fake gradient of `value`, in the layout that the run-time wrapper will give it."""
    order = memory_order(value)
    back = [order.index(dim) for dim in range(len(order))]
    with mode, torch.no_grad():
        shape = [value.shape[dim] for dim in order]
        return torch.empty(shape, dtype=value.dtype, device=value.device).permute(back)
