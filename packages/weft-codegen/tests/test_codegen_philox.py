"""Random numbers as loops: the generator against its published vectors, streams, distributions."""

from __future__ import annotations

import math

import pytest
import torch
from codegen_check import dynamic_trace, externs, launches, trace
from kernel_programs import unary
from weft_codegen.compile import make_program
from weft_codegen.config import Options, settings
from weft_codegen.kernels import compile_program
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.ops import philox
from weft_codegen.loops.program import Program

LOOPS = Options(fallback_random=False)
# Known answers of Random123 1.14 for philox4x32-10: counter, key, result.
KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _long(low: int, high: int) -> int:
    """Two words of 32 bits as an int64."""
    return torch.tensor([low, high]).to(torch.uint32).view(torch.int64).item()


def _known_operands() -> tuple[list[torch.Tensor], torch.Tensor]:
    rows, words = [], []
    for counter, key, result in KNOWN:
        for word in range(4):
            rows.append([_long(*key), _long(*counter[:2]), _long(*counter[2:]), word])
            words.append(result[word])
    expected = torch.tensor(words).to(torch.uint32).view(torch.int32)
    return list(torch.tensor(rows).t().contiguous()), expected


def _program(fn, *args, dynamic: bool = False) -> Program:
    graph, inputs = dynamic_trace(fn, args) if dynamic else (trace(fn, args), args)
    with settings.patch(verify_ir=True):
        return make_program(graph, inputs, LOOPS)


def test_reference_gives_the_published_vectors() -> None:
    operands, expected = _known_operands()
    assert torch.equal(philox(*operands), expected)


def test_c_gives_the_published_vectors_and_the_references_words() -> None:
    operands, expected = _known_operands()
    (actual,) = compile_program(unary("philox", torch.int64, len(expected)))(*operands)
    assert torch.equal(actual, expected)
    torch.manual_seed(0)
    operands = [torch.randint(-(2**63), 2**63 - 1, (4000,)) for _ in range(3)]
    operands.append(torch.arange(4000) % 4)
    (actual,) = compile_program(unary("philox", torch.int64, 4000))(*operands)
    assert torch.equal(actual, philox(*operands))


def _everything(x):
    noise = torch.randn_like(x) + torch.empty_like(x).normal_(3, 2)
    drawn = torch.rand(x.shape) * torch.empty_like(x).uniform_(-1, 1)
    dropped = torch.native_dropout(x, 0.25, True)
    return noise, drawn, *dropped, torch.bernoulli(x, 0.5), torch.rand_like(x).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_native_code_equals_the_interpreter(dtype: torch.dtype) -> None:
    x = torch.ones(33, 17, dtype=dtype)
    program = _program(_everything, x)
    assert externs(program) == ["aten.randint.default"]  # the seed
    torch.manual_seed(5)
    expected = run_program(program, [x])
    torch.manual_seed(5)
    for result, want in zip(compile_program(program)(x), expected, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)


def test_numbers_are_made_where_they_are_used() -> None:
    def fn(x, bias):
        y, mask = torch.native_dropout((x + bias).relu(), 0.3, True)
        return y * 2 + torch.rand_like(x), mask

    program = _program(fn, torch.randn(40, 30), torch.randn(30))
    assert launches(program) == 1


def test_one_binary_for_all_sizes_draws_what_a_static_one_does() -> None:
    def fn(x):
        return torch.rand_like(x), torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(8, 6)
    dynamic = compile_program(_program(fn, x, dynamic=True))
    for shape in ((8, 6), (5, 31)):
        x = torch.ones(shape)
        torch.manual_seed(1)
        static = compile_program(_program(fn, x))(x)
        torch.manual_seed(1)
        for result, want in zip(dynamic(x), static, strict=True):
            assert torch.equal(result, want)


def test_numbers_do_not_depend_on_layout() -> None:
    x = torch.ones(12, 20)
    run = [compile_program(_program(torch.rand_like, y)) for y in (x, x.t().contiguous().t())]
    results = []
    for function, y in zip(run, (x, x.t().contiguous().t()), strict=True):
        torch.manual_seed(2)
        results.append(function(y)[0])
    assert torch.equal(*results)


def test_no_stream_is_drawn_twice() -> None:
    def fn(x):
        return torch.rand_like(x), torch.rand_like(x), torch.rand(x.shape[::-1])

    x = torch.empty(40, 30)
    function = compile_program(_program(fn, x))
    torch.manual_seed(3)
    first, second = function(x), function(x)
    streams = [result.flatten() for result in (*first, *second)]
    torch.manual_seed(3)
    for again, before in zip(function(x), first, strict=True):
        assert torch.equal(again, before)
    for position, stream in enumerate(streams):
        for other in streams[position + 1 :]:
            # Numbers of 24 bits: 1200 pairs agree once in 14,000 times.
            assert int((stream == other).sum()) <= 1
            assert abs(torch.corrcoef(torch.stack([stream, other]))[0, 1]) < 0.12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(dtype: torch.dtype) -> None:
    n = 400_000

    def fn(x):
        return torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x, 0.3)

    torch.manual_seed(4)
    uniform, normal, coin = compile_program(_program(fn, torch.ones(n, dtype=dtype)))(
        torch.ones(n, dtype=dtype)
    )
    assert uniform.min() >= 0
    assert uniform.max() < 1
    counts = uniform.mul(100).long().bincount(minlength=100).double()
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 149  # chi-square of 99: p = 0.001
    theirs = 0.5 * (1 + torch.erf(normal.double().sort().values / math.sqrt(2)))
    steps = torch.arange(1, n + 1) / n
    assert (theirs - steps).abs().max() * math.sqrt(n) < 1.95  # Kolmogorov-Smirnov: p = 0.001
    assert abs(coin.mean() - 0.3) < 4 * math.sqrt(0.21 / n)
    # Neighbours are independent.
    assert abs(torch.corrcoef(torch.stack([normal[1:], normal[:-1]]))[0, 1]) < 4 / math.sqrt(n)


def test_sixteen_bits_never_round_up_to_one() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.empty(50_000, dtype=dtype)
        (drawn,) = compile_program(_program(torch.rand_like, x))(x)
        assert drawn.min() >= 0
        assert drawn.max() < 1


def test_what_eager_checks_or_draws_otherwise_stays_eagers() -> None:
    def fn(x):
        return torch.bernoulli(x), torch.randint(0, 9, (4,)), torch.nn.functional.dropout(x, 0.0)

    names = externs(_program(fn, torch.rand(4)))
    assert "aten.bernoulli.default" in names
    assert "aten.randint.low" in names


def test_a_generator_of_its_own_is_not_the_graphs_seed() -> None:
    generator = torch.Generator()
    names = externs(_program(lambda x: torch.rand(4, generator=generator) + x, torch.rand(4)))
    assert names == ["aten.rand.generator"]


def test_dropping_all_and_none() -> None:
    x = torch.randn(64)

    def fn(x):
        values = [torch.native_dropout(x, p, True) for p in (0.0, 1.0)]
        return values[0][0], values[1][0], torch.native_dropout(x, 0.5, False)[0]

    none, everything, inference = compile_program(_program(fn, x))(x)
    assert torch.equal(none, x)
    assert torch.equal(everything, torch.zeros(64))
    assert torch.equal(inference, x)


def test_eagers_numbers_by_default() -> None:
    x = torch.ones(50)

    def fn(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    program = make_program(trace(fn, (x,)), (x,))
    torch.manual_seed(6)
    expected = fn(x)
    torch.manual_seed(6)
    assert torch.equal(compile_program(program)(x)[0], expected)
