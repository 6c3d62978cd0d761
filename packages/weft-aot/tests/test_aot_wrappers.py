"""Programs that meet tensors of classes with a `__torch_dispatch__`."""

import pytest
import torch
from aot_helpers import function_graph
from torch.testing._internal.two_tensor import TwoTensor
from weft_aot import aot_compile
from weft_core.wrappers import leaves


def two(*size, requires_grad=False):
    return TwoTensor(torch.randn(size), torch.randn(size)).requires_grad_(requires_grad)


def two_ones():
    return TwoTensor(torch.ones(()), torch.ones(()))


def same(one, other):
    assert type(one) is type(other)
    for a, b in zip(leaves(one), leaves(other), strict=True):
        torch.testing.assert_close(a, b)


def plain_only(gm, inputs):
    """A compiler whose programs take nothing but plain tensors."""

    def run(*args):
        assert all(type(arg) is torch.Tensor for arg in args)
        return gm(*args)

    return run


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_plain_program_with_a_gradient_of_a_subclass(create_graph):
    x, y = torch.randn(3, requires_grad=True), two(3)
    program = function_graph(lambda x: x.sin() * 2, 1)
    compiled = aot_compile(program, [x], fw_compiler=plain_only)
    (found,) = torch.autograd.grad(compiled(x)[0], x, y, create_graph=create_graph)
    (expected,) = torch.autograd.grad(x.sin() * 2, x, y, create_graph=create_graph)
    same(found, expected)
    if create_graph:
        second = [torch.autograd.grad(g.sum(), x, two_ones())[0] for g in (found, expected)]
        same(*second)


def test_a_subclass_as_an_argument():
    x, y = two(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    program = function_graph(lambda x, y: (x.sin() @ y,), 2)
    compiled = aot_compile(program, [x, y], fw_compiler=plain_only)
    (result,) = compiled(x, y)
    same(result, x.sin() @ y)
    gradients = torch.autograd.grad(result, [x, y], result.detach())
    for one, other in zip(
        gradients, torch.autograd.grad(x.sin() @ y, [x, y], result.detach()), strict=True
    ):
        same(one, other)
