"""What computes a matrix product, an attention, a convolution: the library, a function of weft's
own, or a loop.

With the option `max_autotune` a loop is raced against the other two: both are built as programs of
their own while the graph compiles and run in turn on random numbers; the verdict is kept on disk.
A loop of its own counts for less than it is worth: in the graph it also takes the pointwise work
after it along.
"""

from __future__ import annotations

import hashlib
import time

import torch
from weft_core import events
from weft_core.cachedir import cache_dir, read_checked, try_write

from weft_codegen.kernels import CompiledGraph, compile_program
from weft_codegen.kernels.toolchain import find as find_toolchain
from weft_codegen.kernels.toolchain import isa_flags
from weft_codegen.loops.printer import buffer_text
from weft_codegen.loops.program import (
    Buffer,
    BufferRef,
    Buffers,
    Extern,
    Input,
    Program,
    step_reads,
)
from weft_codegen.loops.schedule import schedule
from weft_codegen.torch_compat import VERSION

_ROUNDS = 20
_log = events.logger("codegen", "autotuning")


# Rows with which weft's own function is faster than the library, by instruction set, the first that
# the CPU has: where the library packs the weight in each call, and where it was packed before.
# avx512f: Zen 4, 2026-11-28. avx2: Zen 3 (docs/architecture/codegen-linear.md).
_ROWS = {
    "avx512f": (range(2, 1 << 40), range(24, 161)),
    "avx2": (range(2, 385), range(2, 385)),
}
_NO_ROWS = (range(0), range(0))
_LEAST_QUERIES = 24
# Multiplications and pixels of a convolution (docs/architecture/codegen-convolution.md).
_SMALL, _MOST_PIXELS = 1_500_000, 200
# Rows from which short sums leave too little to compute beside what is moved, and their terms.
_MANY_ROWS, _SHORT = 385, 256


def linear_wins(
    rows: int | None,
    columns: int,
    depth: int,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
) -> bool:
    """Whether weft's own function computes a product with a linear layer's weight (linear.py).

    Each thread needs some strips of columns. Few rows are loops before this is asked (matmul.py).

    Args:
        rows: None where they are only known while running.
        packed: whether the library's weight would be packed once, for all calls.
    """
    threads, isa = torch.get_num_threads(), isa_flags()
    enough = columns >= 96 * threads and columns * depth >= 4096
    if dtype is not torch.float32:
        return enough and lacks_16_bit() and (rows is None or rows > 4)
    won = next((_ROWS[name] for name in _ROWS if name in isa), _NO_ROWS)[packed]
    exact = torch.get_float32_matmul_precision() == "highest"
    fits = bool(won) if rows is None else rows in won and (rows < _MANY_ROWS or depth >= _SHORT)
    return exact and enough and fits


def lacks_16_bit() -> bool:
    """Whether the library has no fast products of 16-bit floats, as with AVX2 and no AVX-512."""
    isa = isa_flags()
    return "avx2" in isa and "avx512f" not in isa


def attention_wins(queries: int | None) -> bool:
    """Whether weft's own function computes an attention (attention.py).

    Measured on Zen 4 with AVX-512 and with AVX2 (docs/architecture/codegen-attention.md): it takes
    0.55 to 0.9 of the library's time from 64 queries on, as long with 16.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    fast = not isa_flags().isdisjoint(_ROWS)
    return exact and fast and (queries is None or queries >= _LEAST_QUERIES)


def convolution_wins(pixels: int, filters: int, terms: int) -> bool:
    """Whether weft's own function computes a convolution (convolution.py).

    It reads a weight as it lies, which the library packs in each call: that takes longer than what
    the function is slower by where a result has few pixels, a batch's together. It also takes
    less time to begin.
    """
    threads, fast = torch.get_num_threads(), not isa_flags().isdisjoint(_ROWS)
    enough = filters >= 48 * threads or threads == 1
    return fast and (pixels * filters * terms <= _SMALL or (enough and pixels <= _MOST_PIXELS))


def loop_wins(item: Extern, buffers: Buffers) -> bool:
    """Whether the product `item` (of known sizes) is faster as a loop than in the library."""
    names = tuple(dict.fromkeys(step_reads(item)))
    result = item.results[0]
    assert result is not None
    layouts = (buffer_text(buffers[name]).split(": ", 1)[1] for name in names)
    what = f"{item.op}({', '.join(layouts)})"
    parts = (what, find_toolchain().fingerprint, VERSION, str(torch.get_num_threads()))
    path = cache_dir("tuned") / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    verdict = read_checked(path)
    if verdict is None:
        used = {name: buffers[name] for name in (*names, result)}
        inputs = tuple(map(Input, names))
        alone = Program((), inputs, {}, used, {}, (item,), (BufferRef(result),))
        candidates = [
            compile_program(schedule(alone, linear=linear_wins)),
            compile_program(schedule(alone, prefer=lambda *_: True)),
        ]
        library, loop = _race(candidates, [_random(buffers[name]) for name in names])
        verdict = b"1" if loop < library else b"0"
        try_write(path, verdict)
        times = f"{library * 1e6:.1f} us in the library, {loop * 1e6:.1f} us as a loop"
        _log.info("max_autotune: %s takes %s", what, times)
    return verdict == b"1"


def _random(buffer: Buffer) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size, *dims = (n.value for n in (buffer.storage, *buffer.shape, *buffer.strides))
    memory = torch.rand(size, generator=generator, dtype=torch.float32, device="cpu")
    return memory.as_strided(dims[: len(buffer.shape)], dims[len(buffer.shape) :])


def _race(candidates: list[CompiledGraph], args: list[torch.Tensor]) -> list[float]:
    """The best time of each, run in turn."""
    best = [float("inf")] * len(candidates)
    for _ in range(_ROUNDS):
        for position, run in enumerate(candidates):
            start = time.perf_counter()
            run(*args)
            best[position] = min(best[position], time.perf_counter() - start)
    return best
