"""Convolutions of channels-last memory, which a function of weft's own computes
(kernels/include/weft_convolution.h).

    convolution(x, w, bias, ...)    weft_codegen.convolution(x, w, bias, stride, padding, dilation)

Where the function is the faster one is decided by who calls (tune.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weft_codegen.loops.program import Buffer, Buffers, Extern, on_cpu

_ATEN = torch.ops.aten.convolution.default
_library = torch.library.Library("weft_codegen", "FRAGMENT")
_library.define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation) -> Tensor"
)
_library.impl("convolution", torch.conv2d, "CompositeExplicitAutograd")

CONVOLUTION = torch.ops.weft_codegen.convolution.default

ConvolutionWins = Callable[[int, int, int], bool]
"""Whether weft's function is faster, by pixels of the results, filters, terms of a sum."""


def own_convolution(step: Extern, buffers: Buffers, wins: ConvolutionWins) -> Extern | None:
    """A call of weft's function, where it can compute a convolution and wins."""
    if step.op is not _ATEN or step.results[0] is None or step.kwargs:
        return None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = step.args
    used = [buffers[ref.name] for ref in (x, weight, bias) if ref is not None]
    used.append(buffers[step.results[0]])
    image, filters, *_, result = used
    plain = on_cpu(used, torch.float32) and all(map(_is_known, used)) and len(image.shape) == 4
    if not plain or transposed or groups != 1:
        return None
    (_, channels, high, wide) = (size.value for size in filters.shape)
    terms = channels * high * wide
    kept = ((terms, high * wide, wide, 1), (terms, 1, wide * channels, channels))
    if not any(_lies(filters, strides) for strides in kept):
        return None
    if not all(_lies(buffer, _last(buffer)) for buffer in (image, result)):
        return None
    pixels = result.shape[0].value * result.shape[2].value * result.shape[3].value
    if not wins(pixels, filters.shape[0].value, terms):
        return None
    args = (x, weight, bias, *(_pair(one) for one in (stride, padding, dilation)))
    return replace(step, op=CONVOLUTION, args=args)


def _is_known(buffer: Buffer) -> bool:
    """Whether the sizes of a buffer are known and not zero."""
    sizes = (*buffer.shape, *buffer.strides)
    return all(size.is_const for size in sizes) and all(size.value > 0 for size in buffer.shape)


def _lies(buffer: Buffer, strides: tuple[int, ...]) -> bool:
    """Whether a buffer has these strides, but for dimensions of size 1."""
    rows = zip(buffer.shape, buffer.strides, strides, strict=True)
    return all(size.value == 1 or stride.value == wanted for size, stride, wanted in rows)


def _last(buffer: Buffer) -> tuple[int, ...]:
    """The strides of channels-last memory."""
    _, channels, rows, columns = (size.value for size in buffer.shape)
    return (rows * columns * channels, 1, columns * channels, channels)


def _pair(sizes: Any) -> list[int]:
    return [*sizes] * (2 // len(sizes))


def convolution_sizes(step: Extern, buffers: Buffers) -> list[int]:
    """What the function is told of sizes: the fields of `weft_convolution_of`."""
    x, weight, _, stride, padding, dilation = step.args
    image, filters, result = buffers[x.name], buffers[weight.name], buffers[step.results[0] or ""]
    sizes = [[size.value for size in buffer.shape] for buffer in (image, filters, result)]
    (batch, channels, *size), (count, _, *window), (_, _, *area) = sizes
    geometry = [*size, *area, *window, *stride, *padding, *dilation]
    by_channel = channels == 1 or filters.strides[1].value == 1
    return [batch, channels, count, *geometry, 1 if by_channel else window[0] * window[1]]
