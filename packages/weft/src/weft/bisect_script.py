"""The script for a fault of capture: one expression, on the values that its names had in eager."""

from __future__ import annotations

import ast
import hashlib
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from weft_core import cachedir

from weft.minimise import copy_of, text_of_input

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def source_of(file: str, positions: Sequence[int | None]) -> str:
    """Return the source text at an instruction's positions."""
    line, end, column, end_column = positions
    text = linecache.getline(file, line or 0)
    if line != end or column is None or end_column is None:
        return text.strip()
    return text.encode()[column:end_column].decode().strip()


def write_script(text: str) -> str:
    """Write a script to the cache folder; returns its path."""
    path = cachedir.cache_dir("repro") / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    cachedir.atomic_write(path, text.encode())
    return str(path)


def expression_script(run: Callable[[], Any], place: str, expression: str, about: str) -> str:
    """Return a program that evaluates an expression eagerly and captured.

    Args:
        run: runs the function that is bisected eagerly.
        place: `file:line` of the expression.
        expression: its source text.
        about: the script's first comment.

    Returns:
        The text; empty where the expression needs more than values and imported names, or where the
        captured expression alone does not differ.
    """
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        return ""
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    values = _values_at(run, place, names)
    imports, inputs = ["import torch", "from torch import inf, nan"], dict[str, str]()
    for name, value in values.items():
        text = _input(value)
        line = "" if text else _import(name, value)
        if not text and not line:
            return ""
        if text:
            inputs[name] = text
        elif line not in imports:
            imports.append(line)
    lines = [
        *(f"# {line}" for line in about.splitlines()), *imports, "", "import weft", "", "",
        f"def f({', '.join(['tensor', *inputs])}):", f"    return tensor + 1, {expression}", "", "",
        "inputs = [", "    torch.ones(1),", *(f"    {text}," for text in inputs.values()), "]",
        "expected = f(*inputs)", "result = weft.compile(f, backend='eager')(*inputs)",
        "torch.testing.assert_close(result, expected)", "",
    ]  # fmt: skip
    script = "\n".join(lines)
    return script if _fails(script) else ""


def _values_at(run: Callable[[], Any], place: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of names when a line is first reached."""
    file, _, line = place.rpartition(":")
    found: dict[str, Any] = {}

    def at_line(frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno == int(line) and not found:
            for name in names:
                for scope in (frame.f_locals, frame.f_globals):
                    if name in scope:
                        value = scope[name]
                        found[name] = copy_of(value) if isinstance(value, torch.Tensor) else value
                        break
        return at_line

    def at_call(frame: types.FrameType, event: str, _: Any) -> Any:
        return at_line if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        run()
    finally:
        sys.settrace(before)
    return found


def _input(value: Any) -> str:
    """An expression for a value; empty for what has none."""
    if isinstance(value, torch.Tensor):
        return text_of_input(value)
    if type(value) in (list, tuple) and value:
        items = [_input(item) for item in value]
        joined = ", ".join(items) + ("," if len(items) == 1 else "")
        return "" if not all(items) else f"[{joined}]" if type(value) is list else f"({joined})"
    return repr(value) if type(value) in _PLAIN else ""


def _import(name: str, value: Any) -> str:
    """The statement that imports a value under a name; empty where there is none."""
    if isinstance(value, types.ModuleType):
        module = value.__name__
        return f"import {module}" if module == name else f"import {module} as {name}"
    home, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(home, str) or vars(sys.modules.get(home, types)).get(own) is not value:
        return ""
    return f"from {home} import {own} as {name}" if home != "__main__" else ""


def _fails(script: str) -> bool:
    with suppress(Exception):
        exec(compile(script, "<script>", "exec"), {"__name__": "script"})
        return False
    return True
