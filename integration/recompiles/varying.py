"""Programs made of a table: a value that differs in each call, where it comes from, and its use.

`programs()` yields every combination that makes sense; `python benchmarks/recompiles.py --varying`
counts their graphs. `test_integration_recompiles.py` runs each kind and use from one origin.
`DECIDES` lists what decides what the program does, and so may be compiled for each value.
"""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import linecache
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from recompiles.table import Compile

_PRELUDE = """\
import collections, dataclasses, datetime, decimal, enum, fractions, pathlib, uuid
import numpy as np
import torch

Color = enum.Enum("Color", [f"c{i}" for i in range(64)])
Level = enum.IntEnum("Level", [f"l{i}" for i in range(64)])
Point = collections.namedtuple("Point", "x y")

@dataclasses.dataclass
class Record:
    number: int
    name: str

@dataclasses.dataclass(frozen=True)
class Frozen:
    number: int

class Plain:
    def __init__(self, number):
        self.number = number

class Holder:
    pass

def make(n):
    return {make}

@torch.compiler.disable
def broken():
    global calls
    calls += 1
    return make(calls)

@torch.compiler.disable
def sink(v):
    seen.append(v)

calls, seen, table, names = 0, [], {{}}, {{i: i for i in range(200)}}
holder = Holder()
"""

# Each kind of value: how the n-th one is made, and what it can be used for.
_NUMBER = "arithmetic tensor compare equal truth minmax accumulate "
_WHOLE = _NUMBER + "size index item range modulo power repeat "
_TEXT = "concat startswith equal truth length split upper "
_MOVING = "length iterate truth last contains "
KINDS: dict[str, tuple[str, str]] = {
    "int": ("n + 2", _WHOLE),
    "negative": ("-n - 2", _NUMBER),
    "bool": ("n % 2 == 0", "truth tensor"),
    "float": ("n + 0.5", _NUMBER + "power round"),
    "small_float": ("0.1 * 0.9 ** n", _NUMBER),
    "complex": ("complex(n, 1)", "arithmetic tensor equal"),
    "str": ("f'name{n}'", _TEXT),
    "long_str": ("'ab' * (n + 1)", _TEXT),
    "bytes": ("bytes([n % 256, 1, 2])", "concat equal truth length"),
    "np_float64": ("np.float64(n + 0.5)", _NUMBER),
    "np_float32": ("np.float32(n + 0.5)", _NUMBER),
    "np_int64": ("np.int64(n + 2)", _WHOLE),
    "np_int32": ("np.int32(n + 2)", _WHOLE),
    "np_bool": ("np.bool_(n % 2)", "truth"),
    "np_str": ("np.str_(f'n{n}')", "equal length"),
    "array": ("np.full(3, n + 0.5)", "arithmetic total"),
    "tensor": ("torch.full((3,), n + 0.5)", "arithmetic tensor"),
    "sized_tensor": ("torch.ones(n + 2)", "total rows"),
    "item_tensor": ("torch.tensor(n + 2)", "to_number"),
    "ints": ("(n + 2, n + 3)", "length first contains iterate sizes"),
    "list_of_ints": ("[n + 2, n + 3]", "length first contains iterate sizes"),
    "list_of_floats": ("[n + 0.5, n + 1.5]", "length first iterate"),
    "list_of_str": ("[f'a{n}', f'b{n}']", "length contains"),
    "dict_of_floats": ("{'rate': n + 0.5, 'name': f'{n}'}", "rate length"),
    "dict_of_keys": ("{f'k{n}': 1}", "length"),
    "dict_of_ids": ("{n: torch.ones(2)}", "length"),
    "growing_list": ("list(range(n + 2))", _MOVING),
    "growing_floats": ("[0.5 * i for i in range(n + 2)]", "length truth last"),
    "growing_tensors": ("[torch.ones(2)] * (n + 2)", "length truth last"),
    "growing_dict": ("{i: 1.0 for i in range(n + 2)}", "length truth"),
    "growing_deque": ("collections.deque(range(n + 2))", _MOVING),
    "growing_set": ("set(range(n + 2))", "length truth"),
    "size": ("torch.Size((n + 2, 3))", "length first sizes"),
    "range": ("range(n + 2)", "length"),
    "slice": ("slice(0, n + 1)", "indexes"),
    "enum": ("list(Color)[n % 64]", "equal identity name"),
    "int_enum": ("Level(n % 64 + 1)", "equal tensor"),
    "datetime": ("datetime.datetime(2020, 1, 1) + datetime.timedelta(n)", "equal year isoformat"),
    "timedelta": ("datetime.timedelta(seconds=n + 1)", "equal seconds"),
    "decimal": ("decimal.Decimal(n)", "equal"),
    "fraction": ("fractions.Fraction(n, 7)", "equal"),
    "path": ("pathlib.Path(f'/tmp/{n}')", "equal path"),
    "uuid": ("uuid.UUID(int=n)", "equal"),
    "dataclass": ("Record(n + 2, f'r{n}')", "number"),
    "frozen": ("Frozen(n + 2)", "number equal"),
    "namedtuple": ("Point(n + 2, n + 0.5)", "first"),
    "object": ("Plain(n + 2)", "number"),
    "function": ("lambda x: x * 2", "call"),
    "generator": ("torch.Generator()", ""),
    "none_or_int": ("None if n % 2 else 3", "is_none"),
}
_ALWAYS = "unused returned formatted stored appended key sunk hashed is_none isinstance pair"

