"""Compiled coroutines and generators do what eager's do, with a graph between any two waits."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import sys
import traceback
import weakref

import pytest
import torch
from capture_check import X, eager_backend, same
from weft_capture import capture

LEVEL = contextvars.ContextVar("level", default=1)


async def waits(x, error=None):
    y = x * 2
    await asyncio.sleep(0)
    if error is not None:
        raise error
    return y + 1


async def straight(x, log, *, key=2, **rest):
    y = x * key + await waits(x)
    log.append(y.sum())
    return torch.relu(y).clamp(await waits(0.1))


async def loops(x, log):
    def more():
        nonlocal x
        x = x + LEVEL.get()

    LEVEL.set(x.ndim)
    for i in range(3):
        await asyncio.sleep(0)
        more()
        if i == 5:
            y = x
    try:
        return y
    except UnboundLocalError as error:
        both = await asyncio.gather(waits(x), waits(x, StopIteration()), return_exceptions=True)
        return str(error), both[0], repr(both[1])


async def handles(x, log):
    try:
        await waits(x, ValueError("first"))
    except ValueError as error:
        y = x * await waits(x)
        try:
            await waits(y, KeyError("second"))
        except KeyError as inner:
            await asyncio.sleep(0)
            log.append([repr(e) for e in (error, inner.__context__, sys.exc_info()[1])])
            raise
    finally:
        await asyncio.sleep(0)
        log.append(repr(sys.exc_info()[1]))


async def managers(x, log):
    with contextlib.suppress(ValueError):
        async with asyncio.timeout(9):
            x = x * await waits(2)
            raise ValueError
    with torch.no_grad():
        y = x * 3
        await asyncio.sleep(0)
        log.append((torch.is_grad_enabled(), (y + 1).requires_grad))
    return y + x


def shown(one):
    """What can be seen of an exception; other results as they are."""
    if not isinstance(one, BaseException):
        return one
    places = [(at.name, at.lineno) for at in traceback.extract_tb(one.__traceback__)[1:]]
    return repr(one), repr(one.__context__), places


def outcome(function, *calls):
    """Run some calls at once; returns results, or errors, and logs."""
    logs = [[] for _ in calls]

    async def main():
        made = [function(x, log) for x, log in zip(calls, logs, strict=True)]
        return await asyncio.gather(*made, return_exceptions=True)

    with torch.enable_grad():  # blocks of `no_grad` that overlap leave another mode
        results = [*asyncio.run(main()), torch.is_grad_enabled()]
    return list(map(shown, results)), logs


@pytest.mark.slow
@pytest.mark.parametrize("function", [straight, loops, handles, managers])
@pytest.mark.filterwarnings("ignore:.*runs eagerly")  # what follows in a handler
def test_coroutine_agrees_with_eager(function):
    optimised, x = capture(function, eager_backend), X.clone().requires_grad_()
    wanted = outcome(function, x, x + 1)
    for _ in range(2):
        assert same(outcome(optimised, x, x + 1), wanted)


def running(x, log):
    try:
        for i in range(2):
            got = yield x + i
            x = x * 2 if got is None else x + got
    except KeyError:
        yield x - 1
        raise
    finally:
        log.append("end")
    yield from [x * 2, x]
    return x


@pytest.mark.filterwarnings("ignore:.*runs eagerly")  # what follows in a handler
@pytest.mark.parametrize("steps", ["nnnnnn", "n3n2n", "3cn", "ntnn", "nnntn", "nnnncn"])
def test_generator_agrees_with_eager(steps):
    def drive(function):
        made, log = function(X, log := []), log
        ways = {"n": made.__next__, "t": lambda: made.throw(KeyError), "c": made.close}
        for way in steps:
            try:
                log.append(made.send(float(way)) if way.isdigit() else ways[way]())
            except BaseException as error:
                log.append(shown(error)[::2])
        return log

    assert same(drive(capture(running, eager_backend)), drive(running))


def raises_in_a_handler(x):
    try:
        yield x + 1
        raise ValueError(1)
    except ValueError:
        raise KeyError(2)  # noqa: B904 - what it is chained to


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_generator_handles_is_the_context_of_what_it_raises(times):
    optimised = capture(raises_in_a_handler, eager_backend, fullgraph=True)
    for _ in range(times):
        with pytest.raises(KeyError) as raised:
            list(optimised(X))
    assert repr(raised.value.__context__) == "ValueError(1)"


def test_pieces_are_found_again_and_the_object_is_a_coroutine_of_that_name():
    graphs = []
    optimised = capture(straight, lambda one, _: graphs.append(one) or one.forward, fullgraph=True)
    made = optimised(X, [])
    assert inspect.iscoroutine(made) and made.__name__ == "straight"
    asyncio.run(made)
    assert len(graphs) == 5  # in `waits` too
    assert same(outcome(optimised, X, X + 1), outcome(straight, X, X + 1))
    assert len(graphs) == 5
    with pytest.raises(TypeError, match=r"straight\(\) missing 1 required"):
        optimised(X)
    with pytest.warns(RuntimeWarning, match="coroutine 'straight' was never awaited"):
        optimised(X, [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs eagerly")  # what follows in a handler
def test_cancelled_coroutine_runs_finally_and_lets_go():
    async def slow(x, seen):
        thing = torch.nn.Module()
        seen.append(weakref.ref(thing))
        try:
            x = x + 1
            await asyncio.sleep(9)
        finally:
            await asyncio.sleep(0)
            seen.append(x)

    async def main(seen):
        task = asyncio.create_task(capture(slow, eager_backend)(X, seen))
        while not seen or seen[0]() is None:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main(seen := [])) and same(seen[1], X + 1)
    assert gc.collect() >= 0 and seen[0]() is None


async def goes_on(_):
    return 1


async def rows(x, log, pause=asyncio.sleep):
    try:
        for i in range(2):
            got = yield x * 2 + i
            x = x * (await pause(0) or 2) if got is None else x + got
    except KeyError:
        yield x - 1
        await pause(0)
        raise
    finally:
        await pause(0)
        log.append(repr(sys.exc_info()[1]))
    yield x


async def follows(x, log):
    async for y in rows(x, log):
        yield y + 1
    try:
        yield [z async for z in rows(x, log)]
    except GeneratorExit:
        yield x + 2
    raise StopIteration(3)


async def cancelled(made):
    task = asyncio.ensure_future(made.__anext__())
    await asyncio.sleep(0)
    task.cancel()
    return len(await asyncio.wait([task]))


async def watched(made):
    sys.set_asyncgen_hooks(lambda one: SEEN.append(one.__name__))


SEEN = []
WAYS = {
    "n": lambda made: made.__anext__(),
    "3": lambda made: made.asend(3.0),
    "t": lambda made: made.athrow(KeyError("t")),
    "s": lambda made: made.athrow(StopIteration("s")),
    "a": lambda made: made.athrow(StopAsyncIteration("a")),
    "c": lambda made: made.aclose(),
    "x": cancelled,
    "w": watched,
}


async def steps_through(function, steps, seen):
    made = function(X, seen)
    for step in steps:
        try:
            seen.append(await WAYS[step](made))
        except BaseException as error:
            seen.append((repr(error), repr(error.__context__)))
    with contextlib.suppress(RuntimeError, StopAsyncIteration):
        await made.aclose()
    return seen


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*runs eagerly")  # what follows in a handler
@pytest.mark.parametrize("steps", "wnnnnnn n3n3nn ncn cn 3 ntnn nnnt nsn nan nxn nnnnc".split())
@pytest.mark.parametrize("function", [rows, follows, functools.partial(rows, pause=goes_on)])
def test_asynchronous_generator_agrees_with_eager(function, steps):
    optimised, run = capture(function, eager_backend), capture(steps_through, eager_backend)
    wanted = asyncio.run(steps_through(function, steps, []))
    names = [SEEN.pop() for _ in SEEN.copy()]
    for run, made_by in [(steps_through, optimised), (run, function)] * 2:
        assert same(asyncio.run(run(made_by, steps, [])), wanted)
        assert [SEEN.pop() for _ in SEEN.copy()] == names
