"""Objects that are told apart by identity, made for real while capturing, or must die in time."""

import collections
import contextlib
import contextvars
import enum
import functools
import gc
import io
import itertools
import operator
import re
import sys
import threading
import types
import typing
import weakref

import pytest
import torch
import weft_capture as wc
from capture_check import X, check, eager_backend, same


def captured(function):
    """Return a function captured without tensor compilation, and its state."""
    optimised = wc.capture(function, eager_backend)
    return optimised, optimised._weft_capture


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Tagged(int):
    def __new__(cls, tag):
        self = int.__new__(cls, 7)
        self.tag = tag
        return self


class Text(str):
    pass


def test_objects_without_weak_references_are_guarded():
    run, _ = captured(lambda x, key: (x + 1, key))
    for key in (Bits.A, Bits.B, Tagged("a"), Tagged("b"), Text("t"), classmethod(len), len, repr):
        assert run(X, key)[1] is key
    method, _ = captured(lambda x, key: key(["ab"]) if x is not None else 0)
    assert type(method(X, dict.fromkeys)) is dict
    assert type(method(X, collections.OrderedDict.fromkeys)) is collections.OrderedDict


def test_attributes_of_a_number_subclass_are_read_at_each_call():
    run, _ = captured(lambda x, n: (x * int(n), n.tag, n + 1))
    for tag in ("a", "b"):
        assert run(X, Tagged(tag))[1:] == (tag, 8)


Plain = functools.singledispatch(lambda value: "other")


def test_single_dispatch_follows_its_registry():
    run, state = captured(lambda x, v: (x + 1, Plain(v)))
    assert run(X, 1)[1] == "other"
    Plain.register(int, lambda value: "int")
    assert run(X, 1)[1] == "int"
    assert run(X, "s")[1] == "other"
    assert not state.breaks


def test_objects_of_c_types_made_inside_agree_with_eager():
    def program(x):
        data = bytearray(b"abc")
        view = memoryview(data)[1:]
        text = io.StringIO()
        view[0] = 120
        try:
            data.extend([1, 300])
        except ValueError:
            text.write("bad")
        wc.graph_break()
        view[1] = 121
        text.write(str(len(data)))
        return x + 1, bytes(data), text.getvalue(), text, data

    run, state = captured(program)
    for _ in range(2):
        got, want = run(X), program(X)
        assert got[1:3] == want[1:3] and got[4] == want[4]
        assert got[3].getvalue() == want[3].getvalue()
    assert run(X)[4] is not run(X)[4]
    assert len(state.breaks) >= 1


def test_a_lock_made_inside_is_held_where_the_program_holds_it():
    def program(x):
        lock, again = threading.Lock(), threading.RLock()
        lock.acquire()
        with again, again:
            y = x + 1
        return y, lock, lock.locked()

    run, _ = captured(program)
    _, lock, held = run(X)
    assert held and lock.locked()


CALLS = []


def shout(match):
    CALLS.append(match.group())
    return match.group().upper()


def test_sub_calls_its_function_once_for_each_match():
    run, state = captured(lambda x, s: (x + 1, re.sub("[ab]", shout, s, count=2)))
    for _ in range(2):
        CALLS.clear()
        assert run(X, "cabab")[1] == "cABab"
        assert CALLS == ["a", "b"]
    assert not state.breaks


class Counter:
    made = 0
    kind = "plain"


class Sub(Counter):
    @property
    def kind(self):
        return "property"


def test_class_attributes_are_written():
    def program(x):
        Counter.made += 1
        Counter.kind = "set"
        return x + Counter.made, Sub().made, Sub().kind, Counter().kind, Sub.made

    run, state = captured(program)
    for wanted in (1, 2, 3):
        y, *seen = run(X)
        assert seen == [wanted, "property", "set", wanted]
        assert torch.equal(y, X + wanted) and Counter.made == wanted
    assert Counter.kind == "set"
    assert not state.breaks


def test_module_attributes_are_written():
    module = types.ModuleType("settings")
    module.level = 1

    def program(x):
        module.level += 1
        return x * module.level

    run, state = captured(program)
    assert torch.equal(run(X), X * 2) and module.level == 2
    assert torch.equal(run(X), X * 3) and module.level == 3
    assert not state.breaks

    class Special(types.ModuleType):
        pass

    def changed(x):
        module.__class__ = Special
        return x + 1, type(module)

    assert captured(changed)[0](X)[1] is Special


def test_dispatch_follows_what_was_just_registered():
    def program(x):
        show = functools.singledispatch(lambda value: "other")
        before = show(1)
        show.register(int, lambda value: "int")
        return x + 1, before, show(1)

    assert captured(program)[0](X)[1:] == ("other", "int")


class Names(set):
    pass


class Rows(list):
    pass


def test_the_text_of_a_subclass_names_it():
    def program(x):
        return x + 1, repr(Names(["a"])), str(Rows([1]))

    assert captured(program)[0](X)[1:] == ("Names({'a'})", "[1]")


def test_a_tuple_that_holds_itself_is_made_once():
    def program(x):
        inner = []
        outer = (inner,)
        inner.append(outer)
        return x + 1, outer

    outer = captured(program)[0](X)[1]
    assert outer[0][0] is outer


def test_iterables_are_asked_for_iterators_at_once():
    def program(x):
        try:
            itertools.zip_longest([1], 5)
        except TypeError:
            return x + 1, "raised"
        return x, "made"

    assert captured(program)[0](X)[1] == "raised"


def test_an_enum_made_inside_is_the_programs():
    def program(x):
        class Colour(enum.Enum):
            RED = 1

        return x + 1, Colour, Colour.RED

    run, _ = captured(program)
    _, colour, red = run(X)
    assert type(red) is colour and colour.RED is red


