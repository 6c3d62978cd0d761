"""What was compiled is freed with the function, its code and the parameters it worked on.

Each program runs a few times, with code objects of its own each time; then as many objects of weft,
graphs, tensors and modules must be alive as after the first times.
"""

import collections
import gc
import textwrap

import pytest
import torch
import weft
from torch import fx

PROGRAMS = {
    "a function": """
        def function(x):
            return x.sin() + 1

        weft.compile(function)(torch.ones(3))
    """,
    "graph breaks in a loop": """
        def function(x):
            for _ in range(3):
                x = x.sin()
                weft.graph_break()
            return x

        weft.compile(function, backend="eager")(torch.ones(3))
    """,
    "graph breaks in inlined functions": """
        def inner(x):
            y = x.sin()
            weft.graph_break()
            return y * 2

        weft.compile(lambda x: inner(x) + inner(x + 1), backend="eager")(torch.ones(3))
    """,
    "recursion with graph breaks": """
        def function(x, n):
            weft.graph_break()
            return x if n == 0 else function(x.sin(), n - 1)

        weft.compile(function, backend="eager")(torch.ones(3), 3)
    """,
    "symbolic sizes": """
        compiled = weft.compile(lambda x: x.sin() + x.shape[0], backend="aot_eager")
        for size in (3, 5, 7):
            compiled(torch.ones(size))
    """,
    "a module": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return self.layer(x).relu()

        weft.compile(Net())(torch.ones(3, 4)).sum().backward()
    """,
    "a module of a library": """
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        weft.compile(net, backend="aot_eager")(torch.ones(3, 4)).sum().backward()
    """,
    "frozen parameters": """
        with torch.no_grad():
            layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8)
            net = nn.Sequential(*layers).eval()
            weft.compile(net, options={"freezing": True})(torch.ones(2, 3, 4, 4))
    """,
    "CUDA graphs": """
        net = nn.Linear(4, 4)
        weft.compile(net, mode="reduce-overhead")(torch.ones(2, 4)).sum().backward()
        weft.compile(net, backend="cudagraphs")(torch.ones(2, 4)).sum().backward()
    """,
    "a captured backward": """
        net = nn.Linear(4, 4)
        with weft.compiled_autograd.enable(weft.compile(backend="aot_eager")):
            weft.compile(net, backend="aot_eager")(torch.ones(2, 4)).sum().backward()
    """,
    "a captured backward inside": """
        net = nn.Linear(4, 4)
        with weft.config.patch(compiled_autograd=True):
            weft.compile(lambda x: net(x).sum().backward(), backend="aot_eager")(torch.ones(2, 4))
    """,
    "hooks of gradients": """
        net = nn.Linear(4, 4)
        net.weight.register_hook(lambda grad: grad * 2)
        with weft.compiled_autograd.enable(weft.compile(backend="eager")):
            weft.compile(net, backend="eager")(torch.ones(2, 4)).sum().backward()
    """,
    "hooks of modules": """
        net = nn.Linear(4, 4)
        net.register_forward_hook(lambda module, inputs, output: output * 2)
        net.register_full_backward_hook(lambda module, before, after: None)
        weft.compile(net, backend="aot_eager")(torch.ones(2, 4)).sum().backward()
    """,
    "a step of an optimizer": """
        net = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(net.parameters())

        def step(x):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()

        compiled = weft.compile(step, backend="aot_eager")
        for _ in range(3):
            compiled(torch.ones(2, 4))
    """,
    "generators": """
        def each(x):
            for n in range(3):
                yield x.sin() + n

        compiled = weft.compile(each, backend="eager")
        list(compiled(torch.ones(3)))
        next(compiled(torch.ones(3)))
        weft.compile(lambda x: sum(each(x)), backend="eager")(torch.ones(3))
    """,
    "asynchronous generators": """
        import asyncio

        async def each(x):
            for n in range(2):
                yield x + n
                await asyncio.sleep(0)

        async def main():
            return [item async for item in weft.compile(each, backend="eager")(torch.ones(3))]

        asyncio.run(main())
    """,
    "a backend that fails": """
        def fails(graph, inputs):
            raise ValueError

        try:
            weft.compile(lambda x: x + 1, backend=fails)(torch.ones(3))
        except weft.BackendCompilerError:
            pass
    """,
    "a graph break with fullgraph": """
        def function(x):
            weft.graph_break()
            return x + 1

        try:
            weft.compile(function, fullgraph=True)(torch.ones(3))
        except weft.Unsupported:
            pass
    """,
    "a program that raises": """
        def function(x):
            y = x + 1
            raise LookupError

        try:
            weft.compile(function, backend="eager")(torch.ones(3))
        except LookupError:
            pass
    """,
    "an explanation and a report": """
        def function(x):
            y = x.sin()
            weft.graph_break()
            return y + 1

        str(weft.explain(function)(torch.ones(3)))
        weft.compile(function, backend="eager")(torch.ones(3))
        str(weft.report())
    """,
    "partials and methods": """
        import functools

        class Scale:
            def __init__(self):
                self.by = torch.ones(3)

            def scale(self, x):
                return x * self.by

        weft.compile(Scale().scale, backend="eager")(torch.ones(3))
        halved = functools.partial(lambda x, by: x / by, by=torch.ones(3))
        weft.compile(halved, backend="eager")(torch.ones(3))
    """,
    "functions of autograd": """
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, grad):
                return 2 * ctx.saved_tensors[0] * grad

        x = torch.ones(3, requires_grad=True)
        weft.compile(lambda x: Square.apply(x).sum(), backend="aot_eager")(x).backward()
    """,
    "gradients of gradients": """
        x = torch.ones(3, requires_grad=True)
        y = weft.compile(lambda x: (x**3).sum(), backend="aot_eager")(x)
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.sum().backward()
    """,
    "repeated blocks": """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                return x + self.outer(self.inner(x).relu()).sin().cos().exp().tanh()

        net = nn.Sequential(*[Block() for _ in range(4)])
        weft.compile(net)(torch.ones(2, 8)).sum().backward()
    """,
    "functions compiled inside": """
        inner = weft.compile(lambda x: x.cos(), backend="eager")
        weft.compile(lambda x: inner(x.sin()) * 2, backend="eager")(torch.ones(3))
        inner(torch.ones(3))
    """,
    "stances": """
        with weft.set_stance("aot_eager_then_compile"):
            compiled = weft.compile(lambda x: x.sin() + 1, backend="eager")
            for _ in range(2):
                compiled(torch.ones(3))
    """,
}
KEPT = (
    # by reports
    "weft_capture.breaks.BreakRecord",
    "weft_capture.policy.reports.FrameReport",
    # by the cache of torch's engine, emptied
    "weft_compiled_autograd.cache.BackwardEntry",
    # by tables of torch's symbolic shapes, the last few hundred
    "weft_core.fake._shape_env_class.<locals>.WeftShapeEnv",
    "weft_core.symbolic_sizes.SizeSource",
)


def alive():
    for _ in range(3):  # functions, what their code had, and what that was in a cycle with
        gc.collect()
    found = collections.Counter()
    for kind in map(type, gc.get_objects()):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name.startswith("weft") or issubclass(kind, torch.Tensor | torch.nn.Module | fx.Graph):
            found[name] += name not in KEPT
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_compiled_is_freed(name):
    source = textwrap.dedent(PROGRAMS[name])

    def run(times):
        for _ in range(times):
            exec(source, {"__name__": __name__, "torch": torch, "nn": torch.nn, "weft": weft})
        return alive()

    gc.freeze()  # what other tests left need not be walked
    before = run(2)
    growth = run(3) - before
    assert {kind: more for kind, more in growth.items() if more >= 3} == {}
