"""The program's own Triton kernels, run by Triton's interpreter, are nodes of the graph."""

import pytest
import torch
import weft

triton = pytest.importorskip("triton", "3.4")
triton.knobs.runtime.interpret, tl = True, triton.language


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def launch(x, out, kernel=double, **choice):
    kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), **choice)
    return out


class Double(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: launch(x, torch.empty_like(x), BLOCK=16))
    backward = staticmethod(lambda ctx, grad: launch(grad * 1, torch.empty_like(grad), BLOCK=16))


configs = [triton.Config({"BLOCK": size}) for size in (16, 32)]
tuned = triton.autotune(configs, ["n"], do_bench=lambda call, quantiles: [call() or 1.0])(double)
fitting = triton.heuristics({"BLOCK": lambda args: 16 if args["n"] < 40 else 32})(double)
PROGRAMS = {
    "tuned": lambda x: launch(x.sin(), torch.empty_like(x), tuned) + x,
    "in place": lambda x: launch(y := x.data, y, BLOCK=16).cos() + x,
    "past autograd": lambda x: launch(y := x.exp(), y, fitting) * x,
    "function": lambda x: Double.apply(x * 3).exp() + x,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_launch_is_in_the_graph(name):
    results, compiled = [], weft.compile(PROGRAMS[name], fullgraph=True, dynamic=name != "function")
    for run, rows in zip([PROGRAMS[name], compiled] * 3, (6, 6, 6, 6, 9, 9), strict=True):
        x = torch.linspace(0, 1, 5 * rows).reshape(rows, 5).requires_grad_()
        run(x).mean().backward()
        results.append((run(x), x, x.grad, x._version))
    torch.testing.assert_close(results[::2], results[1::2])
    assert weft.counters["stats"]["unique_graphs"] <= 2
