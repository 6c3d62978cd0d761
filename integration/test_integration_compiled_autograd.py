"""Compiled autograd in the whole stack: compiled forwards, inlined backwards, hooks, settings."""

import re
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import weft
from torch import nn
from weft_compiled_autograd import graph_compiler


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(b, t, w)
        return x + self.mlp(x)


def gradients(model, run):
    model.zero_grad(set_to_none=True)
    run()
    return [p.grad.clone() for p in model.parameters()]


def loss_of(function, x):
    return function(x).square().mean()


COMPILERS = {
    "as it is": lambda: lambda gm: gm,
    "weft.compile": lambda: weft.compile,
    "weft.compile(backend)": lambda: weft.compile(backend="aot_eager"),
    "graph compiler": lambda: graph_compiler(weft.lookup_backend("codegen")),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("compiler", COMPILERS.values(), ids=COMPILERS.keys())
@pytest.mark.parametrize("forward", ["eager", "aot_eager", "codegen"])
def test_gradients_of_a_transformer_block(forward, compiler):
    torch.manual_seed(0)
    model = Block()
    function = model if forward == "eager" else weft.compile(model, backend=forward)
    made = compiler()

    def run(x):
        loss = loss_of(function, x)
        with weft.compiled_autograd.enable(made):
            loss.backward()

    for batch, length in ((2, 6), (3, 5), (2, 6)):
        x = torch.randn(batch, length, 16)
        want = gradients(model, loss_of(model, x).backward)
        for got, expected in zip(gradients(model, lambda x=x: run(x)), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert weft.counters["compiled_autograd"]["captures"] <= 4
    assert weft.counters["compiled_autograd"]["eager"] == 0


def test_breaks_in_the_forward_one_graph_in_the_backward():
    graphs = []

    @weft.compile(backend="aot_eager")
    def function(x):
        x = x.sin()
        weft.graph_break()
        x = x.cos()
        weft.graph_break()
        return x.tanh()

    x = torch.randn(5, requires_grad=True)
    with weft.compiled_autograd.enable(lambda gm: graphs.append(gm) or gm):
        function(x).sum().backward()
    assert weft.counters["stats"]["unique_graphs"] == 3
    assert len(graphs) == 1
    prefixes = {n.name.split("_")[0] for n in graphs[0].graph.nodes if n.name.startswith("aot")}
    assert len(prefixes) == 3
    want = torch.autograd.grad(x.sin().cos().tanh().sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("forward", ["eager", "aot_eager", "codegen"])
def test_four_sizes_are_two_captures(forward):
    torch.manual_seed(0)
    model = Block()
    function = model if forward == "eager" else weft.compile(model, backend=forward)
    graphs = []

    def keep(gm):
        graphs.append(gm)
        return gm

    def run(x):
        with weft.compiled_autograd.enable(keep):
            F.cross_entropy(function(x).flatten(0, 1), x.argmax(-1).flatten()).backward()

    for batch in (10, 100, 10, 37):
        x = torch.randn(batch, 5, 16)
        want = gradients(
            model,
            lambda x=x: F.cross_entropy(model(x).flatten(0, 1), x.argmax(-1).flatten()).backward(),
        )
        for got, expected in zip(gradients(model, lambda x=x: run(x)), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert len(graphs) == weft.counters["compiled_autograd"]["captures"] == 2
    assert weft.counters["compiled_autograd"]["eager"] == 0


def test_the_setting_covers_every_backward_and_switches_off_again():
    model = Block()
    x = torch.randn(2, 4, 16)
    want = gradients(model, lambda: loss_of(model, x).backward())
    function = weft.compile(model)
    with weft.config.patch(compiled_autograd=True):
        for _ in range(3):
            got = gradients(model, lambda: loss_of(function, x).backward())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    before = weft.counters["compiled_autograd"]["captures"]
    assert before == 1
    (model(x).sum() * 3).backward()
    assert weft.counters["compiled_autograd"]["captures"] == before


def test_the_setting_covers_a_backward_that_a_compiled_function_runs():
    model, x = Block(), torch.randn(2, 4, 16)
    want = gradients(model, loss_of(model, x).backward)

    def run():
        loss = loss_of(model, x)
        weft.compile(lambda: loss.backward())()

    with weft.config.patch(compiled_autograd=True):
        got = gradients(model, run)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert weft.counters["compiled_autograd"]["captures"] == 1
    assert weft.counters["compiled_autograd"]["eager"] == 0


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


def reached(model, x):
    model(x).square().sum().backward()


def test_the_tutorials_training_function(capfd):
    model, x = net(), torch.randn(4, 10)
    want = gradients(model, model(x).square().sum().backward)
    step = weft.compile(reached)
    weft.set_logs(compiled_autograd=True)
    with weft.config.patch(compiled_autograd=True):
        got = gradients(model, lambda: step(model, x))
    weft.set_logs(compiled_autograd=False)
    torch.testing.assert_close(got, want)
    assert weft.counters["compiled_autograd"] == {"captures": 1, "graphs": 1}
    assert re.search(r"aot\d+_mm_default", capfd.readouterr().err)


def test_the_setting_decides_at_each_call_who_captures():
    model, x = net(), torch.randn(4, 10)
    want = gradients(model, model(x).square().sum().backward)
    step = weft.compile(reached)
    for on in (False, True, False, True):
        with weft.config.patch(compiled_autograd=on):
            torch.testing.assert_close(gradients(model, lambda: step(model, x)), want)
        with weft.config.patch(compiled_autograd=on), weft.compiled_autograd.disable():
            torch.testing.assert_close(gradients(model, lambda: step(model, x)), want)
    assert weft.counters["compiled_autograd"]["captures"] == 1
    assert weft.counters["stats"]["unique_graphs"] == 3


def test_a_backward_has_the_flags_of_the_function_that_reaches_it():
    model, graphs = net(), []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    for dynamic, count in ((None, 4), (True, 2), (False, 8)):
        weft.reset()
        graphs.clear()
        step = weft.compile(reached, backend=backend, dynamic=dynamic)
        for rows in (4, 5, 6, 7):
            x = torch.randn(rows, 10)
            want = gradients(model, model(x).square().sum().backward)
            with weft.config.patch(compiled_autograd=True):
                torch.testing.assert_close(gradients(model, partial(step, model, x)), want)
        assert len(graphs) == count


def test_fullgraph_forbids_breaks_of_hooks_alone():
    model, x = net(), torch.randn(4, 10)

    @weft.compile(fullgraph=True)
    def step(x):
        grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        return [grad * 2 for grad in grads]

    want = gradients(model, model(x).square().sum().backward)
    with weft.config.patch(compiled_autograd=True):
        torch.testing.assert_close(step(x), [grad * 2 for grad in want])
    assert dict(weft.counters["graph_break"]) == {"backward": 1}
    model[0].weight.register_hook(lambda grad: weft.graph_break())
    with weft.config.patch(compiled_autograd=True), pytest.raises(weft.Unsupported):
        weft.compile(reached, fullgraph=True)(model, x)


@pytest.mark.parametrize("scope", ["setting", "enable"])
def test_equal_requests_share_the_graphs_of_a_backward(scope):
    model, x = net(), torch.randn(4, 10)
    want = gradients(model, model(x).square().sum().backward)
    for _ in range(12):
        model.zero_grad()
        loss = model(x).square().sum()
        if scope == "setting":
            with weft.config.patch(compiled_autograd=True):
                weft.compile(lambda loss=loss: loss.backward(), fullgraph=True)()
        else:
            with weft.compiled_autograd.enable(weft.compile(backend="aot_eager")):
                loss.backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], want)
    assert weft.counters["compiled_autograd"] == {"captures": 1, "graphs": 1}


def test_a_captured_backward_frees_its_history_at_once():
    x = torch.randn(3, requires_grad=True)
    with weft.config.patch(compiled_autograd=True):
        y = x.exp()
        died = weakref.ref(y)
        y.sum().backward()
    del y
    assert died() is None


def test_a_hook_of_batched_gradients_runs_as_it_is():
    def jacobian(x):
        handle = x.register_hook(lambda grad: grad * 1.5)
        y = (x * 1).sin()
        found = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, create_graph=True)
        handle.remove()
        return found[0]

    x = torch.randn(3, requires_grad=True)
    want, compiled = jacobian(x), weft.compile(jacobian)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), want)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_gradients_of_gradients_make_no_graphs_of_their_own(backend):
    model, x = net(), torch.randn(4, 10)

    def step(x):
        model(x).square().mean().backward(create_graph=True)
        slope = sum(p.grad.square().sum() for p in model.parameters())
        return torch.autograd.grad(slope, list(model.parameters()))

    model.zero_grad()
    want, compiled = step(x), weft.compile(step, backend=backend)
    for _ in range(3):
        model.zero_grad()
        torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-6)
        model.zero_grad()
    assert weft.counters["stats"]["unique_graphs"] <= 3


