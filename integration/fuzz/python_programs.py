"""Python programs: values and tensors, classes of the program, state changed between calls.

python_grammar.txt has the productions, python_prelude.txt what all programs share. A section
`[name]` holds a production a line; lines that begin with `|` carry on the one before. `4* ` in
front of a production is its weight. In it, `«name»` is expanded in turn, and `«a¦b»` is one of the
two. What takes several lines is indented as the line that it stands in.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from .program import Program

_HERE = Path(__file__).parent
_NAMES = re.compile(r"«(\w+)»")
_REPEATED = {
    "block": ("stmt", 1, 2),
    "localblock": ("localstmt", 1, 2),
    "methods": ("method", 1, 6),
}
_DEPTH = 3  # from here on the productions that end soonest are taken

_Rows = list[tuple[int, str]]


def _grammar() -> dict[str, _Rows]:
    found: dict[str, _Rows] = {}
    rows: _Rows = []
    for line in _HERE.joinpath("python_grammar.txt").read_text().splitlines():
        if re.fullmatch(r"\[\w+\]", line):
            rows = found[line[1:-1]] = []
        elif line.startswith("|") and rows:
            rows[-1] = rows[-1][0], f"{rows[-1][1]}\n{line[1:]}"
        elif line and not line.startswith("#"):
            weight, text = re.fullmatch(r"(?:(\d+)\* )?(.*)", line).groups()  # type: ignore[union-attr]
            rows.append((int(weight or 1), text))
    return found


_PRELUDE = _HERE.joinpath("python_prelude.txt").read_text()
_GRAMMAR = _grammar()


def _heights() -> dict[str, int]:
    """How many expansions a symbol takes at least."""
    heights = dict.fromkeys(_GRAMMAR, 99)
    for _ in range(12):
        for name, rows in _GRAMMAR.items():
            heights[name] = min(_height(text, heights) for _, text in rows)
    return heights


def _height(text: str, heights: dict[str, int]) -> int:
    names = (_REPEATED.get(name, (name,))[0] for name in _NAMES.findall(text))
    return 1 + max((heights.get(name, 0) for name in names), default=0)


_HEIGHTS = _heights()


class _Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def expand(self, name: str, depth: int = 0) -> str:
        """Return a random text of a symbol."""
        if name in _REPEATED:
            one, low, high = _REPEATED[name]
            count = self.random.randint(low, high)
            gap = "\n\n" if name == "methods" else "\n"
            return gap.join(self.expand(one, depth) for _ in range(count))
        rows = _GRAMMAR[name]
        if depth >= _DEPTH:
            lowest = min(_height(text, _HEIGHTS) for _, text in rows)
            lowest += depth < _DEPTH + 2
            rows = [row for row in rows if _height(row[1], _HEIGHTS) <= lowest]
        weights, texts = zip(*rows)
        return self.fill(self.random.choices(texts, weights)[0], depth + 1)

    def fill(self, text: str, depth: int) -> str:
        """Expand what a production has in marks."""
        done = ""
        while "«" in text:
            before, rest = text.split("«", 1)
            done += before
            inside, text = _matched(rest)
            options = _alternatives(inside)
            if len(options) > 1:
                filled = self.fill(self.random.choice(options), depth)
            else:
                filled = self.expand(inside, depth)
            line = done.rpartition("\n")[2]
            indent = line[: len(line) - len(line.lstrip())]
            done += filled.replace("\n", "\n" + indent)
        return done + text

    def program(self) -> Program:
        """Return a program that compiles."""
        while True:
            source = self.source()
            calls = tuple(self.call(number) for number in range(self.random.randint(3, 6)))
            try:
                for text in (source, *calls):
                    compile(text, "program", "exec")
            except SyntaxError:
                continue
            dynamic = self.random.choice((None, None, None, True, False))
            return Program(source, calls, 0, dynamic)

    def source(self) -> str:
        classes = re.split(r"\n\n\n", self.expand("classes"))
        parts = [
            _PRELUDE,
            *map(_tried, classes[:-1]),
            classes[-1],
            self.expand("functions"),
            _STATE,
        ]
        names = self.random.choice(("SCALE, OBJ", "SCALE, NAMES, OBJ"))
        lines = [f"global {names}", _LOCALS]
        lines += [self.statement() for _ in range(self.random.randint(2, 7))]
        body = "\n".join(lines).replace("\n", "\n    ")
        parts.append(f"def run(x, n, out):\n    {body}")
        parts.append(_CALLS[self.random.random() < 0.3])
        return "\n\n\n".join(parts) + "\n"

    def statement(self) -> str:
        text = self.expand("stmt")
        if self.random.random() < 0.5:
            return text
        inner = text.replace("\n", "\n    ")
        return f"try:\n    {inner}\nexcept Exception as error:\n    out.append(about(error))"

    def call(self, number: int) -> str:
        count = self.random.choice((0, 0, 1, 1, 2, 3)) if number else 0
        changes = [self.fill(self.expand("state"), 2) for _ in range(count)]
        lines = [_tried(one) for one in changes]
        size, value = self.random.choice((3, 3, 3, 2, 4)), self.random.choice((1, 3, 3, 0))
        return "\n".join([*lines, f"(tensor(({size},), seed={number}, kind='ties'), {value})"])


_LOCALS = (
    "y, i, l, m, d, s = x + 1, 1, [3, 1, 2], [n, 'k', x], {'a': 1, 'b': n}, 'text'\n"
    "o, p = OBJ, made(B, 2)"
)
_CALLS = (
    """\
def f(x, n):
    out = []
    LOG.clear()
    try:
        run(x, n, out)
    except Exception as error:
        out.append(about(error))
    return None if DEEP else out""",
    """\
def f(x, n):
    out = []
    LOG.clear()
    run(x, n, out)
    return None if DEEP else (out, list(LOG))""",
)
_STATE = """\
def state():
    known = globals()
    if DEEP:
        return None
    names = "LOG", "SCALE", "NAMES", "TABLE", "OBJ", "plain", "helper"
    members = [vars(cls) for cls in (A, B, C, Plain, WithMeta, Data)]
    members.append({k: v for k, v in vars(net).items() if k in ("calls", "total", "flag", "width")})
    return [known.get(name) for name in names], [
        {k: v for k, v in found.items() if k[:2] != "__" and not callable(v)} for found in members
    ]"""


def _tried(text: str) -> str:
    body = text.replace("\n", "\n    ")
    name = re.match(r"class (\w+)", text)
    other = f"class {name[1]}(Plain):\n        pass" if name else "pass"
    return f"try:\n    {body}\nexcept Exception:\n    {other}"


def _matched(text: str) -> tuple[str, str]:
    """Split behind the mark that closes one opened just before."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"«": 1, "»": -1}.get(letter, 0)
        if not depth:
            return text[:place], text[place + 1 :]
    raise ValueError(text)


def _alternatives(text: str) -> list[str]:
    """Split at the marks that are not inside of others."""
    found, depth = [""], 0
    for letter in text:
        depth += {"«": 1, "»": -1}.get(letter, 0)
        if letter == "¦" and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def generate(seed: int) -> Program:
    """Make a function of random statements, and calls with changes of state between them."""
    return _Writer(seed).program()
