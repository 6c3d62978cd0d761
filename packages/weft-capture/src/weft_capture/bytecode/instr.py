"""The instruction type, the decoded code object, and the few facts about the running CPython.

An `Instr` says the same on every supported version (docs/architecture has the vocabulary);
`Decoded` is a code object in that form. Both are immutable; every other module here refers to an
instruction by its index in `Decoded.instrs`.
"""

from __future__ import annotations

import dis
import opcode
import weakref
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from weft_capture.python_compat import PY312, PY313, PY314

#: On 3.11 and 3.12 the NULL of a call lies below the callable, from 3.13 on above it.
NULL_BELOW = not PY313

CO_VARARGS = 0x04
CO_VARKEYWORDS = 0x08
CO_NESTED = 0x10
CO_GENERATOR = 0x20
CO_COROUTINE = 0x80
CO_ASYNC_GENERATOR = 0x200
CO_HAS_DOCSTRING = 0x4000000 if PY314 else 0


def docstring_of(code: CodeType) -> str | None:
    """Return the docstring of a function's code, which 3.14 marks with a flag."""
    if PY314 and not code.co_flags & CO_HAS_DOCSTRING:
        return None
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


# ---- raw opcodes


def _cache_entries() -> dict[int, int]:
    table = opcode._inline_cache_entries  # type: ignore[attr-defined]
    if isinstance(table, dict):
        return {dis.opmap[name]: n for name, n in table.items() if name in dis.opmap}
    return dict(enumerate(table))


#: Inline cache units behind each opcode.
CACHE_UNITS = _cache_entries()
#: Opcodes that have an argument.
HAS_ARG: frozenset[int] = frozenset(getattr(dis, "hasarg", range(dis.HAVE_ARGUMENT, 256)))
#: What the argument is: an index of a "local", "name" or "const", a "jump" distance, or a "number".
KIND: dict[int, str] = dict.fromkeys(HAS_ARG, "number")
for _kind, _group in (
    ("const", dis.hasconst),
    ("name", dis.hasname),
    ("local", (*dis.haslocal, *dis.hasfree)),
    ("jump", (*dis.hasjrel, *dis.hasjabs)),
):
    KIND.update(dict.fromkeys(_group, _kind))
BACKWARD = frozenset(op for name, op in dis.opmap.items() if "BACKWARD" in name)
EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
COMPARE_SHIFT = 5 if PY313 else 4 if PY312 else 0
#: Set in a comparison of 3.13 that gives an exact bool.
COMPARE_TO_BOOL = 16
#: Names for what CALL_INTRINSIC_n does, those of 3.11 where it had an opcode: (n, number).
INTRINSICS = {
    "IMPORT_STAR": (1, 2),
    "STOPITERATION_ERROR": (1, 3),
    "ASYNC_GEN_WRAP": (1, 4),
    "UNARY_POSITIVE": (1, 5),
    "LIST_TO_TUPLE": (1, 6),
    "PREP_RERAISE_STAR": (2, 1),
}
#: What LOAD_COMMON_CONSTANT loads, by its number (3.14).
COMMON_CONSTANTS: list[Any] = getattr(opcode, "_common_constants", [])
#: What BEFORE_WITH is from 3.14 on, and BEFORE_ASYNC_WITH with 2 added to the LOAD_SPECIALs.
ENTER_WITH = (
    ("COPY", 1), ("LOAD_SPECIAL", 1), ("SWAP", 2), ("SWAP", 3), ("LOAD_SPECIAL", 0), ("CALL", 0),
)  # fmt: skip
#: The number of BINARY_OP that subscribes (3.14).
SUBSCRIBE = 26 if PY314 else -1
#: How far before its label a FOR_ITER's raw target lies: END_FOR, and POP_TOP from 3.13 on.
FOR_ITER_BACK = 2 if PY313 else 1 if PY312 else 0

# ---- instructions

