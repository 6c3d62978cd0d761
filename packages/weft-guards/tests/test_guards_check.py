"""Every kind of guard holds for what was seen, fails for what differs, and says how."""

import enum
import math
import types
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from weft_guards.check import arg_names_of, compile_check
from weft_guards.explain import explain_miss
from weft_guards.guards import KINDS, Guard, GuardSet
from weft_guards.payloads import MemoryUse, NamespaceUse, ShapeExpr, TensorSpec, WeakIdentity
from weft_guards.sources import (
    AttrSource,
    CellSource,
    ClosureSource,
    GlobalsSource,
    InstanceAttrSource,
    ItemSource,
    LocalSource,
    ProgramSource,
    TensorProperty,
    TorchStateSource,
)


class Box:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class SubInt(int):
    pass


def one(x):
    return x


def other(x):
    return x + 1


X = LocalSource("x")
T = torch.arange(12.0).reshape(3, 4)
PARAMETER = torch.nn.Parameter(torch.zeros(2))
ANY_ROWS = replace(TensorSpec.of(torch.zeros(3, 4)), sizes=(None, 4), strides=(None, None))
FIVE_TWICE = ShapeExpr(
    "{0} + {1} == 7", (TensorProperty(X, "size", 0), TensorProperty(X, "size", 1))
)
SEVEN = object.__new__(Box)

# (kind, what the guard is made from, values that pass, values that fail)
TABLE = [
    ("TYPE", int, [1, 2], [True, SubInt(1), 1.0, "1"]),
    ("TYPE", Box, [Box(), SEVEN], [Box, None]),
    ("ID", one, [one], [other, None]),
    ("ID", Color.RED, [Color.RED], [Color.BLUE, 1]),
    ("ID", torch.float32, [torch.float32], [torch.float64]),
    ("ID", len, [len], [abs]),
    ("NONE", None, [None], [0, False, ()]),
    ("CONST", 3, [3, int("3")], [True, 3.0, SubInt(3), 4, None, "3", torch.tensor(3)]),
    ("CONST", True, [True], [1, False, 1.0]),
    ("CONST", "abc", ["abc", "".join("abc")], ["abd", b"abc"]),
    ("CONST", 2.5, [2.5], [2, 2.25]),
    ("CONST", 0.0, [0.0], [-0.0, 0, False]),
    ("CONST", -0.0, [-0.0], [0.0]),
    ("CONST", math.nan, [math.nan, float("nan")], [0.0, None]),
    ("CONST", math.inf, [math.inf], [-math.inf]),
    ("CONST", 1 + 0j, [1 + 0j], [1, complex(1, -0.0)]),
    ("CONST", (1, (2.0, "x")), [(1, (2.0, "x"))], [(1, (2, "x")), (True, (2.0, "x")), [1]]),
    ("CONST", frozenset([1, 2]), [frozenset([2, 1])],
     [frozenset([1]), {1, 2}, frozenset([True, 2])]),
    ("CONST", torch.Size([1, 2]), [torch.Size([1, 2])], [(1, 2)]),
    ("CONST", torch.device("cpu"), [torch.device("cpu")], [torch.device("meta"), "cpu"]),
    ("CONST", range(3), [range(0, 3)], [range(4), [0, 1, 2]]),
    ("LEN", 2, [[1, 2], (1, 2), {1: 1, 2: 2}], [[], 5, None]),
    ("DICT_KEYS", {"a": 1, "b": 2}, [{"a": 5, "b": None}, OrderedDict(a=1, b=1)],
     [{"b": 1, "a": 2}, {"a": 1}, {}, None]),
    ("DICT_KEYS", {1: 1, "a": 2}, [{1: 1, "a": 0}], [{True: 1, "a": 2}, {1.0: 1, "a": 2}, {1: 1}]),
    ("DICT_KEYS", {1: 1, one: 2}, [{1: 1, one: 0}], [{True: 1, one: 2}, {1: 1, other: 2}]),
    ("DICT_KEYS", {(int, (one, 1)): 1}, [{(int, (one, 1)): 0}],
     [{(int, (other, 1)): 1}, {(int, (one, True)): 1}, {(int, one): 1}, {int: 1}]),
    ("DICT_KEYS", {torch.device("cpu"): 1}, [{torch.device("cpu"): 0}],
     [{torch.device("meta"): 1}, {"cpu": 1}]),
    ("ATTR_ABSENT", "name", [Box(), Box(other=1)], [Box(name=1), 5]),
    ("KEY_ABSENT", "k", [{}, {"a": 1}], [{"k": 1}, 5]),
    ("TENSOR", T, [T, T.clone(), torch.zeros(3, 4)],
     [T.double(), T[:2], T.t(), T.t().contiguous().t(), torch.zeros(3, 4, requires_grad=True),
      torch.nn.Parameter(T), T.to("meta"), T.numpy(), None, T.to_sparse(), T[None],
      torch.zeros(3, 4, dtype=torch.complex64), torch.zeros(12)]),
    ("TENSOR", PARAMETER, [torch.nn.Parameter(torch.ones(2))],
     [torch.zeros(2, requires_grad=True), torch.nn.Parameter(torch.ones(2), requires_grad=False)]),
    ("TENSOR", torch.zeros(2, dtype=torch.cfloat),
     [torch.zeros(2, dtype=torch.cfloat)], [torch.zeros(2, dtype=torch.cfloat).conj()]),
    ("TENSOR", ANY_ROWS, [T, T[:2], torch.zeros(9, 4)],
     [torch.zeros(3, 5), torch.zeros(3), T.double()]),
    ("SHAPE", FIVE_TWICE, [T, torch.zeros(5, 2)], [torch.zeros(2, 2), torch.zeros(3), None]),
]  # fmt: skip