# Each use: statements on `x` and `v` that leave a result in `y`.
USES: dict[str, str] = {
    "unused": "y = x * 2",
    "returned": "y = x * 2, v",
    "formatted": "y = x * 2, f'<{v}>'",
    "stored": "holder.last = v; y = x * 2",
    "appended": "seen.append(v); y = x * 2",
    "key": "table[v] = 1; y = x * 2",
    "sunk": "y = x * 2; sink(v); y = y + 1",
    "hashed": "y = x * 2, hash(v) == hash(v)",
    "is_none": "y = x * 2 if v is None else x * 3",
    "isinstance": "y = x * 2 if isinstance(v, int) else x * 3",
    "pair": "y = x * 2, (v, [v])",
    "arithmetic": "y = x, v * 2 + 1",
    "tensor": "y = x * v",
    "compare": "y = x * 2 if v < 5000 else x",
    "equal": "y = x * 2 if v == -77 else x",
    "truth": "y = x * 2 if v else x",
    "minmax": "y = x * min(v, 5000)",
    "accumulate": "holder.total = holder.total + v; y = x * 2",
    "size": "y = torch.ones(v).sum() + x",
    "index": "y = torch.arange(200)[v] + x",
    "item": "y = x + list(range(200))[v]",
    "range": "y = x + torch.arange(v).sum()",
    "modulo": "y = x * 2 if v % 5 == 0 else x",
    "power": "y = x * 0.9 ** v",
    "repeat": "y = x.repeat(v).sum()",
    "round": "y = x * round(v, 2)",
    "concat": "y = x * 2, v + v",
    "startswith": "y = x * 2 if v[:1] == 'q' else x",
    "split": "y = x * 2, v.split('m')",
    "upper": "y = x * 2, v.upper()",
    "length": "y = x * 2, len(v)",
    "iterate": "y = x * 2, sum(v)",
    "last": "y = x * v[-1]",
    "contains": "y = x * 2 if -77 in v else x",
    "total": "y = x * v.sum()",
    "rows": "y = x * v.shape[0]",
    "to_number": "y = x * 2, v.item()",
    "first": "y = x * v[0]",
    "sizes": "y = torch.ones(tuple(v)).sum() + x",
    "rate": "y = x * v['rate']",
    "indexes": "y = torch.arange(200)[v].sum() + x",
    "identity": "y = x * 2 if v is Color.c3 else x",
    "name": "y = x * 2, v.name",
    "year": "y = x * v.day",
    "isoformat": "y = x * 2, v.isoformat()",
    "seconds": "y = x * v.total_seconds()",
    "path": "y = x * 2, v / 'a'",
    "number": "y = x * v.number",
    "call": "y = v(x)",
}

