"""json, re, string, textwrap, hashlib, statistics: modules that work on plain data."""

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


@case
def json_dumps_indent(x):
    return (
        x + 1,
        json.dumps({"a": [1, {"b": None}], "c": 1.5}, indent=2),
        json.dumps([True, "é"], ensure_ascii=False),
    )


@case
def json_dumps_default(x):
    class P:
        v = 3

    return x + 1, json.dumps({"p": P()}, default=lambda o: o.v)


@case
def json_dumps_shape(x):
    return x * 2, json.dumps({"shape": list(x.shape), "dtype": str(x.dtype)})


@case
def json_loads_hook(x):
    d = json.loads(
        '{"a": 1, "b": [2, 3]}', object_hook=lambda d: {k.upper(): v for k, v in d.items()}
    )
    return x + d["A"], d


@case
def json_object_pairs(x):
    d = json.loads('{"b": 1, "a": 2}', object_pairs_hook=collections.OrderedDict)
    return x + d["a"], list(d)


@case
def json_encoder_class(x):
    class E(json.JSONEncoder):
        def default(self, o):
            if isinstance(o, set):
                return sorted(o)
            return super().default(o)

    return x + 1, json.dumps({"s": {2, 1}}, cls=E)


@case
def json_dump_to_stream(x):
    f = io.StringIO()
    json.dump({"a": 1}, f)
    return x + 1, f.getvalue()


@case
def re_groupdict_and_finditer(x):
    ms = [m.span() for m in re.finditer(r"\d+", "a12b345")]
    d = re.match(r"(?P<k>\w+)=(?P<v>\d+)", "abc=12").groupdict()
    return x + int(d["v"]), ms, d


@case
def re_split_subn_escape(x):
    return x + 1, re.split(r"[,;]\s*", "a, b;c"), re.subn("a", "x", "banana"), re.escape("a.b")


@case
def re_verbose_flags(x):
    p = re.compile(
        r"""(\d+) # n
    \s*(px)?""",
        re.X | re.I,
    )
    m = p.match("12 PX")
    return x + int(m[1]), m.group(1, 2), m.start(2), m.lastindex, p.flags & re.I == re.I, m.re is p


@case
def re_module_pattern_loop(x):
    for name in ["layers.0.weight", "layers.1.bias"]:
        m = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if m and m.group(2) == "weight":
            x = x + int(m.group(1)) + 1
    return x


@case
def string_template(x):
    t = string.Template("$a and ${b} $$")
    return x + 1, t.substitute(a=1, b="z"), t.safe_substitute(a=1)


@case
def string_template_missing(x):
    try:
        string.Template("$a").substitute()
    except KeyError as e:
        return x + 1, str(e)


@case
def string_formatter(x):
    return (
        x + 1,
        string.Formatter().format("{0} {name!r:>5}", 1, name="z"),
        string.ascii_letters[:3],
        string.capwords("a bc"),
    )


@case
def textwrap_functions(x):
    return (
        x + 1,
        textwrap.dedent("  a\n   b\n"),
        textwrap.indent("a\nb", "> "),
        textwrap.fill("aaa bb cc d", 5),
        textwrap.shorten("hello big world", 10),
    )


@case
def textwrap_wrapper(x):
    w = textwrap.TextWrapper(width=8, initial_indent="* ")
    return x + 1, w.wrap("one two three four")


@case
def uuid_constants(x):
    u = uuid.UUID("12345678123456781234567812345678")
    return (
        x + 1,
        str(u),
        u.hex,
        uuid.uuid5(uuid.NAMESPACE_DNS, "a.b"),
        uuid.uuid3(uuid.NAMESPACE_URL, "q").int % 7,
    )


@case
def hashlib_update(x):
    h = hashlib.sha256()
    h.update(b"a")
    h.update(b"b")
    return (
        x + h.digest_size,
        h.hexdigest(),
        hashlib.new("sha1", b"q").hexdigest(),
        hashlib.blake2b(b"a", digest_size=4).hexdigest(),
    )


@case
def struct_functions(x):
    a, b = struct.unpack(">hI", struct.pack(">hI", -3, 9))
    s = struct.Struct("<2f")
    return (
        x + a + b,
        s.size,
        s.unpack(s.pack(1.5, 2.0)),
        list(struct.iter_unpack("<h", b"\1\0\2\0")),
        struct.unpack_from("<h", b"\0\1\0", 1),
    )


@case
def base64_functions(x):
    return (
        x + 1,
        base64.b64decode("YWI="),
        base64.urlsafe_b64encode(b"\xff\xfe"),
        base64.b32encode(b"ab"),
        base64.b16encode(b"a"),
        base64.b85encode(b"abcd"),
    )


@case
def pprint_pformat(x):
    return (
        x + 1,
        pprint.pformat({"b": [1, 2], "a": (3,)}),
        pprint.pformat(list(range(40)), width=40, compact=True),
    )


@case
def pprint_nested(x):
    return x + 1, pprint.pformat({"k": {"l": ["a" * 30, "b" * 30, {"z": None}]}}, width=50)


@case
def reprlib_repr(x):
    return x + 1, reprlib.repr(list(range(100))), reprlib.repr("a" * 100)


@case
def statistics_functions(x):
    d = [1, 2, 2, 4]
    return (
        x + statistics.mean(d),
        statistics.median(d),
        statistics.mode(d),
        statistics.pstdev(d),
        statistics.stdev([1.5, 2.5, 4.0]),
        statistics.fmean(d),
        statistics.variance(d),
    )


@case
def statistics_more(x):
    return (
        x + 1,
        statistics.quantiles([1, 2, 3, 4, 5]),
        statistics.harmonic_mean([1, 2]),
        statistics.multimode("aabb"),
        statistics.median_low([1, 2, 3, 4]),
    )


@case
def statistics_normal(x):
    n = statistics.NormalDist(0, 1)
    return x + n.cdf(0.5), n.pdf(0.1), n.mean, n.stdev, (n + 2).mean


@case
def statistics_mean_error(x):
    try:
        statistics.mean([])
    except statistics.StatisticsError as e:
        return x + 1, str(e)


@case
def literal_eval(x):
    return x + ast.literal_eval("[1, 2]")[1], ast.literal_eval("{'a': (1, None)}")


@case
def json_errors(x):
    texts = []
    for t in ("{", '{"a" 1}', "[1,]", '"\\x"'):
        try:
            json.loads(t, object_hook=lambda d: d)
        except json.JSONDecodeError as e:
            texts.append(str(e))
    return x + 1, texts


@case
def re_sub_callback(x):
    seen = []

    def f(m):
        seen.append(m.group())
        return m.group().upper()

    return x + 1, re.sub("[ab]", f, "cab", count=1), seen, re.sub(re.compile("a"), "b", "aa")


@case
def finditer_twice(x):
    it = re.finditer("a", "banana")
    a = next(it).start()
    return x + a, [m.start() for m in it], list(it)


@case
def finditer_returned(x):
    return (
        x + 1,
        [m.group() for m in re.finditer("a.", "banana")],
        "".join(m.group() for m in re.compile("n").finditer("banana")),
    )


@case
def pformat_objects(x):
    class P:
        def __repr__(self):
            return "P!"

    return x + 1, pprint.pformat([P(), {"b": 1}])


@case
def strptime_and_ordinals(x):
    return (
        x + 1,
        datetime.datetime.strptime("2020-02-03 04", "%Y-%m-%d %H"),
        datetime.date.fromordinal(700000),
        datetime.datetime.fromisoformat("2020-01-01T01:02:03+00:00").utcoffset(),
    )
