"""A linear layer and its cross entropy, chunk by chunk of rows, without the matrix of logits.

A loss that is a sum or a mean has a gradient that is linear in one number, so the forward makes the
gradients of each chunk while its logits are at hand, and the backward only scales them. Where each
row has a gradient of its own (``reduction="none"``), the backward computes each chunk again.
Gradients of the weights are added up in float32 (float64 for such weights).

The first form is that of Liger kernels (Hsu et al., 2024, "Liger Kernel: Efficient Triton Kernels
for LLM Training"), made of traced operators instead of one kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Step = Callable[[torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class ChunkedLoss:
    """The loss as a function of (hidden, weight, bias, target, class_weight).

    Args:
        indices: of the rows of `hidden` that take part, one after the other.
        steps: what is done to the logits, row by row.
        loss: `F.cross_entropy` or `F.nll_loss`.
        options: of the loss, without `reduction`.
        reduction: mean, sum or none.
        chunks: number of chunks.
        one_pass: make gradients in the forward.
    """

    indices: tuple[Any, ...]
    steps: tuple[Step, ...]
    loss: Callable[..., torch.Tensor]
    options: dict[str, Any]
    reduction: str
    chunks: int
    one_pass: bool

    __name__ = "chunked_loss"

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the loss: a number, or the shape of `target` without a reduction.

        Args:
            hidden: (..., features), of which `indices` take rows.
            weight: (classes, features).
            bias: (classes,) or None.
            target: int64 class of each row.
            class_weight: (classes,) or None.
        """
        for index in self.indices:
            hidden = hidden[index]
        rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        valid = labels != self.options["ignore_index"]
        self._check(labels, valid, weight)
        autocast = _Autocast(rows.device.type, _autocast_dtype(rows))
        count = None
        if self.reduction == "mean":
            count = valid.sum() if class_weight is None else _weigh(class_weight, labels, valid)
            some = valid.any()
            count = torch.where(some, count, 1)
        tensors = rows, weight, bias, labels, class_weight, count
        loss: torch.Tensor = _LinearLoss.apply(self, autocast, *tensors)  # type: ignore[no-untyped-call]
        result_dtype = self._dtype(autocast.dtype or rows.dtype, autocast)
        if self.reduction == "none":
            return loss.to(result_dtype).reshape(target.shape)
        if self.reduction == "mean":
            loss = torch.where(some, loss, torch.nan)
        return loss.to(result_dtype)

    def _check(self, labels: torch.Tensor, valid: torch.Tensor, weight: torch.Tensor) -> None:
        """Raise an IndexError when this runs with a label that is no class: a look-up does."""
        probe = weight.detach().new_zeros(()).expand(weight.shape[0])
        probe[torch.where(valid, labels, 0)]

    def _dtype(self, dtype: torch.dtype, autocast: _Autocast) -> torch.dtype:
        """The dtype of the unreduced loss of logits of `dtype`."""
        with torch.no_grad(), autocast.on():
            logits = torch.empty(1, 1, dtype=dtype, device=autocast.device)
            for step in self.steps:
                logits = step(logits)
            label = torch.zeros(1, dtype=torch.int64, device=autocast.device)
            return self.loss(logits, label).dtype

    def rows(
        self, logits: torch.Tensor, labels: torch.Tensor, class_weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the loss of each row of some logits, in float32 or more.

        Labels are compared, not looked up, so that no chunk has to check them.
        """
        for step in self.steps:
            logits = step(logits)
        logits = logits.to(_wide(logits.dtype))
        classes = torch.arange(logits.shape[-1], device=logits.device)
        own = labels.unsqueeze(-1) == classes
        loss = -torch.where(own, logits, 0).sum(-1)
        total = torch.logsumexp(logits, -1) if self.loss is F.cross_entropy else None
        loss = loss if total is None else loss + total
        if class_weight is not None:
            loss = loss * torch.where(own, class_weight, 0).sum(-1)
        if smoothing := self.options.get("label_smoothing"):
            assert total is not None
            others = total.unsqueeze(-1) - logits
            others = others if class_weight is None else others * class_weight
            loss = (1 - smoothing) * loss + smoothing * others.mean(-1)
        return torch.where(labels == self.options["ignore_index"], 0, loss)

    def chunked(self, *tensors: torch.Tensor | None) -> Iterator[Any]:
        """Yield the chunks of tensors that have a first dimension in common.

        Sizes are the same for all chunks but the last, which a symbolic size must allow.
        """
        total = next(t for t in tensors if t is not None).shape[0]
        if isinstance(total, int):
            size = -(-total // self.chunks)
            size += -size % 8 if size > 64 else 0
        else:
            size = total // self.chunks
        start = 0
        for number in range(self.chunks):
            stop = start + size
            if number == self.chunks - 1 or (isinstance(total, int) and stop >= total):
                stop = total
            yield [t if t is None else t[start:stop] for t in tensors]
            if stop is total:
                return
            start = stop


@dataclass(frozen=True)
class _Autocast:
    """The autocast state of the forward, for the backward as well; `dtype` is None where off."""

    device: str
    dtype: torch.dtype | None

    def on(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype is None:
            return self.off()
        return torch.autocast(self.device, self.dtype)

    def off(self) -> contextlib.AbstractContextManager[object]:
        if not torch.amp.is_autocast_available(self.device):
            return contextlib.nullcontext()
        return torch.autocast(self.device, enabled=False)


class _LinearLoss(torch.autograd.Function):
    """The losses of the rows, or their sum divided by `count`."""

    @staticmethod
    def forward(ctx: Any, spec: ChunkedLoss, autocast: _Autocast, *tensors: Any) -> torch.Tensor:
        ctx.spec, ctx.autocast = spec, autocast
        ctx.one_pass = spec.one_pass and spec.reduction != "none"
        needed = ctx.needs_input_grad[2:5] if ctx.one_pass else (False,) * 3
        gradients, (*operands, count) = _Gradients(needed), tensors
        # Float16 would lose small gradients: there the backward divides, when losses are scaled.
        lower = autocast.dtype or operands[0].dtype
        ctx.divided = ctx.one_pass and count is not None and lower is not torch.float16
        seeds = (1 / count).expand(operands[0].shape[0]) if ctx.divided else None
        losses = list(_losses(spec, autocast, operands, gradients, seeds))
        ctx.save_for_backward(*(gradients.results() if ctx.one_pass else operands), count)
        if spec.reduction == "none":
            return torch.cat(losses)
        total = torch.stack([loss.sum() for loss in losses]).sum()
        return total if count is None else total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        *saved, count = ctx.saved_tensors
        if count is not None and not ctx.divided:
            grad = grad / count
        if ctx.one_pass:
            found: Tensors = tuple(g if g is None else g * grad.to(g.dtype) for g in saved)
        else:
            gradients = _Gradients(ctx.needs_input_grad[2:5])
            seeds = grad.expand(saved[0].shape[0])
            for _ in _losses(ctx.spec, ctx.autocast, saved, gradients, seeds):
                pass
            found = gradients.results()
        return (None, None, *found, None, None, None)


def _losses(
    spec: ChunkedLoss,
    autocast: _Autocast,
    tensors: Sequence[Any],
    gradients: _Gradients,
    seeds: torch.Tensor | None,
) -> Iterator[torch.Tensor]:
    """Yield the losses of each chunk's rows, and add what its rows give to `gradients`.

    Args:
        tensors: rows, weight, bias, labels and weights of classes.
        seeds: gradients of the losses; None for ones.
    """
    rows, weight, bias, labels, class_weight = tensors
    if autocast.dtype is not None:
        weight = weight.to(autocast.dtype)
        bias = bias if bias is None else bias.to(autocast.dtype)
    with autocast.off():
        for part, targets, slopes in spec.chunked(rows, labels, seeds):
            part = part.to(weight.dtype)
            logits = F.linear(part, weight, bias).detach()
            if not any(gradients.needed):
                with autocast.on():
                    yield spec.rows(logits, targets, class_weight)
                continue
            logits.requires_grad_()
            with torch.enable_grad(), autocast.on():
                losses = spec.rows(logits, targets, class_weight)
            slopes = torch.ones_like(losses) if slopes is None else slopes.to(losses.dtype)
            (slope,) = torch.autograd.grad(losses, logits, slopes)
            gradients.add(slope, part, weight)
            yield losses.detach()


class _Gradients:
    """The gradients of rows, weight and bias so far, of which `needed` are made."""

    def __init__(self, needed: tuple[bool, ...]) -> None:
        self.needed = needed
        self._rows: list[torch.Tensor] = []
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def add(self, slope: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """Add those of a chunk, whose logits have the gradient `slope`."""
        if self.needed[0]:
            self._rows.append(_product(slope, weight))
        if self.needed[1]:
            self._weight = _plus(self._weight, _product(slope.t(), rows))
        if self.needed[2]:
            self._bias = _plus(self._bias, slope.sum(0, dtype=_wide(slope.dtype)))

    def results(self) -> Tensors:
        """Return the three gradients, None for one that is not needed."""
        rows = torch.cat(self._rows) if self._rows else None
        return rows, self._weight, self._bias


def _plus(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total + term


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix product in float32, or in float64 of such matrices."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    if a.dtype is torch.float16:  # a sum over many rows may overflow
        return torch.mm(a.float(), b.float())
    return torch.mm(a, b).float()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """What autocast makes of a linear layer's operands; None where it is off."""
    device = tensor.device.type
    available = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if tensor.dtype is torch.float64 or not available:
        return None
    return torch.get_autocast_dtype(device)


def _weigh(class_weight: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The sum of the weights of the rows that count."""
    weights = class_weight[torch.where(valid, labels, 0)]
    return torch.where(valid, weights, 0).sum(dtype=_wide(class_weight.dtype))
