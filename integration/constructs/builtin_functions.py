"""Builtin functions and types."""

from constructs import case


@case
def sum_any_all(x):
    return sum([x, x], start=x), any([0, 1]), all([]), any(i > 2 for i in range(5)), sum([], 3)


@case
def min_max(x):
    return x + min(3, 1, 2), max([1, 5], default=0), min([], default=7), max("ab", "c", key=len)


@case
def min_of_empty(x):
    try:
        max([])
    except ValueError as error:
        return x + 1, str(error)


@case
def sorted_variants(x):
    data = [(2, "b"), (1, "z"), (2, "a")]
    return (
        x + 1, sorted(data), sorted(data, key=lambda p: p[1], reverse=True),
        sorted({"b": 1, "a": 2}), sorted([3, 1, 2], key=lambda n: -n),
    )  # fmt: skip


@case
def sort_stability(x):
    data = [("a", 1), ("b", 0), ("c", 1), ("d", 0)]
    data.sort(key=lambda p: p[1])
    down = sorted(data, key=lambda p: p[1], reverse=True)
    return x + 1, data, down


@case
def zip_strict(x):
    try:
        list(zip([1], [1, 2], strict=True))
    except ValueError as error:
        return x + 1, str(error), list(zip([1, 2], "ab", strict=True)), list(zip())


@case
def map_filter(x):
    return (
        x + sum(map(int, ["1", "2"])), list(map(lambda a, b: a * b, [1, 2], [3, 4])),
        list(filter(None, [0, 1, "", "a"])), list(filter(lambda n: n > 1, range(4))),
    )  # fmt: skip


@case
def enumerate_reversed(x):
    return x + 1, list(enumerate("ab", start=1)), list(reversed([1, 2])), list(reversed(range(3)))


@case
def iter_with_sentinel(x):
    items = [1, 2, 0, 3]
    return x + sum(iter(lambda: items.pop(0), 0)), items


@case
def iter_next_protocol(x):
    it = iter([x, x + 1])
    first = next(it)
    return first + next(it), next(it, None)


@case
def range_operations(x):
    r = range(0, 10, 3)
    return x + len(r), r[1], list(r[::-1]), 6 in r, 7 in r, r.index(9), r == range(0, 12, 3), r.step


@case
def list_methods(x):
    a = [3, 1, 2]
    a.append(5)
    a.extend((7, 8))
    a.insert(1, 9)
    a.remove(3)
    popped = a.pop(), a.pop(0)
    a.sort(reverse=True)
    a.reverse()
    b = a.copy()
    b.clear()
    return x + a.index(2), a, popped, a.count(1), b, a + [0], a * 2


@case
def list_slices(x):
    a = list(range(8))
    a[2:4] = ["x"]
    a[::3] = [0, 0, 0]
    del a[-2:]
    a[1:1] = [10, 11]
    return x + 1, a, a[-3:], a[::-2]


@case
def list_errors(x):
    messages, key = [], "a"
    for action in (
        lambda: [].pop(), lambda: [1].remove(2), lambda: [1].index(3), lambda: [1][key],
        lambda: [1, 2][9], lambda: (1,)[4],
    ):  # fmt: skip
        try:
            action()
        except Exception as error:
            messages.append((type(error).__name__, str(error)))
    return x + 1, messages


@case
def dict_methods(x):
    d = {"a": 1, "b": 2}
    d.update({"c": 3}, e=5)
    d |= {"f": 6}
    d.setdefault("g", []).append(1)
    popped = d.pop("a"), d.pop("zz", None), d.popitem()
    return (
        x + d["b"], d, popped, d.get("q", 0), list(d.items()), "b" in d, list(reversed(d)),
        d | {"b": 0}, dict.fromkeys("ab", 0), dict([("k", 1)]), dict(z=2), d == dict(d),
    )  # fmt: skip


