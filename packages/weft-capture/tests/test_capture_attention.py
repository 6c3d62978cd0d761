"""flex_attention in one graph: results as in eager, gradients as of the same scores by hand."""

import math

import pytest
import torch
import weft_capture
from capture_check import eager_backend
from torch._higher_order_ops import flex_attention as operator
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from weft_capture.libraries import attention
from weft_core.flex_attention import flex_attention as fused
from weft_guards import CacheRules

BIAS = torch.tensor([0.5, -2.0])
DOCUMENT = torch.tensor([0] * 5 + [1] * 7)
TABLE = torch.linspace(-1, 1, 24).reshape(2, 12)


def heads(count=2, batch=2):
    return torch.randn(batch, count, 12, 8)


def causal(batch, head, query, key):
    return query >= key


MASK = create_block_mask(causal, None, None, 12, 12, device="cpu", BLOCK_SIZE=4)


WHOLE = create_block_mask(causal, None, None, 12, 12, device="cpu", BLOCK_SIZE=16)


def plain(q, k, v):
    return flex_attention(q * 1.5, k, v) + 1


def distances(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + (m - n) * 0.1)


def captured_tensors(q, k, v):
    def bias(score, b, h, m, n):
        inside = torch.where(DOCUMENT[m] == DOCUMENT[n], score * BIAS[h], -torch.inf)
        return inside + TABLE[0, n] + TABLE[b, m]

    return flex_attention(q, k, v, score_mod=bias)


def mask_from_outside(q, k, v):
    return flex_attention(q, k, v, block_mask=MASK)


def mask_in_blocks(q, k, v):
    return flex_attention(q, k, v, block_mask=WHOLE)


def mask_made_inside(q, k, v):
    mask = create_block_mask(causal, None, None, 12, 12, device="cpu", BLOCK_SIZE=4)
    return flex_attention(q, k, v, block_mask=mask), create_mask(causal, 1, 1, 12, 12, "cpu")


def fewer_heads_and_sums(q, k, v):
    given = k[:, :1], v[:, :1]
    return flex_attention(q, *given, enable_gqa=True, return_lse=True, scale=0.7)


def nothing_takes_part(q, k, v):
    def later(score, b, h, m, n):
        return torch.where(n > m, score, -torch.inf)

    return flex_attention(q, k, v, score_mod=later, return_lse=True)


def permuted(q, k, v):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v).stride()


def autocast(q, k, v):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return flex_attention(q, k, v, block_mask=MASK)


PROGRAMS = (
    plain, distances, captured_tensors, mask_from_outside, mask_made_inside,
    fewer_heads_and_sums, nothing_takes_part, permuted, autocast,
)  # fmt: skip


def sizes(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s * (m + 1) / q.size(-2))


@pytest.fixture
def on_cpu(monkeypatch):
    """Let graphs on a CPU have the operator for which GPUs have a kernel."""
    monkeypatch.setattr(attention, "FUSED_ON", {"cpu"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_flex_attention_in_one_graph(function):
    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    for _ in range(2):
        given = [heads() for _ in range(3)]
        torch.testing.assert_close(optimised(*given), function(*given))
    assert len(optimised._weft_capture.graphs) == 1


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function", [captured_tensors, mask_in_blocks, fewer_heads_and_sums, sizes]
)
def test_the_operator_of_blocks(function, dynamic):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    rules = CacheRules(dynamic=dynamic)
    optimised = weft_capture.capture(function, backend, fullgraph=True, rules=rules)
    given = [heads() for _ in range(3)]
    torch.testing.assert_close(optimised(*given), function(*given))
    (graph,) = graphs
    assert len(graph.graph.find_nodes(op="call_function", target=fused)) == 1


@pytest.mark.usefixtures("on_cpu")
def test_gradients_of_captured_tensors_take_all_scores():
    slope = torch.randn(2, requires_grad=True)

    def program(q, k, v):
        return operator(q, k, v, lambda s, b, h, m, n: s * slope[h], WHOLE.as_tuple(), 0.5, {})[0]

    given = [heads() for _ in range(3)]
    (grad,) = torch.autograd.grad(
        weft_capture.capture(program, eager_backend, fullgraph=True)(*given).sum(), slope
    )
    q, k, v = given
    scores = (q @ k.mT * 0.5 * slope.view(2, 1, 1)).masked_fill(~causal_matrix(), -torch.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), slope)[0])
    with torch.no_grad():
        graph = weft_capture.capture(program, lambda gm, inputs: graphs.append(gm) or gm)
        graphs = []
        torch.testing.assert_close(graph(*given), expected)
    assert graphs[0].graph.find_nodes(op="call_function", target=fused)


def causal_matrix():
    return torch.ones(12, 12, dtype=torch.bool).tril()


def test_what_torch_refuses_is_refused():
    optimised = weft_capture.capture(plain, eager_backend)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        optimised(heads().requires_grad_(), heads(), heads())


def test_gradients():
    """On a CPU torch refuses gradients before it comes to the operator, which is asked here."""

    def score(s, b, h, m, n):
        return s * BIAS[h] + (m - n)

    def program(q, k, v):
        nobody = lambda b, h, m, n: (m >= n) & (m > 0)  # noqa: E731
        return operator(q, k, v, score, (nobody,), 0.5, {})

    def by_hand(q, k, v):
        m, n = torch.arange(12).unsqueeze(1), torch.arange(12)
        scores = q @ k.transpose(-2, -1) * 0.5 * BIAS.view(2, 1, 1) + (m - n)
        scores = scores.masked_fill(~((m >= n) & (m > 0)), -1e30)
        sums = scores[:, :, 1:].logsumexp(-1) / math.log(2)
        return torch.nn.functional.pad(scores[:, :, 1:].softmax(-1) @ v, (0, 0, 1, 0)), sums

    values = [heads() for _ in range(3)]
    got, expected = ([x.clone().requires_grad_() for x in values] for _ in range(2))
    out, sums, largest = weft_capture.capture(program, eager_backend, fullgraph=True)(*got)
    reference, reference_sums = by_hand(*expected)
    torch.testing.assert_close(out, reference)
    torch.testing.assert_close(sums[:, :, 1:], reference_sums)
    assert not largest.requires_grad and torch.isneginf(sums[:, :, 0]).all()
    (out.sin().sum() + sums[:, :, 1:].cos().sum()).backward()
    (reference.sin().sum() + reference_sums.cos().sum()).backward()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
