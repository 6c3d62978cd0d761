"""torch's blocks, kinds of tensors and questions to a debugger: whole, or one break that says why.

Results and gradients are eager's either way.
"""

import contextlib
import pdb
import warnings

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch import distributions
from torch.autograd import graph, profiler
from torch.utils.flop_counter import FlopCounterMode
from weft_core.errors import Unsupported

X = torch.linspace(0.1, 2, 12, dtype=torch.float64).reshape(3, 4)
SPARSE = torch.eye(3, dtype=torch.float64).to_sparse()
SCHEMA = torch._C.parse_schema("f(Tensor a) -> Tensor")
ROWS = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


# ---- whole


def profiled_range(x):
    with torch.profiler.record_function("a"), profiler.record_function("b"):
        y = x.sin()
    return y * x


def dual_numbers(x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        out = torch.autograd.forward_ad.unpack_dual(dual.sin())
    return out.tangent * x


def annotated(x):
    with torch.fx.traceback.annotate({"part": 1}):
        y = x.sin()
    return y * x


def stream_of_the_cpu(x):
    with torch.cpu.stream(torch.cpu.Stream()):
        y = x.sin()
    return y * x


def sparse_made_inside(x):
    return x.relu().to_sparse().to_dense() * 2


def unvalidated_distribution(x):
    normal = distributions.Normal(x, x.exp(), validate_args=False)
    return normal.log_prob(x + 1) + distributions.kl_divergence(normal, normal)


def inner_gradient(x):
    (slope,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return slope * slope


def linearized(x):
    out, along = torch.func.linearize(lambda a: a.sin() * a, x)
    rows = torch.func.vmap(along)(torch.stack([x.detach(), torch.ones_like(x)]))
    return along(x * 2) + out * rows.sum(0)


def batched_gradients(x):
    seeds = torch.eye(3, dtype=x.dtype)
    (rows,) = torch.autograd.grad((x**3).sum(1), x, seeds, create_graph=True, is_grads_batched=True)
    return rows.sum(0) * x


def jagged(x):
    y = x * 2
    rows = torch.nested.as_nested_tensor([y[:1], y[1:]], layout=torch.jagged)
    return (rows * 2).values() + 1, (ROWS * 2).values()


# ---- with breaks


class Doubling(graph.saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda x: x * 2, lambda x: x / 2)


def saved_tensors_hooks(x):
    y = x * 2
    with Doubling():
        y = (y * y).sin()
    return y + 1


def saved_on_cpu(x):
    with graph.save_on_cpu():
        y = (x * x).sin()
    return y + 1


def anomalies(x):
    y = x * 2
    with torch.autograd.set_detect_anomaly(True):
        y = y.sin()
    return y + 1


def one_thread(x):
    with torch.autograd.set_multithreading_enabled(False):
        y = x.sin()
    return y + 1


def counted(x):
    y = x * 2
    with FlopCounterMode(display=False) as counter:
        y = y @ y.T
    return y + 1, counter.get_total_flops()


def sparse_from_outside(x):
    y = x.sin()
    return torch.sparse.mm(SPARSE, y) + 1


def masked(x):
    y = x * 2
    return torch.masked.masked_tensor(y, y > 1).sum().get_data() + x.sum()


def validated_distribution(x):
    normal = distributions.Normal(x, x.exp(), validate_args=True)
    beta = distributions.Beta(x.exp(), x.exp(), validate_args=True)
    zeros = distributions.Laplace(x, x.exp(), validate_args=True).rsample() * 0
    return normal.log_prob(x + 1) + beta.log_prob(x.sigmoid()) + zeros


def method_of_pybind11(x):
    y = x * 2
    try:
        same = SCHEMA.is_backward_compatible_with(SCHEMA)
    except AttributeError:
        return y.cos()
    return y.sin() + same


def backward_with_hooks(x):
    seen = []
    w = (x * 2).detach().requires_grad_()

    def note(grad):
        seen.append(round(float(grad.sum()), 4))
        return grad * 3

    w.register_hook(note)
    (w * w).sin().sum().backward()
    return x * w.grad, seen


WHOLE = (
    profiled_range, dual_numbers, annotated, stream_of_the_cpu, sparse_made_inside,
    unvalidated_distribution, validated_distribution, inner_gradient,
    batched_gradients, jagged,
)  # fmt: skip
BROKEN = {
    saved_tensors_hooks: "_push_saved_tensors_default_hooks",
    saved_on_cpu: "_push_saved_tensors_default_hooks",
    anomalies: "anomaly detection",
    one_thread: "_is_multithreading_enabled",
    counted: "",
    sparse_from_outside: "torch.sparse_coo",
    masked: "MaskedTensor",
    linearized: "torch.func.linearize",
    backward_with_hooks: "register_hook",
    method_of_pybind11: "is_backward_compatible_with",
}


def run(function):
    x = X.clone().requires_grad_()
    out = function(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return out, x.grad


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [*WHOLE, *BROKEN], ids=lambda f: f.__name__)
def test_like_eager(function):
    whole = function in WHOLE
    optimised = weft_capture.capture(function, eager_backend, fullgraph=whole)
    for _ in range(2):
        torch.testing.assert_close(run(optimised), run(function))
    state = optimised._weft_capture
    assert whole == (not state.breaks) and state.graphs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", BROKEN, ids=lambda f: f.__name__)
def test_the_reason_names_what_was_met(function):
    with pytest.raises(Unsupported, match=BROKEN[function]):
        run(weft_capture.capture(function, eager_backend, fullgraph=True))


def test_an_invalid_parameter_of_a_distribution_raises():
    def program(x):
        return distributions.Normal(x, -x, validate_args=True).log_prob(x)

    with pytest.raises(ValueError, match="Expected parameter scale") as expected:
        program(X)
    with pytest.raises(ValueError, match="Expected parameter scale") as got:
        weft_capture.capture(program, eager_backend, fullgraph=True)(X)
    assert got.value.args == expected.value.args


@pytest.mark.parametrize("ask", ["breakpoint", "set_trace"])
def test_a_debugger_sees_the_variables(ask, monkeypatch):
    seen = []

    def stop(*_):
        import sys  # noqa: PLC0415 - in the place of a debugger

        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, frame.f_locals["y"]))

    monkeypatch.setattr("sys.breakpointhook", stop)
    monkeypatch.setattr(pdb, "set_trace", stop)

    def program(x):
        y = x + 1
        breakpoint() if ask == "breakpoint" else pdb.set_trace()
        return y * 2

    optimised = weft_capture.capture(program, eager_backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(optimised(X), (X + 1) * 2)
    assert [name for name, _ in seen] == ["program"]
    torch.testing.assert_close(seen[0][1], X + 1)


def _packing_while_disabled(x):
    with graph.disable_saved_tensors_hooks("disabled here"):
        y = x * x
        with graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return (y * x).sum()


def _disabled(x):
    with graph.disable_saved_tensors_hooks("disabled here"):
        return (x * x).sum()


@pytest.mark.parametrize("inside", [True, False])
def test_saved_tensors_hooks_that_are_disabled(inside):
    function = _packing_while_disabled if inside else _disabled
    x = torch.randn(3, requires_grad=True)
    compiled = weft_capture.capture(function, lambda gm, inputs: gm.forward)
    if not inside:
        assert torch.equal(compiled(x), function(x))
    outer = contextlib.nullcontext() if inside else graph.save_on_cpu()
    for run in (function, compiled):
        with outer, pytest.raises(RuntimeError, match="disabled here"):
            run(x)


@pytest.mark.parametrize("inner", [True, False])
def test_disabled_hooks_as_a_decorator(inner):
    def function(x):
        if not inner:
            return x.sin()
        return graph.disable_saved_tensors_hooks("no")(torch.profiler.record_function("f")(sine))(x)

    def sine(x):
        return x.sin()

    decorated = function if inner else graph.disable_saved_tensors_hooks("no")(function)
    compiled = weft_capture.capture(decorated, lambda gm, inputs: gm.forward)
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin())


@pytest.mark.filterwarnings("ignore:.autograd-state")
@pytest.mark.parametrize("parts", [torch.unbind, lambda x: x.split(2)], ids=["unbind", "split"])
def test_views_that_autograd_no_longer_follows(parts):
    def function(x):
        y = x * 2
        made = parts(y)
        y.mul_(2)
        return y, made[0].detach() if x.shape[0] == 4 else made[0] * 1

    compiled = weft_capture.capture(function, lambda gm, inputs: gm.forward)
    x = torch.randn(4, requires_grad=True)
    for got, want in zip(compiled(x), function(x), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="modified inplace"):
        compiled(torch.randn(6, requires_grad=True))
