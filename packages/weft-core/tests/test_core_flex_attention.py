"""The operator of flex_attention and its backward against the matrix of scores by hand."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from weft_core.flex_attention import flex_attention, score_texts

SLOPES = torch.tensor([0.5, -2.0])
BLOCKS = [torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)] * 4
SIZE = (1 << 30, 1 << 30)


def change(score, batch, head, query, key, slopes):
    score = torch.tanh(score * torch.ops.aten.index.Tensor(slopes, [head])) + (query - key) * 0.1
    return score, (query >= key) & (query != 3)


def texts(function):
    graph = fx.symbolic_trace(function)
    with FakeTensorMode():
        numbers = [torch.empty(()), *(torch.empty((), dtype=torch.int32) for _ in range(4))]
        return score_texts(graph, [*numbers, torch.empty(2)])


def by_hand(query, key, value):
    rows = torch.arange(12)
    key, value = (one.repeat_interleave(2, 1) for one in (key, value))
    positions = rows.unsqueeze(1), rows
    score = torch.tanh(query @ key.mT * 0.5 * SLOPES.view(2, 1, 1))
    score = score + (positions[0] - positions[1]) * 0.1
    kept = (positions[0] >= positions[1]) & (positions[0] != 3)
    score = score.masked_fill(~kept, -torch.inf)
    lse = torch.where(kept.any(-1), score.masked_fill(~kept.any(-1, True), 0).logsumexp(-1), 0)
    return torch._safe_softmax(score, -1) @ value, lse


def operands(dtype=torch.float32):
    shapes = (2, 2, 12, 8), (2, 1, 12, 8), (2, 1, 12, 5)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def test_results_and_gradients():
    given, same = operands(), operands()
    for one, other in zip(same, given, strict=True):
        one.data.copy_(other.data)
    out, lse, largest = flex_attention(*given, [SLOPES], BLOCKS, SIZE, *texts(change), 0.5)
    expected, expected_lse = by_hand(*same)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.where(lse.isinf(), 0, lse * torch.log(torch.tensor(2.0))), expected_lse
    )
    assert (lse.isinf() == largest.isinf()).all()
    weights = torch.randn(out.shape), torch.randn(lse.shape)
    grads = torch.autograd.grad(
        (out * weights[0]).sum() + (torch.where(lse.isinf(), 0, lse) * weights[1]).sum(), given
    )
    lse_of = expected_lse / torch.log(torch.tensor(2.0))
    wanted = torch.autograd.grad((expected * weights[0]).sum() + (lse_of * weights[1]).sum(), same)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


def test_the_attention_lies_as_the_query():
    query = torch.randn(2, 12, 2, 8).transpose(1, 2)
    key, value = torch.randn(2, 1, 12, 8), torch.randn(2, 1, 12, 5)
    program, gradient = texts(change)
    out = flex_attention(query, key, value, [SLOPES], BLOCKS, SIZE, program, gradient, 0.5)[0]
    assert out.stride() == (12 * 2 * 5, 5, 10, 1)


def test_a_function_with_tensors_of_its_own_has_no_text():
    assert texts(lambda s, b, h, m, n, slopes: (s + torch.tensor([1.0])[0], m >= n)) is None


def test_a_score_that_is_no_function_of_the_score_has_no_slope():
    program, gradient = texts(lambda s, b, h, m, n, slopes: ((m - n) * 0.5, m >= n))
    query, key, value = operands()
    out = flex_attention(query, key, value, [SLOPES], BLOCKS, SIZE, program, gradient, 0.5)[0]
    found = torch.autograd.grad(out.sum(), (query, key, value))
    assert not found[0].any()
    assert not found[1].any()
    assert found[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    given = operands(dtype)
    out = flex_attention(*given, [SLOPES], BLOCKS, SIZE, *texts(change), 0.5)[0]
    expected = by_hand(*(one.detach().float() for one in given))[0]
    assert out.dtype is dtype
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
