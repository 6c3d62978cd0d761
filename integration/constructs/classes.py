"""Classes: made inside and outside, inheritance, super, descriptors, metaclasses."""

import abc
import functools

import torch

from constructs import case


class Base:
    factor = 2
    made = 0

    def __init__(self, x):
        self.x = x

    def scale(self):
        return self.x * self.factor

    @classmethod
    def build(cls, x):
        return cls(x + 1)

    @staticmethod
    def twice(x):
        return x * 2

    @property
    def total(self):
        return self.x.sum()

    @total.setter
    def total(self, value):
        self.x = torch.full_like(self.x, value)


class Child(Base):
    factor = 3

    def __init__(self, x, extra=1):
        super().__init__(x)
        self.extra = extra

    def scale(self):
        return super().scale() + self.extra


class Left(Base):
    def scale(self):
        return super().scale() * 10


class Right(Base):
    def scale(self):
        return super().scale() + 7


class Both(Left, Right):
    pass


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


class Positive:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name)

    def __set__(self, obj, value):
        if value < 0:
            raise ValueError(f"{self.name} is negative")
        setattr(obj, self.name, value)


class Account:
    balance = Positive()

    def __init__(self, balance):
        self.balance = balance


class Meta(type):
    registry = "meta attribute"

    def __call__(cls, *args):
        instance = super().__call__(*args)
        instance.from_meta = True
        return instance

    def __len__(cls):
        return 42


class WithMeta(metaclass=Meta):
    def __init__(self, x):
        self.x = x


class Dynamic:
    def __init__(self):
        self.known = 1

    def __getattr__(self, name):
        if name.startswith("dyn_"):
            return len(name)
        raise AttributeError(name)

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value * 2 if name == "known" else value)


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

    def describe(self):
        return type(self).__name__, self.area()


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self):
        return self.side * self.side


@case
def instance_and_methods(x):
    b = Base(x)
    return b.scale(), Base.twice(x), Base.build(x).x


@case
def inheritance_and_super(x):
    c = Child(x, extra=5)
    return c.scale(), c.extra, isinstance(c, Base), type(c).__name__


@case
def multiple_inheritance(x):
    return Both(x).scale(), [k.__name__ for k in Both.__mro__]


@case
def property_get_and_set(x):
    b = Base(x)
    before = b.total
    b.total = 3
    return before, b.total


@case
def class_attribute_shadowed(x):
    b = Base(x)
    b.factor = 9
    return b.scale(), Base.factor, "factor" in vars(b)


@case
def class_attribute_changed(x):
    Base.made = 0
    for _ in range(3):
        Base.made += 1
    return x + Base.made


@case
def slots(x):
    s = Slotted(x)
    s.b = 2
    try:
        s.c = 3
    except AttributeError:
        s.b = 5
    return s.a * s.b, hasattr(s, "__dict__")


@case
def slot_unset(x):
    s = Slotted(x)
    try:
        s.b
    except AttributeError:
        return s.a + 1


@case
def data_descriptor(x):
    account = Account(3)
    account.balance = account.balance + 4
    try:
        account.balance = -1
    except ValueError as error:
        return x + account.balance, str(error)


@case
def non_data_descriptor(x):
    class Lazy:
        def __get__(self, obj, owner):
            return 5

    class Holder:
        value = Lazy()

    h = Holder()
    first = h.value
    h.__dict__["value"] = 7
    return x + first, h.value


@case
def metaclass_call(x):
    w = WithMeta(x)
    return w.x + 1, w.from_meta, WithMeta.registry, len(WithMeta)


@case
def getattr_and_setattr_methods(x):
    d = Dynamic()
    d.known = 4
    d.other = 3
    try:
        d.missing
    except AttributeError as error:
        return x + d.known + d.dyn_abc + d.other, error.args


@case
def getattribute_method(x):
    class Spy:
        def __init__(self):
            self.reads = []

        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name != "reads":
                self.reads.append(name)
            return value

        def method(self):
            return 3

    spy = Spy()
    return x + spy.method(), spy.reads


@case
def abstract_base_class(x):
    return Square(x).describe(), isinstance(Square(1), Shape)


@case
def abstract_class_cannot_be_made(x):
    try:
        Shape()
    except TypeError as error:
        return x + 1, type(error).__name__


@case
def class_statement_plain(x):
    class Local:
        scale = 3

        def __init__(self, y):
            self.y = y

        def go(self):
            return self.y * self.scale

    return Local(x).go(), Local.__name__


