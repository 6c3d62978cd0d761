"""Single patterns through weft_codegen, in turn with eager: is any kernel slower than eager?

Each row is one graph: `forward` without gradients, `backward` as weft_aot makes it.  The ratio to
eager is the median over rounds, so noise on the machine hits both alike.  GB/s counts what has to
be moved at least (every input and output once) and stands beside the speed of a plain copy.

    OMP_NUM_THREADS=2 python benchmarks/kernels.py --only softmax,gelu [--torch] [--below 1.0]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import weft_codegen
from torch import Tensor
from weft_aot import aot_compile
from weft_codegen.compile import decompositions
from weft_codegen.config import settings

ROUND_SECONDS = 0.02
Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A function of tensors; `grad`: which directions are measured besides the forward one."""

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    grad: bool = False


def _normal(*shape: int, count: int = 1) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(shape) for _ in range(count))


def _with(*shape: int, more: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(shape), *more())


def chain(x: Tensor, y: Tensor) -> Tensor:
    """Six pointwise operators."""
    return ((x * y + x).relu() * 0.5 - y).clamp(-2, 2) * x


def adamw(*tensors: Tensor) -> tuple[Tensor, ...]:
    """One AdamW step on many tensors, as an optimizer's graph has it: new values of all states."""
    count = len(tensors) // 4
    groups = [tensors[k * count : (k + 1) * count] for k in range(4)]
    made: list[Tensor] = []
    for parameter, grad, mean, square in zip(*groups, strict=True):
        mean = mean.lerp(grad, 0.1)
        square = square * 0.999 + grad * grad * 0.001
        step = mean / (square.sqrt() / 0.9 + 1e-8)
        made += [parameter * 0.9999 - step * 1e-3, mean, square]
    return tuple(made)


def _parameters(count: int, size: int) -> tuple[Tensor, ...]:
    return tuple(torch.rand(size) for _ in range(4 * count))


BIG, SMALL, IMAGE = (1024, 1024), (32, 32), (8, 32, 56, 56)


def _norm() -> tuple[Tensor, ...]:
    return torch.randn(1024), torch.randn(1024)


def _channels() -> tuple[Tensor, ...]:
    return torch.randn(32), torch.randn(32), torch.zeros(32), torch.ones(32)


def _classes() -> tuple[Tensor, ...]:
    return (torch.randint(0, 1024, (1024,)),)


def _tokens() -> tuple[Tensor, ...]:
    return torch.randint(0, 4096, (2048,)), torch.randn(4096, 256)


def _tiny() -> tuple[Tensor, ...]:
    return torch.randn(4, 32), torch.randn(32, 32), torch.randn(32)


def _halves(dtype: torch.dtype, name: str) -> list[Case]:
    """Patterns in a 16-bit type: adding, and the usual arithmetic between two conversions."""

    def normal(count: int) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(torch.randn(BIG, dtype=dtype) for _ in range(count))

    return [
        Case(f"add {name}", torch.add, normal(2)),
        Case(f"gelu {name}", F.gelu, normal(1), grad=True),
        Case(f"chain {name}", chain, normal(2), grad=True),
        Case(f"softmax {name}", lambda x: x.softmax(-1), normal(1), grad=True),
        Case(f"rms_norm {name}", lambda x: F.rms_norm(x, (1024,)), normal(1), grad=True),
        Case(f"sum 0 {name}", lambda x: x.sum(0), normal(1)),
    ]


