"""Tensor subclasses with a `__torch_function__` are traced through."""

import warnings

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from mode_programs import (
    Shifts,
    arithmetic,
    check_same,
    functions,
    in_place,
    methods,
    plain,
    questions,
    whole,
)
from torch import nn
from torch.nn import functional as F
from weft_core.collector import collector_paused
from weft_core.errors import Unsupported


class Tagged(torch.Tensor):
    """Carries a tag from operand to result, and doubles what `add` gives."""

    gain = 2

    @staticmethod
    def __new__(cls, data, tag="none"):
        made = torch.Tensor._make_subclass(cls, data)
        made.tag = tag
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.add:
            out = out.as_subclass(torch.Tensor).mul(cls.gain).as_subclass(cls)
        if type(out) is cls:
            out.tag = next(
                (getattr(one, "tag", "") for one in args if isinstance(one, cls)), "none"
            )
        return out

    def twice(self):
        return self + self


class Inherits(torch.Tensor):
    """No handler of its own: results are of its class."""


def both_ways(x, y):
    back = x.as_subclass(torch.Tensor)
    return back + 1, back.as_subclass(type(x)), isinstance(x, torch.Tensor), y * back


PROGRAMS = [arithmetic, functions, questions, methods, in_place, both_ways]


def operands(kind):
    x = kind(torch.arange(4.0)) if kind is Tagged else torch.arange(4.0).as_subclass(kind)
    return x, torch.ones(4) * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Tagged, Inherits])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_on_subclasses(program, kind):
    optimised = whole(program)
    for _ in range(2):
        check_same(optimised(*operands(kind)), program(*operands(kind)))
    assert len(optimised._weft_capture.caches[program.__code__].entries) == 1


def test_a_subclass_and_its_attributes():
    def function(x):
        y = Tagged(x * 2, "made")
        z = x.twice() + y
        return z, z.tag, x.tag, (y * 1).tag, hasattr(y, "other")

    x = Tagged(torch.ones(3), "given")
    check_same(whole(function)(x), function(x))
    x.tag = "other"
    optimised = whole(function)
    check_same(optimised(x), function(x))
    x.tag = "changed"
    check_same(optimised(x), function(x))


def test_an_object_that_comes_back_is_the_same_one():
    def function(x, y):
        x.note = y + 1
        return x, [x], x * y

    x, y = operands(Inherits)
    found = whole(function)(x, y)
    assert found[0] is x and found[1][0] is x
    assert torch.equal(plain(x.note), y + 1)


@pytest.mark.parametrize("change", ["handler", "default", "attribute", "method"])
def test_what_the_class_says_is_guarded(change):
    class Local(Tagged):
        pass

    def handler(cls, func, types, args=(), kwargs=None):
        return plain(super(Tagged, cls).__torch_function__(func, types, args, kwargs or {})) * 0

    def function(x):
        return x + 1, x.twice()

    x = Local(torch.ones(3))
    optimised = whole(function)
    check_same(optimised(x), function(x))
    if change == "handler":
        Local.__torch_function__ = classmethod(handler)
    elif change == "default":
        Local.__torch_function__ = torch._C._disabled_torch_function_impl
    elif change == "attribute":
        Local.gain = 5
    else:
        Local.twice = lambda self: self * 100
    optimised = weft_capture.capture(function, eager_backend) if change == "default" else optimised
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(optimised(x), function(x))


def test_one_class_is_not_taken_for_another():
    optimised = whole(arithmetic)
    for kind in (Tagged, Inherits, Tagged):
        check_same(optimised(*operands(kind)), arithmetic(*operands(kind)))
    y = torch.ones(4)
    check_same(optimised(y, y), arithmetic(y, y))


def test_gradients_go_through():
    def function(x, w):
        return (torch.sin(x) * w + x).sum()

    grads = []
    for run in (function, whole(function)):
        leaf = torch.arange(3.0, requires_grad=True)
        w = torch.ones(3, requires_grad=True)
        run(leaf.as_subclass(Inherits), w).backward()
        grads.append((leaf.grad, w.grad))
    check_same(*grads)


