"""`show_code`: the code that replaces captured frames, as Python text.

    def f(x):
        graph_result = __compiled_0(x)
        if graph_result[1]:
            return __resume_at_7(graph_result[0])
        return __resume_at_9(graph_result[0])

Graphs, functions of capture and other objects that no literal denotes have names that begin with
two underscores. Nothing here runs, and this module is not imported, unless somebody asks.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import keyword
import linecache
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from weft_core.errors import InvalidArgument

from weft_capture import frame as hook
from weft_capture.bytecode import decode, is_resume
from weft_capture.bytecode.decompile import decompile
from weft_capture.bytecode.decompile_state import NotExpressible
from weft_capture.bytecode.encode import assemble
from weft_capture.bytecode.instr import FrameShape, Item, Op, call_pair, program_of, prologue_of
from weft_capture.output.eager_instruction import special_method
from weft_capture.output.entry import is_entry
from weft_capture.policy.reports import FrameReport

_LITERALS = (int, str, bytes, bool, complex, type(None), type(Ellipsis))
_GUARDS = 12  # guards of an entry that a text lists
_WIDTH = 80  # of an object's repr


class Continuation:
    """A resume function in a text: calling it continues the frame.

    Args:
        code: its code.
        namespace: the frame's globals.
        function: what to call it by; the hook's `tail_call` in code that the hook runs.
        cells: its closure.
    """

    def __init__(
        self, code: CodeType, namespace: dict[str, Any], call: Callable[..., Any] | None = None,
        cells: tuple[CellType, ...] = (),
    ) -> None:  # fmt: skip
        self.code, self.namespace, self.call, self.cells = code, namespace, call, cells

    def with_cells(self, *cells: CellType) -> Continuation:
        """The same with a closure."""
        return Continuation(self.code, self.namespace, self.call, cells)

    def __call__(self, *args: Any) -> Any:
        function = FunctionType(self.code, self.namespace, None, None, self.cells or None)
        return function(*args) if self.call is None else self.call(function, *args)


class FrameNames:
    """The names of objects in the texts of some frames; each name stays with its object."""

    special_method: object = staticmethod(special_method)

    def __init__(self) -> None:
        self.objects: dict[str, object] = {}
        self.functions: dict[str, CodeType] = {}
        self._names: dict[int, str] = {}
        self._callers: set[str] = set()
        self._graphs = itertools.count()

    def of(self, value: object) -> str | None:
        """The name of an object; None for a literal."""
        if _is_literal(value):
            return None
        known = self._names.get(id(value))
        return known or self._new(value, self._base_of(value), self.objects)

    def function(self, code: CodeType) -> str:
        """The name of the function that a frame makes of a code object."""
        found = next((name for name, made in self.functions.items() if made is code), None)
        return found or self._new(code, self._base_of(code), self.functions)

    def without_first(self, name: str) -> bool:
        """Whether calls of a name leave out its first argument, which is always None."""
        return name in self._callers

    def _new(self, value: Any, base: str, kind: dict[str, Any]) -> str:
        numbers = itertools.count(1)
        name = base
        while name in self.objects or name in self.functions:
            name = f"{base}_{next(numbers)}"
        kind[name] = value
        if kind is self.objects:
            self._names[id(value)] = name
        if value is hook.run or type(value).__name__ == "Check":  # of `weft_guards.call_with`
            self._callers.add(name)
            kind[name] = functools.partial(value, None)
        return name

    def _base_of(self, value: object) -> str:
        if _runs_graph(value):
            return f"__compiled_{next(self._graphs)}"
        if isinstance(value, CodeType):
            kind = "resume" if is_resume(value) else "entry" if is_entry(value) else ""
            line = value.co_qualname.rpartition(" at ")[2].rstrip(">")
            if "start of" in decode(value).derived or not kind:
                return f"__original_{value.co_name.strip('<>')}"
            return f"__{kind}_at_{line}"
        if value is hook.run:
            return "__eagerly"
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name):
            is_builtin = getattr(builtins, name, None) is value
            return name if is_builtin else f"__{name.strip('_')}"
        return f"__{type(value).__name__.strip('_')}"


def _is_literal(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_literal, value))
    if type(value) is float:
        return repr(value).lstrip("-")[0].isdigit()
    return type(value) in _LITERALS


def _runs_graph(value: object) -> bool:
    """Whether this calls a compiled graph (see `Assembly.call_graph`)."""
    while isinstance(value, functools.partial):
        if value.func is hook.run:
            return len(value.args) > 1
        value = value.args[0] if value.args else None
    return type(value).__name__ == "Check"


@dataclass(frozen=True)
class FrameCode:
    """The text of one code object, and what it refers to.

    Args:
        text: the definition of one function.
        code: what it stands for.
        names: the objects behind its names.
    """

    text: str
    code: CodeType
    names: FrameNames

    @classmethod
    def of(cls, code: CodeType, names: FrameNames, name: str = "") -> FrameCode:
        """Decompile a code object that replaces a frame.

        Raises:
            NotExpressible: for code that the language has no words for.
        """
        name = name or code.co_name
        plain = name if name.isidentifier() and not keyword.iskeyword(name) else "frame"
        return cls(decompile(code, names, plain, hook.tail_call), code, names)

    @property
    def source(self) -> str:
        """The text as a module: a function with free variables stands in one that has them."""
        outer = self.code.co_freevars
        if not outer:
            return f"{self.text}\n"
        lines = [f"    {' = '.join(outer)} = None", textwrap.indent(self.text, "    ")]
        return "\n".join(["def outer():", *lines, ""])

    def compiled(self, filename: str | None = None) -> CodeType:
        """Compile the text into code that can stand in for `code`.

        Args:
            filename: a file with `source`, for debuggers; by default the original's.
        """
        outer = self.code.co_freevars
        filename = filename or self.code.co_filename
        found = _only_code(compile(self.source, filename, "exec", dont_inherit=True))
        found = _only_code(found) if outer else found
        decoded = decode(found)
        shape = replace(
            FrameShape.of(found), name=self.code.co_name, qualname=self.code.co_qualname,
            freevars=outer,
        )  # fmt: skip
        items = program_of(decoded)
        begin, resume = next(
            (i, op) for i, op in enumerate(items) if isinstance(op, Op) and op.opname == "RESUME"
        )
        body = [*itertools.chain.from_iterable(map(self._bound, items[begin + 1 :]))]
        return assemble(prologue_of(shape, resume.positions) + body, shape)

    def _bound(self, item: Item) -> list[Item]:
        """Put an object in the place of its name."""
        if not isinstance(item, Op) or item.opname != "LOAD_GLOBAL":
            return [item]

        def const(value: object) -> Op:
            return Op("LOAD_CONST", argval=value, positions=item.positions, cover=item.cover)

        def called(count: int) -> Op:
            return Op("CALL", count, (), positions=item.positions, cover=item.cover)

        null = Op("PUSH_NULL", positions=item.positions, cover=item.cover)
        if item.argval in self.names.functions:
            make = functools.partial(_continue, self.names.functions[item.argval])
            inner = [*call_pair(const(globals), null), called(0)]
            pair = call_pair(const(make), null)
            return [*pair, *inner, called(1)]
        if item.argval in self.names.objects:
            return [const(self.names.objects[item.argval])]
        return [item]


def _continue(code: CodeType, namespace: dict[str, Any]) -> Continuation:
    return Continuation(code, namespace, hook.tail_call)


def _only_code(code: CodeType) -> CodeType:
    return next(value for value in code.co_consts if isinstance(value, CodeType))


# ---- listings


def show_code(function: Callable[..., Any]) -> str:
    """Print, and return, the code that replaces what `weft.compile` returned, as Python text.

    Each compiled entry of the function and of its resume functions is one definition, below the
    guards that admit calls to it. Names with two leading underscores are explained at the end.

    Args:
        function: a compiled function or module that has been called.

    Raises:
        InvalidArgument: for a function that is not compiled.
    """
    call = getattr(function, "_weft_call", function)
    state = getattr(call, "_weft_capture", None)
    if state is None:
        detail = f"show_code takes what weft.compile returned, not {function!r}."
        raise InvalidArgument("function", detail=detail)
    text = listing([(code, cache.entries) for code, cache in state.caches.items()])
    text = text or f"# Nothing is compiled yet for {getattr(function, '__name__', function)}.\n"
    print(text, end="")
    return text


def code_of(frame: FrameReport) -> str:
    """Return the text of what is compiled for a function, as `show_code` prints it."""
    pairs = [(code_ref(), cache_ref()) for code_ref, cache_ref in frame.codes]
    return listing([(code, cache.entries) for code, cache in pairs if code and cache])


def listing(compiled: Iterable[tuple[CodeType, Sequence[Any]]]) -> str:
    """Return one text for code objects with their `CacheEntry`s, in the order that they are run."""
    names, entries = FrameNames(), dict(compiled)
    waiting = [code for code in entries if not is_resume(code)]
    parts: list[str] = []
    listed: set[str] = set()
    while waiting:
        code = waiting.pop(0)
        name = next((n for n, made in names.functions.items() if made is code), "")
        parts += _definitions(code, entries.get(code, ()), names, name)
        new = [n for n in (*names.functions, *names.objects) if n not in listed]
        listed.update(new)
        for name in new:
            found = names.functions.get(name, names.objects.get(name))
            if isinstance(found, CodeType) and _is_part(found):
                waiting.append(found)
    if not parts:
        return ""
    legend = [
        f"# {name}: {_described(value)}"
        for name, value in names.objects.items()
        if value is not hook.tail_call and getattr(builtins, name, None) is not value
    ]
    return "\n\n\n".join([*parts, "\n".join(["# ---- names", *legend])]) + "\n"


def _is_part(code: CodeType) -> bool:
    """Whether a listing shows this code: what continues a frame, not what runs it eagerly."""
    return is_entry(code) or (is_resume(code) and "start of" not in decode(code).derived)


def _definitions(
    code: CodeType, entries: Sequence[Any], names: FrameNames, name: str
) -> Iterator[str]:
    """Yield the definitions of one code object, each below a comment."""
    title = f"# {code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    if is_entry(code):
        replacement = decode(code).derived.get("replacement", code)
        named = next((n for n, value in names.objects.items() if value is code), "")
        yield f"{title}: the rest of an inlined call\n{_text(replacement, names, named)}"
        return
    if not entries and is_resume(code):
        yield "\n".join([f"{title}: runs as it is, from this line on", *_lines_from(code)])
    for number, entry in enumerate(entries, 1):
        head = [title + (f", entry {number} of {len(entries)}" if len(entries) > 1 else "")]
        if is_resume(code):
            head += _lines_from(code)
        guards = [f"#   {guard}" for guard in sorted(map(str, entry.guards), key=_is_general)]
        head += guards[:_GUARDS]
        if guards[_GUARDS:]:
            head.append(f"#   and {len(guards) - _GUARDS} more guards")
        yield "\n".join([*head, _text(entry.code, names, name)])


def _is_general(guard: str) -> bool:
    """Whether a guard is not about the function's arguments and variables."""
    return "L[" not in guard and "C[" not in guard


