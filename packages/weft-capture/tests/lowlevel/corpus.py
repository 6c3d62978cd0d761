"""Functions that between them use what Python's compiler emits, each with argument tuples.

They log into a list argument, so that tests compare the order of effects as well as results.
"""

from __future__ import annotations

import contextlib


class Context:
    """A context manager that logs and may swallow ValueErrors."""

    def __init__(self, log, swallow=False):
        self.log = log
        self.swallow = swallow

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, traceback):
        self.log.append(("exit", kind))
        return self.swallow and kind is ValueError


def straight(log, a, b):
    c = a + b * 2
    log.append(c)
    d, e = c, [a, b, *log]
    return {"d": d, "e": e, **{"f": c}}, e[1:], e[0], -c, not c


def loops(log, n, m):
    total = 0
    for i in range(n):
        for j, k in enumerate(range(m)):
            if j == 2:
                continue
            total += i * j + k
            log.append(total)
            if total > 20:
                break
        else:
            log.append("else")
    while n > 0:
        n -= 1
        if n == 1:
            return total, "early"
    return total


def branches(log, a, b):
    x = a or b
    y = a and b
    if a is None or b is not None and a > 1:
        log.append("first")
    elif not a:
        log.append("second")
    z = "big" if (a or 0) > 2 else "small"
    return x, y, z, 0 < b < 5, a in (1, 2), a not in [3]


def with_blocks(log, swallow, fail):
    with Context(log, swallow) as one, Context(log):
        log.append("body")
        if fail:
            raise ValueError("inside")
        log.append(one.swallow)
        if swallow:
            return "returned"
    log.append("after")
    return "end"


def tries(log, kind):
    try:
        log.append("try")
        if kind == 1:
            raise ValueError("one")
        if kind == 2:
            raise KeyError("two")
        if kind == 4:
            return "from try"
    except ValueError as error:
        log.append(str(error))
    except KeyError:
        log.append("key")
        raise RuntimeError("other") from None
    else:
        log.append("else")
    finally:
        log.append("finally")
    try:
        return int("x" if kind == 3 else "7")
    except ValueError:
        return "no int"


def try_in_loop(log, n):
    done = []
    for i in range(n):
        try:
            if i % 2:
                raise ValueError(i)
            done.append(10 // (i - 2))
        except ZeroDivisionError:
            log.append("zero")
            continue
        except ValueError as e:
            log.append(e.args)
            if i > 3:
                break
        finally:
            log.append(i)
    return done


def cells(log, a, b=2, *args, k=3, **kw):
    count = 0

    def inc(by):
        nonlocal count
        count += by
        return count + a

    log.append(inc(1))
    a += 10
    log.append(inc(b))
    return count, args, k, sorted(kw), inc(len(args)), (lambda: (count, k))()


def comprehensions(log, n):
    x = "kept"
    squares = [x * x for x in range(n) if x % 2]
    table = {i: [i + j for j in range(i)] for i in range(n)}
    makers = [lambda y=y: y + n for y in range(3)]
    log.append(sum(v for v in squares))
    return squares, table, {s % 3 for s in squares}, x, [m() for m in makers]


def calls(log, a):
    def target(*args, key=None, **rest):
        log.append((args, key, rest))
        return len(args)

    both = {"key": 1, "other": 2}
    one = target(a, target(a, key=target(1, 2)), key=3)
    return one + target(*[a, a], **both) + target(a, *(1,), key=0) + max(a, min(4, a, key=abs))


def strings(log, a):
    width = 8
    text = f"{a!r:>{width}}|{a}|{a:03d}|{log}"
    return text.upper().split("|"), "%s-%s" % (a, width), "literal"  # noqa: UP031


def assignments(log, n):
    data = list(range(n))
    data[1:3] = [7, 8, 9]
    data[0] += 5
    del data[-1]
    first, *rest = data
    holder = Context(log)
    holder.swallow = holder.extra = first
    del holder.extra
    if (m := len(rest)) > 2:
        log.append(m)
    del m
    return first, rest, holder.swallow, data[::2]


def matching(log, value):
    match value:
        case [1, x, *others]:
            return x, others
        case {"k": v, **kw}:
            return v, kw
        case str() as s if len(s) > 1:
            return s
        case 0 | 1:
            return "small"
        case _:
            return None


def nested_with_loop(log, n):
    out = []
    for i in range(n):
        with contextlib.suppress(ZeroDivisionError), Context(log, True):
            out.append(6 // (i - 1))
            if i == 2:
                raise ValueError
    return out


class Quiet(list):
    """Base of the log, for methods that call super()."""

    def scale(self, x):
        return x * 2


class Log(Quiet):
    """What every function of the corpus gets as its first argument."""

    def scale(self, x):
        y = super().scale(x)
        self.append(y)
        return super().scale(y) + 1

    def captured_self(self, x):
        later = lambda: len(self)  # noqa: E731
        self.append(x)
        return super().scale(x), later()

    def plain_super(self, x):
        parent = super()
        self.append(x)
        return parent.scale(x), super().scale(x)


def not_bound(log, flag):
    if flag:
        value = 1
    log.append(flag)
    return value


def asserts(log, x):
    assert x > 0, f"bad {x}"
    global _COUNTER
    _COUNTER = x
    return _COUNTER


_COUNTER = 0

CASES = [
    (straight, (1, 2)),
    (loops, (3, 4)),
    (loops, (0, 0)),
    (branches, (1, 2)),
    (branches, (None, 0)),
    (branches, (3, 7)),
    (with_blocks, (False, False)),
    (with_blocks, (True, False)),
    (with_blocks, (True, True)),
    (with_blocks, (False, True)),
    (tries, (0,)),
    (tries, (1,)),
    (tries, (2,)),
    (tries, (3,)),
    (tries, (4,)),
    (try_in_loop, (7,)),
    (cells, (1,)),
    (cells, (1, 5, 6, 7)),
    (comprehensions, (5,)),
    (calls, (3,)),
    (strings, (42,)),
    (assignments, (6,)),
    (matching, ([1, 2, 3, 4],)),
    (matching, ({"k": 1, "z": 2},)),
    (matching, ("text",)),
    (matching, (1,)),
    (matching, (None,)),
    (nested_with_loop, (4,)),
    (not_bound, (True,)),
    (not_bound, (False,)),
    (asserts, (1,)),
    (asserts, (-1,)),
    (Log.scale, (4,)),
    (Log.captured_self, (4,)),
    (Log.plain_super, (4,)),
]