@case
def dict_views(x):
    d, e = {"a": 1, "b": 2}, {"b": 2, "c": 3}
    return (
        x + len(d.keys()), sorted(d.keys() & e.keys()), sorted(d.keys() | e), d.items() == d.items(),
        sorted(d.keys() - e), ("a", 1) in d.items(), 2 in d.values(), sorted(d.items() ^ e.items()),
    )  # fmt: skip


@case
def dict_order_and_delete(x):
    d = {"a": x, "b": 2}
    d["a"] = x + 1
    d["c"] = 3
    del d["b"]
    d["b"] = 4
    return list(d), d["a"]


@case
def dict_changed_while_iterating(x):
    d = {1: 1}
    try:
        for k in d:
            d[k + 1] = 1
    except RuntimeError as error:
        return x + 1, str(error)


@case
def dict_of_tensors(x):
    d = {i: x * i for i in range(3)}
    d[1] += 5
    return {k: v.sum() for k, v in d.items()}


@case
def set_operations(x):
    a, b = {1, 2, 3}, {2, 3, 4}
    a.add(9)
    a.discard(100)
    c = frozenset([1, 2])
    return (
        x + len(a), sorted(a & b), sorted(a | b), sorted(a - b), sorted(a ^ b), a >= {1}, c <= a,
        a.isdisjoint({77}), sorted(a.union([5], (6,))), c == {1, 2}, {c: 1}[frozenset([2, 1])],
    )  # fmt: skip


@case
def set_updates(x):
    a = {1, 2, 3}
    a |= {7}
    a &= {1, 2, 7}
    a -= {1}
    a ^= {2, 5}
    a.update([8], {9})
    a.difference_update([9])
    a.intersection_update({5, 7, 8})
    a.symmetric_difference_update([8, 11])
    return x + len(a), sorted(a)


@case
def set_errors(x):
    try:
        {1}.remove(2)
    except KeyError as error:
        return x + 1, error.args


@case
def unhashable(x):
    try:
        {[1]: 2}
    except TypeError as error:
        return x + 1, str(error)


@case
def tuple_operations(x):
    t = (1, 2, 2)
    return x + t.count(2), t.index(2), t + (3,), t * 2, t < (1, 3), t[1:], (1, 2) == (1, 2), hash(t)


@case
def tensors_in_tuple_comparison(x):
    t = (x, 1)
    return t == t, t[0] is x, x + 1


@case
def int_methods(x):
    n = 10
    return (
        x + n.bit_length(), n.to_bytes(2, "big"), int.from_bytes(b"\x01\x02", "big"), (-7) // 2,
        (-7) % 3, divmod(-7, 2), pow(3, 4, 5), 2**100, n.bit_count(), int(3.9), int(-3.9), ~n,
        round(2.5), round(1234, -2), abs(-4), int(True),
    )  # fmt: skip


@case
def float_methods(x):
    f = 2.5
    return (
        x + f, f.is_integer(), f.as_integer_ratio(), (0.1).hex(), float("inf") > 1, round(f, 1),
        float.fromhex("0x1p3"), f // 1, f % 1, -f, f == 2.5, float("nan") == float("nan"),
    )  # fmt: skip


@case
def complex_numbers(x):
    c = 1 + 2j
    return x + c.real, c * c, abs(3 + 4j), c.conjugate(), complex(1, 2) == c, c.imag, c**2


@case
def bool_arithmetic(x):
    return (
        x + True,
        True + True,
        bool(""),
        bool([0]),
        True & False,
        not 0,
        True ^ True,
        isinstance(True, int),
    )


@case
def type_calls(x):
    return (
        x + 1,
        type(3)(4.7),
        type([])("ab"),
        type("")(5),
        type(x) is type(x + 1),
        type(None) is type(None),
    )


@case
def getattr_family(x):
    class C:
        a = 1

    c = C()
    setattr(c, "b", 2)
    delattr(c, "b")
    return x + getattr(c, "a"), getattr(c, "zz", 3), hasattr(c, "b"), hasattr(x, "shape"), vars(c)


@case
def isinstance_issubclass(x):
    return (
        x + 1, isinstance(3, (str, int)), isinstance(True, int), issubclass(bool, int),
        isinstance([], list | dict), isinstance(x, object), isinstance(type, type),
    )  # fmt: skip


