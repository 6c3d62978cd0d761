"""Jagged tensors: values, gradients and identities as in eager, with sizes that vary."""

import functools

import pytest
import torch
import torch.nn.functional as F
import weft
from torch import nested
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nested._internal.nested_tensor import nested_from_padded as repad

BATCHES = [[2, 3, 4], [3, 1, 5], [4, 5]]
torch.manual_seed(0)
MODULES = torch.nn.ModuleList([torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4)])
WIDE, NARROW, NORM = MODULES
JAGGED, attend = torch.jagged, F.scaled_dot_product_attention
jagged = nested.nested_tensor_from_jagged
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)


def one(lengths, dim=1, offsets=None, used=None):
    torch.manual_seed(sum(lengths))
    values = torch.randn((sum(lengths), 4) if dim == 1 else (4, sum(lengths)))
    offsets = torch.tensor([0, *lengths]).cumsum(0) if offsets is None else offsets
    return jagged(values, offsets, used, dim).detach().requires_grad_()


def pair(lengths):
    first = one(lengths)
    return first, one(lengths, offsets=first._offsets)


def apart(lengths):
    return pair(lengths) if len(lengths) == 2 else (one(lengths), one(lengths))


MAKERS = {
    "jagged": lambda n: [one(n)],
    "with known": lambda n: [nested.nested_tensor(one(n).unbind(), layout=JAGGED).requires_grad_()],
    "with holes": lambda n: [one(n, used=torch.tensor(n).clamp(max=2))],
    "ragged last": lambda n: [one(n, dim=2)],
    "pair": pair,
    "apart": apart,
    "aliases": lambda n: [
        x := one(n).detach(),
        jagged(x._values[:] if n[1] == 1 else -x._values, x._offsets),
    ],
    "rows": lambda n: [torch.ones(size, 4, requires_grad=True) for size in n[:2]],
    "row": lambda n: [torch.ones(n[0], 4, requires_grad=True)],
    "empty": lambda n: [one([2, *n[1:]]), one([0, *n[1:]])],
    "lonely": lambda n: [one([1, *n[1:]]) if n[0] == 2 else one([0, 1, n[1]])],
    "packed": lambda n: [torch.ones(sum(n), 4, requires_grad=True), one(n)._offsets],
}


def with_break(x):
    ragged, y = x.shape[1], x * 2
    weft.graph_break()
    return y.view(x.shape[0], ragged, 2, 2) + 1


