"""Guards as bytes: what is found again in another process, and what is not."""

import enum
import functools
import gc
import io
import operator
import types

import pytest
import torch
from weft_guards import ClassUse, GuardSet, TorchState, arg_names_of, compile_check
from weft_guards.payloads import WeakIdentity, find_in_class
from weft_guards.serialization import (
    GuardPickler,
    GuardUnpickler,
    NotSerializable,
    Stale,
    bind,
    digest,
    find,
    import_path_of,
)
from weft_guards.sources import (
    AttrSource,
    CallSource,
    ConstSource,
    GlobalSource,
    LocalSource,
    ProgramSource,
    TorchStateSource,
    TypeSource,
)


class Colour(enum.Enum):
    RED = 1


class Thing:
    kind = 3

    @property
    def size(self):
        return 1

    @classmethod
    def make(cls):
        return cls()

    def method(self):
        return 2


def plain(x):
    return x


def twice(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(function(x))

    return wrapper


@twice
def decorated(x):
    return x


def program(x, thing):
    return decorated(x), thing


X, THING = LocalSource("x"), LocalSource("thing")


def sent(value, known=None, given=None):
    """Write a value as one process does, and read it as another one."""
    file = io.BytesIO()
    GuardPickler(file, known or {}).dump(value)
    loader = GuardUnpickler(io.BytesIO(file.getvalue()))
    loader.known = given or {}
    return loader.load()


def guards_of(x, thing):
    guards = GuardSet()
    guards.add(X, "TENSOR", x)
    guards.add(THING, "TYPE", type(thing))
    guards.add(TypeSource(THING), "ID", type(thing))
    guards.add(GlobalSource("plain"), "ID", plain)
    guards.add(AttrSource(GlobalSource("plain"), "__code__"), "ID", plain.__code__)
    guards.add(TorchStateSource(), "GLOBAL_STATE", TorchState.now())
    names = {name: find_in_class(Thing, name) for name in ("size", "method", "absent")}
    guards.add(ProgramSource(WeakIdentity(Thing)), "CLASS", ClassUse.of(Thing, names))
    guards.add(CallSource(operator.is_, (THING, ConstSource(None))), "CONST", False)
    return tuple(guards)


def test_guards_hold_again_and_fail_again():
    x, thing = torch.ones(2, 3), Thing()
    again = bind(sent(guards_of(x, thing)), program, (x, thing))
    assert sorted(map(str, again)) == sorted(map(str, guards_of(x, thing)))
    check = compile_check(again, arg_names_of(program.__code__))
    assert check(program, x, thing)
    assert check(program, torch.zeros(2, 3), Thing())
    assert not check(program, torch.ones(3, 2), thing)
    assert not check(program, x, 5)
    with torch.inference_mode():
        assert not check(program, torch.ones(2, 3), thing)


def test_a_call_that_they_do_not_admit_is_stale():
    x, thing = torch.ones(2, 3), Thing()
    saved = sent(guards_of(x, thing))
    with pytest.raises(Stale):
        bind(saved, program, (x.double(), thing))
    with pytest.raises(Stale):
        bind(saved, program, (x, 5))


def test_other_code_is_stale(monkeypatch):
    x, thing = torch.ones(2, 3), Thing()
    saved = sent(guards_of(x, thing))

    def other(x):
        return x + 1

    monkeypatch.setattr(plain, "__code__", other.__code__)
    with pytest.raises(Stale):
        bind(saved, program, (x, thing))


@pytest.mark.parametrize(
    ("name", "value"), [("absent", 1), ("size", 4), ("method", property(plain))]
)
def test_another_class_member_is_stale(monkeypatch, name, value):
    x, thing = torch.ones(2, 3), Thing()
    saved = sent(guards_of(x, thing))
    monkeypatch.setattr(Thing, name, value, raising=False)
    with pytest.raises(Stale):
        bind(saved, program, (x, thing))


def test_a_guard_of_code_that_is_alike_takes_the_new_code(monkeypatch):
    x, thing = torch.ones(2, 3), Thing()
    saved = sent(guards_of(x, thing))
    monkeypatch.setattr(plain, "__code__", plain.__code__.replace())
    again = bind(saved, program, (x, thing))
    assert compile_check(again, arg_names_of(program.__code__))(program, x, thing)


@pytest.mark.parametrize(
    "value",
    [
        torch.float16, torch.device("cpu"), torch.strided, torch.Size([2]), range(3), slice(1), 2j,
        None, ..., Colour.RED, Thing, plain, decorated, len, operator, torch.add, torch.Tensor.size,
        torch.nn.functional.gelu, torch.nn.functional.max_pool2d, torch.ops.aten.add.Tensor,
        torch.ops.aten.add, object.__init__, (1, "a", b"", 0.5, frozenset([1])),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)  # fmt: skip
def test_found_again(value):
    assert sent(value) == value


def test_functions_inside_of_what_decorators_made():
    for function in (vars(Thing)["size"].fget, vars(Thing)["make"].__func__, decorated.__wrapped__):
        assert find(*import_path_of(function)) is function
        assert sent(function) is function


class Awkward:
    def __getattr__(self, name):
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "value",
    [object(), [1, 2], {}, {1}, Thing(), torch.ones(1), lambda: 1, Thing().method, iter([]),
     type("Local", (), {}), Awkward(), plain.__code__],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_not_found_again(value):
    with pytest.raises(NotSerializable, match=r"\[unnamed-object\]"):
        sent((1, value))


def test_an_object_that_is_gone_is_not_written():
    held = WeakIdentity(type("Gone", (), {}))
    gc.collect()
    assert held.get() is None
    with pytest.raises(NotSerializable):
        sent(held)


def test_what_the_caller_knows_goes_by_its_name():
    mine, yours = [1], [2]
    assert sent((mine, 3), {id(mine): ("mine",)}, {("mine",): yours})[0] is yours


def test_namespaces_are_found_by_module():
    assert sent(vars(types)) is vars(types)


def test_what_is_not_imported_is_stale():
    with pytest.raises(Stale):
        find("a_module_that_nobody_has_imported", "f")
    with pytest.raises(Stale):
        find("types", "absent")
    with pytest.raises(Stale):
        find("types", "f.<locals>.g")


def test_digests_tell_code_apart():
    texts = [
        "def f(x): return x + 1",
        "def f(x): return x + 2",
        "\ndef f(x): return x + 1",
        "def f(y): return y + 1",
        "def f(x): return lambda: 1",
        "def f(x): return lambda: 2",
    ]
    digests = []
    for text in texts:
        namespace = {}
        exec(compile(text, "file", "exec"), namespace)
        digests.append(digest(namespace["f"].__code__))
    assert len(set(digests)) == len(texts)
    assert digest(plain.__code__) == digest(plain.__code__.replace())