def test_the_setting_covers_other_threads():
    x = torch.randn(3, requires_grad=True)
    with weft.config.patch(compiled_autograd=True):
        worker = threading.Thread(target=lambda: (x * 2).sum().backward())
        worker.start()
        worker.join()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert weft.counters["compiled_autograd"]["captures"] == 1


def test_hooks_with_a_compiled_forward():
    torch.manual_seed(0)
    model = Block()
    order = []
    for name, p in model.named_parameters():
        p.register_hook(lambda g: g * 0.5)
        p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    x = torch.randn(2, 4, 16)
    want = gradients(model, lambda: loss_of(model, x).backward())
    expected, order[:] = list(order), []
    function = weft.compile(model)

    def run():
        with weft.compiled_autograd.enable(graph_compiler(weft.lookup_backend("codegen"))):
            loss_of(function, x).backward()

    for _ in range(2):
        order.clear()
        got = gradients(model, run)
        assert sorted(order) == sorted(expected)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_setting_takes_hooks_into_the_graph():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 4, 16)

    def hook(grad):
        return grad * 0.5

    for parameter in model.parameters():
        parameter.register_hook(hook)
    want = gradients(model, lambda: loss_of(model, x).backward())
    python = []
    with weft.config.patch(compiled_autograd=True):
        for _ in range(3):
            sys.setprofile(lambda f, event, arg: python.append(f.f_code) if event == "call" else 0)
            got = gradients(model, lambda: loss_of(model, x).backward())
            sys.setprofile(None)
    assert hook.__code__ not in python
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert weft.counters["stats"]["unique_graphs"] == 1
    assert not weft.counters["graph_break"]


