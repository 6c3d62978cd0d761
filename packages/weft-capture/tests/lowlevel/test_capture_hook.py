"""The frame hook: what it intercepts, what it passes, and that it leaves nothing behind."""

import gc
import inspect
import sys
import textwrap
import threading
import traceback
import types

import pytest
from weft_capture import frame
from weft_capture.bytecode import Writer, decode, make_resume, stack_name


def never(func, code, flat):
    """An on_miss that lets every unknown code run as it is."""
    return None


def fresh(source, **names):
    """A new function, so that hook state of one test does not reach another."""
    namespace = dict(names)
    exec(textwrap.dedent(source), namespace)
    return namespace["f"]


def always(code):
    return lambda func, *flat: code


def test_flat_arguments_and_scope():
    seen = []

    def on_miss(func, code, flat):
        seen.append((func, code.co_name, flat))
        frame.skip(code)
        return None

    def helper(x):
        return x

    f = fresh("def f(a, b=2, *args, k=3, **kw):\n    return helper(a)", helper=helper)
    assert frame.run(on_miss, f, 1, 2, 3, 4, k=5, z=6) == 1
    assert [entry[1:] for entry in seen] == [("f", (1, 2, 5, (3, 4), {"z": 6})), ("helper", (1,))]
    assert seen[0][0] is f
    frame.run(on_miss, f, 1)
    assert len(seen) == 2, "skipped code is not asked about again"


def test_argument_that_is_a_cell_arrives_as_a_value():
    f = fresh("def f(a):\n    g = lambda: a\n    a += 1\n    return g()")
    seen = []
    frame.set_lookup(f.__code__, lambda func, *flat: seen.append(flat))
    assert frame.run(never, f, 5) == 6
    assert seen == [(5,)]


def test_hit_miss_and_off():
    f = fresh("def f(a):\n    return 'original', a")
    new = fresh("def f(a):\n    return 'new', a").__code__
    frame.set_lookup(f.__code__, lambda func, a: new if a > 0 else None)
    assert frame.run(never, f, 1) == ("new", 1)
    assert frame.run(never, f, -1) == ("original", -1)
    assert f(1) == ("original", 1)
    assert frame.run(never, lambda: frame.run(None, f, 1)) == ("original", 1)
    assert frame.run(lambda func, code, flat: new, f, -1) == ("new", -1)
    frame.skip(f.__code__)
    assert frame.run(never, f, 1) == ("original", 1)
    assert not frame.is_active()


def test_what_a_skipped_code_calls_may_be_skipped_with_it():
    seen = []

    def on_miss(func, code, flat):
        seen.append(func)
        if func is outer:
            frame.skip(code, True)
        return None

    inner = fresh("def f(a):\n    return a, active()", active=frame.is_active)
    outer = fresh("def f(a):\n    return g(a)", g=inner)
    f = fresh("def f(a):\n    return g(a), g(a), active()", g=outer, active=frame.is_active)
    assert frame.run(on_miss, f, 1) == ((1, False), (1, False), True)
    assert seen == [f, outer]


def test_lookups_and_misses_run_with_the_hook_off():
    state = []
    f = fresh("def f():\n    return active()", active=frame.is_active)
    frame.set_lookup(f.__code__, lambda func: state.append(frame.is_active()))

    def on_miss(func, code, flat):
        state.append(frame.is_active())
        return None

    assert frame.run(on_miss, f) is True
    assert state == [False, False]


def test_closure_and_defaults():
    cell = types.CellType("inside")
    outer = fresh("def f(c):\n    def inner(a, b=2):\n        return c\n    return inner")
    code = next(c for c in outer.__code__.co_consts if isinstance(c, types.CodeType))
    f = types.FunctionType(code, {}, "inner", (2,), (cell,))
    writer = Writer(decode(f.__code__))
    writer.load_cell("c")
    writer.load_local("b")
    writer.build_tuple(2)
    writer.return_()
    frame.set_lookup(f.__code__, always(writer.finish()))
    assert frame.run(never, f, 1) == ("inside", 2)


@pytest.mark.parametrize(
    ("lookup", "error", "text"),
    [
        (lambda func, a: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda func, a: "code", TypeError, "must return a code object or None, not str"),
        (always((lambda: 0).__code__), ValueError, "takes 0 arguments and 0 cells"),
    ],
)
def test_errors_of_lookups_reach_the_caller(lookup, error, text):
    f = fresh("def f(a):\n    return a")
    frame.set_lookup(f.__code__, lookup)
    with pytest.raises(error, match=text):
        frame.run(never, f, 1)
    assert not frame.is_active()