#: Opcodes of the vocabulary after which execution never goes on at the next instruction.
NO_FALL_THROUGH = frozenset({"JUMP", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE"})

#: The variable of handlers that are no part of the program (`resume.restore_unbound`).
UNBOUND = "_weft_unbound"

Positions = tuple[int | None, int | None, int | None, int | None]
NO_POSITION: Positions = (None, None, None, None)


class Handler(NamedTuple):
    """A handler: cut the stack to `depth`, push the offset if `lasti`, then the exception."""

    target: int
    depth: int
    lasti: bool


class Instr(NamedTuple):
    """One instruction of the vocabulary; a named tuple because a frame has hundreds of them.

    `offset` is the byte offset in the original code, `target` the index a jump goes to,
    `positions` (line, end line, column, end column), `handler` the innermost exception handler.
    """

    opname: str
    arg: int
    argval: Any
    offset: int
    target: int | None
    positions: Positions
    handler: Handler | None

    @property
    def lineno(self) -> int | None:
        """Line of the user's source, None for an instruction that the compiler added."""
        return self.positions[0]


@dataclass(frozen=True, eq=False)
class FrameShape:
    """A code object without its instructions; fields have its names without the `co_`."""

    name: str
    qualname: str
    filename: str
    firstlineno: int
    flags: int
    varnames: tuple[str, ...]
    cellvars: tuple[str, ...]
    freevars: tuple[str, ...]
    argcount: int
    posonlyargcount: int
    kwonlyargcount: int

    @staticmethod
    def of(code: CodeType) -> FrameShape:
        """The shape of a code object.

        Where an inlined comprehension has a variable called as a free one, each has a slot.
        """
        fields = {name: getattr(code, f"co_{name}") for name in FrameShape.__match_args__}
        for name in fields["freevars"]:
            for field_name in ("varnames", "cellvars"):
                fields[field_name] = tuple(f".{n}" if n == name else n for n in fields[field_name])
        return FrameShape(**fields)

    def variant(
        self,
        args: tuple[str, ...],
        cellvars: tuple[str, ...],
        freevars: tuple[str, ...],
        qualname: str,
    ) -> FrameShape:
        """The shape of other code for this frame, which takes `args` as positionals."""
        # Other code has other constants: 3.14 would take the first, or none, for the docstring.
        flags = self.flags & ~(CO_VARARGS | CO_VARKEYWORDS | CO_NESTED | CO_HAS_DOCSTRING)
        return FrameShape(
            name=self.name,
            qualname=qualname,
            filename=self.filename,
            firstlineno=self.firstlineno,
            flags=flags | CO_NESTED if freevars else flags,
            varnames=args,
            cellvars=cellvars,
            freevars=freevars,
            argcount=len(args),
            posonlyargcount=len(args),
            kwonlyargcount=0,
        )

    @property
    def slots(self) -> tuple[str, ...]:
        """Names by slot of the frame's variable array (a cell that is an argument has one slot)."""
        local_names = set(self.varnames)
        return (
            self.varnames + tuple(c for c in self.cellvars if c not in local_names) + self.freevars
        )

    @property
    def flat_args(self) -> tuple[str, ...]:
        """Argument names in the hook's order: positional, keyword-only, *args, **kwargs."""
        extra = bool(self.flags & CO_VARARGS) + bool(self.flags & CO_VARKEYWORDS)
        return self.varnames[: self.argcount + self.kwonlyargcount + extra]

    @property
    def cells(self) -> frozenset[str]:
        """Names whose slot holds a cell."""
        return frozenset(self.cellvars + self.freevars)

    @property
    def is_generator(self) -> bool:
        """Whether a call of the function returns a generator or coroutine."""
        return bool(self.flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR))


@dataclass(frozen=True, eq=False)
class Decoded(FrameShape):
    """A code object as instructions, with the data to build variants of it.

    It holds no reference to the code object, so that caches keyed by the code can hold it.
    `derived` caches what other modules compute once per code object.
    """

    instrs: tuple[Instr, ...]
    code_ref: weakref.ref[CodeType]
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def code(self) -> CodeType:
        """The original code object; raises ReferenceError when it no longer exists."""
        code = self.code_ref()
        if code is None:
            raise ReferenceError(f"the code object of {self.qualname} is gone")
        return code

    def unwinds(self, instr: Instr) -> bool:
        """Whether an exception here reaches a handler of the program, not only the compiler's."""
        while instr.handler is not None:
            instr = self.instrs[instr.handler.target]
            if instr.opname != "CLEANUP_THROW":
                return instr.opname != "STOPITERATION_ERROR"
        return False


def call_pair(func: Any, null: Any) -> tuple[Any, Any]:
    """The two stack slots, lower first, that hold a callable without self on this version."""
    return (null, func) if NULL_BELOW else (func, null)


# ---- what an assembler takes: operations of the vocabulary, and labels


@dataclass(slots=True, eq=False)
class Label:
    """A position in the program; the assembler sets the index of the raw instruction there."""

    index: int | None = None


class Cover(NamedTuple):
    """The exception handler of an operation, with its label."""

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
    """The start of the code: creation of cells and of the generator, and RESUME."""
    items: list[Item] = []
    if shape.freevars:
        items.append(Op("COPY_FREE_VARS", len(shape.freevars)))
    items += [Op("MAKE_CELL", 0, name) for name in shape.cellvars]
    if shape.is_generator:
        items += [Op("RETURN_GENERATOR", positions=positions), Op("POP_TOP", positions=positions)]
    items.append(Op("RESUME", positions=positions))
    return items


def program_of(
    decoded: Decoded, keep: list[bool] | None = None, labels: dict[int, Label] | None = None
) -> list[Item]:
    """The instructions of `decoded` as a program, those with a false `keep` left out.

    `labels` has labels for indices that other code jumps to; labels for the jump targets and
    handlers of the kept instructions are added to it. All instructions that a kept instruction can
    reach must be kept, too.
    """
    instrs = decoded.instrs
    labels = {} if labels is None else labels
    for index, instr in enumerate(instrs):
        if keep is not None and not keep[index]:
            continue
        if instr.target is not None:
            labels.setdefault(instr.target, Label())
        if instr.handler is not None:
            labels.setdefault(instr.handler.target, Label())
    items: list[Item] = []
    covers = {
        handler: Cover(labels[handler.target], handler.depth, handler.lasti)
        for handler in {i.handler for i in instrs if i.handler and i.handler.target in labels}
    }
    for index, instr in enumerate(instrs):
        if index in labels:
            items.append(labels[index])
        if keep is not None and not keep[index]:
            continue
        jump = None if instr.target is None else labels[instr.target]
        cover = None if instr.handler is None else covers[instr.handler]
        items.append(Op(instr.opname, instr.arg, instr.argval, jump, instr.positions, cover))
    return items
