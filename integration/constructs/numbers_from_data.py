"""Numbers and sizes out of tensors, captured where the setting for it is on."""

import math

import torch

from constructs import case


def tensor_and_count():
    return torch.arange(6.0).reshape(2, 3), torch.tensor(2)


def tensor_and_mask():
    return torch.arange(6.0).reshape(2, 3), torch.tensor(
        [[True, False, True], [False, False, True]]
    )


def tensor_and_lengths():
    return torch.arange(6.0), torch.tensor([1, 2, 3])


data_case = case(reads_data=True, inputs=tensor_and_count)
masked_case = case(reads_data=True, inputs=tensor_and_mask)
lengths_case = case(reads_data=True, inputs=tensor_and_lengths)


@data_case
def item_in_arithmetic(x, n):
    k = n.item()
    return x * k, k + 1, k * 0.5, -k, k // 2, k % 2, x.sum().item() * 2


@data_case
def conversions(x, n):
    return int(n), float(n), int(x.mean()), bool(n.bool()), math.sqrt(x.max().item())


@data_case
def size_of_new_tensors(x, n):
    k = n.item()
    return torch.zeros(k, 3) + x, torch.arange(k), x.new_full((k,), 2.0), torch.ones(k).numel()


@data_case
def slices(x, n):
    k = n.item()
    return x[:k] * 2, x[:, k:], x[0, :k].sum()


@data_case
def index_by_item(x, n):
    return x[:, n.item()] + 1, x[0, n.item() - 1], x[..., n.item()]


@data_case
def item_kept_in_containers(x, n):
    state = {"n": n.item()}
    state["twice"] = state["n"] * 2
    return state, [x * v for v in state.values()]


@data_case
def check_then_branch(x, n):
    k = n.item()
    torch._check(k > 0)
    return x + 1 if k > 0 else x - 1


@data_case
def failed_check(x, n):
    k = n.item()
    torch._check(k > 2, lambda: "needs more rows")
    return x[:k]


@data_case
def branch_on_item(x, n):
    return x + 1 if n.item() > 1 else x - 1


@data_case
def range_of_item(x, n):
    return [x * i for i in range(n.item())]


@data_case
def item_in_text(x, n):
    return f"{n.item()} rows", x * 2


@masked_case
def boolean_mask(x, m):
    y = x[m]
    return y * 2, y.sum() / max(len(y), 1), x.masked_select(m), y.shape


@masked_case
def assignment_by_mask(x, m):
    x = x.clone()
    x[m] = x[m] + 10
    return x


@masked_case
def nonzero_in_three_ways(x, m):
    return m.nonzero(), torch.where(m), torch.argwhere(m)[:, 0], m.nonzero(as_tuple=True)


@lengths_case
def split_by_tolist(x, lengths):
    return [piece.sum() for piece in x.split(lengths.tolist())], sum(lengths.tolist())


@lengths_case
def repeat_interleave_by_tensor(x, lengths):
    return torch.repeat_interleave(x[:3], lengths) + 1


@lengths_case
def unique_values(x, lengths):
    values, places = torch.unique(lengths % 2, return_inverse=True)
    return values[places], torch.unique_consecutive(lengths // 2), torch.bincount(lengths)
