"""Random chains of operators over odd sizes, layouts, dtypes and values.

Each statement is tried in eager while the program is made, so that most run to their end; a few
that raise are kept, since weft must raise too.
"""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .inputs import LAYOUTS, Makers
from .operator_table import INCONSISTENT, TABLES, UNDECIDED, UNORDERED
from .outcomes import observe
from .program import Program
from .runner import arguments, namespace

SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 17, 33)
CHANGING = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
DTYPES = ("float32",) * 10 + ("float64", "float64", "float16", "bfloat16", "int64", "int64") + (
    "int32", "uint8", "int8", "int16", "bool", "bool")  # fmt: skip
UNUSUAL = ("uint16", "uint32", "uint64", "complex64", "complex64", "complex128")
KINDS = ("usual",) * 8 + ("positive", "ties", "ties", "special")
NUMBERS = ("0", "1", "2", "-1", "0.5", "-0.3", "2.0", "1e-3", "3", "-2.5", "True")
# Beyond the range of a dtype, or on its edge.
EXTREMES = ("300", "-129", "70000", "2**31", "2**40", "(2**63 - 1)", "(-(2**63))", "1e10") + (
    "1e39", "-1e39", "1e-40", "float('inf')", "-float('inf')", "float('nan')", "-0.0", "16777217",
    "65520",
)  # fmt: skip
CASTS = ("float32", "float64", "int64", "bool", "float16", "bfloat16", "int32", "uint8", "int8")
DERIVED = ("// 2", "// 3", "- 1", "+ 1", "% 3", "* 2")
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

    `sizes` and `values` are the changing sizes and the variables so far, one dict for each call.
    What keeps a graph from being compiled takes the other parts of the function with it, so only
    drafts that are `unusual` have it: complex numbers, sizes that depend on data, warnings; and in
    `raising` ones the last statement may raise.
    """

    rng: random.Random
    sizes: list[dict[str, int]]
    unusual: bool = False
    raising: bool = False
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0

    def new_name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add_input(self, like: torch.Tensor | None, shape: tuple[int | str, ...] | None) -> str:
        """A parameter of its own shape, or one that goes with another value."""
        rng = self.rng
        if shape is None:
            shape = _shape(rng, list(self.sizes[0]))
        dtype = rng.choice(UNUSUAL if self.unusual and rng.random() < 0.4 else DTYPES)
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
        for values, sizes in zip(self.values, self.sizes):
            values[made.name] = eval(made.text(sizes), {**Makers().names()})
        return made.name

    def program(self, results: list[str], lines: list[str], order: int = 0) -> Program:
        """Some statements as a function with the parameters that they use."""
        body = [*lines, f"return {', '.join(results)},"]
        used = set(re.findall(r"\ba\d+\b", "\n".join(body)))
        inputs = [one for one in self.inputs if one.name in used]
        head = f"def f({', '.join(one.name for one in inputs)}):"
        source = "\n".join([head, *(f"    {line}" for line in body)]) + "\n"
        calls = [f"({''.join(one.text(sizes) + ', ' for one in inputs)})" for sizes in self.sizes]
        return Program(source, tuple(calls), order)


def generate(seed: int) -> Program:
    """Many independent chains with known sizes in one function; some functions are unusual."""
    rng = random.Random(f"operators {seed}")
    draft, parts = _draft(rng, [{}], rng.randint(12, 20))
    return _program(draft, parts, True if rng.random() < 0.08 else None)


def generate_dynamic(seed: int) -> Program:
    """A few chains, called with changing sizes, some of them 0 and 1."""
    rng = random.Random(f"dynamic operators {seed}")
    names = [f"n{n}" for n in range(rng.choice((1, 2, 3)))]
    sizes = [{name: rng.choice(CHANGING[3:]) for name in names}]
    for _ in range(3):
        change = {name: rng.choice(CHANGING) for name in names if rng.random() < 0.7}
        sizes.append({**sizes[-1], **change})
    draft, parts = _draft(rng, sizes, rng.randint(6, 12))
    return _program(draft, parts, rng.choice((None, None, True)))


def _draft(rng: random.Random, sizes: list[dict[str, int]], parts: int) -> tuple[Draft, int]:
    """An empty program, and how many parts it is to have."""
    chance = rng.random()
    draft = Draft(rng, sizes, unusual=chance < 0.12, raising=chance < 0.05)
    return draft, 1 if draft.raising else 3 if draft.unusual else parts


def _program(draft: Draft, parts: int, dynamic: bool | None) -> Program:
    rng = draft.rng
    order = rng.choice((0, 0, 1, 1, 1, 1, 1, 1, 1, 2))
    draft.values = [{} for _ in draft.sizes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_warn_always(True)
        for _ in range(parts):
            _chain(draft, order)
        results = draft.results + ([_tie(draft)] if order == 1 and rng.random() < 0.8 else [])
        program = draft.program(results, draft.lines, order)
        # A write to what an earlier part has saved.
        while program.order and any("error" in one for one in _outcomes(program)):
            program = replace(program, order=program.order - 1)
    return replace(program, dynamic=dynamic, parts=parts)


def _tie(draft: Draft) -> str:
    """A result that depends on all others: one backward instead of one for each part."""
    known = draft.values[0]
    sums = [
        f"{one}.float().sum()"
        for one in draft.results
        if getattr(known.get(one), "requires_grad", False)
    ]
    return f"torch.stack([{', '.join(sums)}])" if sums else draft.results[0]


def _outcomes(program: Program) -> list[dict[str, Any]]:
    space = namespace(program.source, Makers())
    return [observe(space["f"], arguments(call, space), program.order) for call in program.calls]


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


def _chain(draft: Draft, order: int) -> None:
    """Add one part: inputs of its own, statements, results."""
    rng, start = draft.rng, len(draft.lines)
    if rng.random() > 0.15 or not draft.inputs:
        pool = [draft.add_input(None, None)]
        first = draft.inputs[-1]
    else:  # shares an input with the parts before
        first = rng.choice(draft.inputs)
        pool = [first.name]
    for _ in range(rng.choice((0, 1, 1, 2))):
        pool.append(draft.add_input(draft.values[0][first.name], _related(draft, first)))
    for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 6, 9))):
        if not _statement(draft, pool):
            break
    results = [name for name in pool if name.startswith("v")][-rng.choice((1, 1, 2)) :] or pool[:1]
    alone = draft.program(results, draft.lines[start:], max(order, 1))
    plain = replace(alone, order=0)
    if not draft.raising and any("error" in one for one in _outcomes(plain)):
        # It ran when its statements were tried: eager takes a view whose base was written by
        # another view for a leaf.
        del draft.lines[start:]
        return
    # What eager cannot differentiate (a write to what was saved) weft sometimes can.
    if not draft.raising and any("error" in one for one in _outcomes(alone)):
        results = [f"{name}.detach()" for name in results]
    draft.results += results


def _statement(draft: Draft, pool: list[str]) -> bool:
    """Add a statement that runs in all calls; False after one that raises."""
    rng = draft.rng
    tables = [rows for _, rows in TABLES.values()]
    weights = [weight * (name != "unusual" or draft.unusual)
               for name, (weight, _) in TABLES.items()]  # fmt: skip
    for _ in range(30):
        template = rng.choice(rng.choices(tables, weights)[0])
        filled = _fill(template, draft, pool)
        if filled is None:
            continue
        if UNDECIDED.search(filled) or ("as_strided" in filled and _reaches_beyond(filled, draft)):
            continue
        if INCONSISTENT.search(filled) and not _moderate(filled, draft):
            continue
        if UNORDERED.search(filled) and not _in_order(filled, draft):
            continue
        name = draft.new_name()
        writes = "{w}" in template
        line = filled if writes else f"{name} = {filled}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if draft.unusual else "error")
                found = [_executed(line, values).get(name) for values in draft.values]
        except Exception:
            if draft.raising and rng.random() < 0.05:
                draft.lines.append(line)
                return False
            continue
        if not writes:
            if not all(isinstance(v, torch.Tensor) and v.numel() <= MOST_ELEMENTS for v in found):
                continue
            if found[0].is_complex() and not draft.unusual:
                continue
            for values, value in zip(draft.values, found):
                values[name] = value
            pool.append(name)
        draft.lines.append(line)
        return True
    return True


def _named(text: str, draft: Draft) -> list[torch.Tensor]:
    """The values that a statement names, in all calls."""
    return [values[name] for name in re.findall(r"\b[av]\d+\b", text) for values in draft.values]


def _reaches_beyond(text: str, draft: Draft) -> bool:
    """Whether a statement may read memory that is no element's, of which eager may have any."""
    for value in _named(text, draft):
        whole = value if value._base is None else value._base
        rows = zip(whole.shape, whole.stride())
        end = 1 + whole.storage_offset() + sum((size - 1) * stride for size, stride in rows)
        if whole.untyped_storage().nbytes() > end * whole.itemsize:
            return True
    return False