def test_exceptions_show_the_replacement_only():
    f = fresh("def f(a):\n    return a")
    new = fresh("def f(a):\n    raise KeyError(a)").__code__
    frame.set_lookup(f.__code__, always(new))
    with pytest.raises(KeyError) as caught:
        frame.run(never, f, "x")
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_exceptions_show_the_replacement_only", "f"]


def test_generators_and_class_bodies_are_left_alone():
    f = fresh(
        """
        def f(n):
            class Body:
                size = n
            def gen():
                for i in range(n):
                    yield i
            async def co():
                return n
            try:
                co().send(None)
            except StopIteration as stop:
                return list(gen()), Body.size, stop.value, sum(i for i in range(n))
        """
    )
    asked = []

    def on_miss(func, code, flat):
        asked.append(code.co_name)
        return None

    assert frame.run(on_miss, f, 3) == ([0, 1, 2], 3, 3, 3)
    assert asked == ["f"]


def test_recursion_of_hooked_frames():
    fib = fresh("def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)")
    frame.set_lookup(fib.__code__, lambda func, n: func.__code__)
    assert frame.run(never, fib, 14) == 377
    endless = fresh("def f(n):\n    return f(n + 1) + 1")
    frame.set_lookup(endless.__code__, lambda func, n: func.__code__)
    with pytest.raises(RecursionError):
        frame.run(never, endless, 0)
    assert frame.run(never, fib, 10) == 55


def test_tail_calls_do_not_nest():
    f = fresh("def f(n, done):\n    return n")
    step = fresh(
        "def f(n, done):\n    return tail_call(step, n - 1, done + 1) if n else (done, depth())",
        tail_call=frame.tail_call,
        depth=lambda: len(inspect.stack(0)),
    )
    step.__globals__["step"] = step
    frame.set_lookup(step.__code__, lambda func, n, done: func.__code__)
    frame.set_lookup(f.__code__, always(step.__code__))
    f.__globals__.update(step.__globals__)
    done, depth = frame.run(never, f, 20_000, 0)
    assert done == 20_000
    assert depth < len(inspect.stack(0)) + 10


@pytest.mark.slow
def test_loop_broken_in_every_iteration():
    f = fresh(
        """
        def f(n):
            total = 0
            for i in range(n):
                total += step(i)
            return total
        """,
        step=lambda i: i,
    )

    def cut(func, code, flat):
        """End the frame at its first call of `step` and go on behind it."""
        if code.co_name != "f":
            frame.skip(code)
            return None
        codes.add(id(code))
        decoded = decode(code)
        call = next(
            i for i, x in enumerate(decoded.instrs) if x.opname == "CALL" and x.positions[0] == 5
        )
        resumed = "<resume" in code.co_qualname
        names = dict(zip(decoded.flat_args, flat, strict=True))
        writer = Writer(decoded, tail_call=frame.tail_call)
        # What an executor would find out: the iterator, and total + step(i).
        iterator = names[stack_name(0)] if resumed else iter(range(flat[0]))
        total = names[stack_name(1)] + names[stack_name(2)] if resumed else 0
        seen.append((code.co_qualname, total))
        item = next(iterator, None)
        if item is None:
            writer.load_const(total)
            writer.return_()
            return writer.finish()
        writer.load_const(iterator)
        writer.load_const(total)
        writer.begin_call()
        writer.load_const(func.__globals__["step"])
        writer.load_const(item)
        writer.call(1)
        writer.call_resume(make_resume(decoded, call + 1, (True, True, True)))
        return writer.finish()

    seen: list = []
    codes: set[int] = set()
    assert frame.run(cut, f, 3000) == sum(range(3000))
    assert seen[:3] == [("f", 0), ("f.<resume at 5>", 0), ("f.<resume at 5>", 1)]
    assert len(seen) == 3001
    assert len(codes) == 2, "resuming a resume function gives the same code again"


