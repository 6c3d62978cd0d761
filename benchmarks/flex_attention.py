"""torch's flex_attention on an NVIDIA GPU: weft beside torch.compile, in turn in one process.

    python benchmarks/flex_attention.py [--shape 4 16 4096 64] [--only causal ...]

A row: milliseconds of a call (peak MiB) of weft and of torch.compile, in inference and training,
in bfloat16, and how far the results and gradients of each are from the matrix of scores in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import weft
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.benchmark import Timer

Case = Callable[..., torch.Tensor]


def cases(heads: int, length: int) -> dict[str, Case]:
    """The programs by name, functions of query, key and value."""
    slopes = torch.exp2(-8 * torch.arange(1, heads + 1, device="cuda") / heads)
    document = torch.arange(length, device="cuda") // (length // 5)

    def causal(b: Any, h: Any, m: Any, n: Any) -> Any:
        return m >= n

    def window(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (m >= n) & (m - n <= 512)

    def documents(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (m >= n) & (document[m] == document[n])

    def alibi(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return score + slopes[h] * (n - m)

    def softcap(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return 20 * torch.tanh(score / 20)

    masks = {
        mask: create_block_mask(mask, None, None, length, length, device="cuda")
        for mask in (causal, window, documents)
    }
    return {
        "no mask": flex_attention,
        "causal": lambda q, k, v: flex_attention(q, k, v, block_mask=masks[causal]),
        "window of 512": lambda q, k, v: flex_attention(q, k, v, block_mask=masks[window]),
        "documents": lambda q, k, v: flex_attention(q, k, v, block_mask=masks[documents]),
        "ALiBi, causal": lambda q, k, v: flex_attention(q, k, v, alibi, masks[causal]),
        "softcap, causal": lambda q, k, v: flex_attention(q, k, v, softcap, masks[causal]),
        "4 queries a key, causal": lambda q, k, v: flex_attention(
            q, k[:, ::4].contiguous(), v[:, ::4].contiguous(), None, masks[causal], enable_gqa=True
        ),
    }


def measured(case: Case, operands: list[torch.Tensor], training: bool) -> tuple[float, float, Any]:
    """Milliseconds, peak MiB above the operands, and results."""
    given = [one.detach().requires_grad_(training) for one in operands]

    def run() -> Any:
        out = case(*given)
        return out, *(torch.autograd.grad(out, given, out.detach()) if training else ())

    with torch.set_grad_enabled(training):
        results = [one.float() for one in run()]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        timer = Timer("run()", globals={"run": run})
        return timer.blocked_autorange(min_run_time=0.4).median * 1e3, peak, results


def main() -> None:
    """Parse the command line and print a row a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=4, default=[4, 16, 4096, 64])
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    _, heads, length, _ = options.shape
    torch.manual_seed(0)
    operands = [torch.randn(options.shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    print("| case | inference: weft | torch.compile | training: weft | torch.compile | off |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, case in cases(heads, length).items():
        if options.only and name not in options.only:
            continue
        exact = measured(case, [one[:1].float() for one in operands], training=True)[2]
        row, off = [name], []
        for training in (False, True):
            for system in (weft, torch):
                compiled = system.compile(case)
                used, peak, results = measured(compiled, operands, training)
                row.append(f"{used:.3f} ({peak:.0f})")
                found = zip(results, exact, strict=False)
                off.append(max(float((a[:1] - b).norm() / b.norm()) for a, b in found))
        print(f"| {' | '.join(row)} | {' / '.join(f'{x:.1e}' for x in off)} |", flush=True)


if __name__ == "__main__":
    main()
