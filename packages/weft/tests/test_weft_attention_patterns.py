"""Attention that a program spells out becomes torch's fused operator, and stays eager's."""

import math

import pytest
import torch
import torch.nn.functional as F
import weft

B, H, L, S, E = 2, 3, 6, 9, 8


def _data(length=L, keys=S, heads=H):
    torch.manual_seed(0)
    shapes = (B, H, length, E), (B, heads, keys, E), (B, heads, keys, E)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def _mask():
    mask = torch.rand(B, 1, L, S) > 0.4
    mask[..., 0] = True
    return mask


def _scaled(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(E), dim=-1) @ v


def _scaled_query(q, k, v):
    scores = torch.matmul(q * E**-0.5, k.mT)
    return torch.matmul(F.dropout(F.softmax(scores, -1), 0.5, False), v).transpose(1, 2)


def _unscaled(q, k, v):
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


def _einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(0.3)
    return torch.einsum("bhqk,bhkd->bqhd", scores.softmax(dim=-1), v)


def _bmm(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * 0.5
    return torch.bmm(scores.softmax(-1), v)


def _baddbmm(q, k, v):
    bias = torch.linspace(-1, 0, S).expand(B * H, 1, S)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=2.0, alpha=0.4)
    return torch.bmm(scores.softmax(-1), v)


def _viewed(q, k, v, mask):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, L, S)
    scores = scores.masked_fill(~mask, -torch.inf).view(B * H, L, S)
    return torch.bmm(scores.softmax(-1), v).view(B, H, L, E)


def _filled(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) / math.sqrt(E)
    return scores.masked_fill(mask == 0, float("-inf")).softmax(-1) @ v


def _filled_in_place(q, k, v, mask):
    scores = q @ k.transpose(-2, -1)
    scores.div_(3).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return scores.softmax(-1) @ v


def _chosen(q, k, v, mask):
    scores = torch.where(mask, q @ k.transpose(-2, -1), -1e9)
    return F.softmax(scores / 2, -1) @ v


def _added(q, k, v, mask):
    bias = (1.0 - mask.float()) * -10000.0
    return F.softmax(q @ k.transpose(-2, -1) * 0.25 + bias, -1) @ v


def _added_infinity(q, k, v, mask):
    bias = torch.zeros(B, 1, L, S).masked_fill(~mask, -torch.inf)
    scores = q @ k.transpose(-2, -1)
    scores += bias
    return F.softmax(scores.float(), dim=-1, dtype=torch.float32).type_as(v) @ v


def _added_lowest(q, k, v, mask):
    bias = torch.zeros(B, 1, L, S).masked_fill(~mask, torch.finfo(torch.float32).min)
    return F.softmax(q @ k.transpose(-2, -1) * 0.25 + bias, -1) @ v