def heads(x):
    return x.unflatten(-1, (2, x.size(-1) // 2)).transpose(1, 2)


def attended(x, y):
    """Two layers as of a decoder: one of self-attention, one that attends to another sequence."""
    h = x + NARROW(attend(*(heads(WIDE(x) * k) for k in (1, 2, 3))).transpose(1, 2).flatten(-2))
    key, value = heads(NORM(y)), heads(y.sin())
    return NORM(h) * x, attend(heads(h), key, value, scale=0.3).transpose(1, 2).flatten(-2)


def guarded(x, y):
    try:
        return x + y
    except RuntimeError:
        return x * 5


ONE = ("jagged", "with known")
WHOLE = {
    "operators": (lambda x: (x.sin() * 2 + x, x, NARROW(WIDE(x)), NORM(x)), *ONE),
    "two": (lambda x, y: (torch.cat([x, y], -1), torch.where(x > 0, x, y), x * y), "pair"),
    "parts": (lambda x: (x * 2, x.values() * 2, x.offsets(), x.lengths()), *ONE, "with holes"),
    "views": (lambda x: (x.detach(), x.transpose(1, 2), x.values()), *ONE),
    "sizes": (lambda x: (x.shape, x.view(x.shape[0], x.size(1), 2, 2) * x.numel()), *ONE),
    "branch": (lambda x: x * x._ragged_idx, "jagged", "ragged last", "with holes"),
    "padded": (lambda x: repad(x.to_padded_tensor(0.0), x._offsets, sum_S=len(x.values())), *ONE),
    "listed": (lambda *xs: nested.as_nested_tensor(xs, layout=JAGGED) * 2, "rows"),
    "copied": (lambda *xs: nested.nested_tensor(xs, layout=JAGGED).sin(), "rows"),
    "packed": (lambda v, o: (jagged(v.sin(), o) * 2, jagged(v * 2, lengths=o.diff())), "packed"),
    "sharing": (lambda v, o: [jagged(v * k, p) for p in [o.clone()] for k in (2, 3)], "packed"),
    "attention": (lambda x: attend(h := heads(x), h * 2, h), *ONE),
    "decoder": (attended, "apart", "empty"),
    "weighted": (lambda x: (x @ WIDE.weight.t()).sin(), *ONE),
    "products": (lambda x, y: (x.transpose(1, 2) @ y).sin(), "pair"),
    "unbind": (lambda x: [y * 2 for y in (x * 2).unbind()], *ONE, "lonely"),
    "row": (lambda x: (x[0] * 2, x[-1].sin()), *ONE),
    "rows": (lambda x: [row.sum(0) for row in x], "jagged", "ragged last", "lonely"),
    "numbered": (lambda x: [x[i] * x[len(x) - 1].sum() for i in range(len(x))], "jagged", "lonely"),
    "selected": (lambda v, o: nested.masked_select(v * 2, v > 0.5) * 2, "packed"),
    "memory": (lambda x, y: [x.mul_(2) is None, y + 1], "aliases"),
}
BROKEN = {
    "holes": (lambda x: [y * 2 for y in (x * 2).unbind()], "with holes"),
    "unlike rows": (lambda x: (x * 2)[0] + x.sin()[1], "jagged", "lonely"),
    "of a view": (lambda x: (x[0], x[1, 0] * 2), *ONE),
    "dropped": (lambda x: attend(*[heads(x)] * 3, dropout_p=0.5), "jagged"),
    "refused": (lambda x: attend(*map(heads, WIDE(x * 2).chunk(2, -1)), heads(x)), "jagged"),
    "added": (lambda x, y: x.sin() + y, "apart"),
    "break": (with_break, "jagged"),
    "narrow": (lambda v, o: nested.narrow(v[None], 1, o[:1], o[1:2], layout=JAGGED), "packed"),
    "narrowed": (lambda v: nested.narrow(v[None] * 2, 1, 1, 2, layout=JAGGED).sin(), "row"),
    "other offsets": (guarded, "apart"),
    "compared": (lambda x, y: x * (2 if x.shape == y.shape else 3), "apart"),
}


def state(tensor, others):
    """What a program may see of a tensor."""
    if not isinstance(tensor, NestedTensor):
        return tensor.detach().clone(), tensor.stride(), tensor.requires_grad
    sizes = [size if isinstance(size, int) else None for size in tensor.shape]
    others = [one for one in others if isinstance(one, NestedTensor)]
    known = [tensor.shape[tensor._ragged_idx] == x.shape[x._ragged_idx] for x in others]
    about = [tensor.is_leaf, tensor.requires_grad, len(tensor._metadata_cache)]
    inside = [tensor._values.detach().clone(), tensor._offsets, tensor._lengths]
    return sizes, known, about, inside, [tensor is x for x in others]


def outcome(function, inputs):
    """What a call gives: results, gradients, and what writing to the results does."""
    torch.manual_seed(1)
    MODULES.zero_grad()
    try:
        results = function(*inputs)
    except RuntimeError:
        return None, [state(x, ()) for x in inputs]
    results = list(results) if isinstance(results, tuple | list) else [results]
    ragged = [r[1] == inputs[0].shape[1] for r in results if isinstance(r, torch.Size)]
    tensors = [one for one in results if isinstance(one, torch.Tensor)]
    seen = [ragged, [state(tensor, [*inputs, *tensors]) for tensor in tensors]]
    dense = [one.values() if one.is_nested else one for one in tensors]
    loss = sum((one * one).sum() for one in dense if one.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    slopes = [x.grad for x in (*inputs, *MODULES.parameters())]
    for tensor in dense:
        tensor.detach().add_(1)
    slopes = [one if one is None else state(one, inputs) for one in slopes]
    return seen, slopes, [state(x, ()) for x in inputs]


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [*WHOLE, *BROKEN])
def test_like_eager(name, dynamic):
    function, *makers = (WHOLE | BROKEN)[name]
    weft.reset()
    whole = name in WHOLE
    compiled = weft.compile(function, backend="aot_eager", dynamic=dynamic, fullgraph=whole)
    for maker, batch in ((MAKERS[name], batch) for name in makers for batch in BATCHES):
        expected = outcome(function, maker(batch))
        close(outcome(compiled, maker(batch)), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["operators", "attention", "padded", "decoder"])
def test_batches_share_two_graphs_and_compiled_code(name):
    weft.counters.clear()
    function, maker, *_ = WHOLE[name]
    compiled = weft.compile(function, fullgraph=True)
    for sizes in ([2, 3], [4, 5], [1, 7], [6, 6], [2, 2, 3], [1, 5, 2, 2]):
        expected = outcome(function, MAKERS[maker](sizes))
        close(outcome(compiled, MAKERS[maker](sizes)), expected)
    graphs = 4 if maker == "apart" else 3  # offsets that are shared, or not
    assert weft.counters["stats"]["unique_graphs"] <= graphs


def test_a_split_whose_backward_would_end_the_process_is_not_differentiated():
    x = one([2, 3])
    first, _ = weft.compile(lambda x: x.split([1, 3], -1), backend="aot_eager")(x)
    torch.testing.assert_close(first.values(), x.values()[:, :1])