def _moderate(text: str, draft: Draft) -> bool:
    """Whether the floats that a statement names are no extremes."""
    named = _named(text, draft)
    floats = [value.detach().abs() for value in named if value.dtype.is_floating_point]
    return all(bool((value < 1e4).all()) for value in floats)


def _in_order(text: str, draft: Draft) -> bool:
    """Whether all goes through the values that a statement names row by row."""
    return all(value.dim() < 2 or value.is_contiguous() for value in _named(text, draft))


def _executed(line: str, values: dict[str, Any]) -> dict[str, Any]:
    space = {"torch": torch, "F": torch.nn.functional, **values}
    exec(line, space)
    return space


_FLOATS, _WHOLE = "fgh", "ij"


def _fill(template: str, draft: Draft, pool: list[str]) -> str | None:
    """The template with values for its letters; None where there is none of a kind."""
    rng, chosen = draft.rng, {}
    values = [(name, draft.values[0][name]) for name in pool]
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
        return rng.choice(NUMBERS if rng.random() < 0.9 else EXTREMES)
    if letter == "t":
        return f"torch.{rng.choice(CASTS)}"
    if letter == "s":
        name, value = rng.choice(values)
        text = f"{name}.shape[{rng.randrange(value.dim())}]" if value.dim() else "3"
        return rng.choice((text, text, text, *(f"({text} {end})" for end in DERIVED)))
    if letter in _FLOATS:
        fitting = [n for n, v in values if v.dtype.is_floating_point]
    elif letter in _WHOLE:
        fitting = [n for n, v in values if not v.dtype.is_floating_point and not v.dtype.is_complex]
        fitting = [n for n in fitting if draft.values[0][n].dtype != torch.bool] or fitting
    elif letter in "mn":
        fitting = [n for n, v in values if v.dtype == torch.bool]
    elif letter == "w":
        fitting = [n for n, v in values if _is_writable(v)]
        if not draft.unusual:  # a write through overlapping elements runs uncompiled
            fitting = [n for n in fitting if not _overlaps(draft.values[0][n])]
    else:
        fitting = [n for n, _ in values]
    if not fitting:
        return None
    return fitting[-1] if rng.random() < 0.5 else rng.choice(fitting)


def _is_writable(value: torch.Tensor) -> bool:
    """Whether eager lets an operator write the value, which is no input that requires grad."""
    try:
        return not (value.requires_grad and value.is_leaf)
    except RuntimeError:  # one of several views, beside which its base was written
        return False


def _overlaps(value: torch.Tensor) -> bool:
    """Whether two elements may lie in one place."""
    return bool(torch._debug_has_internal_overlap(value))
