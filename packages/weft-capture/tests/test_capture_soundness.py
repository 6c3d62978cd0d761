"""Whatever a program depends on may change between calls: the stale graph is then not used.

A program of its own is made for every test, with classes, globals, closures and modules; each
mutation changes one of them, and the captured function must go on like eager.
"""

import collections
import contextlib
import decimal
import fractions
import itertools
import math
import types
from unittest import mock

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = """
import functools
import torch
from torch import nn

FACTOR = 2.0
LIMIT = 3
TABLE = {"a": 1.0, "b": [2.0, 3.0]}
NAMES = ["a"]


def helper(x, by=1.5, *, shift=0.25):
    return x * by + shift


def other_helper(x, by=1.5, *, shift=0.25):
    return x - by


def make_counter(start):
    step = start

    def counter(x):
        return x + step

    return counter


counter = make_counter(2.0)
partial = functools.partial(helper, by=3.0)


class Base:
    rate = 0.5

    def scale(self, x):
        return x * self.rate

    @property
    def offset(self):
        return self.base_offset

    @staticmethod
    def twist(x):
        return x.sin()

    @classmethod
    def name_length(cls):
        return len(cls.__name__)


class Config(Base):
    def __init__(self):
        self.depth = 2
        self.mode = "plus"
        self.base_offset = 0.125
        self.extra = {"gain": 4.0}


class OtherConfig(Base):
    def scale(self, x):
        return x / 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("running", torch.zeros(3))
        self.drop = nn.Dropout(0.0)
        self.inner = nn.Linear(3, 3)
        self.power = 1

    def forward(self, x):
        y = self.inner(x) * self.weight + self.running
        if self.training:
            y = y + 1
        return self.finish(y) ** self.power

    def finish(self, y):
        return y.relu()


config = Config()
layer = Layer()


def main(x):
    y = helper(x) + FACTOR
    for _ in range(config.depth):
        y = config.scale(y) + config.offset
    y = config.twist(y) + config.name_length()
    y = y * config.extra["gain"] if config.mode == "plus" else y - 1
    for name in NAMES:
        y = y + TABLE[name]
    y = y + TABLE["b"][0]
    y = counter(partial(layer(y)))
    if LIMIT > 2:
        y = y * 2
    return y
"""
CODE = compile(SOURCE, "<soundness>", "exec")


def program():
    """Make the program anew, in a module of its own."""
    module = types.ModuleType("soundness_program")
    torch.manual_seed(0)
    exec(CODE, module.__dict__)
    return module


def set_item(container, key, value):
    container[key] = value


def new_scale(self, x):
    return x * 7


def hook(module, args, output):
    return output * 2


def global_hook(p):
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    return handle.remove


