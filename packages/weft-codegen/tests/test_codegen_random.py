"""Random graphs: views, pointwise operators and reductions over odd shapes and strides."""

import torch
from codegen_check import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Each step takes the values so far and makes one more.
POINTWISE = [
    lambda a, b: a + b,
    lambda a, b: a * b - 0.5,
    lambda a, b: torch.where(a > b, a, b * 0.1),
    lambda a, b: a.sigmoid(),
    lambda a, b: (a * 0.1).tanh() + b,
    lambda a, b: a.clamp(-1, 1),
    lambda a, b: torch.maximum(a, b),
]
RESHAPES = [
    lambda a: a.transpose(0, 1).contiguous().transpose(0, 1),
    lambda a: a.reshape(-1).view(a.shape),
    lambda a: a.flip(0),
    lambda a: torch.cat([a[:, 1:], a[:, :1]], 1),
    lambda a: a.t().reshape(a.shape),
    lambda a: a.clone(),
]
REDUCTIONS = [
    lambda a: a - a.mean(0, keepdim=True),
    lambda a: a.softmax(1),
    lambda a: a - a.amax(1, keepdim=True),
    lambda a: a / (1 + a.abs().sum()),
    lambda a: a + a.sum(0),
    lambda a: a * a.var(1, correction=0, keepdim=True),
]

_steps = st.lists(
    st.tuples(st.sampled_from("ppprv"), st.integers(0, 100), st.integers(0, 9), st.integers(0, 9)),
    min_size=3,
    max_size=20,
)


def build(steps, shape):
    """A function of two tensors that applies the steps and returns the last three values."""

    def fn(x, y):
        values = [x, y]
        for kind, pick, left, right in steps:
            a, b = values[left % len(values)], values[right % len(values)]
            if kind == "p":
                values.append(POINTWISE[pick % len(POINTWISE)](a, b))
            elif kind == "v":
                values.append(RESHAPES[pick % len(RESHAPES)](a))
            else:
                values.append(REDUCTIONS[pick % len(REDUCTIONS)](a))
        return tuple(value.clone() for value in values[-3:])

    return fn


def _inputs(shape, permuted):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(shape, generator=generator) - 0.5
    y = torch.rand(shape[::-1], generator=generator) - 0.5
    return x, y.t() if permuted else y.t().contiguous()


_slow = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=60, **_slow)
@given(_steps, st.sampled_from([(3, 5), (1, 7), (16, 17), (4, 1)]), st.booleans())
def test_random_graphs_interpreted(steps, shape, permuted):
    check(build(steps, shape), *_inputs(shape, permuted), atol=1e-4, rtol=1e-4)


@settings(max_examples=4, **_slow)
@given(_steps, st.sampled_from([(5, 70), (33, 64)]), st.booleans())
def test_random_graphs_native(steps, shape, permuted):
    x, y = _inputs(shape, permuted)
    check(build(steps, shape), x, y, native=True, interpret=False, atol=1e-4, rtol=1e-4)
