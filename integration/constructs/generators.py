"""Generators: send, throw, close, yield from, return values, expressions; over graph breaks."""

import contextlib
import traceback

from constructs import case


def countdown(n):
    while n:
        yield n
        n -= 1
    return "done"


@case
def simple_generator(x):
    for n in countdown(3):
        x = x + n
    return x


@case
def generator_of_tensors(x):
    def rows():
        for row in x:
            yield row * 2

    return sum(rows())


@case
def send_values(x):
    def averager():
        total, count = 0, 0
        while True:
            value = yield total
            if value is None:
                return count
            total = total + value
            count += 1

    g = averager()
    next(g)
    out = [g.send(x), g.send(x + 1)]
    try:
        g.send(None)
    except StopIteration as stop:
        return out, stop.value


@case
def throw_into_generator(x):
    def gen():
        while True:
            try:
                yield 1
            except ValueError as error:
                yield error.args[0] * 10

    g = gen()
    return x + next(g) + g.throw(ValueError(4)) + next(g)


@case
def throw_uncaught(x):
    g = countdown(3)
    next(g)
    try:
        g.throw(KeyError("k"))
    except KeyError as error:
        return x + 1, error.args, next(g, "over")


@case
def close_runs_finally(x):
    log = []

    def gen():
        try:
            yield x
        finally:
            log.append("closed")

    g = gen()
    y = next(g) + 1
    g.close()
    g.close()
    return y, log


@case
def close_unstarted(x):
    g = countdown(3)
    g.close()
    return x + 1, list(g)


@case
def yield_from_returns(x):
    def outer():
        result = yield from countdown(2)
        yield result

    return x + 1, list(outer())


@case
def yield_from_iterables(x):
    def gen():
        yield from [1, 2]
        yield from (3,)
        yield from {"a": 1}
        yield from range(2)

    return x * 2, list(gen())


@case
def send_through_yield_from(x):
    def inner():
        got = yield 1
        return got * 2

    def outer():
        result = yield from inner()
        yield result

    g = outer()
    next(g)
    return g.send(x)


@case
def throw_through_yield_from(x):
    def inner():
        try:
            yield 1
        except ValueError:
            yield 2

    def outer():
        yield from inner()

    g = outer()
    next(g)
    return x + g.throw(ValueError)


@case
def generator_expression(x):
    return sum(x * i for i in range(4) if i % 2), max(i * i for i in (1, -3, 2))


@case
def generator_in_call(x):
    return ",".join(str(n) for n in countdown(3)), x + sum(countdown(4))


@case
def recursive_generator(x):
    def walk(tree):
        if isinstance(tree, list):
            for node in tree:
                yield from walk(node)
        else:
            yield tree

    return x + sum(walk([1, [2, [3, 4]], [[5]]]))


@case
def partly_consumed(x):
    g = countdown(5)
    first = next(g)
    second = next(g)
    return x + first * second, list(g)


@case
def zip_and_enumerate_generators(x):
    out = []
    for i, (a, b) in enumerate(zip(countdown(3), countdown(5))):
        out.append((i, a, b))
    return x + len(out), out


@case
def return_generator(x):
    return x + 1, list(n for n in countdown(2))


@case
def generator_raises_stop_iteration(x):
    def gen():
        yield 1
        raise StopIteration(3)

    try:
        list(gen())
    except RuntimeError as error:
        return x + 1, str(error), type(error.__cause__).__name__


@case
def next_with_default(x):
    g = countdown(1)
    return x + next(g), next(g, None), next(g, 5)


@case
def generator_with_context(x):
    def gen():
        with open_log() as log:
            for n in range(3):
                log.append(n)
                yield n
        yield tuple(log)

    return x + 1, list(gen())


class open_log:
    def __enter__(self):
        self.log = []
        return self.log

    def __exit__(self, *error):
        self.log.append("end")


@case
def infinite_generator(x):
    def naturals():
        n = 0
        while True:
            yield n
            n += 1

    for n in naturals():
        if n > 4:
            break
        x = x + n
    return x


