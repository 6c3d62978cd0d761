"""What each instruction is in a text: rows of `decompile`; and what the texts call."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import CellType
from typing import Any, TypeAlias

from weft_capture.python_compat import PY314

from .decompile_state import NotExpressible, State, Walk, call, load
from .instr import Instr, call_pair
from .tidy import delete, store

Rule: TypeAlias = Callable[[State, Walk, Instr], None]


# ---- what the texts call

STOP = object()
"""What `next` returns at the end of an iterator."""


def cell_of(function: Any) -> CellType:
    """The cell that a lambda of one variable refers to."""
    cell: CellType = function.__closure__[0]
    return cell


# ---- expressions


def negated(value: ast.expr) -> ast.expr:
    """The expression of `not value`."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not):
        return value.operand
    return ast.UnaryOp(ast.Not(), value)


def _lambda(body: ast.expr) -> ast.Lambda:
    empty = ast.parse("lambda: 0", mode="eval").body
    assert isinstance(empty, ast.Lambda)
    empty.body = body
    return empty


def _literal(value: object) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


_BINARY: dict[str, type[ast.operator]] = {
    "+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div, "//": ast.FloorDiv, "%": ast.Mod,
    "**": ast.Pow, "@": ast.MatMult, "<<": ast.LShift, ">>": ast.RShift, "&": ast.BitAnd,
    "|": ast.BitOr, "^": ast.BitXor,
}  # fmt: skip
_COMPARE: dict[str, type[ast.cmpop]] = {
    "<": ast.Lt, "<=": ast.LtE, "==": ast.Eq, "!=": ast.NotEq, ">": ast.Gt, ">=": ast.GtE,
}  # fmt: skip


def _takes(count: int, make: Callable[..., ast.expr]) -> Rule:
    """The rule of an instruction that replaces `count` operands by an expression."""

    def rule(self: State, walk: Walk, instr: Instr) -> None:
        walk.stack.append(make(*self.pops(walk, count)))

    return rule


def _builds(make: Callable[[list[ast.expr]], ast.expr], each: int = 1) -> Rule:
    """The rule of an instruction that makes a container of `each * arg` operands."""

    def rule(self: State, walk: Walk, instr: Instr) -> None:
        walk.stack.append(make(self.pops(walk, each * instr.arg)))

    return rule


def _calls(function: object) -> Rule:
    """The rule of an instruction that does to one operand what a function does."""

    def rule(self: State, walk: Walk, instr: Instr) -> None:
        walk.stack.append(self.named(function, self.pop(walk)))

    return rule


def _compares(operator: Callable[[Instr], ast.cmpop]) -> Rule:
    def rule(self: State, walk: Walk, instr: Instr) -> None:
        left, right = self.pops(walk, 2)
        walk.stack.append(ast.Compare(left, [operator(instr)], [right]))

    return rule


def _binary(self: State, walk: Walk, instr: Instr) -> None:
    left, right = self.pops(walk, 2)
    symbol = instr.argval.removesuffix("=")
    if symbol == instr.argval:
        walk.stack.append(ast.BinOp(left, _BINARY[symbol](), right))
        return
    target = self.fresh("value")
    self.assign(walk, target, left)
    self.write(walk, ast.AugAssign(store(target), _BINARY[symbol](), right))
    walk.stack.append(load(target))


def _const_key_map(self: State, walk: Walk, instr: Instr) -> None:
    *values, keys = self.pops(walk, instr.arg + 1)
    assert isinstance(keys, ast.Tuple)
    walk.stack.append(ast.Dict(list(keys.elts), values))


def _convert(self: State, walk: Walk, instr: Instr) -> None:
    convert = (None, str, repr, ascii)[instr.arg & 3]
    if convert is not None:
        walk.stack.append(self.named(convert, self.pop(walk)))


def _format(self: State, walk: Walk, instr: Instr) -> None:
    spec = self.pops(walk, bool(instr.arg & 4))
    _convert(self, walk, instr)
    walk.stack.append(self.named(format, self.pop(walk), *spec))


