"""What a joint trace takes and returns: inputs, what the program did to them, forward values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from weft_core.errors import Unsupported
from weft_core.fake import Intermediate
from weft_core.symnodes import SymValue, equal_sizes
from weft_core.tensor_versions import version_of
from weft_core.tracing import AtenTracer

from weft_aot.records import Mutation, ValueRef, ViewStep


@dataclasses.dataclass(frozen=True)
class TracedInput:
    """One input, and its state before the program ran.

    Attributes:
        fake: the fake tensor, SymInt or Python number given.
        leaf: what gradients are taken of.
        program: what the program sees; `leaf` itself, or a copy of it that is no leaf.
        start: the pure value of `program`.
        history: its `grad_fn`.
        storage: identity of its storage.
        version: how often it was written.
        same_as: index of the first input that is the same object.
        whole: an alias of `program` that keeps its layout, where the program changes that.
    """

    fake: Any
    leaf: Any
    program: Any
    start: Any
    history: Any
    storage: int
    version: int
    same_as: int
    whole: Any = None


class InputsReshaped(Exception):
    """The program changes the layout of these of its inputs in place."""

    def __init__(self, indices: Collection[int]) -> None:
        super().__init__(f"inputs {sorted(indices)} get another layout")
        self.indices = frozenset(indices)


class ValueTable:
    """The forward values of a trace: what the graph returns, each with the program's tensor."""

    def __init__(self) -> None:
        self.programs: list[Any] = []
        self.pures: list[Any] = []
        self._index: dict[int, int] = {}

    def add(self, program: Any, pure: Any) -> int:
        """Index of the value; `program` is what autograd knows, `pure` what the graph knows."""
        if id(program) not in self._index:
            self._index[id(program)] = len(self.programs)
            self.programs.append(program)
            self.pures.append(pure)
        return self._index[id(program)]


def add_inputs(
    tracer: AtenTracer, fakes: Sequence[Any], same_as: Sequence[int], reshaped: Collection[int] = ()
) -> list[TracedInput]:
    """Add a placeholder per input to an active trace; equal objects become one program value.

    `reshaped` are inputs whose layout the program changes in place.
    """
    inputs: list[TracedInput] = []
    for index, (fake, first) in enumerate(zip(fakes, same_as, strict=True)):
        leaf = tracer.input(fake)
        given = inputs[first] if first != index else _add(tracer, fake, leaf, index)
        if index in reshaped:
            given = dataclasses.replace(given, whole=given.program.detach())
        inputs.append(given)
    return inputs


def _add(tracer: AtenTracer, fake: Any, leaf: Any, index: int) -> TracedInput:
    if not isinstance(fake, torch.Tensor):
        return TracedInput(fake, leaf, leaf, leaf, None, 0, 0, index)
    program = leaf
    if fake.requires_grad and not fake.is_leaf:
        # In-place ops are legal on an intermediate but not on a leaf.
        with torch.enable_grad():
            program = Intermediate.apply(leaf, lambda: tracer.functional(fake))  # type: ignore[no-untyped-call]
    storage = program.untyped_storage()._cdata
    start = tracer.value(program)
    version = version_of(program)
    return TracedInput(fake, leaf, program, start, program.grad_fn, storage, version, index)


def find_mutations(
    tracer: AtenTracer, inputs: Sequence[TracedInput], values: ValueTable
) -> list[Mutation]:
    """Which inputs the program wrote; final values that autograd must see are added to `values`.

    Raises:
        Unsupported: the program sets an input's data or requires_grad.
        InputsReshaped: it changes the layout of inputs that have no `whole`.
    """
    found, reshaped = [], []
    for index, given in enumerate(inputs):
        if given.same_as != index or not isinstance(given.fake, torch.Tensor):
            continue
        _refuse_rebinding(index, given)
        final = tracer.value(given.program)
        if final is given.start:
            continue
        layout = None
        if not same_layout(given.start, final):
            if given.whole is None:
                reshaped.append(index)
                continue
            step = restride(final, tracer.value(given.whole), inputs, values)
            layout = dataclasses.replace(step, op=as_strided_in_place)
        node_of = tracer.recorder.node_of
        written = given.whole is None or node_of(final_contents(tracer, given)) is not node_of(
            given.start
        )
        # With its old history, autograd saw nothing of the write: a buffer, no_grad or detach.
        unseen = given.program.grad_fn is given.history
        silent = given.version == version_of(given.program) and not given.fake.is_inference()
        value = None if unseen or not written else values.add(given.program, final)
        found.append(Mutation(index, value, silent, written, layout))
    if reshaped:
        raise InputsReshaped(reshaped)
    return found


def refuse_reshaping(tracer: AtenTracer, inputs: Sequence[TracedInput]) -> None:
    """Refuse a program that changes the layout of an input in place."""
    for index, given in enumerate(inputs):
        if isinstance(given.fake, torch.Tensor) and not same_layout(
            given.start, tracer.value(given.program)
        ):
            raise Unsupported(
                "input-metadata-mutation",
                f"the program changes the shape or strides of its input {index} in place",
                "return the reshaped tensor instead of changing the argument",
            )


def final_contents(tracer: AtenTracer, given: TracedInput) -> Any:
    """The final value of an input, in the layout that it came in."""
    return tracer.value(given.program if given.whole is None else given.whole)


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one size, strides and offset, for all values of symbols."""
    return one.dim() == other.dim() and all(
        equal_sizes(a, b)
        for a, b in (
            (one.shape, other.shape),
            (one.stride(), other.stride()),
            ([one.storage_offset()], [other.storage_offset()]),
        )
    )


def restride(
    result: torch.Tensor, base: torch.Tensor, inputs: Sequence[TracedInput], values: ValueTable
) -> ViewStep:
    """What makes a view like `result` of the tensor that is `base` in the trace."""

    def plain(number: Any) -> Any:
        return find_symbol(number, inputs, values) if isinstance(number, SymValue) else int(number)

    sizes, strides = [*map(plain, result.shape)], [*map(plain, result.stride())]
    offset = plain(result.storage_offset() - base.storage_offset())
    return ViewStep(as_strided_from, (sizes, strides, offset), {})


def as_strided_from(base: torch.Tensor, sizes: Any, strides: Any, offset: int) -> torch.Tensor:
    """`as_strided` with an offset from the first element of `base`, not of its memory."""
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def as_strided_in_place(base: torch.Tensor, sizes: Any, strides: Any, offset: int) -> None:
    """Give a tensor another layout, with an offset from its first element so far."""
    base.as_strided_(sizes, strides, base.storage_offset() + offset)


def find_symbol(value: Any, inputs: Sequence[TracedInput], values: ValueTable) -> ValueRef:
    """Where a symbolic number is found at run time; it becomes a forward value if need be."""
    for i, given in enumerate(inputs):
        if isinstance(given.fake, SymValue) and given.fake.node.expr == value.node.expr:
            return ValueRef("input", i)
    return ValueRef("value", values.add(value, value))


def _refuse_rebinding(index: int, given: TracedInput) -> None:
    program = given.program
    marked = program.grad_fn is None and program.requires_grad != given.fake.requires_grad
    if marked or program.untyped_storage()._cdata != given.storage:
        raise Unsupported(
            "input-rebinding",
            f"the program sets .data or .requires_grad of its input {index}",
            "do it outside the compiled function",
        )
