"""Makers of arguments: the same numbers for the same seed, in any memory layout.

Stands alone: files of failing programs hold a copy of it.
"""

import math

import torch

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0)


class Makers:
    """Makers for one run: `floats` replaces float dtypes, `nudge` moves values by a rounding.

    Other nudges move other values.
    """

    def __init__(self, floats=None, nudge=0):
        self.device = torch.get_default_device()
        self.floats = floats
        self.nudge = nudge

    def tensor(self, shape, dtype="float32", seed=0, layout="dense", kind="usual", grad=False):
        """A tensor; `layout` is a key of LAYOUTS, `kind` says which values (see `_numbers`).

        It lies on torch's default device.
        """
        dtype = getattr(torch, dtype)
        with torch.device("cpu"):  # the same numbers on every device
            result = self._on_cpu(shape, dtype, seed, layout, kind)
        return result.detach().requires_grad_() if grad else result

    def _on_cpu(self, shape, dtype, seed, layout, kind):
        random = torch.Generator().manual_seed(seed)
        view, memory = LAYOUTS[layout](tuple(shape))
        values = _numbers(memory, dtype, kind, random)
        if self.device.type == "cuda" and dtype.is_floating_point:
            # Triton's functions, unlike CUDA's, take subnormal numbers for zero.
            values = torch.where(values.abs() < torch.finfo(dtype).tiny, 0.0, values)
        if self.nudge and dtype.is_floating_point:
            random.manual_seed(seed + 1000 * self.nudge)
            signs = torch.randint(0, 2, memory, generator=random) * 2.0 - 1
            signs = torch.where(values.abs() < torch.finfo(dtype).max / 2, signs, 0)
            values = (values * (1 + signs * torch.finfo(dtype).eps)).to(dtype).to(torch.float64)
        if self.floats is not None and (dtype.is_floating_point or dtype.is_complex):
            dtype = self.floats.to_complex() if dtype.is_complex else self.floats
        result = view(values.to(self.device, dtype))
        assert tuple(result.shape) == tuple(shape)
        return result

    def indices(self, shape, high, seed=0, dtype="int64"):
        """Integers from 0 up to `high`, which is not among them."""
        random = torch.Generator().manual_seed(seed)
        values = torch.randint(0, max(high, 1), tuple(shape), generator=random, device="cpu")
        return values.to(self.device, getattr(torch, dtype))

    def names(self):
        """What a program may use of this."""
        return {"tensor": self.tensor, "indices": self.indices}


def _numbers(shape, dtype, kind, random):
    """Values in float64 (or int64) that `dtype` holds exactly."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random)
    if dtype.is_complex:
        parts = torch.randn((*shape, 2), generator=random, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if not dtype.is_floating_point:
        low, high = (-4, 5) if dtype.is_signed else (0, 5)
        if kind == "special":
            limits = torch.iinfo(dtype)
            choices = torch.tensor([limits.min, min(limits.max, 2**63 - 1), 0, 1, 2])
            return choices[torch.randint(0, 5, shape, generator=random)]
        return torch.randint(low, high, shape, generator=random)
    values = torch.randn(shape, generator=random, dtype=torch.float64)
    if kind == "positive":
        values = values.abs() + 0.1
    elif kind == "ties":
        values = values.round() + 0.0  # no -0.0, which is special
    elif kind == "special":
        limits = torch.finfo(dtype)
        extremes = (limits.max, limits.min, limits.tiny, limits.smallest_normal / 4, limits.eps)
        choices = torch.tensor([*SPECIAL, *extremes], dtype=torch.float64)
        chosen = choices[torch.randint(0, len(choices), shape, generator=random)]
        values = torch.where(torch.rand(shape, generator=random) < 0.4, chosen, values)
    return values.to(dtype).to(torch.float64)


def _dense(shape):
    return (lambda t: t), shape


def _transposed(shape):
    if len(shape) < 2:
        return _strided(shape)
    return (lambda t: t.transpose(-1, -2)), (*shape[:-2], shape[-1], shape[-2])


def _strided(shape):
    if not shape:
        return (lambda t: t[1]), (2,)
    return (lambda t: t[..., ::2] if shape[-1] else t), (*shape[:-1], max(2 * shape[-1] - 1, 0))


def _offset(shape):
    if not shape:
        return (lambda t: t[2]), (3,)
    return (lambda t: t[2:]), (shape[0] + 2, *shape[1:])


def _expanded(shape):
    if not shape:
        return _dense(shape)
    return (lambda t: t.expand(shape)), (1, *shape[1:])


def _permuted(shape):
    order = list(reversed(range(len(shape))))
    return (lambda t: t.permute(order)), tuple(reversed(shape))


def _channels_last(shape):
    if len(shape) != 4:
        return _permuted(shape)
    n, c, h, w = shape
    return (lambda t: t.permute(0, 3, 1, 2)), (n, h, w, c)


def _inner(shape):
    """With gaps on both sides of each row, and an offset."""
    if not shape:
        return _offset(shape)
    return (lambda t: t[..., 1:-1]), (*shape[:-1], shape[-1] + 2)


def _overlapping(shape):
    """Rows that share memory with the next one."""
    if len(shape) < 2 or 0 in shape[-2:]:
        return _expanded(shape)
    return (lambda t: t.unfold(-1, shape[-1], 1)), (*shape[:-2], shape[-2] + shape[-1] - 1)


LAYOUTS = {
    "dense": _dense,
    "transposed": _transposed,
    "strided": _strided,
    "offset": _offset,
    "expanded": _expanded,
    "permuted": _permuted,
    "channels_last": _channels_last,
    "inner": _inner,
    "overlapping": _overlapping,
}
