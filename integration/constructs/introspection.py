"""json, inspect, types, re, struct, pathlib and friends."""

import base64
import contextlib
import contextvars
import cProfile
import functools
import hashlib
import inspect
import io
import json
import pathlib
import re
import struct
import sys
import threading
import types
import typing
import weakref
from collections.abc import Iterable

import torch

from constructs import case


def sample(a, b: int = 2, *args, c=3, **kwargs):
    """Sample."""
    return a


@case
def json_round_trip(x):
    data = {"a": [1, 2.5, None, True], "b": {"c": "d"}}
    text = json.dumps(data, sort_keys=True)
    return x + json.loads(text)["a"][0], text, json.loads("[1, 2]")


@case
def json_error(x):
    try:
        json.loads("{")
    except json.JSONDecodeError as error:
        return x + 1, error.msg


@case
def inspect_signature(x):
    parameters = inspect.signature(sample).parameters
    return x + len(parameters), list(parameters), parameters["c"].default


@case
def inspect_signature_bind(x):
    bound = inspect.signature(sample).bind(1, c=5)
    bound.apply_defaults()
    return x + bound.arguments["c"], bound.args


@case
def inspect_predicates(x):
    return (
        x + 1,
        inspect.isfunction(sample),
        inspect.isclass(dict),
        inspect.ismethod(sample),
        inspect.getdoc(sample),
    )


@case
def inspect_fullargspec(x):
    return x + len(inspect.getfullargspec(sample).args)


@case
def regular_expressions(x):
    m = re.match(r"(\w+)-(?P<n>\d+)", "layer-12")
    return (
        x + int(m.group("n")),
        m.groups(),
        re.sub("a", "b", "aba"),
        re.findall(r"\d", "a1b2"),
        bool(re.search("z", "a")),
    )


@case
def compiled_pattern(x):
    pattern = re.compile("[ab]+")
    return x + 1, pattern.sub("-", "xabx"), pattern.fullmatch("ab") is not None, pattern.pattern


@case
def re_sub_with_function(x):
    return x + 1, re.sub(r"\d", lambda m: str(int(m.group()) + 1), "a1b2")


@case
def struct_pack(x):
    return x + struct.unpack("<i", struct.pack("<i", 7))[0]


@case
def pathlib_paths(x):
    p = pathlib.PurePosixPath("/a") / "b.txt"
    return x + 1, p.name, p.suffix, str(p.parent)


@case
def string_io(x):
    buffer = io.StringIO()
    buffer.write("a")
    buffer.write("b")
    return x + len(buffer.getvalue())


@case
def hashing_and_base64(x):
    return x + 1, hashlib.md5(b"a").hexdigest()[:4], base64.b64encode(b"ab")


@case
def thread_lock(x):
    lock = threading.Lock()
    with lock:
        x = x + 1
    return x, lock.locked()


@case
def thread_local_and_name(x):
    return x + 1, threading.current_thread() is threading.main_thread()


@case
def weak_reference(x):
    class C:
        n = 2

    c = C()
    ref = weakref.ref(c)
    return x + ref().n, ref() is c


@case
def types_module(x):
    return x + 1, isinstance(sample, types.FunctionType), types.MethodType(lambda s, y: y * s, 3)(x)


@case
def sys_attributes(x):
    return (
        x + (sys.version_info[0] >= 3),
        sys.maxsize > 1,
        sys.version_info >= (3, 8),
        sys.byteorder,
    )


@case
def function_attributes_read(x):
    return (
        x + sample.__code__.co_argcount,
        sample.__name__,
        sample.__doc__,
        sample.__defaults__,
        sample.__module__,
    )


@case
def code_of_lambda(x):
    f = lambda a, b: a  # noqa: E731
    return x + 1, f.__code__.co_varnames, f.__name__


@case
def import_inside(x):
    import math as m
    from collections import OrderedDict

    return x + m.floor(2.5), OrderedDict(a=1)["a"]


@case
def import_missing(x):
    try:
        import no_such_module_at_all
    except ImportError as error:
        return x + 1, type(error).__name__, error.name


@case
def import_submodule(x):
    import os.path
    import xml.etree.ElementTree as ET

    return x + 1, os.path.basename("/a/b"), ET.fromstring("<a b='1'/>").get("b")


@case
def abc_iterable_check(x):
    return x + 1, isinstance([1], Iterable), isinstance(3, Iterable), isinstance(x, Iterable)


@case
def dtype_and_device_objects(x):
    return (
        x.to(torch.float64),
        x.dtype is torch.float32,
        str(x.device),
        x.device.type,
        torch.float32.is_floating_point,
    )


@case
def module_attributes(x):
    return x + 1, json.__name__, hasattr(json, "dumps"), getattr(torch, "relu")(x)


@case
def subclasses_and_mro(x):
    class A: ...

    class B(A): ...

    return x + 1, [k.__name__ for k in B.__mro__], A.__subclasses__() == [B], B.__bases__ == (A,)


@case
def method_resolution_on_instance(x):
    class A:
        def go(self):
            return 1

    a = A()
    a.go = lambda: 5
    return x + a.go(), A().go(), type(a).go(a)


