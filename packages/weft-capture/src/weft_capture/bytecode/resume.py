"""The function that continues a frame after a graph break.

Its code is the part of the original that can still run, after a prologue that pushes its arguments
on the stack and jumps to the break. Variables that were cells in the original are free variables
here (docs/architecture/capture-bytecode.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import CodeType

from .decode import decode
from .encode import assemble
from .instr import (
    UNBOUND,
    Cover,
    Decoded,
    FrameShape,
    Instr,
    Item,
    Label,
    Op,
    call_pair,
    program_of,
    prologue_of,
)
from .liveness import first_argument_of_super, live_at, reachable, shows_frame

_PROLOGUE = frozenset({"RESUME", "COPY_FREE_VARS", "RETURN_GENERATOR"})
_SELF = "_weft_self"


@dataclass(frozen=True)
class Origin:
    """The original instructions of a resume function.

    Weak, because `decode`'s cache holds it by the resume code, which the original's cache holds.
    """

    decoded: weakref.ref[Decoded]
    prologue: int
    indices: tuple[int, ...]
    made_with: tuple[int, tuple[bool, ...], frozenset[str]]  # index, stack, bound


@dataclass(frozen=True)
class Resume:
    """A resume function's code and its parameters.

    `args` describes each positional argument: an int is a slot of the operand stack (0 is the
    bottom), a string a variable by name (a cell variable: its contents). `stack[i]` is False for a
    NULL, which is not passed. `code.co_freevars` names the cells of the closure.
    """

    code: CodeType
    args: tuple[int | str, ...]
    stack: tuple[bool, ...]
    index: int


def stack_name(depth: int) -> str:
    """The name of the argument for slot `depth` of the operand stack."""
    return f"_weft_stack{depth}"


def make_resume(
    decoded: Decoded,
    index: int,
    stack: Sequence[bool] = (),
    locals: Sequence[str] | None = None,
    keep: Collection[str] = (),
) -> Resume:
    """Code that runs `decoded` from instruction `index` on.

    Args:
        decoded: the original frame's code. A generator's code creates a generator, which continues
            there at its first step.
        index: the first instruction to run; not `in_prologue` (ValueError).
        stack: the operand stack there, bottom first: True for a value, False for a NULL.
        locals: plain variables that are bound there; those that are not live are left out.
            By default all live ones. A live variable that is not listed starts unbound.
        keep: those of them to keep even where nothing reads them.

    The same arguments give the same `Resume` as long as `decoded` lives, so that the code cache of
    its code is used again.
    """
    if in_prologue(decoded, index):
        raise ValueError(f"{decoded.qualname} cannot be resumed while it rebuilds its stack")
    origin: Origin | None = decoded.derived.get("origin")
    if origin is not None and (first := original(decoded)) is not decoded:
        # Resuming a resume function resumes the original: a loop meets the same code again.
        return make_resume(first, origin.indices[index - origin.prologue], stack, locals, keep)
    live = live_at(decoded, index).union(keep)
    plain = live.intersection(decoded.varnames) - decoded.cells
    bound = plain if locals is None else plain.intersection(locals)
    key = ("resume", index, tuple(stack), bound)
    resume: Resume | None = decoded.derived.get(key)
    if resume is None:
        resume = decoded.derived[key] = _build(decoded, index, tuple(stack), bound)
    return resume


def original(decoded: Decoded) -> Decoded:
    """Return the original code of a resume function; other code unchanged."""
    origin: Origin | None = decoded.derived.get("origin")
    first = None if origin is None else origin.decoded()
    return first or decoded


def in_prologue(decoded: Decoded, index: int) -> bool:
    """Whether this is the prologue of a resume function.

    A break there would repeat in every further resume function: such a frame runs eagerly.
    """
    origin: Origin | None = decoded.derived.get("origin")
    return origin is not None and index < origin.prologue


def is_resume(code: CodeType) -> bool:
    """Whether `make_resume` made this code."""
    return ".<resume at " in code.co_qualname


def _build(decoded: Decoded, index: int, stack: tuple[bool, ...], bound: frozenset[str]) -> Resume:
    keep = [
        can_run and (instr.opname not in _PROLOGUE or _continues(instr))
        for can_run, instr in zip(reachable(decoded, index), decoded.instrs, strict=True)
    ]
    entry = Label()
    body = program_of(decoded, keep, {index: entry})
    label = "shown" if shows_frame(decoded, index) else "resume"
    args, shape = state_at(decoded, index, stack, bound, label)
    parameters = {*shape.varnames, *shape.freevars}
    unused = tuple(name for name in decoded.varnames if name not in parameters)
    positions = decoded.instrs[index].positions
    prologue = prologue_of(shape, positions)
    stack_names = [stack_name(i) if is_value else None for i, is_value in enumerate(stack)]
    for name in stack_names:
        opname = "LOAD_FAST" if name else "PUSH_NULL"
        prologue.append(Op(opname, argval=name, positions=positions))
    for name in filter(None, stack_names):  # only the stack refers to it
        prologue.append(Op("DELETE_FAST", argval=name, positions=positions))
    prologue.append(Op("JUMP", jump=entry, positions=positions))
    body += restore_unbound(body, shape.freevars, decoded)
    code = assemble(prologue + body, replace(shape, varnames=(*shape.varnames, *unused, UNBOUND)))
    kept = tuple(i for i, keeps in enumerate(keep) if keeps)
    decode(code).derived["origin"] = Origin(
        weakref.ref(decoded), len(prologue), kept, (index, stack, bound)
    )
    return Resume(code, args, stack, index)


def _unbound_error(error: NameError) -> UnboundLocalError:
    name = error.args[0].split("'")[1].lstrip(".")
    text = f"cannot access local variable '{name}' where it is not associated with a value"
    result = UnboundLocalError(text).with_traceback(error.__traceback__)
    result.__context__ = error.__context__
    return result


def restore_unbound(
    items: Sequence[Item], freevars: tuple[str, ...], decoded: Decoded
) -> list[Item]:
    """Keep the exceptions of unbound variables as in the original code.

    A cell of the original is a free variable here, for which CPython raises another exception, and
    a variable of an inlined comprehension that shared a cell's slot has another name. The returned
    handlers, which belong after the operations, are invisible to `decode`.
    """
    cells = set(original(decoded).cellvars).intersection(freevars)
    dotted = {name for name in decoded.varnames if name.startswith(".")}
    renamed = {name for name in dotted if name[1:].isidentifier()}  # not `.0`
    reads = {"LOAD_DEREF": cells, "DELETE_DEREF": cells, "LOAD_FAST": renamed}
    handlers: dict[Cover | None, Label] = {}
    for item in items:
        if isinstance(item, Op) and item.argval in reads.get(item.opname, ()):
            outer = item.cover
            label = handlers.setdefault(outer, Label())
            item.cover = Cover(label, outer.depth if outer else 0, False)
    added: list[Item] = []
    for outer, label in handlers.items():
        pair = call_pair(Op("LOAD_CONST", argval=_unbound_error), Op("PUSH_NULL"))
        added += [label, Op("STORE_FAST", argval=UNBOUND), *pair, Op("LOAD_FAST", argval=UNBOUND)]
        added += [Op("CALL", 1, ()), Op("DELETE_FAST", argval=UNBOUND), Op("RERAISE", cover=outer)]
    return added


def _continues(instr: Instr) -> bool:
    """Whether this is the RESUME behind a yield, which tells what kind of one that is."""
    return instr.opname == "RESUME" and bool(instr.arg & 3)


def state_at(
    decoded: Decoded, index: int, stack: Sequence[bool], bound: frozenset[str], label: str
) -> tuple[tuple[int | str, ...], FrameShape]:
    """Return how a frame's state at an instruction is passed on to code that continues it.

    Args:
        decoded: the frame's code.
        index: the instruction.
        stack: the operand stack there, as for `make_resume`.
        bound: the plain variables that are bound there, and needed.
        label: what to call the new code.

    Returns:
        The arguments, as in `Resume.args`, and the shape of code that takes them.
    """
    live = live_at(decoded, index)
    freevars = tuple(n for n in decoded.cellvars + decoded.freevars if n in live)
    args: list[int | str] = [i for i, is_value in enumerate(stack) if is_value]
    args += [name for name in decoded.varnames if name in bound]
    first = first_argument_of_super(decoded)
    if first is not None and first in live and "__class__" in freevars:
        # A super() without arguments takes the frame's first slot: keep the first argument there.
        args = [first, *(arg for arg in args if arg != first)]
    names = tuple(
        stack_name(arg) if isinstance(arg, int) else _SELF if arg in freevars else arg
        for arg in args
    )
    line = decoded.instrs[index].lineno or decoded.firstlineno
    qualname = f"{decoded.qualname}.<{label} at {line}>"
    return tuple(args), decoded.variant(names, (), freevars, qualname)
