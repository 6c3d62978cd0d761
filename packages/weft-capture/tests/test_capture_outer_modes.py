"""Function modes and devices that are active around a captured call."""

import contextlib

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from mode_programs import PROGRAMS, Counts, Shifts, check_same, whole
from torch import nn
from torch.overrides import TorchFunctionMode


def under(kinds, function, *args):
    """Return the result of a call under new modes, and what became of them."""
    modes = [kind() for kind in kinds]
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        result = function(*args)
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._is_torch_function_enabled()
    return result, [vars(mode) for mode in modes]


def check_under(kinds, optimised, function, *args):
    copies = [[arg.clone() for arg in args] for _ in range(2)]
    check_same(under(kinds, optimised, *copies[0]), under(kinds, function, *copies[1]))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_under_outer_modes(program):
    optimised = whole(program)
    for kinds in ([Counts], [Shifts], [Counts, Shifts], [], [Shifts, Counts], [Counts]):
        check_under(kinds, optimised, program, torch.arange(4.0), torch.ones(4) * 3)
    assert len(optimised._weft_capture.caches[program.__code__].entries) == 5


def split(x):
    y = torch.sin(x)
    weft_capture.graph_break()
    return y + torch.sin(x)


def split_in_a_call(x):
    return split(x * 2) + torch.sin(x)


def split_in_a_loop(x):
    for _ in range(3):
        x = torch.sin(x)
        weft_capture.graph_break()
    return x


def enters_another(x):
    y = torch.sin(x)
    with Shifts():
        y = y + torch.sin(x)
        weft_capture.graph_break()
        y = y + torch.sin(x)
    return y + torch.sin(x)


def switches_off(x):
    with torch._C.DisableTorchFunction():
        y = torch.sin(x)
    return y + torch.sin(x), torch._C._len_torch_function_stack()


def raises(x):
    y = torch.sin(x)
    try:
        torch.sin(x).nothing()
    except AttributeError:
        return y + torch.sin(x)


def without_gradients(x):
    with torch.no_grad():
        y = torch.sin(x)
    return y + x


def writes(x):
    x.note = torch.sin(x)
    x.add_(1)
    return x.note


def prints(x):
    print("now")
    return torch.sin(x)


def shows(x):
    return f"{torch.sin(x)}", torch.sin(x) + 1


def reads_a_number(x):
    number = torch.sin(x).sum().item() * 2 - 1
    return x * number, -number


def optimises(x):
    weight = x.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    (weight * x).sum().backward()
    optimizer.step()
    return weight.detach()


def asks(x):
    mode = torch.overrides._get_current_function_mode()
    return type(mode).__name__, torch.sin(x), x.grad, x.shape[0]


BROKEN = [
    split, split_in_a_call, split_in_a_loop, enters_another, switches_off, raises,
    without_gradients, writes, prints, shows, reads_a_number, optimises, asks,
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("kinds", [[Counts], [Shifts], [Counts, Shifts]])
@pytest.mark.parametrize("function", BROKEN)
def test_pieces_of_a_frame_under_outer_modes(function, kinds):
    optimised = weft_capture.capture(function, eager_backend)
    for _ in range(3):
        check_under(kinds, optimised, function, torch.arange(3.0))
    check_same(optimised(torch.arange(3.0)), function(torch.arange(3.0)))


def test_a_mode_entered_before_a_break_and_left_after_it():
    def function(x):
        mode = Counts()
        mode.__enter__()
        x = torch.sin(x)
        weft_capture.graph_break()
        x = torch.sin(x)
        mode.__exit__(None, None, None)
        return torch.sin(x), mode.seen

    optimised = weft_capture.capture(function, eager_backend)
    for _ in range(3):
        check_under([], optimised, function, torch.ones(3))


def test_a_break_in_a_handler():
    class Breaks(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.sin:
                weft_capture.graph_break()
            return func(*args, **(kwargs or {})) * 2

    def function(x):
        return torch.sin(x + 1) + x

    optimised = weft_capture.capture(function, eager_backend)
    for _ in range(2):
        check_under([Breaks, Counts], optimised, function, torch.ones(3))


def test_what_an_outer_mode_reads_is_guarded():
    class Local(Shifts):
        pass

    mode, x = Local(), torch.ones(3)

    def function(x):
        return torch.sin(x)

    optimised = whole(function)

    def check():
        with mode:
            pair = optimised(x), function(x)
        check_same(*pair)

    check()
    Local.by = 3.0
    check()
    mode.by = 4.0
    check()
    Local.__torch_function__ = lambda self, func, types, args=(), kwargs=None: args[0] * 0
    check()
    check_same(optimised(x), function(x))
    check_under([Counts], optimised, function, x)


def test_an_error_in_the_graph_switches_handlers_on_again():
    def failing(graph, inputs):
        def run(*args):
            raise RuntimeError("in the graph")

        return run

    optimised = weft_capture.capture(split, failing)
    with Counts():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="in the graph"):
                optimised(torch.ones(3))
            assert torch._C._is_torch_function_enabled()


@pytest.mark.parametrize(
    "off", [torch._C.DisableTorchFunction, torch._C.DisableTorchFunctionSubclass]
)
def test_an_outer_mode_switched_off_by_the_caller(off):
    def function(x):
        return torch.sin(x)

    optimised = weft_capture.capture(function, eager_backend)

    def call(run, x):
        with off():
            return run(x)

    x = torch.ones(3)
    for _ in range(2):
        check_under([Shifts], optimised, function, x)
        with Shifts():
            pair = call(optimised, x), call(function, x)
        check_same(*pair)


def test_training_under_an_outer_mode():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4))
    optimised = whole(net)

    def step(run):
        net.zero_grad()
        x = torch.ones(2, 3)
        with Counts() as mode:
            run(x).sum().backward()
        return [one.grad for one in net.parameters()], mode.seen

    expected = step(net)
    for _ in range(2):
        check_same(step(optimised), expected)


