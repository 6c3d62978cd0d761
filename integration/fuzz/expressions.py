"""Python's operators and builtin functions on pairs of values of every kind.

A program evaluates several expressions, each on a pair of operands that its calls pass. What the
language's data model decides is what differs: which operand is asked first, what a class of the
program overrides, what the text of an error says.
"""

from __future__ import annotations

import random

from .program import Program

_PRELUDE = """\
import collections
import enum
import operator


class Items(list):
    pass


class Table(dict):
    def __missing__(self, key):
        return key


class Number(int):
    def __add__(self, other):
        return "number"


class Word(str):
    pass


class Pair(collections.namedtuple("Pair", "a b")):
    __slots__ = ()

    def __add__(self, other):
        return Pair(self.a + other[0], self.b + other[1])


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


class Reflected:
    def __radd__(self, other):
        return "radd"

    def __rmul__(self, other):
        return "rmul"

    def __ror__(self, other):
        return "ror"

    def __eq__(self, other):
        return "equal"

    def __lt__(self, other):
        return True

    __hash__ = object.__hash__

    def __repr__(self):
        return "Reflected()"


class Sized:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return range(self.size)[index]

    def __index__(self):
        return self.size

    def __bool__(self):
        return self.size > 1

    def __repr__(self):
        return f"Sized({self.size})"


class Plain:
    def __repr__(self):
        return "Plain()"


def evaluate(function, a, b):
    try:
        return function(a, b)
    except Exception as error:
        return type(error).__name__, str(error)

"""

_EXPRESSIONS = (
    "a + b", "a - b", "a * b", "a / b", "a // b", "a % b", "a ** b", "a @ b", "a & b", "a | b",
    "a ^ b", "a << b", "a >> b", "a == b", "a != b", "a < b", "a <= b", "a > b", "a >= b",
    "a in b", "a not in b", "a is b", "a and b", "not a", "-a", "+a", "~a", "abs(a)", "len(a)",
    "bool(a)", "a[b]", "a[b:]", "a[:2]", "list(a)", "tuple(a)", "sorted(a)", "sum(a)", "max(a)",
    "min(a, b)", "any(a)", "all(a)", "hash(a) == hash(b)", "int(a)", "float(a)", "str(a)",
    "f'{a}'", "repr(a)", "'%s' % (a,)", "divmod(a, b)", "round(a)", "pow(a, b)",
    "isinstance(a, int)",
    "isinstance(a, type(b))", "callable(a)", "list(zip(a, b))", "list(enumerate(a))",
    "list(reversed(a))", "list(map(str, a))", "dict(a)", "set(a)", "frozenset(a)", "[*a, *b]",
    "{**a, **b}", "operator.iadd(a, b)", "operator.imul(a, b)", "operator.ior(a, b)",
    "operator.index(a)", "operator.contains(a, b)", "a.index(b)", "a.count(b)", "a.get(b)",
    "a.union(b)", "a.keys() & b", "list(iter(a))", "next(iter(a))", "range(a)", "slice(a, b)",
    "type(a)(b)", "getattr(a, 'real')", "hasattr(a, '__len__')", "dict.fromkeys(a, b)",
)  # fmt: skip

_OPERANDS = (
    "[1, 2]", "[]", "[2, 1, 3]", "(1, 2)", "()", "(1, 'a')", "Items([1, 2])", "{1: 2}", "{}",
    "{'a': 1, 'b': 2}", "Table({1: 2})", "{1, 2}", "set()", "frozenset([1])", "'ab'", "''", "'%s'",
    "Word('ab')", "b'ab'", "bytearray(b'a')", "0", "1", "3", "-2", "2 ** 70", "2.5", "0.0",
    "float('inf')", "1j", "True", "False", "None", "Number(3)", "Color.RED", "Pair(1, 2)",
    "Reflected()", "Sized(2)", "Sized(0)", "Plain()", "range(3)", "range(0)", "slice(1, 2)",
    "{1: 2}.keys()", "{1: 2}.items()", "{1: 2}.values()", "collections.deque([1, 2])",
    "collections.OrderedDict(a=1)", "collections.defaultdict(int, {1: 2})",
    "collections.Counter('ab')",
    "torch.Size([1, 2])", "torch.float32", "int", "len", "...", "NotImplemented",
)  # fmt: skip


def generate(seed: int) -> Program:
    """Return a program of eight expressions, called three times with operands that change."""
    choose = random.Random(seed)
    expressions = choose.sample(_EXPRESSIONS, 8)
    names = [f"v{index}" for index in range(6)]
    lines = [f"def f(x, {', '.join(names)}):", "    results = [x + 1]"]
    for expression in expressions:
        a, b = choose.sample(names, 2)
        lines.append(f"    results.append(evaluate(lambda a, b: {expression}, {a}, {b}))")
    lines.append("    return results")
    operands = [choose.choice(_OPERANDS) for _ in names]
    calls = []
    for _ in range(3):
        calls.append(f"(tensor((3,)), {', '.join(operands)})")
        operands[choose.randrange(len(operands))] = choose.choice(_OPERANDS)
    return Program(_PRELUDE + "\n".join(lines) + "\n", tuple(calls), parts=8)
