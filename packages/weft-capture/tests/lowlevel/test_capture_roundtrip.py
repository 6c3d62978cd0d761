"""Decoding and assembling again loses nothing, on the standard library's own code."""

import argparse
import contextlib
import dataclasses
import dis
import enum
import inspect
import json.decoder
import statistics
import tarfile
import textwrap
import types
import weakref
from pathlib import Path
from types import SimpleNamespace

import corpus
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft_capture.bytecode import decode, live_at
from weft_capture.bytecode.encode import assemble, exception_table, location_table
from weft_capture.bytecode.instr import program_of

MODULES = [argparse, contextlib, dataclasses, enum, inspect, json.decoder, statistics, tarfile]


def all_codes(module):
    """Every code object of a module's source file."""
    todo = [compile(Path(module.__file__).read_text("utf-8"), module.__file__, "exec")]
    while todo:
        code = todo.pop()
        yield code
        todo += [const for const in code.co_consts if isinstance(const, types.CodeType)]


def reencode(decoded):
    """The same function again, from its decoded form."""
    return assemble(program_of(decoded), decoded)


def meaning(decoded):
    """What must survive the round trip: all but byte offsets."""
    return [instr._replace(offset=0) for instr in decoded.instrs]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_round_trip_keeps_every_instruction(module):
    count = 0
    for code in all_codes(module):
        again = reencode(decode(code))
        assert meaning(decode(again)) == meaning(decode(code)), code
        assert again.co_stacksize <= code.co_stacksize + 2
        assert again.co_varnames == code.co_varnames
        assert again.co_freevars == code.co_freevars
        count += 1
    assert count > 10


def test_reassembled_library_works():
    namespace = dict(vars(textwrap))
    for name, value in vars(textwrap).items():
        if isinstance(value, types.FunctionType):
            code = reencode(decode(value.__code__))
            namespace[name] = types.FunctionType(code, namespace, name, value.__defaults__)
    text = "  one two\n  three\n\n    four " * 3
    assert namespace["dedent"](text) == textwrap.dedent(text)
    assert namespace["shorten"](text, 20) == textwrap.shorten(text, 20)
    assert namespace["indent"](text, "> ") == textwrap.indent(text, "> ")


def test_decode_is_cached_while_the_code_lives():
    namespace: dict = {}
    exec("def f(x): return x + 1", namespace)
    code = namespace.pop("f").__code__
    decoded = decode(code)
    assert decode(code) is decoded
    alive = weakref.ref(decoded.code)
    del code
    assert alive() is None
    with pytest.raises(ReferenceError, match="is gone"):
        _ = decoded.code


def test_liveness():
    decoded = decode(corpus.loops.__code__)
    start = next(i for i, x in enumerate(decoded.instrs) if x.opname == "RESUME")
    assert live_at(decoded, start) == {"log", "n", "m"}
    last_return = max(i for i, x in enumerate(decoded.instrs) if x.opname == "RETURN_VALUE")
    assert live_at(decoded, last_return) == set()
    cells = decode(corpus.cells.__code__)
    live = live_at(cells, len(cells.instrs) // 2)
    assert {"count", "k"} <= live
    assert "a" not in live  # the inner function has its cell already


def test_vocabulary_is_the_same_on_every_version():
    names = {instr.opname for code in all_codes(inspect) for instr in decode(code).instrs}
    gone = {
        "PRECALL",
        "KW_NAMES",
        "CALL_KW",
        "CACHE",
        "EXTENDED_ARG",
        "TO_BOOL",
        "RETURN_CONST",
        "BINARY_SLICE",
        "LOAD_FAST_LOAD_FAST",
        "JUMP_FORWARD",
        "JUMP_BACKWARD",
    }
    assert not names & gone
    assert {"CALL", "JUMP", "LOAD_METHOD", "POP_JUMP_IF_FALSE", "LOAD_GLOBAL"} <= names


_COLUMN = st.integers(0, 300)
_POSITION = st.one_of(
    st.just((None, None, None, None)),
    st.integers(1, 5000).map(lambda line: (line, line, None, None)),
    st.builds(
        lambda line, more, left, right: (line, line + more, left, right),
        st.integers(1, 5000),
        st.integers(0, 9),
        _COLUMN,
        _COLUMN,
    ),
)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 20), _POSITION), min_size=1), st.integers(1, 5000))
def test_location_table_round_trip(rows, firstlineno):
    table = location_table(rows, firstlineno)
    units = sum(width for width, _ in rows)
    code = (lambda: None).__code__.replace(
        co_code=bytes(2 * units), co_linetable=table, co_firstlineno=firstlineno
    )
    expected = [position for width, position in rows for _ in range(width)]
    got = list(code.co_positions())
    # CPython reports a missing column as None for lines without columns, too.
    assert got == [p if p[1] is not None else (None,) * 4 for p in expected]


_ENTRY = st.tuples(
    st.integers(0, 1 << 20),
    st.integers(1, 5000),
    st.integers(0, 1 << 20),
    st.integers(0, 70),
    st.booleans(),
)


@given(st.lists(_ENTRY))
def test_exception_table_round_trip(entries):
    rows = [(start, start + size, *rest) for start, size, *rest in entries]
    parsed = dis._parse_exception_table(SimpleNamespace(co_exceptiontable=exception_table(rows)))
    assert [(a // 2, b // 2, c // 2, d, e) for a, b, c, d, e in parsed] == rows
