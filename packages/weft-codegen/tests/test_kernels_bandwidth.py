"""What kernels do for memory: streamed results, turned tiles, rows together, rows fetched early.

Streaming waits for results larger than every cache, so here each store counts as that large.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, program_of
from weft_codegen.kernels import emit_c, emit_program, prefetch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int16]
SIZES = [(3, 5), (64, 256), (67, 259), (300, 65), (1, 1025)]
ROWS: list[Callable[..., Any]] = [
    lambda x, y: x + y,
    lambda x, y: (x.relu(), x > y, x * y),
    lambda x, y: torch.cat([x[:, 1:], y * 2], 1),
    lambda x, y: (x.t() + y.t()).contiguous(),
]
FLOATS: list[Callable[..., Any]] = [
    lambda x, y: x.softmax(-1),
    lambda x, y: F.layer_norm(x, x.shape[-1:], y[0], x[0]),
    lambda x, y: (x.sum(0), (x * y).amax(0)),
    lambda x, y: (x * y).sum(1, keepdim=True) * y,
]


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefetch, emit_c):
        monkeypatch.setattr(module, "last_level_cache", lambda: 1)


def _pair(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple((torch.randn(rows, columns) * 8).to(dtype) for _ in range(2))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_streamed_results(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, y = _pair(rows, columns, dtype)
    for fn in ROWS:
        check(fn, x, y, interpret=False, native=True)
    if dtype in (torch.float32, torch.float64):
        for fn in FLOATS:
            check(fn, x, y, interpret=False, native=True, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (256, 512), (300, 131), (65, 777)])
def test_turned_tiles(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, y = _pair(rows, columns, dtype)
    program = check(lambda x, y: x + y.t(), x, y.reshape(columns, rows), native=True)
    assert "weft_transpose_" in emit_program(program)[1]


def test_results_that_do_not_start_a_cache_line() -> None:
    x, out = torch.randn(1000), torch.zeros(1003)

    def fill(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(x * 2)

    check(fill, x, out[3:], interpret=False, native=True)


def test_only_cheap_results_are_streamed() -> None:
    x = torch.randn(64, 64)
    streamed = [
        "weft_stream(" in emit_program(program_of(fn, x))[1]
        for fn in (torch.neg, torch.erf, lambda x: x.sum(1, keepdim=True) * x)
    ]
    assert streamed == [True, False, True]


def test_the_last_loop_over_a_row_asks_for_the_next_one() -> None:
    text = emit_program(program_of(lambda x: F.layer_norm(x, x.shape[-1:]), torch.randn(64, 256)))
    (asked,) = re.finditer(r"__builtin_prefetch\((.*), 0, 2\)", text[1])
    assert "i0*256 + 256 + first" in asked[1]
    assert asked.start() > text[1].rindex("sum_lanes_f32(")


def test_a_tile_asks_for_the_next_one_on_both_sides() -> None:
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    text = emit_program(program_of(lambda x, y: x + y.t(), x, y))[1]
    asked = re.findall(r"__builtin_prefetch\((\w+) \+ (.*) \+ first \+ line, 0, 2", text)
    assert sorted(where.rpartition(" + ")[2] for _, where in asked) == ["16384", "64"]


def test_what_caches_hold_is_asked_for_by_sums_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "last_level_cache", lambda: 1 << 20)
    x = torch.randn(64, 256)
    texts = [
        emit_program(program_of(fn, x))[1]
        for fn in (lambda x: x.softmax(-1), lambda x: x + x.t().contiguous().view(64, 256))
    ]
    assert ["prefetch" in text for text in texts] == [True, False]
    assert ", 0, 2)" not in texts[0]
