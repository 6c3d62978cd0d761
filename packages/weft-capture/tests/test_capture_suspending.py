"""Compiled coroutine and generator functions run eagerly, and say so."""

import asyncio
import sys
import traceback

import pytest
import torch
from capture_check import X, eager_backend, same
from weft_capture import capture
from weft_core.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


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


def test_a_coroutine_agrees_with_eager():
    logs = [], []
    optimised = capture(straight, eager_backend)
    for function, log in zip((optimised, straight), logs, strict=True):
        log += [asyncio.run(function(X, log)) for _ in range(2)]
    assert same(*logs)
    assert {record.code for record in optimised._weft_capture.breaks} == {"suspends"}


def shown(one):
    """What can be seen of an exception; other results as they are."""
    if not isinstance(one, BaseException):
        return one
    places = [(at.name, at.lineno) for at in traceback.extract_tb(one.__traceback__)[1:]]
    return repr(one), repr(one.__context__), places


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


def test_an_asynchronous_generator_agrees_with_eager():
    async def drive(function):
        made, log = function(X, log := []), log
        log += [await made.__anext__(), await made.asend(3.0)]
        log += [await made.athrow(KeyError("t"))]
        await made.aclose()
        return log

    assert same(asyncio.run(drive(capture(rows, eager_backend))), asyncio.run(drive(rows)))


@pytest.mark.parametrize("function", [straight, running, rows])
def test_none_of_them_is_a_whole_graph(function):
    with pytest.raises(Unsupported, match="suspends"):
        capture(function, eager_backend, fullgraph=True)(X, [])