@case
def vars_of_module_class(x):
    class A:
        k = 3

    return x + vars(A)["k"], "k" in A.__dict__, "zz" in vars(A)


@case
def typing_subscripts(x):
    parts = torch.jit.annotate(typing.List[torch.Tensor], [x, x])  # noqa: UP006
    hint = typing.Optional[typing.Callable[[int], typing.List[int]]]  # noqa: UP006, UP045
    try:
        typing.Dict[str, int]()  # noqa: UP006
    except TypeError as error:
        text = str(error)
    return sum(typing.cast(list, parts)), typing.get_args(hint)[1], text


HINTS = (typing.ForwardRef("int"), Iterable[int], typing.TypeVar("T"), int | None, 3)


@case
def arguments_of_types(x):
    return x + 1, [typing.get_args(hint) for hint in HINTS]


@case(inputs=lambda: (torch.ones(2), "".join(["ab", "c!"]), "".join(["a", "bc!"])))
def identity_of_equal_texts(x, a, b):
    kept = [a, b, a.strip()]
    y = x + 1
    sys.gettrace()  # breaks
    return y, a is b, a is kept[0], a is kept[2], kept[0] is kept[1], kept[2] is not b


@case
def a_frame_goes_on_after_it_was_looked_at(x):
    y, n, frame = x + 1, 2, sys._getframe()
    first = frame.f_lineno
    z = y * n
    frame.f_locals["n"] = 5  # a variable from CPython 3.13 on
    caller = frame.f_back is not None
    return z + n, caller, frame.f_lineno - first, sorted(frame.f_locals), frame.f_locals["z"]


@case
def a_tracer_that_the_program_calls(x):
    seen = []

    def traced(y):
        z = y + 1
        return z * 2

    def watch(frame, event, argument):
        seen.append((frame.f_code.co_name, event, frame.f_lineno - traced.__code__.co_firstlineno))
        return watch

    y, before = x * 2, sys.gettrace()
    sys.settrace(watch)
    try:
        y = traced(y)
    finally:
        sys.settrace(before)
    return y, seen


class Reference(weakref.ref):
    def __call__(self):
        return super().__call__()


@case(inputs=lambda: (torch.ones(2), threading.local(), Reference(Reference), bytearray()))
def what_only_c_knows(x, local, reference, empty):
    watched = [weakref.ref(one, repr) for one in [x + 1]]
    name, local.held = contextvars.ContextVar("name"), x
    with contextlib.suppress(AttributeError):
        name.name = "readonly"
    profile = cProfile.Profile(lambda: 3)
    profile.runcall(repr, x)
    held = getattr(local, "held", None), hasattr(local, "other"), profile.getstats()[0].totaltime
    return held, reference() is Reference, not empty, not {}.keys(), watched[0]() is None


@case
def objects_that_the_interpreter_shares(x):
    pair, n = (1, 2), x.dim()
    pairs = [
        (tuple([]), pair[:0]),
        (pair[:], pair),
        (pair + (), pair),
        (n - 7, 3 - 8),
        ("", "a"[n:]),
    ]
    return x + 1, [one is other for one, other in pairs]


@case
def types_of_bound_methods(x):
    found = [[].__len__, [].append, (1).__add__, {}.get, x.__len__, x.add, "".join, {1}.__iter__]
    return x + 1, [type(one) for one in found], isinstance([].__len__, type([].append))


@case
def class_of_a_module(x):
    class Kind(types.ModuleType):
        a = 1

    module = types.ModuleType("m")
    module.__class__ = Kind
    seen = module.__class__ is Kind, hasattr(module, "a")
    module.__class__ = types.ModuleType
    return x + 1, seen, hasattr(module, "a")


@case
def signatures_that_change(x):
    def asked(a, b=2):
        pass

    found = [str(inspect.signature(asked))]
    asked.__signature__ = inspect.signature(lambda q: q)
    found.append(str(inspect.signature(asked)))
    del asked.__signature__
    asked.__text_signature__ = "($self, a, /)"
    return x + 1, found, str(inspect.signature(asked))


class Adds(list):
    def __get__(self, owner, kind=None):
        return lambda *given: [*self, *given]


@case
def metaclasses_that_others_call_for(x):
    ways = (len, functools.partial(max, 2), Adds([3]), Adds([4]).index, functools.partial(min))
    kinds = [type("Meta", (type,), {"__call__": way})("Kind", (), {}) for way in ways]
    return x + 1, kinds[0]("ab"), kinds[1](1), kinds[2](5), kinds[3](4), kinds[4]([7])


@case
def what_cannot_be_made_or_hashed(x):
    class Pair(tuple):
        pass

    texts = []
    for make in (
        lambda: type(sys.flags).__new__(type(sys.flags), ()),
        lambda: int.__new__(bool),
        lambda: hash(Pair(([],))),
    ):
        try:
            make()
        except TypeError as error:
            texts.append(str(error))
    return x + 1, texts, hash(Pair((1, 2))) == hash((1, 2))
