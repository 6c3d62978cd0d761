"""Programs of test_codegen_flex_attention.py, which run in processes of their own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from triton.compiler import ASTSource
from weft_codegen.kernels.triton import flex_attention as kernels
from weft_codegen.kernels.triton.jit import SM90
from weft_core.flex_attention import dense_backward, dense_forward, score_texts

SLOPES = torch.tensor([0.5, -2.0])
DOCUMENTS = torch.arange(48) // 20
take = torch.ops.aten.index.Tensor


def plain(s: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any, documents: Any) -> Any:
    return s, torch.ones_like(b, dtype=torch.bool)


def softcap(s: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any, documents: Any) -> Any:
    return 5 * torch.tanh(s * take(slopes, [h]) / 5) + (m - n) * 0.1, m >= n


def masked(s: Any, b: Any, h: Any, m: Any, n: Any, slopes: Any, documents: Any) -> Any:
    return s, (take(documents, [m]) == take(documents, [n])) & (m > n)


def _causal(b: Any, h: Any, m: Any, n: Any) -> Any:
    return m >= n


def _masked(b: Any, h: Any, m: Any, n: Any) -> Any:
    return (DOCUMENTS[m] == DOCUMENTS[n]) & (m > n)


@dataclass(frozen=True)
class Case:
    """A function of a score, its mask (None: none), and the shapes of query, key and value."""

    function: Any
    mask: Any
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32


def _shapes(queries: int, keys: int, width: int = 16, few: int = 2) -> tuple[Any, ...]:
    return (2, 2, queries, width), (2, few, keys, width), (2, few, keys, width + 8)


CASES = {
    "plain": Case(plain, None, _shapes(33, 40)),
    "causal": Case(softcap, _causal, _shapes(48, 48)),
    "documents": Case(masked, _masked, _shapes(48, 48)),
    "heads": Case(softcap, _causal, _shapes(48, 48, few=1)),
    "decode": Case(plain, None, _shapes(1, 40)),
    "half": Case(softcap, _causal, _shapes(48, 48), torch.float16),
    "wide": Case(masked, _masked, _shapes(48, 48, 40)),
}


def _texts(case: Case) -> tuple[str, str]:
    with FakeTensorMode() as mode:
        numbers = [torch.empty(()), *(torch.empty((), dtype=torch.int32) for _ in range(4))]
        captured = [mode.from_tensor(one) for one in (SLOPES, DOCUMENTS)]
        found = score_texts(fx.symbolic_trace(case.function), [*numbers, *captured])
    assert found is not None
    return found


def _blocks(case: Case) -> tuple[list[torch.Tensor], tuple[int, int]]:
    if case.mask is None:
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        return [one, zero, torch.zeros_like(one), zero] * 2, (1 << 30, 1 << 30)
    queries, keys = case.shapes[0][2], case.shapes[1][2]
    mask = create_block_mask(case.mask, None, None, queries, keys, device="cpu", BLOCK_SIZE=16)
    return [one for one in mask.as_tuple()[2:10] if one is not None], (16, 16)


def check(name: str) -> None:
    """Compare a case's results and gradients with those of all scores."""
    torch.manual_seed(0)
    case = CASES[name]
    operands = [torch.randn(shape).to(case.dtype) for shape in case.shapes]
    program, gradient = _texts(case)
    blocks, size = _blocks(case)
    given = *operands, [SLOPES, DOCUMENTS], blocks, size, program, 0.3
    expected, found = dense_forward(*given), kernels.forward(*given)
    loose = {} if case.dtype is torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(found, expected, **loose)
    out, lse, _ = expected
    grad = torch.randn(out.shape).to(case.dtype)
    delta = (grad.float() * out.float()).sum(-1)
    given = grad, delta, *operands, lse, *given[3:6], program, gradient, 0.3
    expected, found = dense_backward(*given), kernels.backward(*given)
    torch.testing.assert_close(found, expected, **(loose or {"rtol": 1e-4, "atol": 1e-4}))


def cubins() -> Iterator[str]:
    """Compile the kernels for a GPU; the names of those that became machine code."""
    case = CASES["causal"]
    captured = [SLOPES, DOCUMENTS]
    functions = kernels._kernels(*_texts(case), tuple(map(kernels._layout, captured)))
    pointers = {"num": "i32", "index": "i32", "full_num": "i32", "full_index": "i32", "in6": "i64"}
    pointers |= dict.fromkeys(("lse", "largest", "delta", "in5"), "fp32")
    operands = "query", "key", "value", "out", "grad", "query_grad", "key_grad", "value_grad"
    pointers |= dict.fromkeys(operands, "bf16")
    query, key = (torch.empty(2, n, 256, 64, dtype=torch.bfloat16) for n in (4, 2))
    for function in ("attend", "attend_queries", "attend_keys"):
        table = kernels._FORWARD if function == "attend" else kernels._BACKWARD
        queries, keys, warps, stages = kernels._tile(table, query, key, key, (128, 128))
        constants = kernels._constants(query, key, key, (128, 128), queries, keys)
        names = functions[function].arg_names
        kinds = {arg: "i32" for arg in names}
        kinds |= {arg: f"*{kind}" for arg, kind in pointers.items() if arg in kinds}
        kinds |= {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
        known = {(names.index(arg),): value for arg, value in constants.items()}
        source = ASTSource(functions[function], kinds, known)
        options = {"num_warps": warps, "num_stages": stages}
        if triton.compile(source, target=SM90, options=options).asm["cubin"]:
            yield function