def test_two_classes_are_asked_in_torchs_order():
    class First(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return [cls.__name__, [kind.__name__ for kind in types]]

    class Second(First):
        pass

    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    def function(a, b, c):
        pairs = [(a, b), (b, a), (c, a), (b, c)]
        results = [[torch.add(*pair), pair[0] * pair[1]] for pair in pairs]
        return results, torch.cat([c, a, b]), torch.einsum("i,i->", c, a)

    args = [torch.ones(2).as_subclass(kind) for kind in (First, Second, Other)]
    assert whole(function)(*args) == function(*args)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_handlers_of_what_is_no_tensor_run_eagerly():
    handled = {}

    class Diagonal:
        def __init__(self, n, value):
            self.n, self.value = n, value

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func not in handled:
                return NotImplemented
            return handled[func](*args, **(kwargs or {}))

    handled[torch.mean] = lambda d: d.value / d.n
    handled[torch.matmul] = lambda d, x: d.value * x

    def function(x):
        d = Diagonal(4, 2.0)
        return torch.mean(d), torch.matmul(d, x)

    optimised = weft_capture.capture(function, eager_backend)
    check_same(optimised(torch.ones(4)), function(torch.ones(4)))


def test_subclasses_off():
    def function(x):
        with torch._C.DisableTorchFunctionSubclass():
            y = x + 1
        return y, x + 1

    x = operands(Tagged)[0]
    check_same(whole(function)(x), function(x))


def test_a_break_in_a_handler():
    class Breaks(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            weft_capture.graph_break()
            return super().__torch_function__(func, types, args, kwargs or {})

    def function(x, y):
        y = torch.sin(y)
        return (x + y) * 2, y + 1

    args = torch.ones(3).as_subclass(Breaks), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(weft_capture.capture(function, eager_backend)(*args), function(*args))
    with pytest.raises(Unsupported):
        whole(function)(*args)


def test_modes_off():
    def function(x):
        with Shifts(), torch._C.DisableTorchFunction():
            y = torch.sin(x)
        return y, torch.sin(x)

    check_same(whole(function)(torch.ones(3)), function(torch.ones(3)))


class OfDispatch(torch.Tensor):
    """Says what operations do below autograd."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {})) + 1


class OfBoth(Tagged):
    __torch_dispatch__ = OfDispatch.__torch_dispatch__


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("kind", [OfDispatch, OfBoth])
def test_dispatch_of_a_class_breaks(kind):
    def function(x, y):
        return torch.sin(y) * 2, torch.sin(x)

    x, y = torch.ones(3).as_subclass(kind), torch.ones(3)
    optimised = weft_capture.capture(function, eager_backend)
    for one in (x, y, x):
        check_same(optimised(one, y), function(one, y))
    with pytest.raises(Unsupported) as error:
        whole(function)(x, y)
    assert error.value.code == "tensor-subclass"


def turned(x):
    y = x * 1
    return y.t_(), y.shape, y


def unsqueezed(x):
    return x.unsqueeze_(0), x.shape


def hooked(x):
    x.register_hook(lambda g: g * 3)
    return (x * 2).sum()


def of_the_object(x):
    return x.is_leaf, x.grad, x.grad_fn is None, x._is_view(), x._version, x.output_nr


def resized(x):
    y = x * 1
    torch.add(x, torch.ones(2, 3, 3), out=y)
    return y


def copied(x):
    import copy

    return copy.copy(x), copy.deepcopy(x.detach())


def printed(x):
    print(x)
    return x + 1


def nested(x):
    return torch.utils._pytree.tree_map(lambda one: one * 2, {"a": [x, (x, 1)]})["a"], [x] == [x]


def indexes(x):
    y = torch.zeros(2, 3)
    y[0] = x[1].detach()
    y[x.detach() > 1] = 5
    return y, y[x.detach() < 1], x[x > 0], x.tolist(), x.sum().item(), float(x.max())


def without_gradients(x):
    with torch.no_grad():
        y = x * 2
    return y, y.requires_grad, x.detach().requires_grad_()


def gives_gradients(x):
    (g,) = torch.autograd.grad((x * x).sum(), x)
    return g


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Tagged, Inherits])
@pytest.mark.parametrize("needs_gradients", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        turned, unsqueezed, hooked, of_the_object, resized, copied, printed, nested, indexes,
        without_gradients, gives_gradients,
    ],
)  # fmt: skip
def test_what_is_of_the_object_is_right(program, kind, needs_gradients, capsys):
    def run(function):
        leaf = torch.arange(6.0).reshape(2, 3).requires_grad_(needs_gradients)
        x = leaf.as_subclass(kind)
        try:
            result = function(x)
        except RuntimeError as error:
            return "error", type(error).__name__
        if program is hooked:
            (result.as_subclass(torch.Tensor) + plain(x).sum()).backward()
            return [leaf.grad]
        return result, x.shape, leaf.shape, capsys.readouterr().out

    check_same(run(weft_capture.capture(program, eager_backend)), run(program))


def test_off_for_real_is_guarded():
    def function(x):
        return x + 1

    x, optimised = operands(Tagged)[0], whole(function)
    for _ in range(2):
        check_same(optimised(x), function(x))
        with torch._C.DisableTorchFunctionSubclass():
            found, expected = optimised(x), function(x)
        check_same(found, expected)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_effects_of_a_handler_keep_their_order():
    seen = []

    class Notes(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    def function(x):
        y = x + 1
        seen.append("between")
        return torch.sin(y) * x

    logs, x = [], torch.ones(3).as_subclass(Notes)
    for run in (function, whole(function)):
        seen.clear()
        check_same(run(x), function(x))
        logs.append(list(seen))
    assert logs[0] == logs[1]


def test_a_global_that_the_handler_reads_is_guarded():
    class Scaled(torch.Tensor):
        table = {"sin": 2.0}  # noqa: RUF012 - it is changed on purpose

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            factor = cls.table.get(func.__name__)
            return out if factor is None else out.as_subclass(torch.Tensor) * factor

    def function(x):
        return torch.sin(x), torch.cos(x)

    x, optimised = torch.ones(3).as_subclass(Scaled), whole(function)
    check_same(optimised(x), function(x))
    for change in ({"sin": 3.0}, {"cos": 4.0}, {}):
        Scaled.table.clear()
        Scaled.table.update(change)
        check_same(optimised(x), function(x))
    Scaled.table = {"sin": 7.0}
    check_same(optimised(x), function(x))


@pytest.mark.parametrize("kind", [Tagged, Inherits])
def test_a_parameter_of_a_class_is_one_by_its_mark(kind):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3).as_subclass(kind))

        def forward(self, x, other):
            marks = [isinstance(one, nn.Parameter) for one in (self.weight, other)]
            return F.linear(x, self.weight), marks, type(self.weight).__name__

    layer, x = Scale(), torch.ones(2, 3)
    run = whole(layer.forward)
    unmarked = torch.ones(3).as_subclass(kind)
    for other in (unmarked, nn.Parameter(torch.ones(3).as_subclass(kind)), unmarked):
        check_same(run(x, other), layer.forward(x, other))
    plain(run(x, unmarked)[0]).sum().backward()
    assert layer.weight.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_lookup_of_the_program_comes_first():
    class Looks(torch.Tensor):
        def __getattribute__(self, name):
            return "looked" if name == "dtype" else super().__getattribute__(name)

    def function(x):
        return x.dtype, x.ndim, x + 1

    x = torch.ones(3).as_subclass(Looks)
    check_same(weft_capture.capture(function, eager_backend)(x), function(x))


@pytest.mark.parametrize("change", ["dispatch", "finalizer"])
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_what_a_class_gets_later_is_seen(change):
    class Local(torch.Tensor):
        pass

    def function(x):
        return x.as_subclass(Local) * 2, type(x).__name__

    died, x = [], torch.ones(3)
    optimised = weft_capture.capture(function, eager_backend)
    check_same(optimised(x), function(x))
    if change == "dispatch":
        Local.__torch_dispatch__ = OfDispatch.__torch_dispatch__
    else:
        Local.__del__ = lambda self: died.append(1)
    with collector_paused():  # nothing of a capture holds what died
        found = [optimised(x), list(died)]
    died.clear()
    check_same(found, [function(x), list(died)])
