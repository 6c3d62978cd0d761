"""dataclasses, enum, typing."""

import collections
import dataclasses
import enum
import typing
from dataclasses import dataclass, field

import torch

from constructs import case

T = typing.TypeVar("T")


@dataclass
class Config:
    width: int = 3
    names: list = field(default_factory=list)
    scale: float = field(default=2.0, repr=False)

    def area(self):
        return self.width * self.scale


@dataclass(frozen=True, order=True)
class Frozen:
    a: int
    b: int = 2


@dataclass
class WithPost:
    x: object
    doubled: object = field(init=False)
    factor: dataclasses.InitVar[int] = 2
    total: typing.ClassVar[int] = 7

    def __post_init__(self, factor):
        self.doubled = self.x * factor


@dataclass(slots=True, kw_only=True)
class Slotted:
    a: object
    b: int = 1


@dataclass
class Derived(Config):
    extra: int = 9


class Colour(enum.Enum):
    RED = 1
    GREEN = 2
    CRIMSON = 1

    def shade(self):
        return self.value * 10

    @classmethod
    def favourite(cls):
        return cls.GREEN


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    C = enum.auto()


class Text(str, enum.Enum):
    HELLO = "hello"


class Stack(typing.Generic[T]):
    def __init__(self):
        self.items: list[T] = []

    def push(self, item: T) -> None:
        self.items.append(item)


class Area(typing.Protocol):
    def area(self) -> float: ...


@case
def what_making_a_class_saw(x):
    @typing.final
    @typing.runtime_checkable
    class Named(typing.Protocol):
        def startswith(self, text): ...

    return x, isinstance("a", Named), T.__module__, int.__repr__(Level.LOW), int.__str__(Level.LOW)


@case
def dataclass_instance(x):
    c = Config(width=4)
    c.names.append("n")
    return x * c.area(), c.names, c, Config() == Config()


@case
def dataclass_repr_and_eq(x):
    return x + 1, repr(Config(1)), Config(1) == Config(2), Config(1) != 3


@case
def frozen_dataclass(x):
    f = Frozen(1)
    try:
        f.a = 2
    except dataclasses.FrozenInstanceError as error:
        return x + f.b, str(error), f < Frozen(2), hash(f) == hash(Frozen(1)), {f: 1}[Frozen(1)]


@case
def post_init_and_initvar(x):
    w = WithPost(x, factor=3)
    return w.doubled, WithPost.total, w.x + 1


@case
def dataclass_replace_asdict_astuple(x):
    c = dataclasses.replace(Config(1), width=8)
    return x + c.width, dataclasses.asdict(Config(2, ["q"])), dataclasses.astuple(Frozen(3))


@case
def dataclass_fields(x):
    return x + 1, [f.name for f in dataclasses.fields(Config)], dataclasses.is_dataclass(Config(1))


@case
def dataclass_slots_kw_only(x):
    s = Slotted(a=x, b=2)
    s.b += 1
    return s.a + s.b


@case
def dataclass_inherited(x):
    d = Derived(2, extra=4)
    return x * d.area() + d.extra, isinstance(d, Config)


@case
def dataclass_made_inside(x):
    @dataclass
    class Local:
        a: int
        b: object = None

    return x + Local(3).a, Local(1, 2) == Local(1, 2), repr(Local(1))


@case
def dataclass_of_tensors(x):
    w = WithPost(x)
    w.doubled += 1
    return w


@case
def enum_members(x):
    c = Colour.RED
    return (
        x * c.value + c.shade(), c.name, Colour(2) is Colour.GREEN, Colour["RED"] is c,
        c is Colour.CRIMSON, [m.name for m in Colour], Colour.favourite(), len(Colour), c == 1,
    )  # fmt: skip


@case
def int_enum_and_str_enum(x):
    return (
        x + Level.HIGH,
        Level.LOW < Level.HIGH,
        Level(5).name,
        Text.HELLO == "hello",
        Text("hello").value,
    )


@case
def flag_enum(x):
    f = Flags.A | Flags.B
    return x + f.value, Flags.A in f, Flags.C in f, f & Flags.B, (f ^ Flags.A).name


