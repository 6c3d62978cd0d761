"""contextlib, decimal, fractions, datetime, functools, types: small objects of the library."""

import ast
import base64
import calendar
import collections
import contextlib
import dataclasses
import datetime
import decimal
import fractions
import functools
import hashlib
import io
import json
import math
import operator
import pprint
import re
import reprlib
import statistics
import string
import struct
import textwrap
import threading
import types
import uuid

from constructs import case

GIVEN = decimal.Decimal("1.10")
STEP = 3


@case
def exit_stack(x):
    log = []

    @contextlib.contextmanager
    def cm(n):
        log.append(("in", n))
        yield n
        log.append(("out", n))

    with contextlib.ExitStack() as s:
        for i in range(3):
            x = x + s.enter_context(cm(i))
        s.callback(log.append, "cb")
    return x, log


@case
def exit_stack_pop_all(x):
    log = []
    with contextlib.ExitStack() as s:
        s.callback(log.append, 1)
        rest = s.pop_all()
    x = x + len(log)
    rest.close()
    return x, log


@case
def exit_stack_exception(x):
    log = []

    def ex(t, v, tb):
        log.append(t.__name__)
        return True

    with contextlib.ExitStack() as s:
        s.push(ex)
        raise ValueError("q")
    return x + 1, log


@case
def nullcontext_and_closing(x):
    class R:
        closed = False

        def close(self):
            self.closed = True

    r = R()
    with contextlib.nullcontext(4) as n, contextlib.closing(r) as q:
        x = x + n
    return x, r.closed, q is r


@case
def redirect_stdout(x):
    f = io.StringIO()
    with contextlib.redirect_stdout(f):
        print("hello", x.shape[0])
        x = x + 1
    print("after")
    return x, f.getvalue()


@case
def redirect_stderr(x):
    import sys

    f = io.StringIO()
    with contextlib.redirect_stderr(f):
        print("hello", file=sys.stderr)
    return x + 1, f.getvalue()


@case
def suppress_errors(x):
    with contextlib.suppress(KeyError, ValueError):
        {}["a"]
    return x + 1


@case
def context_decorator(x):
    log = []

    class C(contextlib.ContextDecorator):
        def __enter__(self):
            log.append(1)

        def __exit__(self, *e):
            log.append(2)

    @C()
    def f(y):
        return y * 3

    return f(x), log


@case
def operator_family(x):
    return (
        operator.add(x, 1),
        operator.itemgetter(1, 0)([1, 2]),
        operator.attrgetter("shape", "ndim")(x),
        operator.methodcaller("sum", 0)(x),
        operator.matmul(x, x.T),
        operator.iadd([1], [2]),
        operator.contains([1], 1),
        operator.truth([]),
        operator.xor(5, 3),
        operator.not_(0),
        operator.index(5),
        operator.inv(4),
        operator.is_not(x, None),
    )


@case
def decimal_constants(x):
    a = decimal.Decimal("1.10") + decimal.Decimal("2.2")
    return (
        x * float(a),
        str(a),
        a > 3,
        a.quantize(decimal.Decimal("0.1")),
        -a,
        round(a, 1),
        int(a),
        a.as_tuple().exponent,
        a == decimal.Decimal("3.30"),
        f"{a:.3f}",
        sum([a, a]),
        max(a, decimal.Decimal(1)),
        hash(a) == hash(decimal.Decimal("3.3")),
    )


@case
def decimal_context(x):
    with decimal.localcontext() as c:
        c.prec = 5
        a = decimal.Decimal(1) / 3
    return x + 1, str(a), str(decimal.Decimal(1) / 7)


@case
def decimal_division_error(x):
    try:
        decimal.Decimal(1) / 0
    except decimal.DivisionByZero as e:
        return x + 1, type(e).__name__


@case
def decimal_given(x):
    return x + 1, GIVEN + 1, GIVEN * GIVEN, GIVEN


@case
def fraction_constants(x):
    f = fractions.Fraction(1, 3) + fractions.Fraction("1/6")
    return (
        x * float(f),
        str(f),
        f.numerator,
        f * 2,
        f < 1,
        fractions.Fraction(0.5),
        f.limit_denominator(10),
        1 / f,
        f**2,
        abs(-f),
        f == 0.5,
        int(f),
        round(f),
        math.floor(f),
        hash(f),
    )


@case
def datetime_constants(x):
    d = datetime.datetime(2020, 1, 2, 3, 4, 5) + datetime.timedelta(days=1, hours=2)
    return (
        x + d.day,
        d.isoformat(),
        d - datetime.datetime(2020, 1, 1),
        d.strftime("%Y/%m"),
        d.date(),
        (d - datetime.datetime(2020, 1, 1)).total_seconds(),
        datetime.timedelta(hours=3) * 2,
        datetime.timedelta(hours=3) / datetime.timedelta(hours=2),
        d < datetime.datetime.max,
        d.replace(year=1999),
        datetime.date.fromisoformat("2021-02-03").weekday(),
        datetime.datetime.strptime("2020-01-01", "%Y-%m-%d"),
        d.astimezone(datetime.timezone.utc).tzinfo is datetime.timezone.utc,
        str(datetime.timedelta(seconds=5)),
        bool(datetime.timedelta(0)),
    )


