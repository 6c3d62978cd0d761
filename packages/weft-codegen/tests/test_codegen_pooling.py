"""Pooling and repetition as loops, against eager."""

import math

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, externs

torch.manual_seed(0)
X = torch.randn(2, 3, 9, 10)
NAN = X.clone()
NAN[0, 0, 3, 3:5] = math.nan
NAN[1, 1] = -math.inf

POOLS = [
    lambda x: F.max_pool2d(x.relu(), 2),
    lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    lambda x: F.max_pool2d(x, (3, 2), (2, 1), ceil_mode=True, return_indices=True),
    lambda x: F.avg_pool2d(x, 3, 2, 1),
    lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False, ceil_mode=True),
    lambda x: F.avg_pool2d(x, 2, divisor_override=3) * 2,
    lambda x: F.avg_pool1d(x[0], 3, 1),
    lambda x: F.interpolate(x, scale_factor=2) + 1,
]


@pytest.mark.parametrize("fn", POOLS)
@pytest.mark.parametrize("x", [X, X.to(memory_format=torch.channels_last), NAN, X.bfloat16()])
def test_pools(fn, x):
    assert externs(check(fn, x)) == []


def test_pools_in_c():
    check(lambda *xs: tuple(POOLS[k](x) for k in (0, 4) for x in xs), X, NAN, native=True)
    check(lambda x: POOLS[1](x), NAN, native=True)


@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 0), (2, 3, 0)]
)
@pytest.mark.parametrize(("ceil", "counted"), [(False, True), (True, False)])
def test_average_backward(size, stride, padding, ceil, counted):
    out = F.avg_pool2d(X, size, stride, padding, ceil, counted)
    arguments = ([size] * 2, [stride] * 2, [padding] * 2, ceil, counted, None)

    def backward(g, x):
        return torch.ops.aten.avg_pool2d_backward(g * 2, x, *arguments)

    assert externs(check(backward, torch.randn_like(out), X, atol=1e-5, rtol=1e-5)) == []


@pytest.mark.parametrize("size", [(3, 5), (9, 2), (9, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adaptive_average_with_whole_windows(size, dtype):
    x = X.to(dtype)
    out = F.adaptive_avg_pool2d(x, size)

    def both(g, x):
        pooled = F.adaptive_avg_pool2d(x * 2, size) + 1
        return pooled, torch.ops.aten._adaptive_avg_pool2d_backward(g * 2, x)

    for memory in (torch.contiguous_format, torch.channels_last):
        args = torch.randn_like(out), x.to(memory_format=memory)
        program = check(both, *args, native=True, atol=2e-2, rtol=1e-2)
        assert externs(program) == []


def test_adaptive_average_with_uneven_windows_is_the_librarys():
    program = check(lambda x: F.adaptive_avg_pool2d(x, (4, 3)), X)
    assert externs(program) == ["aten._adaptive_avg_pool2d.default"]