def _join(values: list[ast.expr]) -> ast.expr:
    empty = ast.Attribute(ast.Constant(""), "join", ast.Load())
    return call(empty, ast.Tuple(values, ast.Load()))


def _unpack(self: State, walk: Walk, instr: Instr) -> None:
    temps = [self.fresh("value") for _ in range(instr.arg)]
    targets = ast.Tuple([store(temp) for temp in temps], ast.Store())
    value = self.pop(walk)
    self.write(walk, ast.Assign([targets], value))
    walk.bound.update(temps)
    walk.stack += map(load, reversed(temps))


# ---- loads and stores


def _load_const(self: State, walk: Walk, instr: Instr) -> None:
    is_function = id(instr.argval) in self.functions
    name = (self.names.function if is_function else self.names.of)(instr.argval)
    walk.stack.append(_literal(instr.argval) if name is None else load(name))


def _load_variable(self: State, walk: Walk, instr: Instr) -> None:
    walk.stack.append(load(self.variable(walk, instr.argval)))


def _load_closure(self: State, walk: Walk, instr: Instr) -> None:
    walk.stack.append(self.named(cell_of, _lambda(load(self.variable(walk, instr.argval)))))


def _load_global(self: State, walk: Walk, instr: Instr) -> None:
    name = instr.argval
    if name in self.decoded.slots:  # the text would mean the variable
        walk.stack.append(ast.Subscript(self.named(globals), ast.Constant(name), ast.Load()))
        return
    self.globals.add(name)
    walk.stack.append(load(name))


def _load_attr(self: State, walk: Walk, instr: Instr) -> None:
    walk.stack.append(ast.Attribute(self.pop(walk), instr.argval, ast.Load()))


def _load_method(self: State, walk: Walk, instr: Instr) -> None:
    walk.stack += call_pair(ast.Attribute(self.pop(walk), instr.argval, ast.Load()), None)


def _load_super_attr(self: State, walk: Walk, instr: Instr) -> None:
    function, *args = self.pops(walk, 3)
    name, is_method = instr.argval
    value = ast.Attribute(call(function, *args), name, ast.Load())
    walk.stack += call_pair(value, None) if is_method else (value,)


def _store(self: State, walk: Walk, instr: Instr) -> None:
    value, name = walk.stack.pop(), self.stored_name(walk, instr.argval)
    if instr.opname == "STORE_FAST" and instr.argval in self.decoded.cells:
        raise NotExpressible("the replacement of a cell")
    if value is None:  # a NULL unbinds the variable
        walk.bound.discard(name)
    else:
        self.assign(walk, name, value)


def _delete(self: State, walk: Walk, instr: Instr) -> None:
    name = self.variable(walk, instr.argval)
    self.spill(walk, name=name)
    self.stored.add(name)
    walk.bound.discard(name)
    walk.out.append(delete(name))


def _global_name(self: State, instr: Instr) -> str:
    name: str = instr.argval
    if name in self.decoded.slots:
        raise NotExpressible(f"{instr.opname} of a name that is a variable, too")
    self.globals.add(name)
    return name


def _store_global(self: State, walk: Walk, instr: Instr) -> None:
    self.assign(walk, _global_name(self, instr), self.pop(walk))


def _delete_global(self: State, walk: Walk, instr: Instr) -> None:
    self.stored.add(_global_name(self, instr))
    self.write(walk, delete(instr.argval))


def _stores_to(count: int, make: Callable[..., ast.expr], deletes: bool = False) -> Rule:
    """The rule of a store to, or deletion of, what `make` makes of an instruction and operands."""

    def rule(self: State, walk: Walk, instr: Instr) -> None:
        operands = self.pops(walk, count)
        value = None if deletes else operands.pop(0)
        target = make(instr, *operands)
        self.write(walk, ast.Assign([target], value) if value else ast.Delete([target]))

    return rule


def _attribute(instr: Instr, owner: ast.expr) -> ast.expr:
    return ast.Attribute(owner, instr.argval, ast.Store())


