"""math, cmath, heapq, bisect, copy, statistics, fractions, decimal."""

import bisect
import copy
import decimal
import fractions
import heapq
import math
import statistics

import numpy as np
import torch

from constructs import case


@case
def math_functions(x):
    return (
        x * math.pi, math.sqrt(16), math.ceil(2.1), math.floor(-2.1), math.gcd(12, 18), math.log2(8),
        math.factorial(5), math.isclose(0.1 + 0.2, 0.3), math.hypot(3, 4), math.copysign(1, -2),
        math.prod([1, 2, 3]), math.comb(5, 2), math.trunc(2.7), math.fsum([0.1] * 10), math.inf > 1,
        math.degrees(math.pi), math.isqrt(17), math.modf(2.5), math.frexp(8.0), math.dist([0], [3]),
    )  # fmt: skip


@case
def math_errors(x):
    messages = []
    for action in (lambda: math.sqrt(-1), lambda: math.log(0), lambda: math.factorial(-1)):
        try:
            action()
        except ValueError as error:
            messages.append(str(error))
    return x + 1, messages


@case
def math_of_shape(x):
    return x / math.sqrt(x.shape[-1]), math.ceil(x.shape[0] / 4), math.prod(x.shape)


@case
def heapq_operations(x):
    heap = [5, 1, 4]
    heapq.heapify(heap)
    heapq.heappush(heap, 0)
    small = heapq.heappop(heap)
    pushed = heapq.heappushpop(heap, 2), heapq.heapreplace(heap, 9)
    return x + small, heap, pushed, heapq.nlargest(2, [1, 5, 3]), heapq.nsmallest(2, "cab")


@case
def heapq_of_tuples_with_tensors(x):
    heap = []
    for i in (3, 1, 2):
        heapq.heappush(heap, (i, x * i))
    return heapq.heappop(heap)[1], [n for n, _ in heap]


@case
def heapq_merge(x):
    return x + 1, list(heapq.merge([1, 4], [2, 3])), heapq.nlargest(1, ["a", "bbb"], key=len)


@case
def bisect_functions(x):
    items = [1, 3, 5]
    bisect.insort(items, 4)
    return (
        x + bisect.bisect_left(items, 3),
        bisect.bisect(items, 3),
        items,
        bisect.bisect_right([1, 2], 9),
    )


@case
def bisect_with_key(x):
    rows = [("a", 1), ("b", 5)]
    return x + bisect.bisect_left(rows, 3, key=lambda r: r[1])


@case
def copy_shallow(x):
    a = [[1], x]
    b = copy.copy(a)
    b[0].append(2)
    b.append(3)
    return x + 1, a[0], len(a), copy.copy({"k": 1}), copy.copy((1,)), copy.copy({1})


@case
def copy_deep(x):
    a = {"k": [1, {"n": (2, [3])}]}
    b = copy.deepcopy(a)
    b["k"][1]["n"][1].append(4)
    shared = [1]
    c = copy.deepcopy([shared, shared])
    return x + 1, a, b, c[0] is c[1]


@case
def copy_user_object(x):
    class C:
        def __init__(self):
            self.items = [1]
            self.n = 3

    a = C()
    b, c = copy.copy(a), copy.deepcopy(a)
    c.items.append(2)
    return x + b.n, b.items is a.items, c.items, a.items


@case
def copy_methods(x):
    class C:
        def __copy__(self):
            return "copied"

        def __deepcopy__(self, memo):
            return "deep"

    return x + 1, copy.copy(C()), copy.deepcopy([C()])


@case
def deepcopy_of_tensor(x):
    y = copy.deepcopy(x)
    y.add_(1)
    return x, y


@case
def statistics_functions(x):
    return x + statistics.mean([1, 2, 3]), statistics.median([3, 1, 2])


@case
def fraction_arithmetic(x):
    f = fractions.Fraction(1, 3) + fractions.Fraction(1, 6)
    return x * float(f), f.numerator, str(f)


@case
def decimal_arithmetic(x):
    d = decimal.Decimal("1.5") + 2
    return x + float(d), str(d)


@case
def integer_number_theory(x):
    def primes(n):
        return [p for p in range(2, n) if all(p % q for q in range(2, int(math.sqrt(p)) + 1))]

    return x + len(primes(30)), primes(12)


