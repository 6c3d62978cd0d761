"""The option `nan_asserts`: raise at the first step of a program that makes a NaN.

What the steps write is returned beside the results, and looked at in the order of the steps. So it
takes memory for all intermediate results; it is for finding a NaN, not for every day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from weft_core.errors import WeftError

from weft_codegen.loops.lower.origins import by_line
from weft_codegen.loops.program import Alias, BufferRef, Program, step_writes


class NotANumber(WeftError):
    """A kernel or an operator of compiled code made a NaN."""


def with_nan_asserts(
    program: Program, build: Callable[[Program], Callable[..., list[Any]]]
) -> Callable[..., list[Any]]:
    """Return the compiled program with a check of what each step has written.

    Raises (in a call):
        NotANumber: names the step and the lines of the program that it comes from.
    """
    written = set(program.mutations)
    rows: list[tuple[str, str]] = []
    for step in program.steps:
        if isinstance(step, Alias):
            continue
        name = getattr(step, "kernel", None) or str(getattr(step, "op", "step"))
        lines = "; ".join(by_line(step.origins))
        for buffer in step_writes(step, program.kernels):
            known = program.buffers.get(buffer)
            if known is not None and known.dtype.is_floating_point and buffer not in written:
                written.add(buffer)
                rows.append((buffer, f"{name}, from {lines}"))
    more = tuple(BufferRef(buffer) for buffer, _ in rows)
    count = len(program.outputs)
    run = build(replace(program, outputs=program.outputs + more))

    def checked(*args: Any) -> list[Any]:
        results = run(*args)
        for tensor, (_, place) in zip(results[count:], rows, strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.isnan().any():
                raise NotANumber(f"a NaN in the result of {place}")
        return results[:count]

    return checked