def _item(instr: Instr, owner: ast.expr, key: ast.expr) -> ast.expr:
    return ast.Subscript(owner, key, ast.Store())


def _import(self: State, walk: Walk, instr: Instr) -> None:
    level, names = self.pops(walk, 2)
    name, frame = ast.Constant(instr.argval), self.named(globals)
    walk.stack.append(self.named(__import__, name, frame, ast.Constant(None), names, level))


def _import_from(self: State, walk: Walk, instr: Instr) -> None:
    self.spill(walk)
    owner = self.pop(walk)
    walk.stack += (owner, ast.Attribute(owner, instr.argval, ast.Load()))


# ---- calls


def _callable(self: State, walk: Walk) -> tuple[ast.expr, list[ast.expr]]:
    """Pop what a call calls, and its first argument; see CALL in the vocabulary."""
    second, first = walk.stack.pop(), walk.stack.pop()
    if first is not None and second is not None:
        return first, [second]
    function = first or second
    assert function is not None
    return function, []


def _call(self: State, walk: Walk, instr: Instr) -> None:
    args = self.pops(walk, instr.arg)
    function, first = _callable(self, walk)
    names = instr.argval or ()
    plain = [*first, *args[: len(args) - len(names)]]
    name = getattr(function, "id", None)
    if name is not None and name == self.tail_call:
        function, *plain = plain
    elif name is not None and plain and self.names.without_first(name):
        del plain[0]
    keywords = zip(names, args[len(args) - len(names) :], strict=True)
    walk.stack.append(ast.Call(function, plain, [ast.keyword(n, v) for n, v in keywords]))


def _call_function_ex(self: State, walk: Walk, instr: Instr) -> None:
    keywords = [ast.keyword(None, value) for value in self.pops(walk, instr.arg & 1)]
    args = ast.Starred(self.pop(walk), ast.Load())
    function, first = _callable(self, walk)
    walk.stack.append(ast.Call(function, [*first, args], keywords))


def _make_function(self: State, walk: Walk, instr: Instr) -> None:
    """A resume function; its cells come in a tuple of `cell_of` calls."""
    code = self.pop(walk)
    if instr.arg & ~8 or not isinstance(code, ast.Name):
        raise NotExpressible("a function with defaults")
    if not instr.arg:
        walk.stack.append(code)
        return
    cells = self.pop(walk)
    walk.stack.append(call(ast.Attribute(code, "with_cells", ast.Load()), *cells.elts))  # type: ignore[attr-defined]


# ---- the stack, exceptions, suspension


def _copy(self: State, walk: Walk, instr: Instr) -> None:
    if not self.is_pure(walk.stack[-instr.arg]):
        self.spill(walk)
    walk.stack.append(walk.stack[-instr.arg])


def _swap(self: State, walk: Walk, instr: Instr) -> None:
    if not all(map(self.is_pure, walk.stack[-instr.arg :])):
        self.spill(walk)
    stack = walk.stack
    stack[-1], stack[-instr.arg] = stack[-instr.arg], stack[-1]


def _pop_top(self: State, walk: Walk, instr: Instr) -> None:
    value = walk.stack.pop()
    if value is not None and not self.is_pure(value):
        self.write(walk, ast.Expr(value))


def _push_exc_info(self: State, walk: Walk, instr: Instr) -> None:
    error = self.pop(walk)
    walk.stack += (ast.Constant(None), error)  # what was handled before


def _pop_except(self: State, walk: Walk, instr: Instr) -> None:
    walk.stack.pop()


def _check_exc_match(self: State, walk: Walk, instr: Instr) -> None:
    kind, error = self.pop(walk), walk.stack[-1]
    walk.stack.append(self.named(isinstance, error, kind))


def _before_with(self: State, walk: Walk, instr: Instr) -> None:
    special, enter = self.name(self.names.special_method), self.fresh("enter")
    self.spill(walk)
    manager = self.pop(walk)
    methods = [call(load(special), manager, _literal(f"__{n}__")) for n in ("enter", "exit")]
    self.assign(walk, enter, methods[0])
    walk.stack += call_pair(methods[1], None) if PY314 else (methods[1],)
    self.spill(walk)
    walk.stack.append(call(load(enter)))