class Thing:
    pass


@pytest.mark.slow
def test_an_inlined_call_lets_go_of_its_arguments():
    def inner(thing):
        ref = weakref.ref(thing)
        del thing
        gc.collect()
        return ref()

    def program(x):
        return x + 1, inner(Thing())

    run, _ = captured(program)
    assert program(X)[1] is None and run(X)[1] is None


class MadeOverABreak:
    def __new__(cls, value):
        make = super().__new__
        wc.graph_break()
        return make(cls)

    def __init__(self, value):
        self.value = value


def test_new_of_a_base_class_over_a_break():
    run, _ = captured(lambda x: MadeOverABreak(x + 1).value * 2)
    assert torch.equal(run(X), (X + 1) * 2)


class Doubled(collections.namedtuple("Doubled", "x y")):
    def __new__(cls, x):
        return super().__new__(cls, x, x * 2)


class Named(typing.NamedTuple):
    a: object
    b: int = 3


def test_named_tuples_are_made_by_their_own_new():
    def f(x):
        texts = []
        for make in (lambda: Named(), lambda: Named(1, 2, 3), lambda: Named(1, c=2)):
            try:
                make()
            except TypeError as error:
                texts.append(str(error))
        return Doubled(x), Named(b=2, a=x), Named(1), texts

    optimised, state = captured(f)
    expected, found = f(X), optimised(X)
    assert repr(found) == repr(expected)
    assert [type(one) for one in found] == [type(one) for one in expected]
    assert not state.breaks


OWN_OF_THREAD = threading.local()
NAMESPACE = types.SimpleNamespace(gone=1)


def test_attributes_of_c_types_are_written_as_their_class_does():
    def f(x):
        OWN_OF_THREAD.count = 3
        NAMESPACE.left = 2
        del NAMESPACE.gone
        return x + OWN_OF_THREAD.count + NAMESPACE.left

    optimised, _ = captured(f)
    assert torch.equal(optimised(X), X + 5)
    assert OWN_OF_THREAD.count == 3
    assert vars(NAMESPACE) == {"left": 2}


SCALE = contextvars.ContextVar("SCALE", default=1.0)
DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("DEPTH")


@contextlib.contextmanager
def scaled(factor):
    token = SCALE.set(factor)
    try:
        yield
    finally:
        SCALE.reset(token)


def context_variables(x, *, breaks=False):
    y = x * SCALE.get()
    with scaled(SCALE.get() * 2):
        y += SCALE.get()
        if breaks:
            wc.graph_break()
        y = y * SCALE.get() + DEPTH.get(0)
    DEPTH.set(DEPTH.get(0) + 1)
    return y * SCALE.get(), DEPTH.get(), SCALE.name


@pytest.mark.parametrize("breaks", [False, True])
def test_context_variables_belong_to_the_context_that_runs(breaks):
    captured = wc.capture(context_variables, eager_backend, fullgraph=not breaks)

    def results(function):
        found = [function(X, breaks=breaks), function(X, breaks=breaks)]
        with scaled(3.0):
            return [*found, function(X, breaks=breaks), DEPTH.get(), SCALE.get()]

    expected = contextvars.copy_context().run(results, context_variables)
    for _ in range(2):
        assert same(expected, contextvars.copy_context().run(results, captured))
    assert DEPTH.get(None) is None


def test_a_context_variable_without_a_value_raises():
    def function(x):
        try:
            return x + DEPTH.get()
        except LookupError as error:
            return x - 1, type(error)

    check(function, X)


def test_new_may_make_an_object_of_a_subclass():
    def function(x):
        class Base:
            def __new__(cls, size):
                return object.__new__(Derived)

        class Derived(Base):
            def __init__(self, size):
                self.size = size

        made = Base(3)
        return type(made).__name__, made.size, x + made.size

    name, size, total = captured(function)[0](X)
    assert (name, size) == ("Derived", 3)
    assert torch.equal(total, X + 3)


def test_an_object_that_is_its_own_call():
    def function(x):
        class Endless:
            pass

        Endless.__call__ = Endless()
        try:
            Endless()()
        except RecursionError:
            return x + 1

    assert torch.equal(captured(function)[0](X), X + 1)


def test_a_range_that_is_too_large_to_be_listed():
    def function(x):
        huge = range(sys.maxsize * 4)
        texts = []
        try:
            len(huge)
        except OverflowError as error:
            texts.append(str(error))
        steps = iter(huge)
        texts += [type(steps).__name__, type(iter(())).__name__, next(steps), next(steps)]
        pairs = [pair for pair in zip(huge, "ab", strict=False)]
        return texts, pairs, huge[-1], len(range(sys.maxsize)), 5 in huge, x.tolist()

    assert captured(function)[0](X) == function(X)


def test_objects_of_subclasses_of_numbers_in_a_class_statement():
    class Number(int):
        pass

    def program(x):
        class Local:
            one = Number(3)
            many = (Number(4), 5)

        return Local().one, Local.many, x + Local.one

    captured = wc.capture(program, eager_backend)
    one, many, _ = captured(X)
    assert (type(one), one) == (Number, 3)
    assert (type(many[0]), many) == (Number, (4, 5))


def test_a_class_attribute_becomes_a_descriptor():
    class Default:
        value = None

    captured = wc.capture(lambda x, one: x * one.value, eager_backend)
    one = Default()
    one.value = 2.0
    assert torch.equal(captured(X, one), X * 2)
    Default.value = property(lambda self: 7.0)
    assert torch.equal(captured(X, one), X * 7)


SUM_KEPT = operator.methodcaller("sum", 0, keepdim=True)


def test_a_caller_of_a_method_with_keywords():
    check(lambda x: (SUM_KEPT(x), list(map(SUM_KEPT, [x, x * 2]))), X)