def check_of(guards):
    return compile_check(guards, ("x",))


@pytest.mark.parametrize(("kind", "seen", "same", "different"), TABLE, ids=lambda v: str(v)[:20])
def test_kind(kind, seen, same, different):
    guards = GuardSet()
    guard = guards.add(X, kind, seen)
    check = check_of(guards)
    for value in same:
        assert check(one, value), value
        assert explain_miss(guards, one, (value,)) == []
    for value in different:
        assert not check(one, value), value
        misses = explain_miss(guards, one, (value,))
        assert misses
        assert all(miss.guard is guard and miss.remedy for miss in misses)
        assert str(guard) in str(misses[0])


def test_namespace():
    module = types.ModuleType("library")
    vars(module).update(function=one, number=1000)
    use = NamespaceUse.of({"function": one, "number": 1000})
    guards = [Guard.of(ProgramSource(WeakIdentity(module)), "NAMESPACE", use)]
    check = check_of(guards)
    for _ in range(4):  # the later runs have a memo
        assert check(one, 0)
    module.other, module.number = 1, int("1000")
    assert check(one, 0)
    module.function = check
    assert not check(one, 0)
    (miss,) = explain_miss(guards, one, (0,))
    assert (miss.what, miss.new) == ("module library", "changed: function")
    module.function = one
    assert check(one, 0)
    del module.number
    assert not check(one, 0)


def test_every_kind_is_tested():
    relational = {"ALIAS", "DISTINCT", "MEMORY", "GRAD_MODE", "GLOBAL_STATE", "CELL_EMPTY", "CLASS"}
    relational.add("NAMESPACE")
    assert {row[0] for row in TABLE} | relational == set(KINDS)


@pytest.mark.parametrize(("kind", "one"), [("ALIAS", True), ("DISTINCT", False)])
def test_alias(kind, one):
    def two(x, y):
        return x, y

    a, b = [], []
    guards = GuardSet()
    guards.add(X, kind, LocalSource("y"))
    check = compile_check(guards, arg_names_of(two.__code__))
    for _ in range(20):  # later ones go by a memo
        assert check(two, a, a) is one
        assert check(two, a, b) is not one
    assert "object" in explain_miss(guards, two, (a, b if one else a))[0].new


@pytest.mark.parametrize(
    ("shared", "elements_apart"), [(False, False), (True, False), (True, True)]
)
def test_memory(shared, elements_apart):
    names = [f"x{i}" for i in range(5)]
    sources = tuple(map(LocalSource, names))
    guards = GuardSet()
    for source in sources:
        guards.add(source, "TYPE", torch.Tensor)
    use = MemoryUse(sources[:2], sources[2:], shared, elements_apart)
    guards.add(sources[0], "MEMORY", use)
    check = compile_check(guards, names)
    apart = [torch.zeros(4) for _ in names]
    only_read = [*apart[:3], apart[4][1:], apart[4]]
    one_twice = [*apart[:4], apart[0]]
    views = [*apart[:3], apart[1].view(2, 2), apart[4]]
    both_written = [apart[0][:2], apart[0][2:], *apart[2:]]
    for values in (apart, only_read):
        assert check(one, *values) is not shared
    for values in (one_twice, views):
        assert check(one, *values) is (shared and not elements_apart)
    assert check(one, *both_written) is elements_apart
    texts = str(explain_miss(guards, lambda x0, x1, x2, x3, x4: 0, apart if shared else views)[0])
    assert "shared" in texts
    assert check(one, *(apart if not shared else both_written if elements_apart else views))


