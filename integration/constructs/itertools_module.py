"""itertools."""

import itertools
import types

from constructs import case


@case
def chain(x):
    return x + sum(itertools.chain([1], (2, 3))), list(itertools.chain.from_iterable(["ab", [1]]))


@case
def product_permutations_combinations(x):
    return (
        x + 1, list(itertools.product("ab", [1, 2])), list(itertools.permutations([1, 2, 3], 2)),
        list(itertools.combinations("abc", 2)), list(itertools.product([0, 1], repeat=2)),
        list(itertools.combinations_with_replacement([1, 2], 2)),
    )  # fmt: skip


@case
def product_of_tensors(x):
    return [a * b for a, b in itertools.product([x, x + 1], repeat=2)]


@case
def islice(x):
    return (
        x + 1, list(itertools.islice(itertools.count(5, 2), 3)), list(itertools.islice("abcdef", 1, 5, 2)),
        list(itertools.islice([1, 2], 5)),
    )  # fmt: skip


@case
def islice_consumes_iterator(x):
    it = iter(range(6))
    head = list(itertools.islice(it, 2))
    return x + next(it), head, list(it)


@case
def islice_lazy(x):
    return x + sum(itertools.islice((n for n in itertools.count()), 2, 5))


@case
def zip_longest(x):
    return x + 1, list(itertools.zip_longest([1, 2], "a", fillvalue="-"))


@case
def takewhile_dropwhile_filterfalse(x):
    data = [1, 2, 5, 1]
    return (
        x + 1, list(itertools.takewhile(lambda n: n < 3, data)),
        list(itertools.dropwhile(lambda n: n < 3, data)),
        list(itertools.filterfalse(lambda n: n == 1, data)),
    )  # fmt: skip


@case
def takewhile_infinite(x):
    return x + sum(itertools.takewhile(lambda n: n < 5, itertools.count()))


@case
def accumulate(x):
    return (
        list(itertools.accumulate([x, x, x])), list(itertools.accumulate([1, 2, 3], initial=10)),
        list(itertools.accumulate([2, 3, 4], lambda a, b: a * b)),
    )  # fmt: skip


@case
def repeat_and_count(x):
    return x + sum(itertools.repeat(2, 3)), [a for a, _ in zip(itertools.count(1), "ab")]


@case
def cycle(x):
    return x + 1, [c for _, c in zip(range(5), itertools.cycle("ab"))]


@case
def groupby(x):
    rows = [("a", 1), ("a", 2), ("b", 3)]
    return (
        x + 1, [(k, [v for _, v in g]) for k, g in itertools.groupby(rows, key=lambda r: r[0])],
        [(k, len(list(g))) for k, g in itertools.groupby("aabbb")],
    )  # fmt: skip


@case
def pairwise_and_batched(x):
    return x + sum(b - a for a, b in itertools.pairwise([1, 4, 9])), list(itertools.pairwise("a"))


@case
def tee(x):
    a, b = itertools.tee(iter([1, 2, 3]))
    return x + next(a), list(b), list(a)


@case
def starmap(x):
    return list(itertools.starmap(lambda a, b: a * b, [(x, 2), (x, 3)]))


@case
def compress(x):
    return x + 1, list(itertools.compress("abcd", [1, 0, True, 0]))


@case
def chain_of_generators(x):
    return x + sum(itertools.chain((n for n in range(3)), itertools.repeat(1, 2)))


@case
def lazy_side_effects(x):
    log = []

    def note(n):
        log.append(n)
        return n

    it = map(note, [1, 2, 3])
    first = next(it)
    return x + first, list(log), list(it), log


@case
def iterators_are_iterators(x):
    it = itertools.chain([1, 2])
    return x + 1, iter(it) is it, next(it), list(it)


@case
def type_of_a_branch(x):
    first, second = itertools.tee([x, x + 1])
    return type(first) is itertools.chain, isinstance(first, types.GeneratorType), list(second)


@case
def repeat_nothing(x):
    """As the standard library counts: what is given in each step is None."""
    return x + len([None for _ in itertools.repeat(None, 3)]), list(itertools.repeat(None, 2))


@case
def map_of_a_function_that_returns_nothing(x):
    seen = []
    return x + 1, list(map(seen.append, [1, 2])), seen
