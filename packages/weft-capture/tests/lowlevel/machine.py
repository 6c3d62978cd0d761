"""Cut a function at any instruction and go on in a resume function, to compare with direct runs."""

from __future__ import annotations

import traceback
from types import CodeType, FunctionType

import corpus
from weft_capture.bytecode import Decoded, Writer, call_pair, decode, make_resume
from weft_capture.bytecode.encode import _effect
from weft_capture.bytecode.lower import Lowering
from weft_capture.bytecode.program import FrameShape, Op, program_of

_NO_RESULT = frozenset(
    """POP_TOP STORE_FAST STORE_DEREF STORE_NAME STORE_GLOBAL STORE_ATTR STORE_SUBSCR DELETE_SUBSCR
    LIST_APPEND LIST_EXTEND SET_ADD SET_UPDATE MAP_ADD DICT_UPDATE DICT_MERGE POP_EXCEPT NOP RESUME
    POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE DELETE_ATTR JUMP
    DELETE_FAST DELETE_DEREF MAKE_CELL COPY_FREE_VARS RETURN_VALUE RAISE_VARARGS RERAISE
    END_FOR""".split()
)
_RESULTS = {
    "LOAD_METHOD": lambda i: 2,
    "LOAD_SUPER_ATTR": lambda i: 1 + i.argval[1],
    "UNPACK_SEQUENCE": lambda i: i.arg,
    "UNPACK_EX": lambda i: (i.arg & 255) + 1 + (i.arg >> 8),
    "BEFORE_WITH": lambda i: 2,
    "FOR_ITER": lambda i: 2,
    "PUSH_EXC_INFO": lambda i: 2,
    "CHECK_EXC_MATCH": lambda i: 2,
}
_ENDS = ("JUMP", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE")


def _net(instr) -> int:
    """Net stack effect of falling through."""
    if instr.opname == "LOAD_METHOD":
        return 1
    if instr.target is not None:
        return {"FOR_ITER": 1, "JUMP": 0}.get(instr.opname, -1)
    names = (instr.argval,) if isinstance(instr.argval, str) else ()
    lowering = Lowering(FrameShape("f", "f", "f", 1, 0, names, (), (), 0, 0, 0))
    lowering.run([Op(instr.opname, instr.arg, instr.argval)])
    return sum(_effect(raw.op, raw.arg, False) for raw in lowering.raws)


class State:
    """What is known before an instruction: the stack, and which variables are bound."""

    def __init__(self, stack, must, may):
        self.stack, self.must, self.may = stack, must, may

    def merge(self, other):
        """Join two paths; the stacks of both have the same shape."""
        return State(self.stack, self.must & other.must, self.may | other.may)

    def same(self, other):
        return (self.must, self.may) == (other.must, other.may)


def states(decoded: Decoded) -> list[State | None]:
    """The state before each reachable instruction.

    Taken for granted: LOAD_METHOD finds methods of the class and pushes no NULL, except for
    `scale`, which the corpus only takes from super objects.
    """
    result: list[State | None] = [None] * len(decoded.instrs)
    arguments = frozenset(decoded.flat_args)
    todo = [(0, State((), arguments, arguments))]
    while todo:
        index, state = todo.pop()
        known = result[index]
        if known is not None:
            state = known.merge(state)
            if state.same(known):
                continue
        result[index] = state
        instr = decoded.instrs[index]
        after = _after(instr, state)
        if instr.handler:
            depth, lasti = instr.handler.depth, instr.handler.lasti
            saved = state.stack[:depth] + (True,) * (lasti + 1)
            both = state.merge(after)
            todo.append((instr.handler.target, State(saved, both.must, both.may)))
        if instr.target is not None:
            cut = {"JUMP": 0}.get(instr.opname, 1)
            stack = state.stack[: len(state.stack) - cut]
            todo.append((instr.target, State(stack, after.must, after.may)))
        if instr.opname not in _ENDS:
            todo.append((index + 1, after))
    return result


def _after(instr, state: State) -> State:
    stack, must, may = state.stack, state.must, state.may
    name = {instr.argval} if isinstance(instr.argval, str) else set()
    if instr.opname == "SWAP":
        items = list(stack)
        items[-1], items[-instr.arg] = items[-instr.arg], items[-1]
        return State(tuple(items), must, may)
    if instr.opname == "COPY":
        return State((*stack, stack[-instr.arg]), must, may)
    if instr.opname == "PUSH_NULL":
        return State((*stack, False), must, may)
    if instr.opname == "LOAD_FAST_AND_CLEAR":
        return State((*stack, bool(name & must)), must - name, may - name)
    if instr.opname == "STORE_FAST":
        is_value = stack[-1]
        return State(
            stack[:-1],
            must | name if is_value else must - name,
            may | name if is_value else may - name,
        )
    if instr.opname == "DELETE_FAST":
        return State(stack, must - name, may - name)
    if instr.opname in ("LOAD_METHOD", "LOAD_SUPER_ATTR") and "scale" in str(instr.argval):
        below = stack[: len(stack) + _net(instr) - 2]
        return State((*below, *call_pair(True, False)), must, may)
    results = _RESULTS.get(instr.opname, lambda i: i.opname not in _NO_RESULT)(instr)
    kept = len(stack) + _net(instr) - results
    return State(stack[:kept] + (True,) * results, must, may)


def cut_code(decoded: Decoded, index: int, stack, bound) -> CodeType:
    """The whole function, except that instruction `index` is replaced by going to a resume."""
    resume = make_resume(decoded, index, stack, bound)
    writer = Writer(decoded)
    writer.call_resume(resume)
    hole = writer._items
    first = next(i for i, instr in enumerate(decoded.instrs) if instr.opname == "RESUME") + 1
    body = program_of(decoded)
    ops = 0
    items = []
    for item in body:
        if isinstance(item, Op):
            if ops == index:
                items += hole
            if ops >= first:
                items.append(item)
            ops += 1
        else:
            items.append(item)
    writer._items = items
    return writer.finish()


def outcome(function, args):
    """What a call does: result or exception, with the lines of the corpus in its traceback."""
    log = corpus.Log()
    try:
        result = ("value", repr(function(log, *args)))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if f.filename.endswith("corpus.py")]
        result = ("error", type(error), str(error), lines[-1:])
    return result, log


def flat(function, args):
    """Arguments in the hook's flat order (the corpus passes positionals only)."""
    decoded = decode(function.__code__)
    positional = list(args[: decoded.argcount])
    if len(positional) < decoded.argcount:
        missing = len(positional) - decoded.argcount
        positional += function.__defaults__[missing:]
    rest = [(function.__kwdefaults__ or {})[n] for n in _kwonly(decoded)]
    if decoded.flags & 4:
        rest.append(tuple(args[decoded.argcount :]))
    if decoded.flags & 8:
        rest.append({})
    return positional + rest


def _kwonly(decoded):
    return decoded.varnames[decoded.argcount : decoded.argcount + decoded.kwonly]


def as_function(code: CodeType, like: FunctionType) -> FunctionType:
    """A function of `code` with the globals and closure of `like`."""
    return FunctionType(code, like.__globals__, like.__name__, None, like.__closure__)