CASES = [
    Case("chain", chain, _normal(*BIG, count=2), grad=True),
    Case("chain 32", chain, _normal(*SMALL, count=2), grad=True),
    Case("add", torch.add, _normal(*BIG, count=2)),
    Case("gelu", F.gelu, _normal(*BIG), grad=True),
    Case("gelu 32", F.gelu, _normal(*SMALL), grad=True),
    Case("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), _normal(*BIG), grad=True),
    Case("silu", F.silu, _normal(*BIG), grad=True),
    *(Case(op.__name__, op, _normal(*BIG)) for op in (torch.erf, torch.tanh, torch.exp)),
    *(Case(op.__name__, op, lambda: (torch.rand(BIG),)) for op in (torch.log, torch.log1p)),
    *(Case(op.__name__, op, _normal(*BIG)) for op in (torch.sigmoid, torch.sin, torch.expm1)),
    Case("pow 2.5", lambda x: x**2.5, lambda: (torch.rand(BIG),)),
    *_halves(torch.bfloat16, "bf16"),
    *_halves(torch.float16, "f16"),
    Case("exp f64", torch.exp, lambda: (torch.randn(BIG, dtype=torch.float64),)),
    Case("softmax", lambda x: x.softmax(-1), _normal(*BIG), grad=True),
    Case("softmax 64", lambda x: x.softmax(-1), _normal(4096, 64), grad=True),
    Case("log_softmax", lambda x: x.log_softmax(-1), _normal(*BIG), grad=True),
    Case(
        "layer_norm", lambda x, w, b: F.layer_norm(x, (1024,), w, b),
        _with(*BIG, more=_norm), grad=True,
    ),
    Case("rms_norm", lambda x, w, b: F.rms_norm(x, (1024,), w), _with(*BIG, more=_norm), grad=True),
    Case("sum", torch.sum, _normal(*BIG)),
    Case("mean of squares", lambda x: (x * x).mean(), _normal(*BIG), grad=True),
    Case("sum 32", torch.sum, _normal(*SMALL)),
    Case("max", torch.amax, _normal(*BIG)),
    Case("sum 0", lambda x: x.sum(0), _normal(*BIG)),
    Case("sum 1", lambda x: x.sum(1), _normal(*BIG)),
    Case("sum 0 tall", lambda x: x.sum(0), _normal(65536, 16)),
    Case("amax 1", lambda x: x.amax(1), _normal(*BIG)),
    Case("var", lambda x: x.var(), _normal(*BIG)),
    Case("var 1", lambda x: x.var(1), _normal(*BIG)),
    Case("var 0", lambda x: x.var(0), _normal(*BIG)),
    Case("argmax 1", lambda x: x.argmax(1), _normal(*BIG)),
    Case("any", lambda x: (x > 5).any(), _normal(*BIG)),
    Case("cumsum", lambda x: x.cumsum(1), _normal(*BIG)),
    Case("cross entropy", F.cross_entropy, _with(*BIG, more=_classes), grad=True),
    Case("embedding", lambda i, w: F.embedding(i, w), _tokens, grad=True),
    Case("transpose", lambda x: x.t().contiguous(), _normal(*BIG)),
    Case("x + y.t", lambda x, y: x + y.t(), _normal(*BIG, count=2), grad=True),
    Case("permute", lambda x: x.permute(0, 2, 1, 3).contiguous(), _normal(8, 128, 16, 64)),
    Case("permute 3", lambda x: x.permute(0, 2, 3, 1).contiguous(), _normal(*IMAGE)),
    Case("cat", lambda x, y: torch.cat([x, y], 1), _normal(*BIG, count=2), grad=True),
    Case("bias", lambda x, b: (x + b).relu(), lambda: (torch.randn(BIG), torch.randn(1024)), True),
    Case("dropout", lambda x: F.dropout(x, 0.1), _normal(*BIG), grad=True),
    Case("max_pool", lambda x: F.max_pool2d(x, 2), _normal(*IMAGE), grad=True),
    Case("avg_pool", lambda x: F.avg_pool2d(x, 2), _normal(*IMAGE), grad=True),
    Case("adaptive pool", lambda x: F.adaptive_avg_pool2d(x, 14), _normal(*IMAGE), grad=True),
    Case("upsample", lambda x: F.interpolate(x, scale_factor=2), _normal(4, 16, 28, 28)),
    Case("pad", lambda x: F.pad(x, (1, 1, 1, 1)), _normal(*IMAGE)),
    Case(
        "batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        _with(*IMAGE, more=lambda: _channels()[:2]), grad=True,
    ),
    Case(
        "batch_norm eval", lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b).relu(),
        _with(*IMAGE, more=_channels),
    ),
    Case("linear 4x32", lambda x, w, b: F.linear(x, w, b).relu(), _tiny, grad=True),
    Case("mm 64", torch.mm, _normal(64, 64, count=2)),
    Case("linear 256", lambda x, w, b: F.gelu(F.linear(x, w, b)),
         lambda: (torch.randn(64, 256), torch.randn(256, 256), torch.randn(256)), grad=True),
    Case("adamw 50 x 4096", adamw, lambda: _parameters(50, 4096)),
    Case("adamw 200 x 64", adamw, lambda: _parameters(200, 64)),
]  # fmt: skip


def _differentiable(case: Case) -> list[Any]:
    return [
        value.requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in case.inputs()
    ]