@case
def float_formatting_and_special(x):
    nan = float("nan")
    return (
        x + 1,
        math.isnan(nan),
        nan != nan,
        1e308 * 10 == math.inf,
        -0.0 == 0.0,
        math.copysign(1, -0.0),
    )


@case
def division_by_zero(x):
    try:
        1 % 0
    except ZeroDivisionError as error:
        return x + 1, str(error)


@case
def torch_and_python_numbers(x):
    n = 3
    return x**n, n**x, 1 / (x + 1), n // (x + 1), -n % (x + 1), torch.tensor(n) + n, 2.5 - x


@case
def dtype_promotion(x):
    i = torch.arange(3)
    return (
        (i + 1).dtype,
        (i + 1.5).dtype,
        (i / 2).dtype,
        (x + i).dtype,
        (i > 1).dtype,
        x.double() + i,
    )


class Slots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = [1]


class Reduced:
    def __init__(self, a):
        self.a, self.more = a, [a]

    def __reduce_ex__(self, protocol):
        return Reduced, (self.a,), self.__dict__


class Restored:
    def __new__(cls, n):
        made = object.__new__(cls)
        made.n = n
        return made

    def __getnewargs__(self):
        return (self.n,)

    def __getstate__(self):
        return {"n": self.n + 1}

    def __setstate__(self, state):
        self.n = state["n"] * 10


class Attributed(dict):
    pass


class Knotted:
    def __init__(self):
        self.shared = [1]
        self.pair = [self.shared, self.shared]
        self.me = self

    def __deepcopy__(self, memo):
        made = Knotted.__new__(Knotted)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            setattr(made, name, copy.deepcopy(value, memo))
        return made


@case
def copy_of_objects_that_say_how(x):
    slots, held = Slots(), Attributed(k=[1])
    held.more = 3
    shallow, deep = copy.copy(held), copy.deepcopy(held)
    copied = copy.copy(slots).a is slots.a, copy.deepcopy(slots).a is slots.a
    reduced = copy.copy(Reduced(3)), copy.deepcopy(Reduced(4))
    texts = [(type(one).__name__, one, one.more, one["k"] is held["k"]) for one in (shallow, deep)]
    return x + reduced[0].a, reduced[1].more, copied, texts, copy.copy(Restored(5)).n


@case
def deepcopy_keeps_what_is_shared(x):
    knot = copy.deepcopy(Knotted())
    return x + 1, knot.pair[0] is knot.pair[1], knot.pair[0] is knot.shared, knot.me is knot


def arrays_that_torch_cannot_share():
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    return torch.ones(3), fixed, np.arange(3.0)[::-1], np.array(["a", "b"])


@case(inputs=arrays_that_torch_cannot_share)
def arrays_that_go_through(x, fixed, turned, texts):
    return x + 1, {"names": texts, "rest": [fixed, turned]}, texts is fixed


@case(inputs=lambda: (torch.ones(3, 2),))
def arrays_of_tuples_of_arrays(x):
    sizes = np.asarray(tuple(np.asarray(size) for size in x.shape))
    return x + 1, sizes, np.array((sizes, sizes))


@case(inputs=lambda: (torch.ones(2), np.array([1.0, 2.0]), np.arange(6).reshape(2, 3).T))
def tensors_of_arrays(x, a, turned):
    copied, shared = torch.tensor(a), torch.as_tensor(a)
    shared[0] = 5.0
    rows = torch.tensor([a.sum(), a.max()]), torch.tensor(turned)
    made = torch.tensor(np.zeros(3, dtype=bool)), torch.as_tensor(a, dtype=torch.float32) + x
    return (
        copied,
        shared,
        rows,
        rows[1].stride(),
        made,
        torch.asarray(obj=a),
        torch.tensor(a[1]),
    )


@case(inputs=lambda: (torch.ones(2), np.arange(20.0).reshape(10, 1, 2), np.array([3, -2, 1])))
def arrays_indexed_by_arrays(x, rows, places):
    first = np.zeros_like(places)
    changed = places.copy()
    changed[first] = 5
    picked = rows[places, first, :], rows[(places + 12) % 10, first] * 2, (places - 5) // 2
    return x + 1, picked, changed, places**2, (places - 5) % 3