def test_under_the_setting_a_hook_that_breaks_says_so(capsys):
    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda grad: print("seen", grad.numpy().sum()))
    for _ in range(3):
        x.grad = None
        with weft.config.patch(compiled_autograd=True):
            (x * 3).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert capsys.readouterr().out == 3 * "seen 9.0\n"
    assert sum(weft.counters["graph_break"].values()) == 1
    assert weft.counters["compiled_autograd"] == {"captures": 1, "graphs": 1}


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, factor, log):
        ctx.save_for_backward(x, y)
        ctx.factor, ctx.log = factor, log
        return x * y * factor

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        if ctx.log is not None:
            ctx.log.append(ctx.factor)
        gx = grad * y * ctx.factor if ctx.needs_input_grad[0] else None
        return gx, grad * x * ctx.factor, None, None


class BreaksInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, factor, log):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        weft.graph_break()
        return grad * y, grad * x, None, None


@pytest.mark.parametrize(("function", "breaks"), [(Scale, 0), (BreaksInside, 1)])
def test_the_setting_takes_an_autograd_function_into_the_graph(function, breaks):
    log = []
    for factor in (2.0, 2.0, 5.0, 2.0):
        log.clear()
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        loss = function.apply(x * 1, y, factor, log).square().sum()
        want = torch.autograd.grad(loss, (x, y), retain_graph=True)
        with weft.config.patch(compiled_autograd=True):
            got = torch.autograd.grad(loss, (x, y))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        assert log == ([] if breaks else [factor, factor])
    assert sum(weft.counters["graph_break"].values()) == breaks
    assert weft.counters["stats"]["unique_graphs"] == 2
    assert weft.counters["compiled_autograd"] == {"captures": 1, "graphs": 1}


def test_hooks_that_keep_changing_are_called_between_pieces():
    seen = []
    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda grad: seen.append(grad * len(seen)))
    for step in range(8):
        x.grad = None
        with weft.config.patch(compiled_autograd=True):
            (x * 3).sum().backward()
        assert torch.equal(seen[-1], torch.full((3,), 3.0 * step)) and len(seen) == step + 1
    assert weft.counters["stats"]["unique_graphs"] <= 5
    assert not weft.counters["graph_break"]


def test_a_backward_in_a_hook_under_the_setting():
    x, z = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with weft.config.patch(compiled_autograd=True), torch.no_grad():
        compiled = weft.compile(torch.enable_grad()(lambda z, g: (z.sin() * g).sum().backward()))
        compiled(z, torch.ones(3))
    torch.testing.assert_close(z.grad, z.detach().cos())
    y = x * 2
    y.register_hook(torch.enable_grad()(lambda g: (z.sin() * g).sum().backward()))
    with weft.config.patch(compiled_autograd=True):
        y.sum().backward()
    torch.testing.assert_close(z.grad, 2 * z.detach().cos())
    assert torch.equal(x.grad, torch.full((3,), 2.0))