# Each origin: a line before the call (with the call's number n), and one within.
ORIGINS: dict[str, tuple[str, str]] = {
    "argument": ("a = make(n)", "v = a"),
    "item": ("a = [make(n)]", "v = a[0]"),
    "value": ("a = {'k': make(n)}", "v = a['k']"),
    "attribute": ("a = holder; holder.value = make(n)", "v = a.value"),
    "global": ("a = None; global_value = make(n)", "v = global_value"),
    "closure": ("a = None; change(n)", "v = cell"),
    "class_attribute": ("a = None; Holder.shared = make(n)", "v = Holder.shared"),
    "broken_call": ("a = None", "v = broken()"),
    "iterator": ("a = iterator", "v = next(a)"),
}

# Kinds and uses that are compiled for each value ("*": any). torch.compile does so with all of them
# but sets that nothing looks at.
DECIDES = {
    ("*", "hashed"), ("*", "split"), ("*", "iterate"), ("*", "contains"), ("complex", "tensor"),
    ("growing_set", "*"), ("range", "key"), ("decimal", "key"), ("fraction", "*"),
    ("int_enum", "*"), ("enum", "*"), ("uuid", "key"), ("frozen", "key"), ("namedtuple", "key"),
    ("namedtuple", "formatted"), ("size", "formatted"),
    *((kind, "formatted") for kind in KINDS if "_of_" in kind or kind.startswith("growing")),
}  # fmt: skip


if sys.version_info >= (3, 12):  # the text of a path is put together from its parts
    DECIDES.add(("path", "formatted"))


def decides(kind: str, use: str) -> bool:
    """Say whether a value is looked at by what the program does with it."""
    return bool({(kind, use), ("*", use), (kind, "*")} & DECIDES)


def uses(kind: str) -> list[str]:
    """Return the uses that make sense for a kind of value."""
    return [*_ALWAYS.split(), *KINDS[kind][1].split()]


def programs() -> Iterator[tuple[str, str, str]]:
    """Yield the combinations of a kind, an origin and a use."""
    for kind, origin in itertools.product(KINDS, ORIGINS):
        for use in uses(kind):
            yield kind, origin, use


def rotated(kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield each use of a kind, from one origin after the other."""
    origins, start = list(ORIGINS), list(KINDS).index(kind)
    for number, use in enumerate(uses(kind), start):
        origin = origins[number % len(origins)]
        yield kind, "attribute" if (kind, origin) == _METHOD else origin, use


_METHOD = ("function", "class_attribute")
"""Replaces a method of a class, whose code is inlined."""


def source(kind: str, origin: str, use: str) -> str:
    """Return the text of a program."""
    before, within = ORIGINS[origin]
    return (
        _PRELUDE.replace("{make}", KINDS[kind][0]).replace("{{", "{").replace("}}", "}")
        + "holder.total, iterator = 0, iter([make(n) for n in range(64)])\n"
        + "def factory():\n    cell = None\n    def change(n):\n        nonlocal cell\n"
        + "        cell = make(n)\n    def f(x, a):\n"
        + f"        {within}\n        {USES[use]}\n        return y\n    return f, change\n"
        + "f, change = factory()\n"
        + f"def prepare(n):\n    global global_value\n    {before}\n    return a\n"
        + "def state():\n    return seen, table, getattr(holder, 'last', None), holder.total\n"
    )


def described(value: Any) -> Any:
    """Return a value as text and containers of text, without addresses."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(described, value)]
    if isinstance(value, dict):
        return [[described(key), described(one)] for key, one in value.items()]
    if dataclasses.is_dataclass(value) or type(value).__name__ == "Plain":
        return [type(value).__name__, described(vars(value))]
    return type(value).__name__ if callable(value) else re.sub(r"0x[0-9a-f]+", "", repr(value))


def run(kind: str, origin: str, use: str, compile: Compile, calls: int) -> list[Any]:
    """Run a program; return the results of its calls and what it changed."""
    text = source(kind, origin, use)
    name = f"/varying/{kind}-{origin}-{use}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    module = sys.modules["varying"] = types.ModuleType("varying")
    space = module.__dict__
    exec(builtins.compile(text, name, "exec"), space)
    step, found = compile(space["f"]), []
    for n in range(calls):
        argument = space["prepare"](n)
        try:
            found.append(described(step(torch.ones(3), argument)))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return [*found, described(space["state"]())]


MOST = 4
"""Graphs of a program: without and with the value, before and behind a broken call."""
