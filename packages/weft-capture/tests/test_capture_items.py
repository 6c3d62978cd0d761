"""Items of tensors at positions that tensors hold: gathered, so that no position is read."""

import pytest
import torch
import weft_capture
from capture_check import eager_backend, same
from weft_guards import CacheRules

X = torch.arange(20.0).reshape(4, 5)
AT = torch.tensor(2)


def suppressed(boxes, scores):
    """Soft non-maximum suppression."""
    scores, kept = scores.clone(), []
    for _ in range(boxes.shape[0]):
        best = scores.argmax()
        kept.append((best, scores[best].clone()))
        overlap = torch.min(boxes[best, 1:], boxes[:, 1:]) - torch.max(
            boxes[best, :1], boxes[:, :1]
        )
        scores = scores * torch.exp(-(overlap.clamp(min=0).prod(-1) ** 2))
        scores[best] = -1
    return torch.stack([at for at, _ in kept]), torch.stack([score for _, score in kept])


def added(x, at):
    x[at] += 5
    x[at] = x[at] * 2
    x[at, at - 1] -= 1
    x[at, 1:] *= 0.5
    return x + 1


def counted(x):
    counts = torch.zeros(3, 3, dtype=torch.int64)
    for row, column in zip(x[:, 0].long() % 3, x[:, 1].long() % 3, strict=True):
        counts[row, column] += 1
    return counts


WHOLE = {
    "rows": lambda x, at: (x[at].sin(), x[at - 5] * 2, (x * 2)[at]),
    "parts": lambda x, at: (x[at, 1:] + x[at, None, :4].sum(), x[:, at].exp(), x[..., at, 1] + 1),
    "small integers": lambda x, at: x[at.int()] + x[at.to(torch.int8), at],
    "set": lambda x, at: (x.__setitem__(at, 7.0), x.__setitem__((at, 1), x[0, 0]), x * 2)[2],
    "set parts": lambda x, at: (
        x.__setitem__((at, slice(1, 3)), torch.ones(1, 2, dtype=torch.int64)),
        x.__setitem__((at - 1, at), torch.tensor(9)),
        x.__setitem__((at, None, ..., 0), 5),
        x + 1,
    )[3],
    "added to": lambda x, at: (added(x, at), counted(x)),
    "read before a write": lambda x, at: (y := x[at] * 2, x.add_(1), y + 1)[2],
}


def broken(function, x, at):
    """Compare with eager; returns the codes of the breaks."""
    mine, eagers = x.clone(), x.clone()
    captured = weft_capture.capture(function, eager_backend)
    found, expected = captured(mine, at), function(eagers, at)
    assert same(found, expected) and same(mine, eagers)
    layouts = [
        [t.stride() for t in (result if isinstance(result, tuple) else (result,))]
        for result in (found, expected)
    ]
    assert layouts[0] == layouts[1]
    return [record.code for record in captured._weft_capture.breaks]


@pytest.mark.parametrize("name", WHOLE)
def test_items_at_positions_in_tensors(name):
    assert broken(WHOLE[name], X, AT) == []
    captured = weft_capture.capture(WHOLE[name], eager_backend, fullgraph=True)
    assert same(captured(X.clone(), AT), WHOLE[name](X.clone(), AT))


def test_a_loop_over_the_best():
    captured = weft_capture.capture(
        suppressed, eager_backend, fullgraph=True, rules=CacheRules(dynamic=True)
    )
    for count in (4, 4, 5):
        boxes, scores = torch.rand(count, 3), torch.rand(count)
        assert same(captured(boxes, scores), suppressed(boxes, scores))
    assert captured._weft_capture.breaks == []


def written(x, at):
    y = (x := x * 2)[at]
    y += 1
    return x + 0


def written_around(x, at):
    y = (x := x * 2)[at]
    x.add_(1)
    return y * 2


def read_between(x, at):
    y = x[at]
    y += 1
    z = x.sum()
    x[at] = y
    return x + z


def view(x, at):
    y = x[at]
    return y[1:], x


def column(x, at):
    return (x * 2)[:, at]


def twice(x, at):
    x = x * 2
    return x[at, 1:], x[at]


def item_of_an_item(x, at):
    z = (x := x * 2)[at][at]
    x.add_(1)
    return z + 1


OTHERS = [written, written_around, read_between, view, column, twice, item_of_an_item]


@pytest.mark.parametrize("function", OTHERS)
def test_items_that_the_program_can_tell_from_copies(function):
    assert set(broken(function, X, AT)) == {"data-dependent-value"}


def written_column(x, at):
    y = x[..., at]
    y += 1
    return x * 2


@pytest.mark.parametrize("function", [written, written_around, written_column, read_between])
def test_items_in_inference_mode_which_counts_no_writes(function):
    inside = torch.inference_mode()(lambda x, at: function(x, at))
    assert "data-dependent-value" in broken(inside, X, AT)


def test_gradients_of_items():
    def loss(x, at):
        return (x * x)[at].sum() + x[at, at]

    found = []
    for function in (loss, weft_capture.capture(loss, eager_backend)):
        x = X.clone().requires_grad_()
        function(x, AT).backward()
        found.append(x.grad)
    assert same(*found)


@pytest.mark.parametrize("at", [9, -5])
def test_positions_out_of_range(at):
    captured = weft_capture.capture(lambda x, at: x[at] * 2, eager_backend)
    with pytest.raises(
        IndexError, match=f"index {at} is out of bounds for dimension 0 with size 4"
    ):
        captured(X, torch.tensor(at))
