"""Results are laid out as eager's, or there is no program."""

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, dynamic_trace, externs, program_of
from weft_codegen.compile import make_program
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.lower.graph import NoLowering

X = torch.randn(5, 6, 4, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "size", "step"), [(1, 3, 1), (0, 2, 2), (3, 2, 1), (2, 4, 3)])
def test_copies_of_windows_keep_their_layout_with_symbolic_sizes(dim, size, step):
    def fn(x):
        return [x.unfold(dim, size, step).clone()]

    graph, fakes = dynamic_trace(fn, (X,))
    got, want = run_program(make_program(graph, fakes), (X,))[0], fn(X)[0]
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_a_layout_that_sizes_do_not_prove_is_no_program():
    # That the sizes divide one another is a guard here, not an identity.
    def inverse(x):
        return [torch.linalg.tensorinv(x, ind=2).clone()]

    x = torch.randn(4, 3, 6, 1, 2)
    graph, fakes = dynamic_trace(inverse, (x,))
    with pytest.raises(NoLowering, match="strides of a result"):
        make_program(graph, fakes)


def _pooled(x):
    return F.max_pool2d(x, 2, return_indices=True)


def test_unpooling_is_an_extern_call_unless_channels_come_last():
    pooled, indices = _pooled(torch.randn(2, 3, 8, 6))
    program = check(lambda p, i: F.max_unpool2d(p, i, 2) + 1, pooled, indices)
    assert externs(program) == ["aten.max_unpool2d.default"]
    last = [t.contiguous(memory_format=torch.channels_last) for t in (pooled, indices)]
    with pytest.raises(NoLowering, match="max_unpool2d"):
        program_of(lambda p, i: F.max_unpool2d(p, i, 2) + 1, *last)


def test_bags_of_bfloat16_run_eagerly():
    weight, where = torch.randn(8, 4, dtype=torch.bfloat16), torch.tensor([[0, 3], [5, 5]])
    with pytest.raises(NoLowering, match="_embedding_bag"):
        program_of(lambda i, w: F.embedding_bag(i, w), where, weight)
    check(lambda i, w: F.embedding_bag(i, w), where, weight.float())


def test_a_result_that_nothing_uses_may_be_other_than_the_fake_one():
    with torch.library._scoped_library("weft_tests", "FRAGMENT") as library:
        library.define("odd(Tensor x) -> (Tensor, Tensor)")
        library.impl("odd", lambda x: (x.sin(), torch.zeros(7, dtype=torch.int8)), "CPU")
        library.impl("odd", lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)), "Meta")
        x = torch.randn(3)
        check(lambda x: torch.ops.weft_tests.odd(x)[0] * 2, x, native=True)


def _batch_norm(x, y):
    return F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), training=True)


def _huber(x, y):
    return F.huber_loss(x, y, reduction="none")


def _cross_entropy(x, y):
    return F.binary_cross_entropy(x, y, reduction="none")


@pytest.mark.parametrize("function", [_batch_norm, _huber, _cross_entropy, torch.cdist])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x.t(), lambda y: y.t()),
        (lambda x: x[:, :1].expand(-1, 3), lambda y: y.t().contiguous().t()),
        (lambda x: x.t().contiguous().t(), lambda y: y[:, :1].expand(-1, 3)),
        (lambda x: x.repeat(1, 2)[:, ::2], lambda y: y[:1].expand(3, -1)),
    ],
)
def test_decompositions_have_the_strides_of_their_operators(function, first, second):
    torch.manual_seed(0)
    x, y = first(torch.rand(3, 3)), second(torch.rand(3, 3))
    got, want = (
        run_program(program_of(lambda x, y: [function(x, y)], x, y), (x, y))[0],
        function(x, y),
    )
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)
