"""Random chains of operators over odd sizes, layouts, dtypes and values.

Each statement is tried in eager while the program is made, so that most run to their end; a few
that raise are kept, since weft must raise too.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from .inputs import LAYOUTS, Makers
from .operator_table import TABLES
from .outcomes import observe
from .program import Program
from .runner import arguments, namespace

SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 17, 33)
CHANGING = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
DTYPES = ("float32",) * 10 + ("float64", "float64", "float16", "bfloat16", "int64", "int64") + (
    "int32", "uint8", "int8", "int16", "bool", "bool", "complex64")  # fmt: skip
KINDS = ("usual",) * 8 + ("positive", "ties", "ties", "special")
NUMBERS = ("0", "1", "2", "-1", "0.5", "-0.3", "2.0", "1e-3", "3", "-2.5", "True")
CASTS = ("float32", "float64", "int64", "bool", "float16", "bfloat16", "int32", "uint8")
MOST_ELEMENTS = 20_000


@dataclass
class Input:
    """A parameter: its sizes are numbers, or names of sizes that change from call to call."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    layout: str
    kind: str
    seed: int
    grad: bool

    def text(self, sizes: dict[str, int]) -> str:
        """The maker's call for these sizes."""
        shape = tuple(sizes.get(n, n) if isinstance(n, str) else n for n in self.shape)
        text = f"tensor({shape}, {self.dtype!r}, {self.seed}, {self.layout!r}, {self.kind!r}"
        return text + (", grad=True)" if self.grad else ")")


@dataclass
class Draft:
    """A program that is being made.

    `values` are the variables of the parts so far, as the first call sees them.
    """

    rng: random.Random
    sizes: dict[str, int]
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def new_name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add_input(self, like: torch.Tensor | None, shape: tuple[int | str, ...] | None) -> str:
        """A parameter of its own shape, or one that goes with another value."""
        rng = self.rng
        if shape is None:
            shape = _shape(rng, list(self.sizes))
        dtype = rng.choice(DTYPES)
        if like is not None and rng.random() < 0.7:
            dtype = str(like.dtype).removeprefix("torch.")
        floats = dtype.startswith(("float", "bfloat"))
        made = Input(
            f"a{len(self.inputs)}",
            shape,
            dtype,
            rng.choice(list(LAYOUTS)) if rng.random() < 0.5 else "dense",
            rng.choice(KINDS),
            rng.randrange(1000),
            floats and rng.random() < 0.5,
        )
        self.inputs.append(made)
        space = {**Makers().names()}
        self.values[made.name] = eval(made.text(self.sizes), space)
        return made.name


def generate(seed: int) -> Program:
    """Several independent chains with known sizes, in one function."""
    rng = random.Random(f"operators {seed}")
    parts = rng.choice((1, 2, 4, 4, 6, 8))
    return _program(rng, parts, changing=0, calls=1)


def generate_dynamic(seed: int) -> Program:
    """One or two chains, called with changing sizes, some of them 0 and 1."""
    rng = random.Random(f"dynamic operators {seed}")
    return _program(rng, rng.choice((1, 1, 2)), changing=rng.choice((1, 2, 3)), calls=4)


def _program(rng: random.Random, parts: int, changing: int, calls: int) -> Program:
    names = [f"n{n}" for n in range(changing)]
    draft = Draft(rng, {name: rng.choice(CHANGING[2:]) for name in names})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(parts):
            _chain(draft)
        order = rng.choice((0, 1, 1, 1, 2))
        return _finished(draft, parts, calls, order)


def _finished(draft: Draft, parts: int, calls: int, order: int) -> Program:
    rng = draft.rng
    body = [*draft.lines, f"return {', '.join(draft.results)},"]
    head = f"def f({', '.join(i.name for i in draft.inputs)}):"
    source = "\n".join([head, *(f"    {line}" for line in body)]) + "\n"
    found = []
    sizes = dict(draft.sizes)
    for _ in range(calls):
        found.append(f"({', '.join(i.text(sizes) for i in draft.inputs)},)")
        for name in sizes:
            if rng.random() < 0.7:
                sizes[name] = rng.choice(CHANGING)
    dynamic = rng.choice((None, None, True) if draft.sizes else (None, None, None, True))
    program = Program(source, tuple(found), order, dynamic, parts)
    # What eager cannot differentiate (a write to what was saved) weft sometimes can.
    while program.order and "error" in _first_outcome(program):
        program = Program(source, tuple(found), program.order - 1, dynamic, parts)
    return program


def _first_outcome(program: Program) -> dict[str, Any]:
    space = namespace(program.source, Makers())
    return observe(space["f"], arguments(program.calls[0], space), program.order)


def _shape(rng: random.Random, names: list[str]) -> tuple[int | str, ...]:
    while True:
        dims = rng.choice((0, 1, 1, 2, 2, 2, 2, 3, 3, 4))
        shape = tuple(
            rng.choice(names) if names and rng.random() < 0.6 else rng.choice(SIZES)
            for _ in range(dims)
        )
        elements = 1
        for size in shape:
            elements *= size if isinstance(size, int) else 8
        if elements <= MOST_ELEMENTS:
            return shape