NO_MEANING = frozenset(("RESUME", "NOP", "MAKE_CELL", "COPY_FREE_VARS"))

RULES: dict[str, Rule] = {
    "LOAD_CONST": _load_const,
    "LOAD_COMMON_CONSTANT": _load_const,
    **dict.fromkeys(("LOAD_FAST", "LOAD_DEREF"), _load_variable),
    **dict.fromkeys(("STORE_FAST", "STORE_DEREF"), _store),
    **dict.fromkeys(("DELETE_FAST", "DELETE_DEREF"), _delete),
    "LOAD_CLOSURE": _load_closure,
    "LOAD_GLOBAL": _load_global,
    "STORE_GLOBAL": _store_global,
    "DELETE_GLOBAL": _delete_global,
    "LOAD_ATTR": _load_attr,
    "LOAD_METHOD": _load_method,
    "LOAD_SUPER_ATTR": _load_super_attr,
    "STORE_ATTR": _stores_to(2, _attribute),
    "DELETE_ATTR": _stores_to(1, _attribute, deletes=True),
    "STORE_SUBSCR": _stores_to(3, _item),
    "DELETE_SUBSCR": _stores_to(2, _item, deletes=True),
    "BINARY_SUBSCR": _takes(2, lambda owner, key: ast.Subscript(owner, key, ast.Load())),
    "BINARY_OP": _binary,
    "UNARY_NOT": _takes(1, negated),
    "UNARY_NEGATIVE": _takes(1, lambda value: ast.UnaryOp(ast.USub(), value)),
    "UNARY_POSITIVE": _takes(1, lambda value: ast.UnaryOp(ast.UAdd(), value)),
    "UNARY_INVERT": _takes(1, lambda value: ast.UnaryOp(ast.Invert(), value)),
    "COMPARE_OP": _compares(lambda instr: _COMPARE[instr.argval]()),
    "IS_OP": _compares(lambda instr: ast.IsNot() if instr.argval else ast.Is()),
    "CONTAINS_OP": _compares(lambda instr: ast.NotIn() if instr.argval else ast.In()),
    "BUILD_TUPLE": _builds(lambda values: ast.Tuple(values, ast.Load())),
    "BUILD_LIST": _builds(lambda values: ast.List(values, ast.Load())),
    "BUILD_SET": _builds(ast.Set),
    "BUILD_MAP": _builds(lambda values: ast.Dict(list(values[::2]), values[1::2]), each=2),
    "BUILD_CONST_KEY_MAP": _const_key_map,
    "BUILD_SLICE": lambda self, walk, instr: walk.stack.append(
        self.named(slice, *self.pops(walk, instr.arg))
    ),
    "BUILD_STRING": _builds(_join),
    "CONVERT_VALUE": _convert,
    "LIST_TO_TUPLE": _calls(tuple),
    "GET_ITER": _calls(iter),
    "FORMAT_VALUE": _format,
    "UNPACK_SEQUENCE": _unpack,
    "IMPORT_NAME": _import,
    "IMPORT_FROM": _import_from,
    "CALL": _call,
    "CALL_FUNCTION_EX": _call_function_ex,
    "MAKE_FUNCTION": _make_function,
    "COPY": _copy,
    "SWAP": _swap,
    "POP_TOP": _pop_top,
    "POP_EXCEPT": _pop_except,
    "PUSH_NULL": lambda self, walk, instr: walk.stack.append(None),
    "PUSH_EXC_INFO": _push_exc_info,
    "CHECK_EXC_MATCH": _check_exc_match,
    "BEFORE_WITH": _before_with,
    "LOAD_ASSERTION_ERROR": lambda self, walk, instr: walk.stack.append(
        load(self.name(AssertionError))
    ),
}
"""How each instruction of the vocabulary is written; one without a row is not expressible."""
