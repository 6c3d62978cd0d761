"""What kernels do for memory: streamed results, turned tiles, rows together, rows fetched early.

Streaming waits for results larger than every cache, so here each store counts as that large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_check import check, program_of
from weft_codegen.kernels import emit_c, emit_program

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
    monkeypatch.setattr(emit_c, "last_level_cache", lambda: 1)


def _pair(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple((torch.randn(rows, columns) * 8).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_streamed_results(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, y = _pair(rows, columns, dtype)
    for fn in ROWS:
        check(fn, x, y, interpret=False, native=True)
    if dtype in (torch.float32, torch.float64):
        for fn in FLOATS:
            check(fn, x, y, interpret=False, native=True, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (256, 512), (300, 131), (65, 777)])
def test_turned_tiles(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, y = _pair(rows, columns, dtype)
    program = check(lambda x, y: x + y.t(), x, y.reshape(columns, rows), native=True)
    assert "weft_turn_" in emit_program(program)[1]


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
