"""Options about rounding: eager's bits, 16-bit results rounded by each operator, NaNs found."""

import pytest
import torch
import weft

F = torch.nn.functional


def network(x, w):
    y = (x * 1.3 + 0.7).tanh() * x - x.exp()
    z = F.layer_norm(y @ w, (w.shape[1],))
    return F.gelu(z.softmax(-1) * 2 + z.sum(-1, keepdim=True)) / z.std()


def chain(x, w):
    y = x * 1.3 + 0.7
    return (y * y - x).sigmoid() * w[: len(x), :1] + y / 3


def results(function, dtype, grad=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator).to(dtype).requires_grad_(grad)
    w = torch.randn(32, 24, generator=generator).to(dtype).requires_grad_(grad)
    result = function(x, w)
    if grad:
        result.sum().backward()
    return result.detach(), x.grad, w.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strict_numerics_have_eagers_bits(dtype):
    strict = weft.compile(network, options={"strict_numerics": True, "measure": False})
    expected = results(network, dtype)
    before = weft.counters["codegen"]["kernels"]
    assert all(map(torch.equal, results(strict, dtype), expected))
    assert weft.counters["codegen"]["kernels"] > before  # what is exact is generated
    plain = weft.compile(network, options={"measure": False})
    assert not torch.equal(results(plain, dtype)[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_precision_casts_are_eagers(dtype):
    expected = results(chain, dtype, grad=False)[0]
    options = {"measure": False}
    fused = results(weft.compile(chain, options=options), dtype, grad=False)[0]
    options = {**options, "emulate_precision_casts": True}
    rounded = results(weft.compile(chain, options=options), dtype, grad=False)[0]
    assert torch.equal(rounded, expected)
    assert not torch.equal(fused, expected)


def makes_nan(x):
    y = x.relu() + 1
    z = (y @ y.T).sum() + torch.log(x)  # of -1 it is a NaN
    return z.mm(y) * 2


@pytest.mark.parametrize("fuses", [True, False])
def test_a_nan_is_found_where_it_is_made(fuses):
    options = {"nan_asserts": True, "epilogue_fusion": fuses}
    compiled = weft.compile(makes_nan, options=options)
    x = torch.ones(3, 3)
    torch.testing.assert_close(compiled(x), makes_nan(x))
    with pytest.raises(weft.WeftError, match=r"a NaN in the result of kernel\d.*torch.log\(x\)"):
        compiled(-x)


def test_a_nan_of_an_operator_is_found():
    compiled = weft.compile(lambda x: x.mm(x) + 1, options={"nan_asserts": True})
    x = torch.full((3, 3), torch.inf)
    x[0] = -torch.inf
    with pytest.raises(weft.WeftError, match=r"a NaN in the result of .*\bmm\b"):
        compiled(x)