@case
def callable_and_id(x):
    y = x
    return (
        x + 1,
        callable(len),
        callable(3),
        id(x) == id(y),
        id(x) == id(x + 1),
        hash("a") == hash("a"),
    )


@case
def dir_function(x):
    class C:
        def method(self): ...

    names = dir(C())
    return x + 1, "method" in names, "zz" in names


@case
def slices_by_objects_with_an_index(x):
    class Place:
        def __index__(self):
            return 1

    items = [x, x + 1, x + 2]
    del items[: Place()]
    return items[Place() :], items[:: Place()], (3, 4)[: Place()]


@case
def slice_objects(x):
    s = slice(0, 2)
    return x[s, slice(1, None)], [1, 2, 3][s], s.stop, slice(5).indices(3)


@case
def divmod_pow_round(x):
    return x + divmod(7, 2)[0], pow(2, 3), round(3.14159, 2), divmod(7.5, 2)


@case
def format_and_ascii(x):
    return (
        x + 1,
        format(3.14159, ".2f"),
        ascii("é"),
        format(255, "#x"),
        repr("q"),
        format("a", ">3"),
    )


@case
def identity_of_containers(x):
    a = [x]
    b = a
    c = list(a)
    return a is b, a is c, b[0] is x, a[0] + 1


@case
def memoryview_and_bytes(x):
    return x + len(memoryview(b"abc")), bytes(memoryview(b"abc")[1:])


@case
def object_sentinel(x):
    missing = object()
    table = {"a": x}
    return table.get("a", missing) is not missing, table.get("b", missing) is missing, x + 1


@case
def nested_data_identity(x):
    inner = [x]
    outer = [inner, inner]
    outer[0].append(x + 1)
    return outer, outer[0] is outer[1]


@case
def cyclic_list(x):
    a = [x + 1]
    a.append(a)
    return a[1][1][0], a[1] is a


@case
def input_function_names(x):
    return x + len([f.__name__ for f in (len, sum, abs)]), len.__name__


@case
def list_len_effects(x):
    log = []

    class S:
        def __len__(self):
            log.append("len")
            return 2

        def __getitem__(self, i):
            log.append(i)
            if i > 1:
                raise IndexError
            return i

    s = S()
    return x + 1, list(s), tuple(s), [*s], sorted(s), [0].extend(s), set(s), log


@case
def list_of_len_raising(x):
    class S:
        def __iter__(self):
            return iter([1])

        def __len__(self):
            raise ValueError("no len")

    try:
        list(S())
    except ValueError as e:
        return x + 1, str(e)


@case
def list_hint_not_implemented(x):
    class S:
        def __iter__(self):
            return iter([1])

        def __length_hint__(self):
            return NotImplemented

    return x + 1, list(S())


@case
def len_missing(x):
    texts = []
    for o in (object(), 3, iter([]), (i for i in ())):
        try:
            len(o)
        except TypeError as e:
            texts.append(str(e))

    class A:
        pass

    try:
        len(A())
    except TypeError as e:
        texts.append(str(e))
    return x + 1, texts


@case
def next_of_non_iterator(x):
    texts = []
    for o in ([1], {}, "a", 3, range(3)):
        try:
            next(o)
        except TypeError as e:
            texts.append(str(e))
    return x + 1, texts


@case
def repr_nested_custom(x):
    class N:
        def __init__(self, k):
            self.k = k

        def __repr__(self):
            return f"N({self.k!r})"

    a = [N(1), {"z": N([2])}]
    a.append(a)
    return x + 1, repr(a), str(a), f"{a}", "%s" % (a,)


@case
def sums_of_floats(x):
    known = [0.1 * i for i in range(10)]
    read = [(x[0, i].item() + 0.5) * 0.1 for i in range(3)] * 5
    far = [1e16 + read[0], 1.0, read[1], -1e16]
    return x, [sum(n, s) for n in (known, read, far, [*read, 1, *known]) for s in (0, 1, 0.5)]
