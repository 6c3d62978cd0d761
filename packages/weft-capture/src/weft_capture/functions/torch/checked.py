"""Functions of torch that read values of tensors, in Python, with a check in the graph instead.

Where the check fails, the frame runs again eagerly.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from weft_core.inlinable import inlinable

from weft_capture.breaks import Break
from weft_capture.effects.runtime_asserts import emit_check
from weft_capture.functions.table import decline, rule
from weft_capture.model.constant import NONE, constant
from weft_capture.model.protocol import Tracer, Value, method
from weft_capture.tensors.tensor import TensorValue

_LEAST = 1e-11
"""What the sum of squares of the windows must exceed everywhere (ATen: SpectralOps.cpp)."""


@inlinable
def _inverse(
    input: torch.Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: torch.Tensor | None = None, center: bool = True, normalized: bool = False,
    onesided: bool | None = None, length: int | None = None, return_complex: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Add the inverse transforms of all frames where they lie, over the squares of the windows."""
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    half = input.size(-2) != n_fft if onesided is None else onesided
    frames = input.size(-1)
    total = n_fft + hop * (frames - 1)
    start = n_fft // 2 if center else 0
    end = total - start if length is None else start + length
    if (
        not (input.is_complex() and 2 <= input.dim() <= 3 and input.numel())
        or not 0 < hop <= width <= n_fft
        or input.size(-2) != (n_fft // 2 + 1 if half else n_fft)
        or end > total
        or (half if return_complex else n_fft % 2)
        or (window is not None and (window.shape != (width,) or window.is_complex()))
    ):
        return _refuse()
    if window is None:
        window = torch.ones(width, dtype=input.real.dtype, device=input.device)
    left = (n_fft - width) // 2
    window = functional.pad(window, (left, n_fft - width - left))
    spectra = (input if input.dim() == 3 else input.unsqueeze(0)).transpose(1, 2)
    norm = "ortho" if normalized else None
    if return_complex:
        signals = torch.fft.ifft(spectra, dim=-1, norm=norm)
    else:
        signals = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], dim=-1, norm=norm)
    squares = (window**2).expand(1, frames, n_fft)
    summed, weight = (
        functional.fold(part.transpose(1, 2), (1, total), (1, n_fft), stride=(1, hop))[:, 0, 0]
        for part in (signals * window, squares)
    )
    _require(weight[:, start:end].min() > _LEAST)
    result = summed[:, start:end] / weight[:, start:end]
    return result if input.dim() == 3 else result.squeeze(0)


def _refuse() -> torch.Tensor:
    """Break."""
    raise NotImplementedError


def _require(condition: torch.Tensor) -> None:
    """Run the frame again eagerly where this does not hold."""


decline("unsupported-arguments", "torch.istft of other shapes, or past the last frame", _refuse)


@rule(_require)
def _check(tx: Tracer, condition: Value) -> None:
    if not isinstance(condition, TensorValue) or not emit_check(tx, condition, True):
        raise Break("data-dependent-value", "a check of torch.istft or torch.bincount")


@rule(torch.istft)
def _istft(tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    return tx.const_object(_inverse).tp_call(tx, list(args), kwargs)


@inlinable
def _counts(numbers: torch.Tensor, minlength: int) -> torch.Tensor:
    """Count numbers that are below `minlength`, so that this is the size of the result."""
    _require(((numbers >= 0) & (numbers < minlength)).all())
    ones = torch.ones_like(numbers, dtype=torch.int64)
    zeros = torch.zeros(minlength, dtype=torch.int64, device=numbers.device)
    return zeros.index_add(0, numbers.long(), ones)


_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


_ZERO = constant(0)


@method(TensorValue, "bincount")
@rule(torch.bincount)
def _bincount(tx: Tracer, input: Value, weights: Value = NONE, minlength: Value = _ZERO) -> Value:
    line = isinstance(input, TensorValue) and input.fake.dim() == 1 and input.fake.dtype in _WHOLE
    plain = line and weights is NONE and not tx.graph.reads_data()
    if plain and minlength.is_constant() and minlength.as_constant() > 1:
        return tx.const_object(_counts).tp_call(tx, [input, minlength], {})
    args = [input, *([] if weights is NONE else [weights])]
    return tx.graph.emit("call_function", torch.bincount, args, {"minlength": minlength})
