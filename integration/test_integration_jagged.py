"""Jagged tensors: values, gradients and identities as in eager, with sizes that vary."""

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
    "packed": lambda n: [torch.ones(sum(n), 4, requires_grad=True), one(n)._offsets],
}


def with_break(x):
    ragged, y = x.shape[1], x * 2
    weft.graph_break()
    return y.view(x.shape[0], ragged, 2, 2) + 1


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
    "memory": (lambda x, y: [x.mul_(2) is None, y + 1], "aliases"),
}
BROKEN = {
    "unbind": (lambda x: [y * 2 for y in (x * 2).unbind()], *ONE),
    "attention": (lambda x: attend(h := x.unflatten(-1, (2, 2)).transpose(1, 2), h * 2, h), *ONE),
    "break": (with_break, "jagged"),
    "narrow": (lambda v, o: nested.narrow(v[None], 1, o[:1], o[1:2], layout=JAGGED), "packed"),
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
    results = function(*inputs)
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
        torch.testing.assert_close(outcome(compiled, maker(batch)), expected)


def test_batches_share_two_graphs_and_compiled_code():
    weft.counters.clear()
    compiled = weft.compile(lambda x: NARROW(WIDE(x)).relu(), fullgraph=True)
    for x in map(one, ([2, 3], [4, 5], [1, 7], [6, 6])):
        torch.testing.assert_close(compiled(x).values(), NARROW(WIDE(x)).relu().values())
    assert weft.counters["stats"]["unique_graphs"] <= 2


def test_a_split_whose_backward_would_end_the_process_is_not_differentiated():
    x = one([2, 3])
    first, _ = weft.compile(lambda x: x.split([1, 3], -1), backend="aot_eager")(x)
    torch.testing.assert_close(first.values(), x.values()[:, :1])