MUTATIONS = {
    "global": lambda p: setattr(p, "FACTOR", 5.0),
    "global of another type": lambda p: setattr(p, "FACTOR", 2),
    "global in a condition": lambda p: setattr(p, "LIMIT", 1),
    "dict entry": lambda p: set_item(p.TABLE, "a", 9.0),
    "list entry": lambda p: set_item(p.TABLE["b"], 0, 9.0),
    "list length": lambda p: p.NAMES.append("a"),
    "global function": lambda p: setattr(p, "helper", p.other_helper),
    "function code": lambda p: setattr(p.helper, "__code__", p.other_helper.__code__),
    "function defaults": lambda p: setattr(p.helper, "__defaults__", (4.0,)),
    "keyword defaults": lambda p: p.helper.__kwdefaults__.update(shift=8.0),
    "closure cell": lambda p: setattr(p.counter.__closure__[0], "cell_contents", 6.0),
    "partial": lambda p: p.partial.keywords.update(by=0.5),
    "attribute": lambda p: setattr(p.config, "mode", "minus"),
    "loop count": lambda p: setattr(p.config, "depth", 3),
    "attribute of a property": lambda p: setattr(p.config, "base_offset", 2.0),
    "nested dict": lambda p: set_item(p.config.extra, "gain", 1.0),
    "class attribute": lambda p: setattr(p.Base, "rate", 0.75),
    "class attribute of a subclass": lambda p: setattr(p.Config, "rate", 0.75),
    "instance over class attribute": lambda p: setattr(p.config, "rate", 0.75),
    "method": lambda p: setattr(p.Base, "scale", new_scale),
    "method of a subclass": lambda p: setattr(p.Config, "scale", new_scale),
    "method of an instance": lambda p: setattr(p.config, "scale", torch.cos),
    "method code": lambda p: setattr(p.Base.scale, "__code__", new_scale.__code__),
    "property": lambda p: setattr(p.Base, "offset", property(lambda self: 3.0)),
    "property of a subclass": lambda p: setattr(p.Config, "offset", property(lambda self: 3.0)),
    "attribute becomes property": lambda p: setattr(p.Config, "depth", property(lambda self: 1)),
    "static method": lambda p: setattr(p.Base, "twist", staticmethod(torch.cos)),
    "class method": lambda p: setattr(p.Base, "name_length", classmethod(lambda cls: 1)),
    "bases": lambda p: setattr(p.Config, "__bases__", (p.OtherConfig,)),
    "class of an instance": lambda p: setattr(p.config, "__class__", p.OtherConfig),
    "getattribute": lambda p: setattr(
        p.Config, "__getattribute__",
        lambda self, name: 1 if name == "depth" else object.__getattribute__(self, name),
    ),
    "another instance": lambda p: setattr(p, "config", p.Config()),
    "parameter": lambda p: setattr(p.layer, "weight", torch.nn.Parameter(torch.full((3,), 2.0))),
    "parameter data": lambda p: setattr(p.layer.weight, "data", torch.full((3,), 2.0)),
    "parameter in place": lambda p: p.layer.weight.data.mul_(3),
    "buffer": lambda p: setattr(p.layer, "running", torch.ones(3)),
    "training": lambda p: p.layer.eval(),
    "module": lambda p: setattr(p.layer, "inner", torch.nn.Identity()),
    "module attribute": lambda p: setattr(p.layer, "power", 2),
    "forward of an instance": lambda p: setattr(p.layer, "forward", torch.sin),
    "forward of a class": lambda p: setattr(p.Layer, "forward", lambda self, x: x + 1),
    "method of a module": lambda p: setattr(p.Layer, "finish", lambda self, y: y.tanh()),
    "forward hook": lambda p: p.layer.register_forward_hook(hook) and None,
    "hook of a submodule": lambda p: p.layer.inner.register_forward_hook(hook) and None,
    "hook of all modules": global_hook,
    "call of a class": lambda p: setattr(p.Layer, "__call__", lambda self, x: x + 1),
    "dtype": lambda p: p.layer.double(),
    "frozen": lambda p: p.layer.requires_grad_(False),
    "names of the module deleted": lambda p: setattr(p, "len", lambda x: 40),
}  # fmt: skip


def outcome(function, x):
    try:
        return function(x)
    except Exception as error:  # also what eager raises must be the same
        return type(error)


def agree(compiled, p, x):
    expected, actual = outcome(p.main, x), outcome(compiled, x)
    assert same(actual, expected) if isinstance(expected, torch.Tensor) else actual is expected


@pytest.mark.sampled
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_is_seen(name):
    p, x = program(), torch.linspace(-1, 1, 6).reshape(2, 3)
    compiled = weft_capture.capture(p.main, eager_backend)
    for _ in range(3):  # so that the checks remember
        agree(compiled, p, x)
    assert len(compiled._weft_capture.graphs) == 1
    undo = MUTATIONS[name](p)
    try:
        for _ in range(2):
            agree(compiled, p, x)
    finally:
        if undo is not None and name == "hook of all modules":
            undo()


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(sorted(set(MUTATIONS) - {"hook of all modules"})), max_size=6))
def test_changes_in_any_order(names):
    p, x = program(), torch.linspace(-1, 1, 6).reshape(2, 3)
    compiled = weft_capture.capture(p.main, eager_backend)
    for name in names:
        agree(compiled, p, x)
        with contextlib.suppress(AttributeError):  # an earlier change made it impossible
            MUTATIONS[name](p)
        agree(compiled, p, x)


def writes(a, b, c):
    a.add_(1)
    return a + b * c


