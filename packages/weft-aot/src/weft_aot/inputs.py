"""What a joint trace takes and returns: inputs, what the program did to them, forward values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from weft_core.errors import Unsupported
from weft_core.fake import Intermediate
from weft_core.tracing import Tracer
from weft_core.versions import version_of

from weft_aot.records import Mutation


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
    """

    fake: Any
    leaf: Any
    program: Any
    start: Any
    history: Any
    storage: int
    version: int
    same_as: int


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


def add_inputs(tracer: Tracer, fakes: Sequence[Any], same_as: Sequence[int]) -> list[TracedInput]:
    """Add a placeholder per input to an active trace; equal objects become one program value."""
    inputs: list[TracedInput] = []
    for index, (fake, first) in enumerate(zip(fakes, same_as, strict=True)):
        leaf = tracer.input(fake)
        inputs.append(inputs[first] if first != index else _add(tracer, fake, leaf, index))
    return inputs


def _add(tracer: Tracer, fake: Any, leaf: Any, index: int) -> TracedInput:
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
    tracer: Tracer, inputs: Sequence[TracedInput], values: ValueTable
) -> list[Mutation]:
    """Which inputs the program wrote; final values that autograd must see are added to `values`.

    Raises:
        Unsupported: a change of an input that is not one of its contents.
    """
    found = []
    for index, given in enumerate(inputs):
        if given.same_as != index or not isinstance(given.fake, torch.Tensor):
            continue
        _refuse_rebinding(index, given)
        final = tracer.value(given.program)
        if final is given.start:
            continue
        _refuse_reshaping(index, given.start, final)
        # With its old history, autograd saw nothing of the write: a buffer, no_grad or detach.
        unseen = given.program.grad_fn is given.history
        silent = given.version == version_of(given.program) and not given.fake.is_inference()
        value = None if unseen else values.add(given.program, final)
        found.append(Mutation(index, value, silent))
    return found


def _refuse_rebinding(index: int, given: TracedInput) -> None:
    program = given.program
    marked = program.grad_fn is None and program.requires_grad != given.fake.requires_grad
    if marked or program.untyped_storage()._cdata != given.storage:
        raise Unsupported(
            "input-rebinding",
            f"the program sets .data or .requires_grad of its input {index}",
            "do it outside the compiled function",
        )


def _refuse_reshaping(index: int, start: torch.Tensor, final: torch.Tensor) -> None:
    if final.shape != start.shape or final.stride() != start.stride():
        raise Unsupported(
            "input-metadata-mutation",
            f"the program changes the shape or strides of its input {index} in place",
            "return the reshaped tensor instead of changing the argument",
        )
