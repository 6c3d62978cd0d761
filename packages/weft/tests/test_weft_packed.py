"""Packed sequences of known lengths in one graph; those whose lengths are in a tensor break."""

import pytest
import torch
import weft
from torch import nn
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

X = torch.linspace(-1, 1, 48).reshape(3, 4, 4)
KINDS = {
    "lstm": lambda: nn.LSTM(4, 5, bias=False, batch_first=True, bidirectional=True, proj_size=2),
    "gru": lambda: nn.GRU(4, 5, 2, batch_first=True, dropout=0.5),
    "rnn": lambda: nn.RNN(4, 5, 2, batch_first=True, nonlinearity="relu"),
}


def encode(layers, x, lengths, total=None):
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, state = layers(packed)
    return rnn.pad_packed_sequence(out, True, -1.0, total), state, out


def train(layers, function, *args):
    x = X.clone().requires_grad_()
    torch.manual_seed(0)
    out = function(layers, x, *args)
    tensors = [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
    loss = sum(one.sum() for one in tensors if one.requires_grad)
    grads = torch.autograd.grad(loss, [x, *layers.parameters()])
    return out, [one.stride() for one in tensors], grads


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "codegen"])
@pytest.mark.parametrize("kind", KINDS)
def test_like_eager(kind, backend):
    layers = KINDS[kind]()
    options = {"fallback_random": True} if backend == "codegen" else None
    optimised = weft.compile(encode, fullgraph=True, backend=backend, options=options)
    lengths = (([2, 4, 3],), ([2, 4, 3],), ([3, 1, 1], 4), ([2, 2, 1], 3))
    for args in lengths[: 2 if backend == "codegen" else 4]:
        expected, got = train(layers, encode, *args), train(layers, optimised, *args)
        assert type(got[0][-1]) is rnn.PackedSequence
        torch.testing.assert_close(got, expected)


def test_sequences_of_their_own_sizes():
    def program(x, y):
        packed = rnn.pack_sequence([x, y, x[:1]], enforce_sorted=False)
        again = packed._replace(data=packed.data * 2)
        made = torch.zeros(packed.batch_sizes[0]), packed.batch_sizes[:1].item()
        return rnn.unpack_sequence(again), again.double(), made

    optimised = weft.compile(program, fullgraph=True, backend="eager")
    for rows in (2, 4, 3):
        given = X[0, :3], X[1, :rows]
        torch.testing.assert_close(optimised(*given), program(*given))


def changed(x, lengths):
    known = torch.tensor([3, 2, 2])
    known[0] += 1
    return rnn.pack_padded_sequence(x * 2, known, True)


BROKEN = (
    lambda x, n: rnn.pad_packed_sequence(rnn.pack_padded_sequence(x * 2, n, True))[0] + 1,
    changed,
    lambda x, n: rnn.pack_padded_sequence(x * 2, [4, 2], True),
    lambda x, n: rnn.pack_padded_sequence(x * 2, [1, 2, 2], True),
)


@pytest.mark.parametrize("program", BROKEN, ids=["tensor", "changed", "few", "unsorted"])
def test_what_breaks(program):
    def outcome(function, lengths):
        try:
            return function(X, lengths), ""
        except RuntimeError as error:
            return (), str(error)

    with pytest.raises(weft.Unsupported, match="data-dependent-value|operator-error"):
        weft.compile(program, fullgraph=True, backend="eager")(X, torch.tensor([4, 2, 1]))
    optimised = weft.compile(program, backend="eager")
    for given in map(torch.tensor, ([4, 2, 1], [4, 2, 1], [4, 4, 2])):
        (expected, why), (got, reason) = outcome(program, given), outcome(optimised, given)
        torch.testing.assert_close(got, expected)
        assert reason == why