SHARING = [
    lambda: (torch.zeros(4), torch.ones(4), torch.ones(4)),
    lambda: (lambda t: (t[:4], t[2:6], torch.ones(4)))(torch.zeros(8)),
    lambda: (lambda t: (t[:4], t[4:], torch.ones(4)))(torch.zeros(8)),
    lambda: (lambda t: (t, t, torch.ones(4)))(torch.zeros(4)),
    lambda: (lambda t: (t, torch.ones(4), t.detach()))(torch.zeros(4)),
    lambda: (lambda t: (torch.zeros(4), t[:4], t[1:5]))(torch.ones(8)),
]


@pytest.mark.parametrize("order", [1, -1])
def test_inputs_that_share_memory(order):
    def functional(graph, inputs):
        """As a backend that writes its inputs only when all is computed."""

        def run(*args):
            copies = [arg.clone() for arg in args]
            results = graph(*copies)
            for arg, copy in zip(args, copies, strict=True):
                arg.copy_(copy)
            return results

        addresses = {t.untyped_storage()._cdata for t in inputs}
        return run if len(addresses) == len(inputs) else graph.forward

    compiled = weft_capture.capture(writes, functional)
    for make, inference in itertools.product(SHARING[::order] * 2, (False, True)):
        with torch.inference_mode(inference):
            expected, actual = make(), make()
            assert same(compiled(*actual), writes(*expected))
            assert same(actual, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit.script:FutureWarning")
def test_tangents_of_forward_mode_are_not_lost():
    forward_ad = torch.autograd.forward_ad
    compiled = weft_capture.capture(lambda x: x.sin() * 2, lambda graph, inputs: graph.forward)
    x, tangent = torch.randn(3), torch.randn(3)
    for _ in range(2):
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, tangent)))
            torch.testing.assert_close(result.tangent, tangent * x.cos() * 2)
        assert torch.equal(compiled(x), x.sin() * 2)
    assert len(compiled._weft_capture.graphs) == 1


def reads_a_late_variable():
    """A function that does without a variable around it, one that calls it, and what sets it."""
    late = None

    def reader(x):
        try:
            return x + late
        except NameError:
            return x

    def caller(x):
        return reader(x) * 2

    def fill(value):
        nonlocal late
        late = value

    del late
    return reader, caller, fill


@pytest.mark.parametrize("which", [0, 1], ids=["own", "of an inlined function"])
def test_an_empty_cell_is_filled_later(which):
    functions = reads_a_late_variable()
    function, fill = functions[which], functions[2]
    captured = weft_capture.capture(function, eager_backend)
    x = torch.ones(2)
    assert torch.equal(captured(x), function(x))
    fill(5)
    assert torch.equal(captured(x), function(x))


@pytest.mark.parametrize("make", [dict, collections.OrderedDict])
def test_a_builtin_method_is_guarded_by_its_name(make):
    captured = weft_capture.capture(lambda x, ask: (x + 1, list(ask())), eager_backend)
    table = make({1: 2})
    for name in ("keys", "values", "items"):
        assert captured(torch.ones(2), getattr(table, name))[1] == list(getattr(table, name)())


class Box:
    def __init__(self, size):
        self.size = size


def _appends(x, a, b):
    a.append(1)
    return x * len(b)


def _sets(x, a, b):
    a["k"] = 2
    return x * len(b)


def _writes(x, a, b):
    a.size = 3
    return x * b.size


def _asks(x, a, b):
    return x + 1 if a is b else x - 1


def _both(x, a, b):
    inner = [a, b]
    b.append(2)
    return x * sum(map(len, inner))


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (_appends, list),
        (_sets, dict),
        (_writes, lambda: Box(1)),
        (_asks, list),
        (_asks, lambda: Box(1)),
        (_asks, lambda: torch.ones(2)),
        (_both, list),
    ],
)
def test_what_was_different_is_one_object_later(function, make):
    captured = weft_capture.capture(function, eager_backend)
    x = torch.ones(3)
    for _ in range(3):
        assert same(captured(x, make(), make()), function(x, make(), make()))
        one, other = make(), make()
        assert same(captured(x, one, one), function(x, other, other))


class Slotted:
    __slots__ = ("value",)


def test_a_slot_is_filled_later():
    captured = weft_capture.capture(lambda x, s: x * getattr(s, "value", 3), eager_backend)
    x, slotted = torch.ones(2), Slotted()
    assert same(captured(x, slotted), x * 3)
    slotted.value = 5
    assert same(captured(x, slotted), x * 5)
    del slotted.value
    assert same(captured(x, slotted), x * 3)