@case
def class_statement_with_super(x):
    class A(Base):
        def scale(self):
            return super().scale() + 1

    return A(x).scale()


@case
def class_statement_with_closure(x):
    k = 4

    class Local:
        value = k + 1

        def go(self, y):
            return y * k + self.value

    return Local().go(x)


@case
def class_statement_with_tensor_closure(x):
    y = x + 1

    class Local:
        def go(self):
            return y * 2

    return Local().go()


@case
def class_statement_slots(x):
    class P:
        __slots__ = ("a",)

        def __init__(self, a):
            self.a = a

    return P(x).a + 1


@case
def class_statement_decorated(x):
    def add_method(cls):
        cls.extra = lambda self: 7
        return cls

    @add_method
    class Local:
        pass

    return x + Local().extra()


@case
def class_statement_returned(x):
    class Local:
        size = 3

    return x + Local.size, Local.__qualname__.rpartition(".")[2], Local().size


@case
def class_statement_with_metaclass(x):
    class Local(metaclass=Meta):
        pass

    return x + len(Local), Local().from_meta


@case
def class_statement_with_keywords(x):
    class Plugin:
        registry = []

        def __init_subclass__(cls, tag=None, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.registry.append(tag)

    class One(Plugin, tag="one"):
        pass

    class Two(Plugin, tag="two"):
        pass

    return x + len(Plugin.registry), Plugin.registry


@case
def three_argument_type(x):
    cls = type("Made", (Base,), {"factor": 6})
    return cls(x).scale(), cls.__name__, cls.__mro__[1] is Base


@case
def dunder_class_and_type(x):
    b = Base(x)
    return b.__class__(x + 1).x, b.__class__ is type(b) is Base, type(b).factor


@case
def change_dunder_class(x):
    b = Base(x)
    b.__class__ = Left
    return b.scale()


@case
def singleton_new(x):
    class Single:
        instance = None

        def __new__(cls, *args):
            if cls.instance is None:
                cls.instance = super().__new__(cls)
            return cls.instance

        def __init__(self, v):
            self.v = v

    a, b = Single(1), Single(2)
    return x + a.v, a is b


@case
def new_returns_other_type(x):
    class Odd:
        def __new__(cls):
            return 5

        def __init__(self):
            raise RuntimeError("not run")

    return x + Odd()


@case
def method_objects(x):
    b = Base(x)
    method = b.scale
    plain = Base.scale
    return method(), plain(b), method.__self__ is b, method.__func__ is plain, method.__name__


@case
def methods_in_containers(x):
    b = Base(x)
    table = {"s": b.scale, "t": Base.twice}
    return table["s"](), table["t"](x), [f(x) for f in (Base.twice, abs)]


@case
def cached_property(x):
    class C:
        calls = 0

        @functools.cached_property
        def value(self):
            self.calls += 1
            return x * 2

    c = C()
    return c.value + c.value, c.calls


@case
def instance_dict(x):
    b = Child(x, 4)
    b.__dict__["added"] = 1
    del b.extra
    return sorted(vars(b)), b.added, b.x + 1, [vars(b).get(n) for n in ("added", "extra", 5)]


@case
def delete_attributes(x):
    b = Child(x, 4)
    del b.extra
    return x + 1, hasattr(b, "extra"), getattr(b, "extra", "gone")


@case(inputs=lambda: (torch.ones(2), Child(torch.ones(2), 3)))
def object_argument_mutated(x, child):
    child.extra += 4
    child.fresh = x * 2
    child.x.add_(1)
    return child.scale()


@case
def class_getitem_and_generic(x):
    class Box:
        def __class_getitem__(cls, item):
            return (cls.__name__, item)

    return x + 1, Box[3]


@case
def nested_class_and_inner_reference(x):
    class Outer:
        class Inner:
            n = 5

        def get(self):
            return self.Inner.n

    return x + Outer().get()


@case
def isinstance_variants(x):
    c = Child(x)
    return x + 1, isinstance(c, (int, Base)), isinstance(3, int | str), issubclass(Child, Base)


@case
def two_classes_of_a_namespace(x):
    class Twice(type):
        def __new__(cls, name, bases, namespace):
            made = super().__new__(cls, name, bases, namespace)
            type("Other", (), namespace)
            return made

    try:

        class Made(metaclass=Twice):
            def own(self):
                return __class__

    except TypeError as error:
        return x + 1, type(error).__name__
    return x + 1, "made"
