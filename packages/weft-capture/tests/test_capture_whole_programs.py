"""What programs that torch.compile captures in one graph use: each is one graph here, too."""

import collections
import dataclasses
import functools
import threading
import typing

import numpy as np
import pytest
import torch
import weft_capture
from capture_check import X, check, eager_backend, same
from torch._higher_order_ops import InvokeQuant, foreach_map
from torch._higher_order_ops import print as print_text
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.wrap import wrap

F = torch.nn.functional
D = torch.distributions
LINE = torch.arange(4.0)
SMALL = np.iinfo(np.int8)
COMPLEX = torch.complex(X, X + 1)

ARRAYS = {
    "meshgrid": lambda t: np.meshgrid(t.numpy(), np.arange(3.0), indexing="ij")[1],
    "fft": lambda t: np.fft.ifft(np.fft.fft(t.numpy())).real,
    "fft of two axes": lambda t: np.abs(np.fft.fft2(t.reshape(2, 2).numpy(), axes=(0, 1))),
    "frequencies": lambda t: np.fft.fftshift(np.fft.fftfreq(4, d=0.5)) + t.numpy(),
    "frequencies of half": lambda t: np.fft.rfftfreq(6) + t.numpy(),
    "take_along_axis": lambda t: np.take_along_axis(t.numpy(), np.array([2, 0]), axis=0),
    "iinfo": lambda t: t + np.iinfo(np.int32).max + np.iinfo("int8").min,
    "finfo": lambda t: np.maximum(t.numpy(), np.finfo(t.numpy().dtype).eps),
    "dtype": lambda t: t.numpy().astype(np.dtype("float64")) + np.dtype("int16").itemsize,
    "issubdtype": lambda t: t if np.issubdtype(t.numpy().dtype, np.floating) else t + 1,
    "strides": lambda t: t.numpy() + t.reshape(2, 2).numpy().strides[0],
    "iinfo from outside": lambda t: t.numpy() + SMALL.max,
    "imaginary parts": lambda t: (t.numpy() * 2j).imag + np.angle(np.fft.fft(t.numpy())),
    "conjugates": lambda t: np.conj(t.numpy() * 1j) - (t.numpy() * 1j).conj(),
    "shifts of axes": lambda t: np.fft.fftshift(np.fft.fft2(t.reshape(2, 2).numpy()), axes=0),
    "differences": lambda t: np.diff(t.numpy()) + np.gradient(t.numpy())[1:],
    "argsort": lambda t: np.argsort((t.numpy() * 7).astype(np.int64) % 3),
    "argsort of columns": lambda t: (t.reshape(2, 2).numpy() > 1).argsort(axis=0),
}
DATA = {
    "tolist": lambda t: [number * 2 for number in t.long().tolist()],
    "item": lambda t: t * t.sum().item(),
    "nonzero": lambda t: t.nonzero(),
    "a mask": lambda t: t[t > 1] * 2,
    "unique": lambda t: t.unique() + 1,
    "a tensor of tensors": lambda t: torch.tensor([[t[0], 1.0], [2, t[1].long()]]),
    "as_tensor of tensors": lambda t: torch.as_tensor([t[2], t[1].double()]),
    "a tensor of a range": lambda t: torch.tensor(range(3, 9, 2)) + torch.tensor(range(0)).sum(),
    "numbers by a tensor": lambda t: t * [1.5, 2.5, 3.5][t.argmin()],
    "tensors by a tensor": lambda t: [t, t + 1, t.sin()][t.argmin()] * 2,
    "the largest of tensors": lambda t: max(t.sum(), t[0], t.prod()) + min(v * 1 for v in t),
}
WARNING = {
    "softmax": lambda t: F.softmax(t),
    "loss": lambda t: F.mse_loss(t, t[:1]) + F.mse_loss(t, t * 2, size_average=True),
    "divergence": lambda t: F.kl_div(t, t),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    scale: int = 2
    shift: float = 3.0


@weft_capture.allow_in_graph
def applied(t, setting):
    return t * setting.scale + setting.shift


class Base:
    pass


class First(Base):
    factor = 2


class Second(Base):
    factor = 5


LOCAL = threading.local()
LOCAL.factor = 3
Number = typing.TypeVar("Number", bound=int)
TIMES = functools.partial(torch.mul, other=3)


def reads_local(t):
    LOCAL.last = t + 1
    own = threading.local()
    own.value = t * LOCAL.factor
    return own.value, LOCAL.last, hasattr(LOCAL, "unknown"), getattr(LOCAL, "factor", None)


def groups(t):
    found = collections.defaultdict.fromkeys("ab", 2)
    return t * found["a"], type(found).__name__, found.default_factory


PYTHON = {
    "a frozen dataclass": lambda t: applied(t, Setting()) + applied(t, Setting(3, shift=1.0)),
    "fromkeys": groups,
    "attributes of a partial": lambda t: TIMES.func(t, TIMES.keywords["other"]),
    "threading.local": reads_local,
    "a TypeVar": lambda t: (t * 1, Number.__name__, Number.__bound__ is int),
    "type hints": lambda t: (t * 1, typing.get_type_hints(Setting)["scale"] is int),
    "subclasses": lambda t: t * sum(c.factor for c in Base.__subclasses__()),
    "ids": lambda t: t * len({id(v) for v in (t, t, LINE)}),
}


def tf32(t):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    result = t @ t, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    return result


def deterministic(t):
    torch.use_deterministic_algorithms(True)
    inside = t.cumsum(0), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    return inside, torch.are_deterministic_algorithms_enabled()


def precise(t):
    torch.set_float32_matmul_precision("highest")
    with torch.autograd.set_detect_anomaly(False):
        return t @ t, torch.get_float32_matmul_precision()


SETTINGS = {"tf32": tf32, "deterministic": deterministic, "precision": precise}
OPERATORS = {
    "wrap": lambda t: wrap(lambda v, k: v.sin() * k, t, 2),
    "strict_mode": lambda t: strict_mode(lambda v: v.sin(), (t,)),
    "hints_wrapper": lambda t: hints_wrapper(lambda v, k: v * k, (t, 2), {}, hints={"a": 1}),
    "invoke_quant": lambda t: InvokeQuant()(lambda v: v.sin(), t, scheme="nf4"),
    "entropy": lambda t: D.Categorical(logits=t).entropy(),
    "a transformed distribution": lambda t: D.TransformedDistribution(
        D.Normal(t, 1.0), [D.TanhTransform()]
    ).log_prob(t.tanh() / 2),
}
PROGRAMS = {**ARRAYS, **DATA, **PYTHON, **SETTINGS, **OPERATORS}


def test_a_function_for_each_row_of_lists():
    def mapped(t):
        return foreach_map(torch.where, [t > 1, t > 2], (t, t), 1.0)

    # Eager execution of the operator loads torch's compiler.
    expected = [torch.where(LINE > 1, LINE, 1.0), torch.where(LINE > 2, LINE, 1.0)]
    captured = weft_capture.capture(mapped, eager_backend, fullgraph=True)
    assert same(captured(LINE), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_one_graph(name, monkeypatch):
    # torch.testing's internals, which other tests import, forbid settings outside of a block.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    assert len(check(PROGRAMS[name], LINE).graphs) == 1


def test_parts_of_complex_arrays():
    check(lambda t: (t.numpy().imag + t.numpy().real, t.numpy().imag), COMPLEX)


@pytest.mark.parametrize("name", WARNING)
def test_a_function_of_torch_that_warns_is_traced(name):
    optimised = weft_capture.capture(WARNING[name], eager_backend, fullgraph=True)
    seen = []
    for function in (WARNING[name], optimised, optimised):
        with pytest.warns(UserWarning) as records:
            function(LINE)
        seen.append([(str(r.message), r.filename, r.lineno) for r in records])
    assert seen[0] == seen[1] == seen[2]


def test_arrays_of_random_numbers():
    def draws(t):
        np.random.seed(3)
        order = torch.from_numpy(np.random.permutation(4))
        chosen = np.random.choice(5, (2, 2), p=[0.2] * 5), np.random.choice(9, 2, replace=False)
        return t.numpy() + np.random.rand(4), np.random.normal(size=(2, 3)), t[order], chosen

    optimised = weft_capture.capture(draws, eager_backend, fullgraph=True)
    for _ in range(2):
        assert same(draws(LINE), optimised(LINE))


def test_an_operator_prints(capsys):
    def prints(t):
        print_text("rows {} of {x}", 3, x=t.shape[0])
        return t + 1

    check(prints, LINE)
    assert capsys.readouterr().out == "rows 3 of 4\n" * 3


def test_the_larger_of_two_inputs_is_the_object_itself():
    a, b = torch.tensor(1.0), torch.tensor(2.0)
    optimised = weft_capture.capture(lambda t, u: max(t, u), eager_backend)
    assert optimised(a, b) is b
    assert optimised(b, a) is b


def test_a_setting_between_operations_breaks():
    def sets(t):
        y = t @ t
        torch.set_float32_matmul_precision("high")
        y = y + 1
        torch.set_float32_matmul_precision("highest")
        return y

    captured = check(sets, LINE, fullgraph=False)
    assert captured.breaks[0].code == "side-effect"


def test_data_of_another_shape_is_replaced():
    def replaces(t, other):
        t.data = other[:2] * 2
        t.add_(1)
        return t * 3, t.shape

    check(replaces, LINE, torch.ones(3))


def test_the_first_call_of_a_lazy_module_is_eager():
    net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.ReLU(), torch.nn.LazyLinear(2))
    optimised = weft_capture.capture(net, eager_backend, fullgraph=True)
    with pytest.warns(UserWarning, match="lazy-module"):
        first = optimised(X)
    torch.testing.assert_close(optimised(X), first)
    assert torch.equal(net(X), first)
    assert type(net[0]) is torch.nn.Linear


def test_batches_are_loaded_eagerly_and_each_step_is_captured():
    data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10))

    def epoch(weight, loader):
        total = 0.0
        for x, y in loader:
            total += (x @ weight).sum().item() * len(y)
        return total

    captured = weft_capture.capture(epoch, eager_backend)
    found = []
    for program in (epoch, captured):
        generator = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=generator)
        found.append([program(torch.ones(3), loader) for _ in range(2)])
    assert found[0] == found[1]
    assert {record.code for record in captured._weft_capture.breaks} == {"loop"}
    assert captured._weft_capture.graphs
