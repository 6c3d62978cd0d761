"""What an assembler takes: operations of the vocabulary, and labels.

`Op` is `Instr` before it has a place: its jump goes to a `Label` object instead of an index, so
operations can be inserted and code of different origins spliced without renumbering anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .instr import NO_POSITION, Decoded, FrameShape, Positions


@dataclass(slots=True, eq=False)
class Label:
    """A place in the program; the assembler gives it the index of the raw instruction there."""

    index: int | None = None


class Cover(NamedTuple):
    """The exception handler of an operation, with a label for its place."""

    label: Label
    depth: int
    lasti: bool


@dataclass(slots=True, eq=False)
class Op:
    """One operation to assemble; fields as in `Instr`."""

    opname: str
    arg: int = 0
    argval: Any = None
    jump: Label | None = None
    positions: Positions = NO_POSITION
    cover: Cover | None = None


Item = Op | Label


def prologue_of(shape: FrameShape, positions: Positions) -> list[Item]:
    """What comes before all else: the cells, and RESUME."""
    items: list[Item] = []
    if shape.freevars:
        items.append(Op("COPY_FREE_VARS", len(shape.freevars)))
    items += [Op("MAKE_CELL", 0, name) for name in shape.cellvars]
    items.append(Op("RESUME", positions=positions))
    return items


def program_of(
    decoded: Decoded,
    keep: list[bool] | None = None,
    places: dict[int, Label] | None = None,
) -> list[Item]:
    """The instructions of `decoded` as a program, those with a false `keep` left out.

    `places` gives labels for indices that other code goes to; labels for the jump targets and
    handlers of the kept instructions are added to it. What is kept must be closed: what a kept
    instruction can reach is kept too.
    """
    instrs = decoded.instrs
    places = {} if places is None else places
    for index, instr in enumerate(instrs):
        if keep is not None and not keep[index]:
            continue
        if instr.target is not None:
            places.setdefault(instr.target, Label())
        if instr.handler is not None:
            places.setdefault(instr.handler.target, Label())
    items: list[Item] = []
    covers = {
        handler: Cover(places[handler.target], handler.depth, handler.lasti)
        for handler in {i.handler for i in instrs if i.handler and i.handler.target in places}
    }
    for index, instr in enumerate(instrs):
        if index in places:
            items.append(places[index])
        if keep is not None and not keep[index]:
            continue
        jump = None if instr.target is None else places[instr.target]
        cover = None if instr.handler is None else covers[instr.handler]
        items.append(Op(instr.opname, instr.arg, instr.argval, jump, instr.positions, cover))
    return items
