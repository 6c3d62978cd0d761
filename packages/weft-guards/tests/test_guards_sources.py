"""Every source prints, compares by structure, reads a value in a check and rebuilds it."""

import math

import pytest
import torch
from weft_guards.check import compile_check
from weft_guards.guards import GuardSet
from weft_guards.sources import (
    AttrSource,
    CallSource,
    ClosureSource,
    ConstSource,
    DictKeySource,
    DictSource,
    GlobalSource,
    GlobalsSource,
    InstanceAttrSource,
    ItemSource,
    LocalSource,
    ModuleSource,
    TensorProperty,
    TorchStateSource,
    TypeSource,
    is_literal,
    render_source,
)

A_GLOBAL = "value of a global"


class Box:
    def __init__(self):
        self.inner = {"k": 7, (1, 2): 8}


def make(cell):
    def function(x, t, *args):
        return cell, A_GLOBAL, x, t, args

    return function


FUNCTION = make("value of a cell")
ARGUMENTS = {"x": Box(), "t": torch.zeros(3, 4)[:, 1:], "args": (5, 6)}
X, T, ARGS = LocalSource("x"), LocalSource("t"), LocalSource("args")
INNER = InstanceAttrSource(X, "inner")

TABLE = [
    (X, "L['x']", ARGUMENTS["x"]),
    (GlobalSource("A_GLOBAL"), "G['A_GLOBAL']", A_GLOBAL),
    (ClosureSource("cell"), "C['cell']", "value of a cell"),
    (ModuleSource("math"), "M['math']", math),
    (ConstSource(5), "5", 5),
    (AttrSource(X, "inner"), "L['x'].inner", ARGUMENTS["x"].inner),
    (DictSource(X), "L['x'].__dict__", ARGUMENTS["x"].__dict__),
    (INNER, "L['x'].__dict__['inner']", ARGUMENTS["x"].inner),
    (ItemSource(INNER, "k"), "L['x'].__dict__['inner']['k']", 7),
    (ItemSource(INNER, (1, 2)), "L['x'].__dict__['inner'][(1, 2)]", 8),
    (ItemSource(ARGS, 1), "L['args'][1]", 6),
    (DictKeySource(INNER, 1), "list(L['x'].__dict__['inner'])[1]", (1, 2)),
    (TypeSource(X), "type(L['x'])", Box),
    (TensorProperty(T, "size", 1), "L['t'].size(1)", 3),
    (TensorProperty(T, "stride", 0), "L['t'].stride(0)", 4),
    (TensorProperty(T, "storage_offset"), "L['t'].storage_offset()", 1),
    (CallSource(len, (ARGS,)), "len(L['args'])", 2),
]


class StackMachine:
    """A builder that executes instead of writing bytecode."""

    def __init__(self):
        self.stack = []

    def load_local(self, name):
        self.stack.append(ARGUMENTS[name])

    def load_global(self, name):
        self.stack.append(globals()[name])

    def load_cell(self, name):
        index = FUNCTION.__code__.co_freevars.index(name)
        self.stack.append(FUNCTION.__closure__[index].cell_contents)

    def load_const(self, value):
        self.stack.append(value)

    def load_attr(self, name):
        self.stack.append(getattr(self.stack.pop(), name))

    def binary_subscr(self):
        key = self.stack.pop()
        self.stack.append(self.stack.pop()[key])

    def begin_call(self):
        self.stack.append(None)

    def call(self, count):
        arguments = [self.stack.pop() for _ in range(count)][::-1]
        function = self.stack.pop()
        assert self.stack.pop() is None
        self.stack.append(function(*arguments))


@pytest.mark.parametrize(("source", "printed", "value"), TABLE, ids=lambda v: str(v)[:30])
def test_source_prints_and_rebuilds(source, printed, value):
    assert str(source) == source.expr() == printed
    machine = StackMachine()
    source.emit(machine)
    assert len(machine.stack) == 1
    assert machine.stack[0] is value or machine.stack[0] == value


@pytest.mark.parametrize(("source", "printed", "value"), TABLE, ids=lambda v: str(v)[:30])
def test_source_reads_in_a_check(source, printed, value):
    guards = GuardSet()
    if is_literal(value):
        guards.add(source, "CONST", value)
    elif isinstance(value, dict):
        guards.add(source, "DICT_KEYS", value)
    else:
        guards.add(source, "ID", value)
    check = compile_check(guards, ("x", "t", "args"), ("cell",))
    assert check(FUNCTION, *ARGUMENTS.values())
    if printed.startswith(("L", "type", "list", "len", "C")):
        assert not check(make("other"), None, None, None)


def test_structural_equality():
    again = [AttrSource(LocalSource("x"), "a"), AttrSource(LocalSource("x"), "a")]
    assert again[0] == again[1]
    assert hash(again[0]) == hash(again[1])
    assert LocalSource("x") != GlobalSource("x")
    assert AttrSource(X, "a") != AttrSource(T, "a")
    assert ConstSource([]) != ConstSource([])


def test_guard_only_sources():
    assert GlobalsSource().expr() == "G"
    assert TorchStateSource().expr() == "torch"
    with pytest.raises(NotImplementedError, match="not rebuilt"):
        TorchStateSource().emit(StackMachine())


def test_render_whole_uses_the_given_names():
    class Names:
        def root(self, kind, name):
            return f"my_{name}"

    assert render_source(ItemSource(ARGS, 0), Names()) == "my_args[0]"


@pytest.mark.parametrize("value", [1, "a", None, (1, ("b", None)), 2.5, b"", ...])
def test_literals(value):
    assert is_literal(value)


@pytest.mark.parametrize("value", [[], (1, []), torch.Size([1]), object()])
def test_not_literals(value):
    assert not is_literal(value)
