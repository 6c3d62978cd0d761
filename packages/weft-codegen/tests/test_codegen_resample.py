"""Interpolation and its backward as loops, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, dynamic_trace, externs
from weft_codegen.compile import make_program
from weft_codegen.kernels import compile_program

aten = torch.ops.aten
SHAPES = {"linear": (2, 3, 7), "bilinear": (2, 3, 6, 5), "bicubic": (2, 3, 6, 5)}
SHAPES["trilinear"] = (1, 2, 4, 3, 5)


def _sizes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Larger, smaller, the same, and one element."""
    return [tuple(f(n) for n in shape[2:]) for f in (_larger, _smaller, int, lambda n: 1)]


def _larger(n: int) -> int:
    return 2 * n + 3


def _smaller(n: int) -> int:
    return max(n - 2, 1)


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", SHAPES)
def test_other_sizes(mode: str, aligned: bool) -> None:
    x = torch.randn(SHAPES[mode], dtype=torch.float64)
    for size in _sizes(x.shape):

        def fn(x, size=size):
            return F.interpolate(x, size, mode=mode, align_corners=aligned) * 2

        assert externs(check(fn, x, native=True)) == []
        check(fn, x.float(), native=True, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", SHAPES)
def test_whole_factors_and_16_bits(mode: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SHAPES[mode]).to(dtype)

        def fn(x):
            return F.interpolate(x.relu(), scale_factor=2, mode=mode)

        # Eager rounds bfloat16 between the dimensions in some layouts.
        close = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        assert externs(check(fn, x, native=True, **close)) == []


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
def test_channels_last_stays(mode: str) -> None:
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    program = check(lambda x: F.interpolate(x, scale_factor=3.0, mode=mode), x, native=True)
    assert externs(program) == []


def test_one_binary_serves_all_sizes() -> None:
    def fn(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear") + 1

    x = torch.randn(2, 3, 6, 5)
    program = make_program(*dynamic_trace(fn, [x]))
    assert externs(program) == []
    compiled = compile_program(program)
    for shape in ((2, 3, 6, 5), (3, 2, 9, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(*_sized(program, x))[0], fn(x))


def _sized(program, x: torch.Tensor) -> list:
    return [x if item.kind == "tensor" else None for item in program.inputs]


def test_factors_that_eager_rounds_are_eagers() -> None:
    x = torch.randn(1, 2, 7, 7)
    cases = [
        lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"),
        lambda x: F.interpolate(x, size=(10, 9), mode="nearest"),
    ]
    for fn in cases:
        assert len(externs(check(fn, x, native=True))) == 1


BACKWARDS = [
    (aten.upsample_linear1d_backward, (2, 3, 5), True),
    (aten.upsample_bilinear2d_backward, (2, 3, 5, 4), True),
    (aten.upsample_nearest1d_backward, (2, 3, 5), False),
    (aten.upsample_nearest2d_backward, (2, 3, 5, 4), False),
    (aten.upsample_nearest3d_backward, (1, 2, 3, 4, 2), False),
    (aten._upsample_nearest_exact2d_backward, (2, 3, 5, 4), False),
]


@pytest.mark.parametrize(("op", "shape", "aligns"), BACKWARDS, ids=lambda v: str(v))
def test_backward(op, shape: tuple[int, ...], aligns: bool) -> None:
    scales = [None] * (len(shape) - 2)
    flag = [False] if aligns else []
    for factor in (2, 3):
        if factor == 3 and len(shape) > (3 if aligns else 4):
            continue
        for inner in (shape, (*shape[:2], *[1] * len(scales))):
            outer = [n * factor for n in inner[2:]]

            def fn(gradient, inner=inner, outer=outer):
                return op(gradient * 2, outer, list(inner), *flag, *scales)

            gradient = torch.randn(*inner[:2], *outer, dtype=torch.float64)
            assert externs(check(fn, gradient, native=True)) == []


def test_backward_of_many_users_or_aligned_corners_is_eagers() -> None:
    gradient = torch.randn(1, 2, 12, 12)
    cases = [
        lambda g: aten.upsample_bilinear2d_backward(g, [12, 12], [1, 2, 4, 4], False),
        lambda g: aten.upsample_bilinear2d_backward(g, [12, 12], [1, 2, 6, 6], True),
        lambda g: aten.upsample_nearest2d_backward(g, [12, 12], [1, 2, 5, 5]),
    ]
    for fn in cases:
        assert len(externs(check(fn, gradient, native=True))) == 1


def test_backward_in_channels_last() -> None:
    gradient = torch.randn(2, 8, 12, 10).contiguous(memory_format=torch.channels_last)
    for op, flag in (
        (aten.upsample_bilinear2d_backward, [False]),
        (aten.upsample_nearest2d_backward, []),
    ):

        def fn(g, op=op, flag=flag):
            return op(g, [12, 10], [2, 8, 6, 5], *flag, None, None)

        assert externs(check(fn, gradient, native=True, rtol=1e-4, atol=1e-5)) == []