def _text(code: CodeType, names: FrameNames, name: str) -> str:
    try:
        return FrameCode.of(code, names, name).text
    except NotExpressible as error:
        shown = textwrap.indent(dis.Bytecode(code).dis(), "#   ")
        return f"# No Python text does this ({error}); the bytecode:\n{shown}"


def _lines_from(code: CodeType) -> Iterator[str]:
    """The lines of the program that a resume function stands for."""
    numbers = {line for _, _, line in code.co_lines() if line}
    first = int(code.co_qualname.rpartition(" at ")[2].rstrip(">"))
    begin, end = min(numbers, default=first), max(numbers, default=first)
    for number in range(begin, end + 1):
        line = linecache.getline(code.co_filename, number).rstrip()
        if number in numbers and line:
            yield f"# {'->' if number == first else '  '} {number:4} | {line}"


def _described(value: object) -> str:
    if _runs_graph(value):
        return "a compiled graph"
    if isinstance(value, functools.partial) and value.func is hook.run:
        return "calls a function with the frame hook off"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, CodeType):
        return f"the code of {value.co_qualname}"
    if isinstance(name, str):
        return f"{module}.{name}" if module else name
    text = repr(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


# ---- texts instead of bytecode


def debugged(code: CodeType, folder: str) -> CodeType:
    """Write the text of a code object into a folder; returns the code of that file.

    Code that has no text is returned as it is.
    """
    try:
        found = FrameCode.of(code, FrameNames())
        source = found.source
    except NotExpressible:
        return code
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    stem = "".join(c if c.isalnum() else "_" for c in code.co_qualname).strip("_")
    for number in itertools.count():
        path = (target / f"{stem}_{number}.py").absolute()
        try:
            with path.open("x") as file:
                file.write(source)
        except FileExistsError:
            continue
        return found.compiled(str(path))
    raise AssertionError("unreachable")


def log_text(code: CodeType) -> str:
    """The text of the log artifact `frame_code`."""
    where = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    return f"rewritten code of {where}\n{_text(code, FrameNames(), '')}"
