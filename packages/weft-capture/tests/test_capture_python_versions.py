"""What CPython's versions do differently: compared with eager, on whichever this is."""

import collections
import dataclasses
import runpy
import sysconfig
import typing
import warnings
from pathlib import Path

import pytest
import torch
import weft_capture
from capture_check import eager_backend

X = torch.arange(3.0)
T = typing.TypeVar("T")


class Unhashable:
    def __hash__(self):
        raise TypeError("not this one")


def refused(function, *args):
    try:
        function(*args)
    except (TypeError, ValueError) as error:
        return str(error)


def unpack(values):
    a, b = values


def enter(manager):
    with manager:
        pass


def unpacking(x):
    values = {1: 1, 2: 2, 3: 3}
    several = [[1, 2, 3], (1, 2, 3), values, values.keys(), iter([1, 2, 3]), {1, 2, 3}, "abc"]
    return x + 1, [refused(unpack, one) for one in several]


def notes(x):
    error = ValueError()
    return x + 1, [refused(error.add_note, one) for one in (1, None, [])]


def managers(x):
    class Enters:
        def __enter__(self):
            return self

    class Leaves:
        def __exit__(self, *error):
            return None

    several = (3, collections.deque(), Enters(), Leaves(), x)
    texts = [refused(enter, one) for one in several]
    return x + 1, texts


def unhashable_keys(x):
    keys, known = ([], {}, collections.deque(), (1, []), Unhashable()), {1: 2}
    texts = [refused(known.__getitem__, key) for key in keys]
    texts += [refused(known.get, key) for key in keys]
    texts += [refused(known.pop, key) for key in keys]
    texts += [refused(known.setdefault, key, 1) for key in keys]
    texts += [refused(lambda key: {key: 1}, key) for key in keys]
    texts += [refused(lambda key: key in known, key) for key in keys]
    texts += [refused(collections.OrderedDict().__setitem__, key, 1) for key in keys]
    texts += [refused(collections.Counter, [key]) for key in keys]
    return x + 1, texts, [refused(hash, key) for key in keys]


def unhashable_elements(x):
    elements, known = ([], {}, (1, []), Unhashable()), {1}
    texts = [refused(lambda one: {one}, one) for one in elements]
    texts += [refused(known.add, one) for one in elements]
    texts += [refused(known.discard, one) for one in elements]
    texts += [refused(lambda one: one in known, one) for one in elements]
    texts += [refused(frozenset, [one]) for one in elements]
    return x + 1, texts, refused(known.update, [[]])


def length_hints(x):
    asked = []

    class Counted:
        def __iter__(self):
            return iter([1, 2])

        def __length_hint__(self):
            asked.append("hint")
            return 2

    return x + 1, list(Counted()), tuple(Counted()), [*Counted()], asked


def annotations(x):
    class Local:
        pass

    class Annotated:
        number = 3
        first: Local = 1
        second: number = 2

        def method(self, one: Local) -> "Local":
            return one

    found = {name: getattr(one, "__name__", one) for name, one in Annotated.__annotations__.items()}
    return x + Annotated.first, found, sorted(Annotated.method.__annotations__)


def annotations_that_see_a_change(x):
    class Annotated:
        number: int = 1

    Annotated.int = 3  # evaluated by now, or not
    Annotated.__annotations__["more"] = str
    return x + 1, {**Annotated.__annotations__}


def dataclass_of_local_types(x):
    class Local:
        pass

    @dataclasses.dataclass
    class Point:
        x: Local
        count: typing.ClassVar[int] = 2

    names = [(field.name, field.type.__name__) for field in dataclasses.fields(Point)]
    return x * Point.count, names, repr(Point(3)).rpartition(".")[2]


def unknown_annotation(x):
    class Annotated:
        one: Unknown = 1  # noqa: F821

    return x + Annotated.one


def type_variable(x):
    return x + 1, T.__module__, T.__name__


def recorded_warnings(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("one", stacklevel=1)
    return x + 1, [str(one.message) for one in seen]


PROGRAMS = (
    unpacking, notes, managers, unhashable_keys, unhashable_elements, length_hints,
    annotations, annotations_that_see_a_change, dataclass_of_local_types, unknown_annotation,
    type_variable, recorded_warnings,
)  # fmt: skip


def outcome(function):
    try:
        return repr(function(X))
    except NameError as error:  # up to 3.13, annotations are evaluated with the class
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_as_eager(program):
    captured = weft_capture.capture(program, eager_backend)
    assert outcome(captured) == outcome(program)
    assert outcome(captured) == outcome(program)


@pytest.mark.parametrize("program", [annotations, recorded_warnings], ids=lambda one: one.__name__)
def test_in_one_graph(program):
    captured = weft_capture.capture(program, eager_backend, fullgraph=True)
    assert outcome(captured) == outcome(program)


def test_building_for_a_free_threaded_python_is_refused(monkeypatch):
    known = sysconfig.get_config_var
    free_threaded = "Py_GIL_DISABLED"
    monkeypatch.setattr(sysconfig, "get_config_var", lambda one: one == free_threaded or known(one))
    with pytest.raises(SystemExit, match="free-threaded"):
        runpy.run_path(str(Path(__file__).parents[1] / "setup.py"))
