"""Cut a function at any instruction and go on in a resume function, to compare with direct runs."""

from __future__ import annotations

import traceback
from types import CodeType, FunctionType

import corpus
from weft_capture.bytecode import Decoded, Writer, decode, make_resume, stack_after
from weft_capture.bytecode.instr import Op, program_of

_ENDS = ("JUMP", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE")


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

    Taken for granted: LOAD_METHOD and `with` find methods of the class, except for
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
            stack = stack_after(instr, state.stack, jump=True)
            todo.append((instr.target, State(stack, after.must, after.may)))
        if instr.opname not in _ENDS:
            todo.append((index + 1, after))
    return result


def _after(instr, state: State) -> State:
    stack, must, may = state.stack, state.must, state.may
    name = {instr.argval} if isinstance(instr.argval, str) else set()
    if instr.opname == "LOAD_METHOD" and "scale" not in instr.argval:
        return State((*stack[:-1], True, True), must, may)
    after = stack_after(instr, stack, bound=name <= must)
    if instr.opname == "BEFORE_WITH":
        after = (True,) * len(after)
    if instr.opname == "STORE_FAST" and stack[-1]:
        return State(after, must | name, may | name)
    if instr.opname in ("STORE_FAST", "LOAD_FAST_AND_CLEAR", "DELETE_FAST"):
        return State(after, must - name, may - name)
    return State(after, must, may)


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
    return decoded.varnames[decoded.argcount : decoded.argcount + decoded.kwonlyargcount]


def as_function(code: CodeType, like: FunctionType) -> FunctionType:
    """A function of `code` with the globals and closure of `like`."""
    return FunctionType(code, like.__globals__, like.__name__, None, like.__closure__)
