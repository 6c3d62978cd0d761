"""Programs that meet tensors of classes with a `__torch_dispatch__`."""

import pytest
import torch
from aot_helpers import function_graph
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from weft_aot import aot_compile
from weft_core.tensor_subclass import leaves

aten = torch.ops.aten


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


class Int8(torch.Tensor):
    """A quantised matrix, whose gradient is plain."""

    @staticmethod
    def __new__(cls, q, s):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=s.dtype, device=q.device)

    def __init__(self, q, s):
        self.q, self.s = q, s

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self):
        return ["q", "s"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Int8(inner["q"], inner["s"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default):
            return return_and_correct_aliasing(
                func, args, kwargs, cls(func(args[0].q), func(args[0].s))
            )
        args, kwargs = pytree.tree_map_only(cls, lambda x: x.q * x.s, (args, kwargs or {}))
        return func(*args, **kwargs)


def int8(*size, requires_grad=False):
    q = torch.randint(-9, 9, size, dtype=torch.int8)
    return Int8(q, torch.rand(size[0], 1)).requires_grad_(requires_grad)


def program_of(function, count, makes=False):
    gm = function_graph(function, count)
    if makes:  # as capture says of a node
        next(n for n in gm.graph.nodes if n.op == "call_function").meta["example_value"] = two(1)
    return gm


def run(function, args):
    """Results, gradients, arguments afterwards and whether their versions changed."""
    results = pytree.tree_leaves(function(*args))
    for result in results:
        if result.requires_grad:
            (result * result).sum().backward(retain_graph=True)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    grads = [arg.grad for arg in tensors if arg.is_leaf]
    written = [arg._version > 0 for arg in tensors]
    return [*results, *grads, *tensors], written, [r.requires_grad for r in results]


def check(function, make, compiled=True, makes=False):
    """Compare with eager; the compiler sees plain tensors alone, or nothing at all."""
    runs, graphs = [], []

    def compiler(gm, inputs):
        graphs.append(gm)
        return plain_only(gm, inputs)

    for eager in (True, False):
        torch.manual_seed(0)
        args = make()
        gm = program_of(function, len(args), makes)
        runs.append(run(gm if eager else aot_compile(gm, args, fw_compiler=compiler), args))
    (values, *rest), (others, *other_rest) = runs
    assert rest == other_rest
    for one, other in zip(values, others, strict=True):
        if one is None or not isinstance(one, torch.Tensor):
            assert one == other
        else:
            same(one, other)
    assert bool(graphs) is compiled


def matmul(x, y):
    return (x.sin() @ y).relu(), x + 1


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_results_and_gradients(first, second):
    """A plain argument's gradient may be of the class, and the other way round."""
    plain = torch.randn(3, 3)
    check(matmul, lambda: (two(3, 3, requires_grad=first), two(3, 3, requires_grad=second)))
    check(
        matmul, lambda: (two(3, 3, requires_grad=first), torch.randn(3, 3).requires_grad_(second))
    )
    check(matmul, lambda: (plain.clone().requires_grad_(first), int8(3, 3, requires_grad=second)))
    nested = lambda: TwoTensor(two(3, 3), two(3, 3)).requires_grad_(first)  # noqa: E731
    check(matmul, lambda: (nested(), two(3, 3)))
    check(matmul, lambda: (nested(), torch.randn(3, 3).requires_grad_(second)))


def test_an_intermediate_as_an_argument():
    check(matmul, lambda: (two(3, 3, requires_grad=True) * 2, torch.randn(3, 3)))


def test_writes():
    def buffers(x, y):
        x.add_(y).mul_(2)
        return (x * y,)

    def under_no_grad(x, y):
        with torch.no_grad():
            y.mul_(2)
        return (x @ y,)

    def inner_only(x, y):
        y.add_(1)
        return (x * 2,)

    check(buffers, lambda: (two(3, 3), torch.randn(3, 3)))
    check(under_no_grad, lambda: (two(3, 3, requires_grad=True), two(3, 3, requires_grad=True)))

    def with_its_part():
        x = two(3, 3)
        return x, x.a

    check(inner_only, with_its_part)


def test_tensors_made_inside():
    def program(x, y):
        z = TwoTensor(x, y + 1)
        return z * 2, z, z.a, z.b, TwoTensor(z * 1, z * 2).sum()

    def make():
        return torch.randn(3), torch.randn(3)

    check(program, make, makes=True)
    x, y = make()
    result = aot_compile(program_of(program, 2, True), [x, y], fw_compiler=plain_only)(x, y)
    assert result[1].a is x and result[2] is x and result[3] is result[1].b


def test_identity_of_arguments_and_what_is_inside():
    def program(x, y):
        return x, y * 2, x.a, y

    x = two(3)
    compiled = aot_compile(program_of(program, 2), [x, x], fw_compiler=plain_only)
    one, _, inner, other = compiled(x, x)
    assert one is x and other is x and inner is x.a


def through_autograd(x):
    x.mul_(2)
    return (x.sin(),)


def rebinding(x):
    x.a = x.a * 2
    return (x + 1,)


@pytest.mark.parametrize(
    "program",
    [lambda x: (x.view(-1),), lambda x: (x.detach(), x * 2), through_autograd, rebinding],
)
def test_what_autograd_or_the_class_would_know_of_runs_uncompiled(program):
    check(program, lambda: (two(3, 3, requires_grad=True) * 1,), compiled=False)


def test_results_that_share_memory_run_uncompiled():
    def program(x):
        y = x * 2
        return y, y.view(-1)

    check(program, lambda: (two(3, 3, requires_grad=True),), compiled=False)


def test_a_handler_that_fails_on_fakes_runs_uncompiled():
    class Hostile(TwoTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs):
            if func is aten.sin.default and args[0].a.data_ptr() == 0:
                raise ValueError("no memory")
            return super().__torch_dispatch__(func, types, args, kwargs)

    make = lambda: (Hostile(torch.ones(3), torch.ones(3)),)  # noqa: E731
    (x,) = make()
    compiled = aot_compile(program_of(lambda x: (x.sin(),), 1), [x], fw_compiler=plain_only)
    torch.testing.assert_close(compiled(x)[0].a, torch.ones(3).sin())


def test_second_derivatives():
    x, y = two(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    gm = program_of(lambda x, y: ((x @ y).sin(),), 2)
    found = []
    for function in (gm, aot_compile(gm, [x, y], fw_compiler=plain_only)):
        (result,) = function(x, y)
        first = torch.autograd.grad((result * result).sum(), [x, y], create_graph=True)
        found.append([*first, *torch.autograd.grad(sum((g * g).sum() for g in first), [x, y])])
    for one, other in zip(*found, strict=True):
        same(one, other)


def test_a_gradient_of_another_class():
    x, y = two(3, requires_grad=True), torch.ones(3, requires_grad=True)
    gm = program_of(lambda x, y: (x * 2 * y, y.sin()), 2)
    compiled, grad = aot_compile(gm, [x, y], fw_compiler=plain_only), torch.arange(3.0)
    want = torch.autograd.grad(gm(x, y)[0], [x, y], grad)
    found = torch.autograd.grad(compiled(x, y)[0], [x, y], grad)
    for one, other in zip(found, want, strict=True):
        assert type(one) is type(other)
        same(one, other)
    (result, _) = compiled(x, y)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="not put together like the result"):
        torch.autograd.grad(result, x, grad)