def _traced(fn: Callable[..., Any], args: list[Any]) -> torch.fx.GraphModule:
    """`fn` as the torch-level graph that a front end would hand over."""
    graph = torch.fx.Graph()
    holders = [graph.placeholder(f"a{k}") for k in range(len(args))]
    graph.output(graph.call_function(fn, tuple(holders)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _forward(case: Case, with_torch: bool) -> dict[str, Step]:
    args = list(case.inputs())
    calls = {"eager": case.fn, "weft": weft_codegen.compile_graph(_traced(case.fn, args), args)}
    if with_torch:
        calls["torch"] = torch.compile(case.fn)

    def step(call: Callable[..., Any]) -> Step:
        def run() -> Any:
            with torch.no_grad():
                return call(*args)

        return run

    return {name: step(call) for name, call in calls.items()}


def _backward(case: Case, with_torch: bool) -> dict[str, Step]:
    """The backward pass alone, over saved values that are kept."""
    args = _differentiable(case)
    wanted = [value for value in args if isinstance(value, Tensor) and value.requires_grad]
    compiled = aot_compile(
        _traced(case.fn, args),
        args,
        fw_compiler=weft_codegen.compile_graph,
        decompositions=decompositions(),
    )
    calls = {"eager": case.fn, "weft": compiled}
    if with_torch:
        calls["torch"] = torch.compile(case.fn)

    def step(call: Callable[..., Any]) -> Step:
        made = call(*args)
        result = made if isinstance(made, Tensor) else made[0]
        grad = torch.randn(()).expand(result.shape).contiguous()

        def run() -> Any:
            return torch.autograd.grad(result, wanted, grad, retain_graph=True, allow_unused=True)

        return run

    return {name: step(call) for name, call in calls.items()}


def _bytes(case: Case) -> int:
    """What the forward pass has to move: every input and every output once."""
    inputs = case.inputs()
    made = case.fn(*inputs)
    tensors = [*inputs, *(made if isinstance(made, tuple | list) else [made])]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def measure(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Seconds a call of each step, medians over rounds in which they take turns."""
    calls: dict[str, int] = {}
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        once = max(1e-7, time.perf_counter() - start)
        calls[name] = max(1, min(5000, int(ROUND_SECONDS / once)))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                step()
            seconds[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(times) for name, times in seconds.items()}


def copy_speed() -> float:
    """GB/s of a copy of 4 MB tensors, as large as the 1024 x 1024 cases (read and write)."""
    source, target = torch.randn(BIG), torch.empty(BIG)
    seconds = measure({"copy": lambda: target.copy_(source)}, 5)["copy"]
    return 2 * source.numel() * 4 / seconds / 1e9


def _rows(case: Case, with_torch: bool) -> Iterator[tuple[str, dict[str, Step], int]]:
    yield case.name, _forward(case, with_torch), _bytes(case)
    if case.grad:
        yield f"{case.name} backward", _backward(case, with_torch), 0


def main() -> None:
    """Measure the chosen cases and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="comma list of beginnings of case names")
    parser.add_argument("--torch", action="store_true", help="measure torch.compile too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--below", type=float, help="print only rows with a ratio below this")
    options = parser.parse_args()
    torch.manual_seed(0)
    settings.measure = False  # show what generated code does, not what replaces it
    wanted = tuple(name for name in options.only.split(",") if name)
    speed = copy_speed()
    print(f"{torch.get_num_threads()} threads, copy {speed:.1f} GB/s")
    print(f"{'case':28s}{'eager µs':>10s}{'weft µs':>10s}{'ratio':>8s}{'GB/s':>8s}{'of copy':>9s}")
    ratios: list[float] = []
    for case in CASES:
        if wanted and not case.name.startswith(wanted):
            continue
        for name, steps, size in _rows(case, options.torch):
            found = measure(steps, options.rounds)
            ratio = found["eager"] / found["weft"]
            ratios.append(ratio)
            if options.below is not None and ratio >= options.below:
                continue
            rate = size / found["weft"] / 1e9
            text = f"{name:28s}{found['eager'] * 1e6:10.1f}{found['weft'] * 1e6:10.1f}{ratio:8.2f}"
            text += f"{rate:8.1f}{rate / speed:9.0%}" if size else " " * 17
            if "torch" in found:
                text += f"   torch.compile {found['eager'] / found['torch']:.2f}"
            print(text, flush=True)
    print(f"geometric mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