@case
def datetime_now_difference(x):
    start = datetime.datetime.now()
    y = x + 1
    return y, (datetime.datetime.now() - start).total_seconds() >= 0


@case
def calendar_module(x):
    return x + calendar.monthrange(2020, 2)[1], calendar.isleap(2000), calendar.month_name[2]


@case
def partialmethod(x):
    class C:
        def __init__(self):
            self.n = 0

        def add(self, a, b=0):
            return x + a + b + self.n

        add3 = functools.partialmethod(add, 3)
        add34 = functools.partialmethod(add, 3, b=4)

    return C().add3(), C().add34(), C().add3(b=2)


@case
def partial_attributes(x):
    p = functools.partial(operator.add, 1)
    p.note = "q"
    return x + p(2), p.note, p


@case
def mapping_proxy(x):
    d = {"a": 1}
    p = types.MappingProxyType(d)
    d["b"] = 2
    try:
        p["a"] = 5
    except TypeError as e:
        text = str(e)
    return (
        x + p["b"],
        dict(p),
        "a" in p,
        len(p),
        list(p.items()),
        text,
        p.get("z", 7),
        p | {"c": 1},
        isinstance(p, collections.abc.Mapping),
        p.copy(),
        repr(p),
        p == d,
    )


@case
def mapping_proxy_returned(x):
    d = {"a": 1}
    p = types.MappingProxyType(d)
    d["q"] = 4
    return x + 1, p, d


@case
def thread_name(x):
    return x + 1, threading.current_thread().name, threading.main_thread().name


@case
def eval_constant(x):
    k = 3
    return eval(" x * k + 1"), eval("[i * k for i in (1, 2)][1]" if k > 5 else "1 + k")


@case
def eval_error(x):
    try:
        eval("undefined_name + 1")
    except NameError as e:
        return x + 1, str(e)


@case
def eval_syntax_error(x):
    try:
        eval("1 +")
    except SyntaxError as e:
        return x + 1, type(e).__name__


@case
def length_hint(x):
    log = []

    class I:
        def __init__(self):
            self.i = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.i += 1
            if self.i > 3:
                raise StopIteration
            return self.i

        def __length_hint__(self):
            log.append("hint")
            return 3

    return x + sum(list(I())), tuple(I()), [*I()], log


@case
def length_hint_bad(x):
    class I:
        def __iter__(self):
            return iter([1])

        def __length_hint__(self):
            return -1

    texts = []
    for k in (I,):
        try:
            list(k())
        except Exception as e:
            texts.append((type(e).__name__, str(e)))
    return x + 1, texts


@case
def cyc_list(x):
    a = [1]
    a.append(a)
    return x + 1, repr(a), str(a)


@case
def cyc_dict(x):
    d = {}
    d["d"] = d
    return x + 1, repr(d)


@case
def cyc_tuple(x):
    e = ({},)
    e[0]["t"] = e
    return x + 1, repr(e), repr(e[0])


@case
def cyc_deque(x):
    q = collections.deque([1])
    q.append(q)
    return x + 1, repr(q)


@case
def cyc_ordered(x):
    q = collections.OrderedDict(a=1)
    q["s"] = q
    c = collections.Counter(a=1)
    c["z"] = 3
    d = collections.defaultdict(list)
    d["d"].append(d)
    return x + 1, repr(q), repr(c), repr(d)


@case
def cyc_userlist(x):
    class L(list):
        pass

    l = L([1])
    l.append(l)
    u = collections.UserList([1])
    u.append(u)
    return x + 1, repr(l), repr(u)


@case
def cyclical_object_repr(x):
    @dataclasses.dataclass
    class N:
        v: int
        n: object = None

    a = N(1)
    a.n = a
    return x + 1, repr(a)


@case
def eval_global_and_local(x):
    K2 = 4
    return (
        x * eval("STEP + K2"),
        eval("x.shape[0]"),
        eval("[i for i in range(STEP)]"),
        eval("(lambda q: q + STEP)(1)"),
        eval("len('abc')"),
    )


@case
def eval_in_helper(x):
    def h(v):
        w = v + 1
        return eval("w * 2")

    return h(x)


@case
def eval_closure_var(x):
    n = 5

    def h():
        n
        return eval("n + 1")

    return x + h()


@case
def eval_raises(x):
    try:
        eval("1 / 0")
    except ZeroDivisionError as e:
        return x + 1, str(e)