@pytest.mark.slow
def test_nothing_leaks():
    class Canary:
        pass

    f = fresh("def f(a, b):\n    return a")
    replacements = [
        "def f(a, b):\n    return [a, b]",
        "def f(a, b):\n    raise ValueError(a)",
        "def f(a, b):\n    return tail_call(g, a)",
    ]
    canary = Canary()
    for source in replacements:
        g = fresh("def f(a):\n    return a")
        code = fresh(source, tail_call=frame.tail_call).__code__
        f.__globals__.update(tail_call=frame.tail_call, g=g)
        frame.set_lookup(f.__code__, always(code))

        def loop(count):
            for _ in range(count):
                try:
                    f(canary, 1)
                except ValueError:
                    pass

        frame.run(never, loop, 10)
        gc.collect()
        before = sys.getrefcount(canary), sys.getrefcount(code), sys.getrefcount(f)
        blocks = sys.getallocatedblocks()
        frame.run(never, loop, 20_000)
        gc.collect()
        assert (sys.getrefcount(canary), sys.getrefcount(code), sys.getrefcount(f)) == before
        assert sys.getallocatedblocks() - blocks < 200


@pytest.mark.slow
def test_lookup_dies_with_the_code():
    class Lookup:
        alive = True

        def __call__(self, func, *flat):
            return None

        def __del__(self):
            Lookup.alive = False

    f = fresh("def f():\n    return 1")
    frame.set_lookup(f.__code__, Lookup())
    assert frame.run(never, f) == 1
    del f
    gc.collect()
    assert not Lookup.alive


def test_tracing_sees_the_replacement():
    events = []

    def tracer(frame_, event, arg):
        events.append((event, frame_.f_code.co_name))
        return tracer

    def caller():
        return f(1)

    f = fresh("def f(a):\n    return a")
    new = fresh("def f(a):\n    return a * 2").__code__.replace(co_name="new")
    frame.set_lookup(f.__code__, always(new))
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert frame.run(never, caller) == 2
    finally:
        sys.settrace(before)
    ours = [e for e in events if e[1] in ("caller", "new", "f")]
    assert [e for e in ours if e[0] == "call"] == [("call", "caller"), ("call", "new")]
    assert ours[-1] == ("return", "caller")


def test_each_thread_has_its_own_activation():
    f = fresh("def f(a):\n    return a + 1")
    new = fresh("def f(a):\n    return -a").__code__
    frame.set_lookup(f.__code__, always(new))
    results: list[list[int]] = [[] for _ in range(4)]

    def work(out, hooked):
        for i in range(2000):
            out.append(frame.run(never, f, i) if hooked else f(i))

    threads = [
        threading.Thread(target=work, args=(out, index % 2 == 0))
        for index, out in enumerate(results)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, out in enumerate(results):
        assert out == [-i if index % 2 == 0 else i + 1 for i in range(2000)]


def test_many_arguments():
    names = [f"a{i}" for i in range(60)]
    f = fresh(f"def f({', '.join(names)}):\n    return 0")
    new = fresh(f"def f({', '.join(names)}):\n    return ({', '.join(names)})").__code__
    frame.set_lookup(f.__code__, always(new))
    assert frame.run(never, f, *range(60)) == tuple(range(60))


def test_make_resume_of_a_generator_goes_on_at_its_yield():
    f = fresh("""
        def f(a):
            try:
                a = yield a
            except KeyError:
                a = yield "caught"
            return a
    """)
    decoded = decode(f.__code__)
    index = next(i for i, one in enumerate(decoded.instrs) if one.opname == "YIELD_VALUE")

    def resumed():
        resume = make_resume(decoded, index, [True], ())
        generator = types.FunctionType(resume.code, {})("yielded again")
        assert next(generator) == "yielded again"
        return generator

    with pytest.raises(StopIteration, match="sent"):
        resumed().send("sent")
    assert resumed().throw(KeyError) == "caught"
    resumed().close()


def test_make_resume_of_a_generator_that_delegates():
    f = fresh("""
        def f(a):
            got = yield from a
            yield got
    """)
    decoded = decode(f.__code__)
    index = next(i for i, one in enumerate(decoded.instrs) if one.opname == "YIELD_VALUE")

    def inner():
        try:
            yield 1
        except KeyError:
            return "caught"

    inside = inner()
    next(inside)
    resume = make_resume(decoded, index, [True, True], ())
    generator = types.FunctionType(resume.code, {})(inside, None)
    next(generator)
    assert generator.gi_yieldfrom is inside
    assert generator.throw(KeyError) == "caught"
