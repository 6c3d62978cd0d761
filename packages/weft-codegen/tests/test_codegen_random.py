"""Random graphs: chains of 5 to 40 operators over odd shapes, strides and dtypes.

Each example is compared with the same graph in float64, with every size known and with every size
symbolic; one compiled binary serves several sizes.
"""

import pytest
import torch
from codegen_check import check, clones, dynamic_trace, trace
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from weft_codegen.compile import make_program
from weft_codegen.kernels import compile_program
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.verify import verify_program

# Each step takes the values so far and makes one more.  All keep values in [-1, 1] or so, and none
# jumps where float32 and float64 may fall on different sides.
POINTWISE = [
    lambda a, b: (a + b) * 0.5,
    lambda a, b: a * b,
    lambda a, b: a.sigmoid() - b * 0.5,
    lambda a, b: (a * 0.5).tanh() + b * 0.25,
    lambda a, b: a.clamp(-1, 1) * 0.75,
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a.exp() * 0.25,
    lambda a, b: (a.abs() + 1).log(),
    lambda a, b: torch.where(a.isnan(), b, a),
]
RESHAPES = [
    lambda a: a.transpose(0, 1).contiguous().transpose(0, 1),
    lambda a: a.reshape(-1).view(a.shape),
    lambda a: a.flip(0),
    lambda a: torch.cat([a[:, 1:], a[:, :1]], 1),
    lambda a: a.t().reshape(a.shape),
    lambda a: a.roll(1, 0),
    lambda a: torch.stack([a, a * 0.5]).sum(0) * 0.5,
    lambda a: a[torch.arange(a.shape[0] - 1, -1, -1)],
]
REDUCTIONS = [
    lambda a: a - a.mean(0, keepdim=True),
    lambda a: a.softmax(1),
    lambda a: a - a.amax(1, keepdim=True) * 0.5,
    lambda a: a / (1 + a.abs().sum()),
    lambda a: a * 0.5 + a.mean(0),
    lambda a: a * a.var(1, correction=0, keepdim=True),
    lambda a: a.cumsum(1) / a.shape[1],
    lambda a: a.cummax(0).values - a.cumsum(0) / a.shape[0],
]
# Steps in place on a copy, and through other dtypes.
MUTATIONS = [
    lambda a, b: a.clone().mul_(0.5).add_(b),
    lambda a, b: _row_written(a.clone(), b),
]
DTYPES = [
    lambda a: a.to(torch.float64).mul(0.5).to(a.dtype),
    lambda a: torch.where((a * 0).to(torch.int32) == 0, a, -a),
    lambda a: a * torch.arange(a.shape[1]).to(a.dtype) / a.shape[1],
    lambda a: a * (a == a).to(torch.int8),
]


def _row_written(a, b):
    a[0].copy_(b[0])
    return a


_steps = st.lists(
    st.tuples(
        st.sampled_from("pppprvmd"), st.integers(0, 100), st.integers(0, 9), st.integers(0, 9)
    ),
    min_size=5,
    max_size=40,
)


def build(steps):
    """A function of two tensors that applies the steps and returns the last three values."""

    def fn(x, y):
        values = [x, y]
        for kind, pick, left, right in steps:
            a, b = values[-1 - left % len(values)], values[right % len(values)]
            table = {"p": POINTWISE, "m": MUTATIONS, "v": RESHAPES, "d": DTYPES}.get(kind)
            step = (table or REDUCTIONS)[pick % len(table or REDUCTIONS)]
            values.append(step(a, b) if kind in "pm" else step(a))
        return tuple(value.clone() for value in values[-3:])

    return fn


def _inputs(shape, permuted, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(shape, generator=generator) - 0.5
    y = torch.rand(shape[::-1], generator=generator) - 0.5
    return [x.to(dtype), (y.t() if permuted else y.t().contiguous()).to(dtype)]


def _assert_near(fn, results, args, tolerance):
    exact = fn(*(arg.double() for arg in args))
    for result, want in zip(results, exact, strict=True):
        assert_close(result.double(), want, atol=tolerance, rtol=tolerance)


_slow = {"deadline": None, "suppress_health_check": list(HealthCheck)}
_shapes = st.sampled_from([(3, 5), (1, 7), (16, 17), (4, 1), (2, 2)])


@pytest.mark.slow
# Two sums into one local, begun in each iteration of a loop that is evaluated at once.
@example([("v", 2, 0, 0), *[("p", 0, 0, 0)] * 2, ("v", 6, 7, 0), ("p", 0, 0, 0)], (3, 5), False)
@settings(max_examples=40, **_slow)
@given(_steps, _shapes, st.booleans())
def test_random_graphs_interpreted(steps, shape, permuted):
    fn, args = build(steps), _inputs(shape, permuted)
    program = make_program(trace(fn, args), args)
    verify_program(program)
    _assert_near(fn, run_program(program, clones(args)), args, 1e-4)


@settings(max_examples=10, **_slow)
@given(_steps, _shapes, st.sampled_from([torch.bfloat16, torch.float16]))
def test_random_graphs_in_16_bits(steps, shape, dtype):
    fn, args = build(steps[:8]), _inputs(shape, False, dtype)
    program = make_program(trace(fn, args), args)
    _assert_near(fn, run_program(program, clones(args)), args, 0.05)


@pytest.mark.slow
@settings(max_examples=15, **_slow)
@given(_steps, st.booleans())
def test_random_graphs_of_every_size(steps, permuted):
    fn = build(steps)
    graph, fakes = dynamic_trace(fn, _inputs((5, 7), permuted))
    program = make_program(graph, fakes)
    verify_program(program)
    for shape in ((5, 7), (3, 11)):
        args = _inputs(shape, permuted)
        _assert_near(fn, run_program(program, clones(args)), args, 1e-4)


@settings(max_examples=4, **_slow)
@given(_steps, st.sampled_from([(5, 70), (33, 64)]), st.booleans())
def test_random_graphs_native(steps, shape, permuted):
    args = _inputs(shape, permuted)
    check(build(steps), *args, native=True, interpret=False, atol=1e-4, rtol=1e-4)


@settings(max_examples=3, **_slow)
@given(_steps, st.booleans())
def test_one_binary_serves_every_size(steps, permuted):
    fn = build(steps)
    graph, fakes = dynamic_trace(fn, _inputs((5, 7), permuted))
    compiled = compile_program(make_program(graph, fakes))
    for shape in ((5, 7), (3, 11), (70, 65)):
        args = _inputs(shape, permuted)
        _assert_near(fn, compiled(*clones(args)), args, 1e-4)
