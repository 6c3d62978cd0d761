"""Read, analyse and write CPython 3.11 to 3.13 bytecode through one vocabulary.

`decode` turns a code object into `Instr`s that mean the same on every version, `live_at` tells
which variables an instruction still needs, `Writer` assembles new code objects, and
`make_resume` builds the function that continues a frame after a graph break.
Nothing here imports torch. docs/architecture/capture-bytecode.md shows how they work together.

The vocabulary (`Instr.opname`, with the meaning of `argval`; `arg` only where named)
------------------------------------------------------------------------------------
Opcodes not listed keep CPython's name and meaning; `argval` is the name, constant or number.
Jumps carry `target`, the index in `instrs` they go to.

    LOAD_FAST name            arg 1 when it may be unbound (checked load), 0 when it cannot
    LOAD_FAST_AND_CLEAR name  pushes NULL when unbound (inlined comprehensions of 3.12+); it and
                              STORE_FAST act on the cell itself when the name is a cell
    LOAD_CLOSURE name         pushes the cell (also on 3.13, where CPython uses LOAD_FAST)
    LOAD_GLOBAL name          never pushes NULL: a PUSH_NULL stands before or after it
    LOAD_ATTR name            never the method form
    LOAD_METHOD name          pops the object, pushes two slots, see CALL
    LOAD_SUPER_ATTR (name, is_method)   pops super, class, self; pushes like LOAD_ATTR/LOAD_METHOD
    CALL kwnames              arg = number of arguments, keywords included; argval = tuple of the
                              keyword names, () when none. Below the arguments lie two slots a, b:
                              when one is NULL the other is called, else a is called with b put in
                              front of the arguments. A LOAD_METHOD pushes `call_pair(f, NULL)` for
                              an ordinary attribute, or (function, self) for a method: the order
                              matters, because a break writes these slots to the real stack
    CALL_FUNCTION_EX          arg 1 when a keyword dict is on top; the same two slots below
    COMPARE_OP '<' ...        CONTAINS_OP, IS_OP: argval True when inverted (not in, is not)
    BINARY_OP '+' or '+=' ... BINARY_SUBSCR, STORE_SUBSCR, BUILD_SLICE (BINARY_SLICE is split)
    POP_JUMP_IF_TRUE, POP_JUMP_IF_FALSE   truth-test any object (TO_BOOL is dropped);
                              UNARY_NOT too; POP_JUMP_IF_NONE, POP_JUMP_IF_NOT_NONE
    JUMP                      forward or backward, arg 1 when it must not be interrupted
                              (JUMP_IF_x_OR_POP is split into COPY 1, POP_JUMP_IF_x, POP_TOP)
    FOR_ITER                  exhausted: pops the iterator and goes to target. END_FOR and the
                              POP_TOP that 3.13 puts behind it stay in the list but are never run
    RETURN_VALUE              RETURN_CONST is split into LOAD_CONST, RETURN_VALUE
    MAKE_FUNCTION             arg = flags 1 defaults, 2 kwdefaults, 4 annotations, 8 closure,
                              operands below the code object in that order (3.11's form)
    FORMAT_VALUE              arg as in 3.11 (1 str, 2 repr, 3 ascii, 4 with a spec on the stack);
                              CONVERT_VALUE arg 1 str, 2 repr, 3 ascii (3.13 only)
    LIST_TO_TUPLE, UNARY_POSITIVE, IMPORT_STAR, PREP_RERAISE_STAR, STOPITERATION_ERROR
                              what CALL_INTRINSIC_1 and CALL_INTRINSIC_2 do on 3.12 and later
    RESUME, MAKE_CELL, COPY_FREE_VARS             the prologue; nothing to execute but MAKE_CELL

Removed: CACHE, EXTENDED_ARG, PRECALL, KW_NAMES, TO_BOOL; paired instructions are split.

The exception table is on each instruction: `handler` is None or `Handler(target, depth, lasti)`.
When an instruction raises, the stack is cut to `depth` values, the instruction's offset is pushed
if `lasti`, then the exception, and execution goes on at `target`.
"""

from .decode import decode
from .encode import AssemblyError, stack_after
from .instr import NO_FALL_THROUGH, NULL_BELOW, Decoded, Handler, Instr, Label, call_pair
from .liveness import live_at, reachable
from .resume import (
    Resume,
    in_prologue,
    is_resume,
    make_resume,
    original,
    stack_name,
    state_at,
)
from .writer import Writer

__all__ = [
    "NO_FALL_THROUGH",
    "NULL_BELOW",
    "AssemblyError",
    "Decoded",
    "Handler",
    "Instr",
    "Label",
    "Resume",
    "Writer",
    "call_pair",
    "decode",
    "in_prologue",
    "is_resume",
    "live_at",
    "make_resume",
    "original",
    "reachable",
    "stack_after",
    "stack_name",
    "state_at",
]