def _related(draft: Draft, first: Input) -> tuple[int | str, ...]:
    """A shape that broadcasts with, multiplies or equals another input's."""
    rng, shape = draft.rng, first.shape
    way = rng.randrange(6)
    if way == 0:
        return tuple(1 if rng.random() < 0.4 else n for n in shape)
    if way == 1 and len(shape) > 1:
        return shape[rng.randrange(len(shape)) :]
    if way == 2 and len(shape) > 1:
        return (*shape[:-2], shape[-1], rng.choice(SIZES[1:]))
    if way == 3 and len(shape) > 1:
        return (*shape[:-2], shape[-1], shape[-2])
    if way == 4 and len(shape) in (3, 4):
        return (rng.choice((1, 2, 3)), shape[1], *[rng.choice((1, 2, 3)) for _ in shape[2:]])
    return shape


def _chain(draft: Draft) -> None:
    """Add one part: inputs of its own, statements, results."""
    rng = draft.rng
    if rng.random() > 0.15 or not draft.inputs:
        pool = [draft.add_input(None, None)]
        first = draft.inputs[-1]
    else:  # shares an input with the parts before
        first = rng.choice(draft.inputs)
        pool = [first.name]
    for _ in range(rng.choice((0, 1, 1, 2))):
        pool.append(draft.add_input(draft.values[first.name], _related(draft, first)))
    for _ in range(rng.choice((1, 2, 3, 4, 6, 9))):
        if not _statement(draft, pool):
            break
    results = [name for name in pool if name.startswith("v")][-rng.choice((1, 1, 2)) :]
    draft.results += results or pool[:1]


def _statement(draft: Draft, pool: list[str]) -> bool:
    """Add a statement that runs; False after one that raises."""
    rng = draft.rng
    tables = [rows for _, rows in TABLES.values()]
    weights = [weight for weight, _ in TABLES.values()]
    for _ in range(30):
        template = rng.choice(rng.choices(tables, weights)[0])
        filled = _fill(template, draft, pool)
        if filled is None:
            continue
        name = draft.new_name()
        writes = "{w}" in template
        line = filled if writes else f"{name} = {filled}"
        space = {"torch": torch, "F": torch.nn.functional, **draft.values}
        # Writes are tried on copies of the layout, as later statements are on what they leave.
        try:
            exec(line, space)
        except Exception:
            if rng.random() < 0.003:
                draft.lines.append(line)
                return False
            continue
        if writes:
            draft.lines.append(line)
            return True
        value = space[name]
        if not isinstance(value, torch.Tensor) or value.numel() > MOST_ELEMENTS:
            continue
        draft.lines.append(line)
        draft.values[name] = value
        pool.append(name)
        return True
    return True


_FLOATS, _WHOLE = "fgh", "ij"


def _fill(template: str, draft: Draft, pool: list[str]) -> str | None:
    """The template with values for its letters; None where there is none of a kind."""
    rng, chosen = draft.rng, {}
    values = [(name, draft.values[name]) for name in pool]
    for letter in dict.fromkeys(re.findall(r"{(\w+)}", template)):
        chosen[letter] = _choice(letter, rng, values, draft)
        if chosen[letter] is None:
            return None
    return template.format(**chosen)


def _choice(
    letter: str, rng: random.Random, values: list[tuple[str, torch.Tensor]], draft: Draft
) -> str | None:
    if letter in "de":
        return str(rng.choice((0, 0, 1, -1, -1, -2, 2)))
    if letter == "k":
        return str(rng.choice((0, 1, 1, 2, 2, 3, 4, -1)))
    if letter == "x":
        return rng.choice(NUMBERS)
    if letter == "t":
        return f"torch.{rng.choice(CASTS)}"
    if letter == "s":
        name, value = rng.choice(values)
        text = f"{name}.shape[{rng.randrange(value.dim())}]" if value.dim() else "3"
        return rng.choice((text, text, text, f"({text} // 2)", f"({text} - 1)", f"({text} % 3)"))
    if letter in _FLOATS:
        fitting = [n for n, v in values if v.dtype.is_floating_point]
    elif letter in _WHOLE:
        fitting = [n for n, v in values if not v.dtype.is_floating_point and not v.dtype.is_complex]
        fitting = [n for n in fitting if draft.values[n].dtype != torch.bool] or fitting
    elif letter in "mn":
        fitting = [n for n, v in values if v.dtype == torch.bool]
    elif letter == "w":
        fitting = [n for n, v in values if not (v.requires_grad and v.is_leaf)]
    else:
        fitting = [n for n, _ in values]
    if not fitting:
        return None
    return fitting[-1] if rng.random() < 0.5 else rng.choice(fitting)