def test_torch_state():
    guards = GuardSet()
    guards.add(TorchStateSource(), "GLOBAL_STATE")
    guards.add(TorchStateSource(), "GRAD_MODE", True)
    check = check_of(guards)
    assert check(one, 0)
    for change in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu"),
        torch.device("meta"),
    ):
        with change:
            assert not check(one, 0), change
            assert explain_miss(guards, one, (0,))
    torch.set_default_dtype(torch.float64)
    try:
        assert not check(one, 0)
        assert "default dtype" in str(explain_miss(guards, one, (0,))[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert check(one, 0)


def test_autocast_details_matter():
    guards = GuardSet()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guards.add(TorchStateSource(), "GLOBAL_STATE")
        assert check_of(guards)(one, 0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not check_of(guards)(one, 0)


def test_globals_and_cells():
    def outer(fill):
        def inner():
            return late

        if fill:
            late = 1
        return inner

    guards = GuardSet()
    guards.add(GlobalsSource(), "KEY_ABSENT", "no_such_global")
    guards.add(ItemSource(AttrSource(LocalSource("f"), "__closure__"), 0), "CELL_EMPTY")
    check = compile_check(guards, ("f",))
    assert check(one, outer(False))
    assert not check(one, outer(True))
    assert "filled" in explain_miss_of(guards, outer(True)).new
    own = GuardSet()
    own.add(CellSource("late"), "CELL_EMPTY")
    check = compile_check(own, (), ("late",))
    assert check(outer(False)) and not check(outer(True))
    filled = GuardSet()
    filled.add(ClosureSource("late"), "CONST", 1)
    check = compile_check(filled, (), ("late",))
    assert check(outer(True))
    assert not check(outer(False))  # an empty cell is a miss, not an error


def explain_miss_of(guards, value):
    def host(f):
        return f

    return explain_miss(guards, host, (value,))[0]


def test_reads_run_no_user_code():
    """A type that matches is required before anything is read from a value."""

    class Hostile:
        def __getattr__(self, name):
            pytest.fail(f"read {name}")

        def forbidden(self, *_):
            pytest.fail("user code ran")

        __eq__ = __bool__ = __len__ = __getitem__ = __contains__ = __iter__ = forbidden
        __hash__ = None

    guards = GuardSet()
    inner = InstanceAttrSource(X, "inner")
    guards.add(ItemSource(inner, 0), "CONST", 1)
    guards.add(inner, "LEN", 1)
    guards.add(inner, "TYPE", list)
    guards.add(X, "TYPE", Box)
    check = check_of(guards)
    assert check(one, Box(inner=[1]))
    for value in (Hostile(), Box(inner=Hostile()), Box(inner=[Hostile()])):
        assert not check(one, value)
        assert explain_miss(guards, one, (value,))


def test_missing_things_are_misses_with_a_reason():
    guards = GuardSet()
    guards.add(ItemSource(InstanceAttrSource(X, "inner"), "k"), "CONST", 1)
    check = check_of(guards)
    for value in (Box(), Box(inner={}), Box(inner=None), 5, None):
        assert not check(one, value)
        assert "cannot be read" in explain_miss(guards, one, (value,))[0].new


def test_each_source_is_fetched_once(form):
    guards = GuardSet()
    inner = InstanceAttrSource(X, "inner")
    for index in range(5):
        guards.add(ItemSource(inner, index), "CONST", index)
    check = check_of(guards)
    if form == "python":
        assert check.source_text.count("__dict__") == 1
    else:
        assert len(check.program) == 3 + 2 * 5  # argument, dict, inner; fetch and test each


def test_equal_guards_are_kept_once():
    guards = GuardSet()
    for _ in range(3):
        guards.add(X, "TENSOR", T)
        guards.add(X, "TYPE", Box)
        guards.add(X, "ID", one)
    assert len(guards) == 3
    assert "TENSOR" in str(guards)


@pytest.mark.parametrize("value", [[], {}, Box(x=1).__dict__, Box().__init__, [].append])
def test_objects_that_cannot_be_held_weakly_are_refused(value):
    with pytest.raises(TypeError):
        GuardSet().add(X, "ID", value)


@pytest.mark.parametrize("value", [[], Box(), (1, [])])
def test_values_that_are_no_constants_are_refused(value):
    with pytest.raises(TypeError):
        GuardSet().add(X, "CONST", value)


def test_unknown_kind_and_unknown_argument():
    with pytest.raises(KeyError):
        GuardSet().add(X, "NO_SUCH_KIND")
    guards = GuardSet()
    guards.add(LocalSource("nowhere"), "NONE")
    with pytest.raises(KeyError):
        check_of(guards)


def test_miss_names_the_users_line():
    import traceback

    guards = GuardSet()
    guards.add(X, "CONST", 3, traceback.extract_stack(limit=1))
    (miss,) = explain_miss(guards, one, (4,))
    assert __file__ in miss.user_line
    assert (miss.old, miss.new) == ("3", "4")
    assert "what to do" in str(miss)


def test_tensor_miss_names_each_property():
    guards = GuardSet()
    guards.add(X, "TENSOR", T)
    misses = explain_miss(guards, one, (torch.zeros(3, 5, dtype=torch.float64),))
    assert [(m.what, m.old, m.new) for m in misses] == [
        ("dtype of L['x']", "torch.float32", "torch.float64"),
        ("size of dim 1 of L['x']", "4", "5"),
        ("stride of dim 0 of L['x']", "4", "5"),
    ]


def test_argument_names_follow_the_frame():
    def function(a, /, b, *rest, c, **more):
        local = a
        return local, b, rest, c, more

    assert arg_names_of(function.__code__) == ("a", "b", "c", "rest", "more")
