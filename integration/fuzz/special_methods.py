"""Classes over builtin ones that override a few special methods, and what CPython asks of them.

A program applies operations out of special_operations.txt to an instance, made in the function or
outside. What is compared are results, texts of errors, and which methods were called in what order.
"""

from __future__ import annotations

import random
from pathlib import Path

from .program import Program

_OPERATIONS = [
    line
    for line in Path(__file__).with_name("special_operations.txt").read_text().splitlines()
    if not line.startswith("#")
]
# A builtin class, and an argument for a class over it.
_BASES = {
    "int": "2", "float": "2.0", "str": "'ab'", "bytes": "b'ab'", "list": "[1, 2]",
    "tuple": "(1, 2)", "dict": "{1: 2}", "set": "{1, 2}", "frozenset": "{1, 2}", "object": "",
    "Exception": "1", "collections.deque": "[1, 2]", "collections.OrderedDict": "[(1, 2)]",
    "collections.Counter": "'aab'", "collections.defaultdict": "int",
}  # fmt: skip
# A method, and what it gives.
_METHODS = {
    "__len__": "2", "__bool__": "False", "__iter__": "iter([7, 8])", "__getitem__": "5",
    "__contains__": "True", "__index__": "1", "__int__": "3", "__float__": "2.5",
    "__complex__": "1j", "__str__": "'str'", "__repr__": "'repr'", "__format__": "'format'",
    "__bytes__": "b'by'", "__hash__": "5", "__eq__": "True", "__ne__": "True", "__lt__": "True",
    "__gt__": "False", "__le__": "True", "__add__": "'add'", "__radd__": "'radd'",
    "__mul__": "'mul'", "__rmul__": "'rmul'", "__iadd__": "'iadd'", "__mod__": "'mod'",
    "__rmod__": "'rmod'", "__or__": "'or'", "__ror__": "'ror'", "__and__": "'and'",
    "__sub__": "'sub'", "__rsub__": "'rsub'", "__neg__": "'neg'", "__abs__": "'abs'",
    "__round__": "'round'", "__trunc__": "4", "__floor__": "5", "__ceil__": "6",
    "__reversed__": "iter([9])", "__length_hint__": "3", "__next__": "11", "__call__": "12",
    "__pow__": "'pow'", "__divmod__": "'divmod'", "__missing__": "13", "__setitem__": "None",
    "__delitem__": "None", "__enter__": "self", "__exit__": "True", "keys": "['a']",
    "items": "[('a', 1)]", "__fspath__": "'p'", "__sizeof__": "5",
}  # fmt: skip
_PRELUDE = """\
import bisect, collections, copy, functools, heapq, io, itertools, math, operator, string
LOG = []


def match_(v):
    match v:
        case [a, b]:
            return "sequence", a, b
        case {"a": q}:
            return "mapping", q
        case int() | str():
            return "plain"
    return "none"


def with_(v):
    with v:
        return 1
    return 2


def for_(v):
    out = []
    for k in v:
        out.append(k)
        if len(out) > 3:
            break
    return out


def gen_(v):
    def inner():
        yield from v

    return list(itertools.islice(inner(), 3))


def unp_(v):
    (a, b), c = v, 1
    return a, b, c


def assert_(v):
    assert v
    return 1


def while_(v):
    n = 0
    while v:
        n += 1
        if n > 2:
            break
    return n


def cmp_(v):
    return 0 < v < 3


def tern_(v):
    return [k for k in [1, 2] if v]


def state():
    return LOG
"""


def generate(seed: int) -> Program:
    """Make a class and a function that applies several operations to an instance of it."""
    chosen = random.Random(seed)
    base = chosen.choice(list(_BASES))
    names = chosen.sample(list(_METHODS), chosen.choice((1, 2, 3, 5, 12)))
    # Texts with addresses say nothing; a class that compares needs a hash.
    names += ["__repr__"] * (base == "object") + ["__hash__"] * ("__eq__" in names)
    lines = [f"class K({base}):"]
    for name in dict.fromkeys(names):
        lines += [f"    def {name}(self, *args):", f"        LOG.append({name!r})"]
        lines += [f"        return {_METHODS[name]}", ""]
    lines += ["", "def f(x, v):", "    LOG.clear()", "    out = []"]
    if chosen.random() < 0.5:
        lines.append(f"    v = K({_BASES[base]})")
    lines.append("    y = x + 1")
    for operation in chosen.sample(_OPERATIONS, 8):
        statement = " = " in operation or operation.startswith("del ")
        lines += ["    try:", f"        {operation if statement else f'out.append({operation})'}"]
        lines += ["    except Exception as error:"]
        lines += ["        out.append((type(error).__name__, str(error)))"]
        lines.append("    LOG.append('-')")
    lines.append("    return y, out")
    source = f"{_PRELUDE}\n\n" + "\n".join(lines) + "\n"
    call = f"(tensor((3,), seed=1), K({_BASES[base]}))"
    return Program(source, (call, call), 0, None, parts=8)
