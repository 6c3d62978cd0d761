"""What a check remembers of the last run: it must never say more than the guards do."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from weft_guards import (
    ClassUse,
    Guard,
    GuardSet,
    WeakIdentity,
    call_with,
    compile_check,
    explain_miss,
)
from weft_guards.abi import extension
from weft_guards.config import settings
from weft_guards.payloads import find_in_class
from weft_guards.sources import (
    DictSource,
    InstanceAttrSource,
    ItemSource,
    LocalSource,
    ProgramSource,
)

pytestmark = pytest.mark.skipif(extension() is None, reason="the C extension was not built")
SELF = LocalSource("self")


@pytest.fixture(autouse=True)
def form():
    """Instead of both forms."""
    return


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2
        self.sizes = [1, 2, 3]
        self.settings = {"a": 1, "b": [1.5]}
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class Other(Net):
    pass


class OtherLinear(nn.Linear):
    pass


def guards_of(net):
    guards = GuardSet()
    walk(guards, SELF, net)
    return guards


def walk(guards, source, value):
    """Guard all that is reachable, the way capture does."""
    if isinstance(value, torch.Tensor):
        guards.add(source, "TENSOR", value)
        return
    if value is None or isinstance(value, int | float | str | bool):
        guards.add(source, "CONST", value)
        return
    guards.add(source, "TYPE", type(value))
    if isinstance(value, list | tuple):
        guards.add(source, "LEN", len(value))
        for index, item in enumerate(value):
            walk(guards, ItemSource(source, index), item)
    elif isinstance(value, dict):
        guards.add(source, "DICT_KEYS", value)
        for key, item in value.items():
            walk(guards, ItemSource(source, key), item)
    elif isinstance(value, nn.Module):
        guards.add(source, "ATTR_ABSENT", "forward")
        for name, item in value.__dict__.items():
            walk(guards, InstanceAttrSource(source, name), item)


def replace_weight(net):
    net.parts[1].weight = nn.Parameter(torch.zeros(3, 2))


def resize_in_place(net):
    net.parts[0].weight.data = torch.zeros(2, 3)


def retype_in_place(net):
    net.parts[0].weight.data = torch.zeros(2, 2, dtype=torch.float64)


def swap_dict(net):
    net.parts[0].__dict__ = {**net.parts[0].__dict__, "forward": 1}


# Each changes what some guard is about, or nothing that matters (those named same_...).
MUTATIONS = [
    lambda net: setattr(net, "scale", 3),
    lambda net: setattr(net, "scale", True),
    lambda net: net.sizes.__setitem__(1, 5),
    lambda net: net.sizes.append(5),
    lambda net: setattr(net, "sizes", (1, 2, 3)),
    lambda net: net.settings.__setitem__("a", 2),
    lambda net: net.settings.__setitem__("c", 2),
    lambda net: net.settings.__setitem__("a", net.settings.pop("a")),
    lambda net: net.settings["b"].__setitem__(0, 2.5),
    lambda net: setattr(net, "training", False),
    lambda net: net.parts[1].eval(),
    lambda net: setattr(net.parts[0], "forward", len),
    lambda net: net.parts[0].register_forward_hook(lambda *args: None),
    lambda net: net.parts.append(nn.Linear(2, 2)),
    lambda net: net.parts[0].requires_grad_(False),
    lambda net: setattr(net, "__class__", Other),
    lambda net: setattr(net.parts[1], "__class__", OtherLinear),
    lambda net: setattr(net.parts[0], "bias", None),
    lambda net: net.parts[0].to(torch.float64),
    lambda net: net._modules.__setitem__("parts", nn.ModuleList()),
    replace_weight,
    resize_in_place,
    retype_in_place,
    swap_dict,
    lambda net: setattr(net, "scale", 2),  # from here on: the same again
    lambda net: setattr(net.parts[0], "__dict__", dict(net.parts[0].__dict__)),
    lambda net: net.parts[1].weight.data.fill_(1),
    lambda net: setattr(net.parts[0], "weight", nn.Parameter(torch.ones(2, 2))),
    lambda net: net.settings.update(a=1),
    lambda net: setattr(net, "sizes", [1, 2, 3]),
    lambda net: net.eval().train(),
]


@pytest.mark.parametrize("seed", range(12))
def test_memos_agree_with_the_python_form_while_state_changes(seed):
    rng = random.Random(seed)
    net = Net()
    guards = guards_of(net)
    check = compile_check(guards, ("self",))
    assert check.residual is None
    with settings.patch(native_checks=False):
        slow = compile_check(guards, ("self",))
    for _ in range(60):
        for _ in range(rng.choice((1, 1, 2, 9))):
            assert check(None, net) == slow(None, net)
        if rng.random() < 0.3 or not slow(None, net):
            net = Net()
        else:
            rng.choice(MUTATIONS)(net)


@pytest.mark.parametrize("index", range(len(MUTATIONS)))
def test_every_change_is_seen_by_a_memo(index):
    net = Net()
    guards = guards_of(net)
    check = compile_check(guards, ("self",))
    with settings.patch(native_checks=False):
        slow = compile_check(guards, ("self",))
    assert all(check(None, net) for _ in range(5))
    MUTATIONS[index](net)
    assert [check(None, net) for _ in range(3)] == [slow(None, net)] * 3


def test_another_object_at_the_same_address_is_another_object():
    check = compile_check(guards_of(Net()), ("self",))
    for round_ in range(50):
        net = Net()
        if round_ % 3 == 1:
            net.parts[1].weight = None
        assert [check(None, net) for _ in range(4)] == [round_ % 3 != 1] * 4
        del net


def test_memos_keep_nothing_alive():
    net = Net()
    check = compile_check(guards_of(net), ("self",))
    assert all(check(None, net) for _ in range(5))
    alive = weakref.ref(net.parts[0].weight)
    del net
    gc.collect()
    assert alive() is None


def sources_of(count):
    parts = ItemSource(DictSource(SELF), "parts")
    return [ItemSource(DictSource(ItemSource(parts, i)), "w") for i in range(count)]


class Bag:
    pass


def bag(count):
    bag = Bag()
    bag.parts = [Bag() for _ in range(count)]
    for index, part in enumerate(bag.parts):
        part.w = index
    return bag


def test_inputs_are_read_from_the_roots():
    calls = []
    function, roots = call_with(lambda *args: calls.append(args), sources_of(20))
    assert roots == [SELF]
    one = bag(20)
    for _ in range(4):
        function(None, one)
    one.parts[3].w = "new"
    function(None, one)
    one.parts[4] = one.parts[5]
    function(None, one)
    function(None, bag(20))
    plain = tuple(range(20))
    changed = (*plain[:3], "new", *plain[4:])
    assert calls == [plain] * 4 + [changed, (*changed[:4], 5, *changed[5:]), plain]


def test_many_inputs_do_not_overflow_and_errors_are_raised():
    function, _ = call_with(lambda *args: len(args), sources_of(400))
    assert function(None, bag(400)) == 400
    broken = bag(400)
    del broken.parts[7].w
    with pytest.raises(LookupError):
        function(None, broken)
    with pytest.raises(TypeError):
        function(None)
    with pytest.raises(ZeroDivisionError):
        call_with(lambda *args: 1 / 0, sources_of(20))[0](None, bag(20))


def test_few_inputs_are_left_to_bytecode():
    assert call_with(len, sources_of(1)) is None


class Reader:
    level = 1

    def method(self):
        return 1

    @property
    def size(self):
        return 2


def class_guard(cls, *names):
    use = ClassUse.of(cls, {name: find_in_class(cls, name) for name in names})
    return Guard.of(ProgramSource(WeakIdentity(cls)), "CLASS", use)


@pytest.mark.parametrize("native_checks", [True, False])
def test_names_of_a_class(native_checks):
    with settings.patch(native_checks=native_checks):
        cls = type("Local", (Reader,), {})
        check = compile_check([class_guard(cls, "method", "missing")], ())
        strict = compile_check([class_guard(cls, "size")], ())
        assert check(None)
        cls.level = 2  # changes the version, but no name that is guarded
        assert [check(None), check(None)] == [True, True]
        cls.missing = 1
        assert not check(None)
        del cls.missing
        assert check(None)
        cls.method = Reader.method
        assert check(None)
        cls.method = lambda self: 2
        assert not check(None)
        cls.size = 1
        assert not strict(None)
        (miss,) = explain_miss([class_guard(cls, "method")], (lambda: 1), ()) or [None]
        assert miss is None
        dead = compile_check([class_guard(type("Gone", (), {}), "x")], ())
        gc.collect()
        assert not dead(None)


def test_a_changed_class_is_explained():
    cls = type("Local", (Reader,), {})
    guard = class_guard(cls, "method", "size")
    cls.method = lambda self: 2
    (miss,) = explain_miss([guard], (lambda: 1), ())
    assert "changed: method" in str(miss)
    assert guard.identities()[0].get() is cls