# ---- devices


def makes(x):
    return torch.ones(2), torch.tensor([1.0]), torch.zeros_like(x), torch.ones(1, device="cpu")


def makes_in_a_block(x):
    with torch.device("meta"):
        y = torch.ones(2)
        with torch.device("cpu"):
            z = torch.ones(3)
        w = torch.zeros(3)
    return y, z, w, torch.ones(1), x + 1


def makes_a_layer(x):
    with torch.device("meta"):
        y = torch.empty(3, dtype=torch.int)
    return y, torch.get_default_device(), nn.functional.relu(x), torch.arange(3)


def under_a_mode(x):
    with Counts() as outer, torch.device("meta"), Counts() as inner:
        y = torch.ones(2) + 1
    return y, outer.seen, inner.seen, torch.ones(1)


WITH_DEVICES = [makes, makes_in_a_block, makes_a_layer, under_a_mode]


def places(result):
    return repr(torch.utils._pytree.tree_map(repr, result))


@pytest.mark.parametrize("function", WITH_DEVICES)
def test_devices_are_part_of_one_graph(function):
    optimised, x = whole(function), torch.ones(3)
    for device in (None, "cpu", "meta", "cpu", None):
        with torch.device(device) if device else contextlib.nullcontext():
            assert places(optimised(x)) == places(function(x))
    entries = optimised._weft_capture.caches[function.__code__].entries
    assert len(entries) == 3


@pytest.mark.slow
@pytest.mark.parametrize("function", WITH_DEVICES)
def test_a_default_device_is_guarded(function):
    optimised, x = whole(function), torch.ones(3)
    try:
        for device in ("cpu", "meta", None, "meta"):
            torch.set_default_device(device)
            assert places(optimised(x)) == places(function(x))
            with Shifts():
                assert places(optimised(x)) == places(function(x))
    finally:
        torch.set_default_device(None)


def sets_default(x):
    torch.set_default_device("meta")
    y = torch.ones(2)
    torch.set_default_device("cpu")
    return y, torch.ones(2), x + 1


def splits_a_block(x):
    with torch.device("meta"):
        y = torch.ones(1)
        weft_capture.graph_break()
        z = torch.ones(2)
    return y, z, torch.ones(1), x + 1


@pytest.mark.parametrize("function", [sets_default, splits_a_block, split])
def test_devices_among_breaks(function):
    optimised, x = weft_capture.capture(function, eager_backend), torch.ones(2)
    try:
        for device in (None, "meta", "cpu", None):
            torch.set_default_device(device)
            found = places(optimised(x))
            torch.set_default_device(device)
            assert found == places(function(x))
    finally:
        torch.set_default_device(None)


def catches_its_own(x):
    done = []
    try:
        done.append(x @ x)
        done.append(nn.functional.linear(x, torch.ones(2, 2, dtype=torch.long)))
    except RuntimeError as error:
        done.append(str(error))
        done.append(torch.ones(1))
    return done


def test_an_operation_that_raises_under_a_default_device():
    captured, x = weft_capture.capture(catches_its_own, eager_backend), torch.ones(2, 2)
    torch.set_default_device("cpu")
    try:
        check_same(captured(x), catches_its_own(x))
        assert torch._C._is_torch_function_enabled()
        check_same(captured(x), catches_its_own(x))
    finally:
        torch.set_default_device(None)