@case
def flags_in_loops(x):
    for member in Flags:
        x = x + member.value
    return x, [one.name for one in Flags], sum(one.value for one in Flags), list(reversed(Flags))


COSTS = {torch.int8: 1, Colour.RED: 2, Colour.GREEN: 3}


@case
def enums_as_keys_of_a_table_from_outside(x):
    return x * COSTS[Colour.GREEN], COSTS.get(Level.LOW), Colour.RED in COSTS, COSTS[torch.int8]


@case
def enum_in_dict_and_match(x):
    table = {Colour.RED: x + 1, Colour.GREEN: x + 2}
    match Colour.GREEN:
        case Colour.RED:
            k = 1
        case Colour.GREEN:
            k = 2
    return table[Colour.GREEN] * k, repr(Colour.RED), str(Colour.GREEN), f"{Level.LOW}"


@case
def enum_wrong_value(x):
    try:
        Colour(77)
    except ValueError as error:
        return x + 1, str(error)


@case
def enum_made_inside(x):
    class Mode(enum.Enum):
        ON = 3
        OFF = 4

    return x + Mode.ON.value, [m.name for m in Mode]


@case
def typing_cast_and_generics(x):
    s: Stack[int] = Stack()
    s.push(typing.cast(int, 4))
    return x + s.items[0], typing.get_origin(list[int]) is list, typing.get_args(dict[str, int])


@case
def generic_alias_called(x):
    return x + Stack[int]().items.__len__(), list[int]([1, 2]), dict[str, int](a=1)


@case
def annotations_and_type_checking(x):
    if typing.TYPE_CHECKING:
        import nothing  # noqa: F401
    y: torch.Tensor = x + 1
    n: int
    return y


@case
def typed_dict_and_newtype(x):
    class Movie(typing.TypedDict):
        name: str

    UserId = typing.NewType("UserId", int)
    return x + UserId(5), Movie(name="m")


@case
def field_default_factory_fresh(x):
    a, b = Config(), Config()
    a.names.append(1)
    return x + len(b.names), a.names


@case(inputs=lambda: (torch.ones(2), Config(2, ["a"]), Colour.RED, Frozen(4)))
def as_arguments(x, config, colour, frozen):
    config.width += 1
    config.names.append(colour.name)
    return x * config.width + frozen.a


@case
def enum_with_auto(x):
    class Kind(enum.Flag):
        A = enum.auto()
        B = enum.auto()
        C = 8
        D = enum.auto()

    class Plain(enum.Enum):
        X = enum.auto()
        Y = 6
        Z = enum.auto()

    return x + Kind.D.value, [one.value for one in Kind], [one.value for one in Plain], len(Kind)


@case
def enum_made_by_its_new(x):
    class Kind(enum.Enum):
        A = 1
        B = 2

        def __new__(cls, number):
            made = object.__new__(cls)
            made._value_ = number * 10
            made.text = str(number)
            return made

    return x + Kind.A.value, Kind.B.text, Kind(20) is Kind.B


@case
def enum_class_specials(x):
    try:
        Colour.RED = 3
    except AttributeError as error:
        text = type(error).__name__
    held = Colour.RED in Colour, Flags.A in Flags, len(Flags), len(Colour), bool(Colour)
    return x + 1, held, text, [kind.__name__ for kind in Colour.mro()], Flags.A | Flags.C


@case
def table_of_an_enum_that_changes(x):
    class Color(enum.Enum):
        RED = 1
        GREEN = 2

    Color._value2member_map_[5] = Color.RED
    return x + Color(5).value, len(Color._value2member_map_)


@case
def defaults_of_a_namedtuple_that_change(x):
    made = collections.namedtuple("made", "a b", defaults=(1,))
    made._field_defaults["b"] = x.ndim
    return x + 1, made._field_defaults, made


@case
def annotations_of_a_dataclass_that_change(x):
    @dataclass
    class Point:
        a: int = 3

    Point.__annotations__["b"] = float
    return x + Point().a, sorted(Point.__annotations__), len(Point.__dataclass_fields__)


@case
def fields_of_a_dataclass_leave(x):
    @dataclass
    class Point:
        a: int = 3

    fields = Point.__dataclass_fields__
    return x + 1, fields is Point.__dataclass_fields__, Point, len(fields)