def _biased(q, k, v, mask):
    slopes = torch.tensor([0.5, 0.25, 0.125]).view(H, 1, 1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(E) + slopes * torch.arange(S)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def _grouped(q, k, v):
    k, v = k[:, :1].repeat_interleave(3, 1), v[:, :1].expand(-1, 3, -1, -1)
    return _scaled(q, k, v)


def _causal(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(E)
    mask = torch.triu(torch.ones(L, L, dtype=torch.bool), diagonal=1)
    return scores.masked_fill(mask, -torch.inf).softmax(-1) @ v


def _causal_added(q, k, v):
    mask = torch.full((L, L), -torch.inf).triu(1)
    return (q @ k.transpose(-2, -1) * 0.4 + mask).softmax(-1) @ v


def _causal_positions(q, k, v):
    """As transformers makes the mask."""
    positions = torch.arange(L).unsqueeze(0).expand(B, -1)
    sequence = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1).ne(1).cumsum(-1)
    batch, query, key = torch.arange(B)[:, None, None], torch.arange(L)[:, None], torch.arange(L)
    seen = query.new_ones((), dtype=torch.bool) & (key <= query)
    seen = seen & (sequence[batch, query] == sequence[batch, key])
    bias = torch.where(seen[:, None], torch.zeros(()), torch.finfo(torch.float32).min)
    return (q @ k.transpose(-2, -1) * 0.4 + bias).softmax(-1) @ v


UNMASKED = [_scaled, _scaled_query, _unscaled, _einsum, _bmm, _baddbmm, _grouped]
MASKED = [_viewed, _filled, _filled_in_place, _chosen, _added, _added_infinity, _biased]
ADDED = [_added, _added_infinity]
CAUSAL = [_causal, _causal_added, _causal_positions]


def _gradients(function, tensors, *rest):
    out = function(*tensors, *rest)
    weights = torch.linspace(0.5, 2, out.numel()).view(out.shape)
    return out, *torch.autograd.grad((out * weights).sum(), tensors)


def _inference(function, tensors, *rest):
    return (function(*tensors, *rest),)


def _rewritten(function, tensors, *rest, times=1, run=_gradients):
    """The results of the compiled function, whose attentions were rewritten `times` times."""
    weft.reset()
    before = weft.counters["aot"]["rewrites"]
    compiled = weft.compile(function, backend="aot_eager", fullgraph=True)
    found = run(compiled, tensors, *rest)
    assert weft.counters["aot"]["rewrites"] == before + times
    return found


def _compare(found, expected, **tolerance):
    assert found[0].stride() == expected[0].stride()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("function", UNMASKED)
def test_spellings_without_a_mask(function):
    tensors = _data()
    _compare(_rewritten(function, tensors), _gradients(function, tensors))


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("function", MASKED)
def test_spellings_with_a_mask_also_where_it_leaves_no_key(function, empty):
    tensors, mask = _data(), _mask()
    if empty:
        mask[1, 0, 2] = False
    times = function not in ADDED
    found = _rewritten(function, tensors, mask, times=times)
    expected = _gradients(function, tensors, mask)
    _compare(found, expected, equal_nan=True)
    nan = empty and function in (_viewed, _filled, _added_infinity, _biased)
    assert expected[0].isnan().any() == nan


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("function", [_added, _added_infinity, _added_lowest])
def test_unknown_numbers_are_added_to_scores_in_inference(function, empty):
    tensors, mask = [t.detach() for t in _data()], _mask()
    if empty:
        mask[1, 0, 2] = False
    found = _rewritten(function, tensors, mask, run=_inference)
    # Scores that -10000 is added to have errors of 5e-4 in eager as well.
    tolerance = {"atol": 2e-3, "rtol": 1e-3} if empty and function is _added else {}
    _compare(found, _inference(function, tensors, mask), equal_nan=True, **tolerance)


@pytest.mark.parametrize("function", CAUSAL)
def test_causal_masks_that_are_computed(function):
    tensors = _data(keys=L)
    seen = []
    backend = weft.aot_autograd(fw_compiler=lambda gm, _: seen.append(gm) or gm.forward)
    found = _gradients(weft.compile(function, backend=backend), tensors)
    _compare(found, _gradients(function, tensors))
    calls = [n for n in seen[0].graph.nodes if "attention" in str(n.target)]
    assert [call.args[4] for call in calls] == [True]  # is_causal


@pytest.mark.parametrize("function", [_scaled, _einsum, _filled, _bmm])
def test_dynamic_sizes(function):
    function_of = weft.compile(function, backend="aot_eager", dynamic=True)
    before = weft.counters["aot"]["rewrites"]
    for size in (0, 3):
        tensors = _data(L + size, S + size)
        rest = [F.pad(_mask(), (0, size, 0, size), value=True)] if function in MASKED else []
        found = _gradients(function_of, tensors, *rest)
        _compare(found, _gradients(function, tensors, *rest))
    assert weft.counters["aot"]["rewrites"] == before + 1


def _llama(q, k, v, mask):
    """transformers' eager attention."""
    weights = torch.matmul(q, k.transpose(2, 3)) * E**-0.5
    weights = weights + mask.to(q.dtype)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


@pytest.mark.parametrize("function", [_llama, _filled])
@pytest.mark.parametrize("autocast", [False, True])
def test_lower_precision_is_as_accurate(function, autocast):
    mask, dtype, run = _mask(), torch.bfloat16, _gradients
    mask[1, 0, 2] = function is _filled  # else a row without a key, which gets the mean
    if function is _llama:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min).to(dtype)
        run = _inference
    exact = [t.detach().double().requires_grad_(run is _gradients) for t in _data()]
    expected = run(function, exact, mask)
    lower = torch.float32 if autocast else dtype
    tensors = [t.detach().to(lower).requires_grad_(run is _gradients) for t in exact]
    with torch.autocast("cpu", dtype, enabled=autocast):
        found = _rewritten(function, tensors, mask, run=run)
        eager = run(function, tensors, mask)
    for ours, theirs, double in zip(found, eager, expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours - double).norm() <= 1.1 * (theirs - double).norm() + 1e-3


def _larger_mask(q, k, v):
    scores = q[0] @ k[0].transpose(-2, -1)
    mask = torch.eye(L, S, dtype=torch.bool).expand(B, H, -1, -1)
    return torch.where(mask, -1e9, scores).softmax(-1) @ v


def _read(q, k, v):
    weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
    return weights @ v + weights.sum()


def _dropped(q, k, v):
    return F.dropout(torch.softmax(q @ k.transpose(-2, -1), -1), 0.5, True) @ v


def _other_dimension(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), dim=-2) @ v


def _weak_mask(q, k, v):
    scores = q @ k.transpose(-2, -1)
    return scores.masked_fill(torch.eye(L, S, dtype=torch.bool), -3.0).softmax(-1) @ v


def _negated(q, k, v):
    scores = q @ k.transpose(-2, -1) * -1.0
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    "function", [_read, _larger_mask, _dropped, _other_dimension, _weak_mask, _negated]
)
def test_what_is_otherwise_stays_as_it_is(function):
    torch.manual_seed(1)
    tensors = _data()
    found = _rewritten(function, tensors, times=0)
    torch.manual_seed(1)
    tensors = _data()
    _compare(found, _gradients(function, tensors))


def test_operands_that_are_written_before_the_second_product_stay():
    def changed(q, k, v):
        q = q * 1
        scores = q @ k.transpose(-2, -1)
        q.add_(1)
        return scores.softmax(-1) @ v

    weft.reset()
    with torch.no_grad():
        before = weft.counters["aot"]["rewrites"]
        found = weft.compile(changed, backend="aot_eager")(*_data())
        torch.testing.assert_close(found, changed(*_data()))
    assert weft.counters["aot"]["rewrites"] == before


def test_the_setting_turns_it_off():
    with weft.config.patch(fuse_attention=False):
        _rewritten(_scaled, _data(), times=0)


def test_eagers_bits_need_eagers_operators():
    weft.reset()
    before = weft.counters["aot"]["rewrites"]
    tensors = _data()
    found = weft.compile(_scaled, options={"strict_numerics": True})(*tensors)
    assert torch.equal(found, _scaled(*tensors))
    assert weft.counters["aot"]["rewrites"] == before


def test_generated_code_runs_it():
    for function in (_causal, _filled):
        tensors = _data(keys=L)
        rest = [_mask()[..., :L]] if function is _filled else []
        weft.reset()
        before = weft.counters["aot"]["rewrites"]
        found = _gradients(weft.compile(function), tensors, *rest)
        assert weft.counters["aot"]["rewrites"] == before + 1
        _compare(found, _gradients(function, tensors, *rest))
