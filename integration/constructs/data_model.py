"""Operators and protocols on user classes."""

import math
import types
import warnings
from collections.abc import Iterable

import torch

from constructs import case


class Vector:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        return NotImplemented

    def __mul__(self, k):
        return Vector(self.x * k, self.y * k)

    __rmul__ = __mul__

    def __neg__(self):
        return Vector(-self.x, -self.y)

    def __abs__(self):
        return self.y * self.y

    def __matmul__(self, other):
        return self.x * other.x + self.y * other.y

    def __iadd__(self, other):
        self.y += other.y
        return self

    def __eq__(self, other):
        return isinstance(other, Vector) and self.y == other.y

    def __hash__(self):
        return hash(self.y)

    def __lt__(self, other):
        return self.y < other.y

    def __bool__(self):
        return self.y != 0

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return (self.x, self.y)[i]

    def __contains__(self, item):
        return item == self.y

    def __iter__(self):
        return iter((self.x, self.y))

    def __call__(self, z):
        return self.x + z

    def __repr__(self):
        return f"Vector({self.y})"

    def __format__(self, spec):
        return f"<{spec}|{self.y}>"

    def __int__(self):
        return self.y

    def __index__(self):
        return self.y

    def __float__(self):
        return self.y / 2

    def __reversed__(self):
        return iter([self.y, self.x])

    def __divmod__(self, other):
        return (self.y // other, self.y % other)

    def __pow__(self, n):
        return self.y**n

    def __rsub__(self, other):
        return other - self.y

    def __invert__(self):
        return ~self.y

    def __round__(self, n=0):
        return self.y + n


class Grid:
    def __init__(self):
        self.cells = {}

    def __getitem__(self, key):
        return self.cells[key]

    def __setitem__(self, key, value):
        self.cells[key] = value

    def __delitem__(self, key):
        del self.cells[key]

    def __missing__(self, key):
        return 0


class Counting:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class OldSequence:
    def __getitem__(self, i):
        if i >= 3:
            raise IndexError(i)
        return i * 10


@case
def add_and_mul(x):
    v = Vector(x, 1) + Vector(x, 2) * 3
    w = 2 * v
    return w.x, w.y


@case
def unary_operators(x):
    v = -Vector(x, 3)
    return v.x, v.y, abs(v), ~v


@case
def matmul_operator(x):
    return Vector(x, 2) @ Vector(x, 3)


@case
def inplace_operator(x):
    v = w = Vector(x, 1)
    v += Vector(x, 4)
    return x + v.y, v is w


@case
def inplace_falls_back(x):
    v = w = Vector(x, 2)
    v *= 3
    return x + v.y, v is w


@case
def not_implemented_type_error(x):
    try:
        Vector(x, 1) - Vector(x, 2)
    except TypeError as error:
        return x + 1, str(error)


@case
def reflected_operator(x):
    return x + (10 - Vector(x, 3))


@case
def reflected_subclass_first(x):
    class A:
        def __add__(self, other):
            return "A"

        def __radd__(self, other):
            return "rA"

    class B(A):
        def __radd__(self, other):
            return "rB"

    return x + 1, A() + B(), B() + A(), 1 + A()


@case
def tensor_with_user_operand(x):
    class Wrap:
        def __radd__(self, other):
            return other * 100

    return x + Wrap()


@case
def equality_and_hash(x):
    a, b, c = Vector(x, 1), Vector(x, 1), Vector(x, 2)
    return x + 1, a == b, a != c, a == 5, len({a, b, c}), {a: 1}[b], a in [c, b]


@case
def ordering(x):
    items = sorted([Vector(x, 3), Vector(x, 1), Vector(x, 2)])
    return x + 1, [v.y for v in items], Vector(x, 1) > Vector(x, 0), max(items).y


@case
def truth_value(x):
    return x + (1 if Vector(x, 2) else 5) + (1 if not Vector(x, 0) else 7)


@case
def truth_from_len(x):
    class Empty:
        def __len__(self):
            return 0

    return x + (1 if Empty() else 2), bool(Empty()), len(Empty())


@case
def length_item_contains(x):
    v = Vector(x, 4)
    return v[0] + v[1], len(v), 4 in v, 5 not in v


@case
def iteration_protocol(x):
    a, b = Vector(x, 4)
    return a * b, list(Vector(1, 2)), tuple(reversed(Vector(1, 2)))


@case
def iterator_class(x):
    return x + sum(Counting(4)), list(zip(Counting(2), Counting(5))), list(Counting(3))


@case
def sequence_protocol_iteration(x):
    return x + sum(OldSequence()), list(OldSequence()), 20 in OldSequence()


@case
def call_operator(x):
    return Vector(x, 1)(3), callable(Vector(x, 1)), callable(3)


@case
def item_assignment(x):
    g = Grid()
    g["a"] = x
    g[1, 2] = 5
    g["a"] += 1
    del g[1, 2]
    try:
        g["zz"]
    except KeyError as error:
        return g["a"], len(g.cells), error.args


@case
def repr_str_format(x):
    v = Vector(x, 3)
    return x + 1, repr(v), str(v), f"{v}", f"{v:abc}", f"{v!r:>12}", format(v, "q")


@case
def number_conversions(x):
    v = Vector(x, 6)
    return x + int(v), float(v), [0, 1, 2, 3, 4, 5, 7][v], range(10)[v], round(v, 2)


@case
def divmod_and_pow(x):
    return x + 1, divmod(Vector(x, 7), 2), Vector(x, 3) ** 2, pow(Vector(x, 2), 5)


@case
def slices_to_user_class(x):
    class Sliced:
        def __getitem__(self, key):
            return (key.start, key.stop, key.step) if isinstance(key, slice) else key

    s = Sliced()
    return x + 1, s[1:2], s[::3], s[...], s[1:2, 3]


@case
def context_and_call_combined(x):
    class Scope:
        def __call__(self, f):
            return lambda y: f(y) * 3

    @Scope()
    def f(y):
        return y + 1

    return f(x)


@case
def dict_subclass(x):
    class D(dict):
        def __missing__(self, key):
            self[key] = key * 2
            return self[key]

    d = D(a=1)
    return x + d[3], dict(d), d.get(9), "a" in d, len(d)


@case
def list_subclass(x):
    class L(list):
        def total(self):
            return sum(self)

    items = L([1, 2])
    items.append(3)
    return x + items.total(), len(items), items[::2], isinstance(items, list)


@case
def int_subclass(x):
    class Celsius(int):
        def warm(self):
            return self + 1

    return x + Celsius(20).warm(), Celsius(3) * 2, isinstance(Celsius(1), int)


@case
def str_subclass(x):
    class Name(str):
        def loud(self):
            return self.upper() + "!"

    return x + 1, Name("ab").loud(), Name("x") + "y", len(Name("abc"))


@case
def tuple_subclass(x):
    class Pair(tuple):
        @property
        def first(self):
            return self[0]

    return Pair((x, 2)).first + 1, len(Pair((1, 2)))


@case
def set_subclass(x):
    class S(set):
        def add_all(self, *items):
            for item in items:
                self.add(item)

    s = S()
    s.add_all(1, 2, 2)
    return x + len(s), sorted(s)


@case
def user_object_as_dict_key(x):
    class Key:
        pass

    a, b = Key(), Key()
    table = {a: x, b: 2}
    return table[a] * table[b], a in table, Key() in table


@case
def comparison_reflected(x):
    class Big:
        def __gt__(self, other):
            return True

        def __le__(self, other):
            return False

    return x + 1, 3 < Big(), Big() > 3, 3 >= Big()


@case
def eq_without_hash(x):
    class E:
        def __eq__(self, other):
            return True

    try:
        {E(): 1}
    except TypeError as error:
        return x + 1, type(error).__name__, E() == 3, E() != 3


@case
def tensor_subclass_of_attribute(x):
    class Holder:
        weight = torch.ones(3)

        def __init__(self):
            self.bias = torch.zeros(3)

    h = Holder()
    return x * h.weight + h.bias


@case
def hash_and_id(x):
    v = Vector(x, 5)
    w = v
    return x + 1, hash(v) == hash(5), id(v) == id(w), id(v) != id(Vector(x, 5))


@case
def class_that_claims_another(x):
    class Proxy:
        def __init__(self, inner):
            self.inner = inner

        @property
        def __class__(self):
            return type(self.inner)

    p = Proxy([1])
    return x + 1, [isinstance(p, kind) for kind in (list, Proxy, dict, Iterable, tuple | list)]


class Sized(type):
    def __len__(cls):
        return 3

    def __bool__(cls):
        return False

    def __contains__(cls, item):
        return item == 1

    def __setattr__(cls, name, value):
        if name == "fixed":
            raise AttributeError(name)
        super().__setattr__(name, value)


class OfSized(metaclass=Sized):
    close = math.isclose

    def __len__(self):
        return 5


@case
def operators_on_classes_ask_the_metaclass(x):
    try:
        OfSized.fixed = 1
    except AttributeError as error:
        text = str(error)
    numbers = len(OfSized), len(OfSized()), OfSized().close(1.0, 1.0)
    return x + 1, numbers, text, bool(OfSized), 1 in OfSized, 2 in OfSized


@case
def attributes_of_functions_and_of_others(x):
    def inner():
        return 3

    texts = []
    for one in (len, 3, None, inner):
        for ask in (iter, lambda value: value.missing):
            try:
                ask(one)
            except (TypeError, AttributeError) as error:
                texts.append(str(error))
    return x + inner.__call__(), inner.__class__.__name__, hasattr(inner, "missing"), texts


@case
def class_from_new_class(x):
    made = types.new_class("Made", (), {}, lambda namespace: namespace.update(a=3))
    return x + made.a, made().a, made.__name__


@case
def metaclass_with_an_order_of_its_own(x):
    class Meta(type):
        def mro(cls):
            return [*super().mro()]

    class Made(metaclass=Meta):
        pass

    return x + 1, Made.__mro__[-1] is object, Made.mro()[-1] is object


class Watched:
    log: list = []

    def __getattribute__(self, name):
        Watched.log.append(name)
        return object.__getattribute__(self, name)


@case(inputs=lambda: (torch.ones(2), Watched()))
def nobody_else_asks_for_attributes(x, watched):
    watched.log.clear()
    watched.gain = 3
    return x * watched.gain, [*Watched.log]


class Slotted:
    __slots__ = ("held",)


@case(inputs=lambda: (torch.ones(2), Slotted()))
def slot_read_after_it_was_deleted(x, slotted):
    slotted.held = x
    del slotted.held
    try:
        return slotted.held
    except AttributeError as error:
        return str(error), x + 1


class Watching:
    def __init__(self):
        self.seen = []
        self.held = torch.ones(3)

    def __getattribute__(self, name):
        seen = object.__getattribute__(self, "seen")
        seen += [name] if len(seen) < 3 else []  # who compares asks as well
        return object.__getattribute__(self, name)


@case(inputs=lambda: (torch.ones(3), Watching()))
def every_attribute_is_watched(x, watching):
    y = x * watching.held
    watching.made = y
    if x.sum() > 0:
        y = y + watching.made + watching.__dict__["held"]
    return y, list(object.__getattribute__(watching, "seen"))


class Doubled:
    """Keeps twice what is written, in the instance's dict under its own name."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        return self if instance is None else instance.__dict__[self.name]

    def __set__(self, instance, value):
        instance.__dict__[self.name] = value * 2


class Holder:
    doubled = Doubled()
    other = 1

    @property
    def fixed(self):
        return 7


OUTSIDE = Holder()


class Slotted:
    __slots__ = ("a", "__dict__")


@case
def descriptor_that_writes_the_dict_under_its_name(x):
    """The object that leaves, and one from outside, are written once."""
    made, slotted = Holder(), Slotted()
    made.doubled, slotted.a, slotted.b = 3, 1, 2
    made.__dict__["fixed"] = x
    OUTSIDE.doubled = x.ndim + 1
    vars(OUTSIDE)["fixed"] = 5
    y = x * made.doubled + OUTSIDE.doubled + OUTSIDE.fixed + made.fixed
    return y, made, dict(vars(OUTSIDE)), dict(vars(slotted))


@case
def dict_of_a_function_under_the_name_of_a_field(x):
    def made():
        return x

    made.__dict__["__name__"] = "other"
    return x + made().ndim, sorted(made.__dict__), made.__name__


@case
def names_that_a_property_learns(x):
    """From CPython 3.13 on a property has a name, which the class tells it."""

    class Made:
        @property
        def first(self):
            return x

        @first.setter
        def second(self, value):
            pass

    return x + 1, getattr(Made.first, "__name__", ""), getattr(Made.second, "__name__", "")


@case
def inverted_flag_that_may_warn(x):
    """From CPython 3.12 on `~` of a bool warns."""
    flag = x.ndim == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        number = ~flag
    return x + number, [str(one.message) for one in caught]


class Compares:
    def __lt__(self, other):
        return [1]


@case
def truth_by_two_nots(x):
    n, one = x.ndim, Compares()
    return x + 1, not not n, not not (one < one), one < one, [not not k for k in (n, 0, "a", one)]


class OneMore(list):
    """Shows other items than it has."""

    def __getitem__(self, index):
        return list.__getitem__(self, index) + 1

    def __len__(self):
        return 10

    def __iter__(self):
        return iter([9])


@case(inputs=lambda: (torch.ones(3), OneMore([1, 2])))
def list_that_shows_other_items(x, items):
    return x + items[0], len(items), [*items], list.__len__(items)


class Answers(ValueError):
    __slots__ = ("unset",)

    @property
    def hidden(self):
        raise AttributeError("hidden")

    def __getattr__(self, name):
        if name == "nothing":
            raise AttributeError(name)
        return f"{name} of {self.args}"


@case
def an_error_that_answers_for_its_attributes(x):
    error = Answers(3)
    error.held = x + 1
    found = error.held, error.other, error.hidden, error.unset, error.args
    return *found, hasattr(error, "nothing"), getattr(error, "nothing", 2), error.upper.upper()


class Stores(ValueError):
    def __getattribute__(self, name):
        return name if name == "odd" else super().__getattribute__(name)

    def __setattr__(self, name, value):
        super().__setattr__(name, (name, value))

    def __delattr__(self, name):
        super().__setattr__(name, None)


@case
def an_error_that_stores_its_attributes(x):
    error = Stores(1)
    error.first = x + 1
    kept = error.first
    del error.first
    return kept, error.first, error.odd, hasattr(error, "even")


@case
def variables_of_an_error(x):
    error = ValueError(1)
    error.__dict__["first"] = x + 1
    kept = dict(vars(error))
    error.__dict__ = {"second": 2}
    error.third = 3
    return kept, hasattr(error, "first"), error.second, sorted(vars(error))


class Weighed(float):
    pass


NAN = Weighed("nan")


@case
def hash_of_a_nan_of_a_class(x):
    return x + 1, hash(NAN), hash(Weighed(2.5))