@case
def generator_mutates_outer(x):
    seen = []

    def gen():
        for n in range(3):
            seen.append(n)
            yield x + n

    first, *rest = gen()
    return first, rest, seen


@case
def generator_unpacked_as_arguments(x):
    def f(*args, **kwargs):
        return sum(args) + sum(kwargs.values())

    return f(*(x * n for n in range(3)), **{k: 1 for k in "ab"})


@case
def generator_method(x):
    class Tree:
        def __init__(self, *children):
            self.children = children

        def __iter__(self):
            for child in self.children:
                yield from child if isinstance(child, Tree) else [child]

    return x + sum(Tree(1, Tree(2, 3), 4))


@case
def lazy_evaluation_order(x):
    log = []

    def gen():
        log.append("start")
        yield 1
        log.append("end")

    g = gen()
    log.append("made")
    values = list(g)
    return x + 1, log, values


@case
def async_function(x):
    import asyncio

    async def double(value):
        return value * 2

    async def main():
        return await double(x) + 1

    return asyncio.run(main())


@case
def generator_returned_unstarted(x):
    y = x + 1

    def gen():
        yield y

    return gen().__class__.__name__, y


def running_sums(x):
    total, step = x, 3
    for i in range(4):
        got = yield total
        total = total + (got or 0) + step
        step += i
    return total


@case
def started_over_break(x):
    g = running_sums(x)
    y = next(g) + g.send(2)
    n = int(x.sum())
    return y, g.send(n), list(g), g.__name__, g.__qualname__


@case
def delegating_over_break(x):
    def outer():
        log.append((yield from running_sums(x)))
        yield "last"

    log = []
    g = outer()
    next(g)
    int(x.sum())
    return list(g), log


@case
def delegating_thrown_into_over_break(x):
    def inner():
        try:
            yield x
        except ValueError as error:
            log.append(error.args)
            return 5

    def outer():
        yield (yield from inner()) * x

    log = []
    g = outer()
    next(g)
    int(x.sum())
    return g.throw(ValueError("thrown")), log


@case
def ended_over_break(x):
    g = countdown(2)
    list(g)
    int(x.sum())
    return x + 1, list(g), next(g, "end")


@case
def dropped_with_finally(x):
    def gen():
        try:
            yield x + 1
        finally:
            log.append("closed")

    log = []
    g = gen()
    y = next(g)
    del g
    log.append("after")
    return y, log


@case
def throw_in_other_ways(x):
    def gen():
        try:
            yield x
        except ValueError as error:
            yield x + len(error.args)

    g = gen()
    try:
        next(g), g.throw(ValueError, "a"), gen().throw(ValueError("z"))
    except ValueError as error:
        return x + 1, [entry.name for entry in traceback.extract_tb(error.__traceback__)][-2:]


@case
def what_close_gives(x):
    def gen():
        try:
            yield 1
        except GeneratorExit:
            return 5

    g = gen()
    return next(g), x + 1, g.close(), g.close(), gen().close()


def _contexts(error):
    while error is not None:
        yield repr(error)
        error = error.__context__


@case
def contexts_of_what_is_thrown(x):
    def gen():
        try:
            raise ValueError(1)
        except ValueError:
            try:
                yield 1
            except (KeyError, GeneratorExit) as error:
                seen.append([*_contexts(error)])

    def outer():
        try:
            raise IndexError(2)
        except IndexError:
            yield from gen()

    def plain():
        try:
            yield 1
        except KeyError as error:
            seen.append([*_contexts(error)])

    seen, makers = [], (gen, outer, plain)
    made = [make() for make in makers]
    steps = [next(one) for one in made]
    try:
        raise TypeError(3)
    except TypeError as handled:
        for one in made:
            with contextlib.suppress(StopIteration):
                one.throw(KeyError(4))
        late = gen()
        next(late)
        late.close()
        with contextlib.suppress(TypeError):
            gen().throw(handled)
        try:
            plain().throw(KeyError(5))
        except KeyError as error:
            seen.append([*_contexts(error)])
    return x + 1, steps, seen
