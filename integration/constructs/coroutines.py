"""async def, await, async for, async with, asynchronous generators; driven by hand or asyncio."""

import asyncio
import contextlib
import sys
import types

from constructs import case


def drive(coroutine, *values):
    """Send None and then the values; returns what was yielded, and the result."""
    seen = []
    try:
        for value in (None, *values):
            seen.append(coroutine.send(value))
    except StopIteration as stop:
        return seen, stop.value
    return seen, "waits"


async def plus_one(x):
    return x + 1


class Wait:
    def __init__(self, what):
        self.what = what

    def __await__(self):
        got = yield self.what
        return got


async def count(x, n=3):
    for i in range(n):
        await plus_one(x)
        yield x + i


@case
def await_coroutines(x):
    async def inner(y):
        return await plus_one(y) * 2

    async def main():
        return await inner(x) + await plus_one(x)

    return drive(main())


@case
def await_object(x):
    async def main():
        return x + await Wait("first") + await Wait("second")

    return drive(main(), 2, 3)


@case
def await_left_waiting(x):
    async def main():
        await Wait(x + 1)

    coroutine = main()
    y = coroutine.send(None)
    coroutine.close()
    return y


@case
def await_raises(x):
    async def bad():
        raise KeyError("k")

    async def main():
        try:
            await bad()
        except KeyError as error:
            return x + len(error.args)

    return drive(main())


@case
def throw_into_coroutine(x):
    async def main():
        try:
            await Wait(1)
        except ValueError as error:
            return x + error.args[0]

    coroutine = main()
    coroutine.send(None)
    try:
        coroutine.throw(ValueError(5))
    except StopIteration as stop:
        return stop.value


@case
def awaited_twice(x):
    coroutine = plus_one(x)
    drive(coroutine)
    try:
        drive(coroutine)
    except RuntimeError as error:
        return x + 1, str(error)


@case
def not_awaitable(x):
    async def main():
        await 3

    try:
        drive(main())
    except TypeError as error:
        return x + 1, str(error)


@case
def coroutine_raises_stop_iteration(x):
    async def main():
        raise StopIteration(3)

    try:
        drive(main())
    except RuntimeError as error:
        return x + 1, str(error), type(error.__cause__)


@case
def generator_based_coroutine(x):
    @types.coroutine
    def wait(y):
        got = yield y
        return got

    async def main():
        return await wait(1) + x

    return drive(main(), 4), wait.__class__ is types.FunctionType


@case
def async_with(x):
    log = []

    class Manager:
        async def __aenter__(self):
            return await plus_one(x)

        async def __aexit__(self, *error):
            log.append(error[0])
            return True

    async def main():
        async with Manager() as y:
            z = y * 2
            raise ValueError
        return z

    return drive(main()), log


@case
def async_with_unfit(x):
    async def main():
        async with x:
            pass

    try:
        drive(main())
    except TypeError as error:
        return x + 1, str(error)


@case
def async_for_over_class(x):
    class Rows:
        def __init__(self):
            self.left = 3

        def __aiter__(self):
            return self

        async def __anext__(self):
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return await plus_one(x)

    async def main():
        total = x
        async for row in Rows():
            total = total + row
        else:
            total = total * 2
        return total

    return drive(main())


@case
def async_for_unfit(x):
    async def main():
        async for _ in [1]:
            pass

    try:
        drive(main())
    except TypeError as error:
        return x + 1, str(error)


@case
def async_generator(x):
    async def main():
        total = x
        async for y in count(x):
            total = total + y
        return total, [y * 2 async for y in count(x) if y.shape], {i: y for i, y in pairs}

    pairs = [(0, x)]
    return drive(main())


@case
def async_comprehensions(x):
    async def main():
        rows = [await plus_one(x + i) for i in range(2)]
        lazy = (y + 1 async for y in count(x))
        return rows, [y async for y in lazy], {y.ndim async for y in count(x)}

    return drive(main())


@case
def async_context_manager(x):
    log = []

    @contextlib.asynccontextmanager
    async def managed():
        log.append("in")
        try:
            yield x + 1
        finally:
            log.append("out")

    async def main():
        async with managed() as y, contextlib.AsyncExitStack() as stack:
            z = await stack.enter_async_context(managed())
            return y + z

    return drive(main()), log


@case
def run_by_asyncio(x):
    async def main():
        return [y + await plus_one(x) async for y in count(x)]

    return asyncio.run(main())


@case
def wait_for_the_loop(x):
    async def part(n):
        await asyncio.sleep(0)
        return x * n + 1

    async def main():
        parts = await asyncio.gather(part(1), part(2))
        return parts[0] + parts[1]

    return asyncio.run(main()) * 2


@case
def started_over_break(x):
    async def main():
        y = x * 2
        got = await Wait(1)
        return y + got

    coroutine = main()
    first = coroutine.send(None)
    n = int(x.sum())
    try:
        coroutine.send(n)
    except StopIteration as stop:
        return first + stop.value


@case
def dropped_unawaited(x):
    plus_one(x)
    return x + 1


@case
def yielded_from_in_a_generator(x):
    def gen(coroutine):
        yield from coroutine

    coroutine = plus_one(x)
    try:
        next(gen(coroutine))
    except TypeError as error:
        coroutine.close()
        return x + 1, str(error)


@case
def coroutine_is_no_iterator(x):
    coroutine = plus_one(x)
    texts = []
    for wrong in (next, iter, list):
        try:
            wrong(coroutine)
        except TypeError as error:
            texts.append(str(error))
    coroutine.close()
    return x + 1, texts, hasattr(coroutine, "__next__"), hasattr(coroutine, "send")


@case
def finalizer_hook_that_closes_nothing(x):
    log = []

    async def rows():
        try:
            yield x + 1
            yield x + 2
        finally:
            log.append("closed")

    async def first():
        async for row in rows():
            return row

    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, lambda one: log.append(one.__name__))
    try:
        return drive(first()), log
    finally:
        sys.set_asyncgen_hooks(*before)