def test_attributes_by_a_descriptor():
    asked = []

    class Asks:
        def __get__(self, owner, cls):
            return lambda name: asked.append(name) or 2

    class Odd:
        __getattribute__ = Asks()

    captured = weft_capture.capture(lambda x, odd: x * odd.some, eager_backend)
    for _ in range(2):
        assert same(captured(torch.ones(2), Odd()), torch.full((2,), 2.0))
    assert asked.count("some") == 2


def test_a_fraction_and_a_decimal_of_one_value():
    half, same_half = fractions.Fraction(1, 2), decimal.Decimal("0.5")
    captured = weft_capture.capture(
        lambda x: (x + 1, half == same_half, same_half != half), eager_backend
    )
    assert captured(torch.ones(1))[1:] == (True, False)


@pytest.mark.parametrize("new", [lambda n: n + 1000, lambda n: n + 0.5, lambda n: f"{n}!"])
def test_identity_of_arguments_is_guarded_and_kept(new):
    compiled = weft_capture.capture(lambda x, a, b: (x + 1, a is b, b), eager_backend)
    for n in range(4):
        a = new(n)
        given = a if n % 2 else new(n)
        _, same_one, got = compiled(torch.ones(2), a, given)
        assert same_one is (a is given) and got is given


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.view(-1)[1:].add_(x.view(-1)[:-1]),
        lambda x: x[:1].expand(2, 3).add_(1),
        lambda x: x.view(-1).unfold(0, 3, 1).mul_(2),
        lambda x: x.as_strided((2, 2), (2, 2)).mul_(x[:, :2]),
        lambda x: x[:, 1:].add_(x[:, :2]),
        lambda x: torch.mm(x, x.t(), out=x[:, :2]),
        lambda x: x.index_add_(0, torch.zeros(1, dtype=torch.long), x[:1]),
    ],
)
def test_writes_that_overlap_are_real(write):
    x, y = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
    compiled = weft_capture.capture(write, eager_backend)
    with contextlib.suppress(RuntimeError):
        write(x)
    with contextlib.suppress(RuntimeError):
        compiled(y)
    assert torch.equal(x, y)
    assert {one.code for one in compiled._weft_capture.breaks} == {"operator-error"}


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_conjugates_and_negatives_from_outside():
    def run(z):
        return (z * 2).tolist(), z.is_conj(), z.is_neg(), (z.resolve_conj() + z).tolist()

    compiled, z = weft_capture.capture(run, eager_backend), torch.tensor([1 + 2j, 3 - 1j])
    for one in (z, z.conj(), z.imag, z.conj().imag, z):
        assert compiled(one) == run(one)


class Rated:
    rate = 0.5


@pytest.mark.parametrize(
    "read",
    [
        lambda: Rated.__dict__["rate"],
        lambda: vars(Rated).get("rate"),
        lambda: dict(Rated.__dict__)["rate"],
        lambda: [value for name, value in Rated.__dict__.items() if name == "rate"][0],
    ],
)
def test_what_is_read_from_the_dict_of_a_class_is_guarded(read, monkeypatch):
    captured = weft_capture.capture(lambda x: x * read(), eager_backend)
    for rate in (0.5, 3.0, 4.0):
        monkeypatch.setattr(Rated, "rate", rate)
        assert captured(torch.ones(1)).item() == rate


def test_a_patched_class_attribute_gets_its_present_value_back(monkeypatch):
    def function(x):
        with mock.patch.object(Rated, "rate", 2.0):
            return x * Rated.rate

    captured = weft_capture.capture(function, eager_backend)
    for rate in (0.5, 3.0, 4.0):
        monkeypatch.setattr(Rated, "rate", rate)
        assert captured(torch.ones(1)).item() == 2 and Rated.rate == rate


def test_a_symbolic_number_beside_infinity():
    captured = weft_capture.capture(lambda x, n: (x, n % math.inf, n // math.inf), eager_backend)
    for n in (3, -2, 4, -5):
        assert captured(torch.ones(1), n)[1:] == (n % math.inf, n // math.inf)