SCOPES = {
    "the setting": lambda: weft.config.patch(compiled_autograd=True),
    "weft.compile": lambda: weft.compiled_autograd.enable(weft.compile),
    "with flags": lambda: weft.compiled_autograd.enable(weft.compile(fullgraph=True)),
}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
@pytest.mark.parametrize("hooked", [False, True])
def test_saved_tensors_die_in_a_graph(monkeypatch, scope, hooked):
    """The one list that holds a large tensor is the one that the compiled code takes it from."""
    from weft_codegen.kernels.load import CompiledGraph

    left = []
    original = CompiledGraph.call_owning

    def noted(self, args):
        alive = [weakref.ref(arg) for arg in args if getattr(arg, "numel", int)() >= 512 * 64]
        result = original(self, args)
        left.append((len(alive), sum(ref() is not None for ref in alive)))
        return result

    monkeypatch.setattr(CompiledGraph, "call_owning", noted)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())))
    for parameter in model.parameters() if hooked else ():
        parameter.register_hook(lambda grad: grad * 0.5)
    make = torch.Generator().manual_seed
    loss = model(torch.randn(512, 64, generator=make(0))).square().sum()
    want = torch.autograd.grad(loss, list(model.parameters()))
    with scope():
        model(torch.randn(512, 64, generator=make(0))).square().sum().backward()
    ((large, alive),) = left
    assert large >= 4 and alive == 0
    for parameter, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_a_hook_that_breaks_the_graph_in_the_middle(backend):
    """What follows the break finds all that it needs, though the parts before it own theirs."""
    seen = []
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh())))
    model[4].weight.register_hook(lambda grad: seen.append(grad.clone()) or weft.graph_break())
    compiler = weft.compile(backend=backend)
    for rows in (5, 5, 7):
        x = torch.randn(rows, 8)
        want = gradients(model, model(x).square().sum().backward)

        def run(x=x):
            with weft.compiled_autograd.enable(compiler):
                model(x).square().sum().backward()

        for got, expected in zip(gradients(model, run), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert len(seen) == 6 and sum(weft.counters["graph_break"].values()) >= 1
    assert weft.counters["stats"]["unique_graphs"] >= 2


def test_flags_that_are_wrong_are_refused_when_a_block_begins():
    with pytest.raises(weft.InvalidBackend, match="no_such"):
        weft.compiled_autograd.enable(weft.compile(backend="no_such"))
    x = torch.randn(3, requires_grad=True)
    for _ in range(3):  # the same graphs each time, whoever asks for the default compiler
        with weft.compiled_autograd.enable(weft.compile):
            (x * 2).sum().backward()
        x.grad = None
    assert weft.counters["compiled_autograd"]["graphs"] == 1


def test_a_training_run_gives_eagers_losses():
    def train(compiled):
        torch.manual_seed(0)
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        function = weft.compile(model) if compiled else model
        losses = []
        with weft.config.patch(compiled_autograd=compiled):
            for step in range(8):
                x = torch.randn(2 + step % 3, 6, 16, generator=torch.Generator().manual_seed(step))
                loss = loss_of(function, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    assert train(True) == pytest.approx(train(False), rel=1e-4)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_gradient_penalty(backend, enabled):
    def penalty(function, model, x):
        score = function(x).square().sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        (score + slope.square().sum()).backward()
        return [x.grad, *[p.grad for p in model.parameters()]]

    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Tanh()
    ).double()
    want = penalty(model, model, x.clone().requires_grad_())
    model.zero_grad()
    with weft.config.patch(compiled_autograd=enabled):
        got = penalty(weft.compile(model, backend=backend), model, x.clone().requires_grad_())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_torchs_compiler_stays_unloaded():
    code = """
import sys, torch, weft
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
compiled = weft.compile(model)
with weft.config.patch(compiled_autograd=True):
    for size in (3, 5, 7):
        compiled(torch.randn(size, 4)).sum().backward()
assert weft.counters["compiled_autograd"]["captures"] >= 1
loaded = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_result_that_retains_what_comes_through_another_one():
    def program(x, w):
        hidden = x * 2
        return hidden, (hidden * w).sin()

    compiled = weft.compile(program)
    with weft.config.patch(compiled_autograd=True):
        for retains in (False, True, False, True):
            found = []
            for function in (program, compiled):
                x, w = torch.ones(3, requires_grad=True), torch.arange(3.0, requires_grad=True)
                hidden, result = function(x, w)
                if retains:
                    hidden.retain_grad()
                (result.sum() + hidden.sum()).backward()
                found.append((x.grad, w.grad, hidden.grad if retains else w))
            torch.testing.assert_close(*found)


@pytest.mark.parametrize("batched", [False, True])
def test_a_gradient_beside_a_hook_of_an_input_runs_the_hook(batched):
    def function(x):
        x.register_hook(lambda gradient: gradient * 1.5)
        weights = torch.eye(3) if batched else torch.ones(3)
        options = {"is_grads_batched": batched, "create_graph": True}
        return torch.autograd.grad(x * x, x, weights, **options)[0]

    found = []
    for run in (function, weft.compile(function)):
        x = torch.arange(3.0, requires_grad=True)
        result = run(x)
        result.sum().backward()
        found.append((result, x.grad))
    torch.testing.assert_close(*found)
