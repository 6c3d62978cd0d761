"""autograd.Functions, checkpointing, what falls back, threads, scopes, errors."""

import subprocess
import sys
import threading

import pytest
import torch
import weft_compiled_autograd as ca
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh():
    ca.reset()
    yield
    ca.reset()


def identity(gm):
    return gm


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, k):
        ctx.save_for_backward(x, y)
        ctx.k = k
        return x * y * k, x + y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y * ctx.k + h, g * x * ctx.k + h, None


def compare(program, compiler=identity, runs=3):
    torch.manual_seed(1)
    want = program()
    for _ in range(runs):
        torch.manual_seed(1)
        with ca.enable(compiler):
            got = program()
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_01_custom_function_is_called_with_its_own_context():
    def program():
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        out = []
        for k in (2.0, 5.0):
            a, b = Scale.apply(x * 1, y, k)
            out += torch.autograd.grad((a * b).sum(), (x, y))
        return out

    compare(program)
    assert ca.counters["compiled_autograd"]["captures"] == 1


def test_02_unused_output_of_a_function():
    def program():
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        a, _ = Scale.apply(x, y, 2.0)
        a.sum().backward()
        return [x.grad, y.grad]

    compare(program)


def test_03_function_that_returns_an_expanded_or_transposed_gradient():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum(), x.t() * 2

        @staticmethod
        def backward(ctx, g, h):
            return g.expand(4, 3) + (h * 2).t()

    def program():
        x = torch.randn(4, 3, requires_grad=True)
        s, t = Odd.apply(x * 3)
        (s * t.sum() + s).backward()
        return [x.grad]

    compare(program)


def test_04_wrong_number_of_gradients():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g, g

    x = torch.randn(3, requires_grad=True)
    with ca.enable(identity), pytest.raises(RuntimeError, match="incorrect number of gradients"):
        Bad.apply(x).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_05_checkpoint(reentrant):
    def program():
        m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        x = torch.randn(5, 3, requires_grad=True)
        y = checkpoint(m, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return [x.grad, *[p.grad for p in m.parameters()]]

    compare(program)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
def test_06_sparse_gradients_are_steps_of_a_graph(hooked, pieces):
    graphs = []
    backend = ca.graph_compiler(lambda gm, inputs: gm.forward)

    def compiler(gm):
        graphs.append(gm)
        return backend(gm) if pieces else gm

    def program(length=4):
        embedding, linear = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 4)
        if hooked:
            embedding.weight.register_hook(lambda grad: grad * 2)
        ids = torch.randint(0, 7, (length,))
        for _ in range(3):  # a first gradient, then sparse ones that add up
            linear(embedding(ids)).square().sum().backward()
        assert embedding.weight.grad.layout is torch.sparse_coo
        return [embedding.weight.grad.to_dense(), linear.weight.grad, linear.bias.grad]

    compare(program, compiler)
    for length in (3, 3, 5, 6):
        compare(lambda length=length: program(length), compiler, runs=1)
    made = ca.counters["compiled_autograd"]
    assert made["eager"] == made["node_by_node"] == 0
    names = [node.name for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert "mm" in names and "embedding_backward0" in names


def test_06b_a_dense_gradient_of_a_weight_that_had_a_sparse_one():
    def program(order):
        embedding = nn.Embedding(7, 3)
        ids = torch.randint(0, 7, (4,))
        for sparse in order:
            nn.functional.embedding(ids, embedding.weight, sparse=sparse).sum().backward()
        grad = embedding.weight.grad
        return [grad.to_dense(), torch.tensor(grad.is_sparse)]

    for order in ((True, False), (False, True), (True, True, False), (False, False)):
        compare(lambda order=order: program(order))


def test_07_anomaly_mode():
    x = torch.tensor([0.0], requires_grad=True)
    with ca.enable(identity), pytest.warns(UserWarning), torch.autograd.detect_anomaly():
        with pytest.raises(RuntimeError, match="nan"):
            (x.sqrt() * 0).sum().backward()


def test_08_threads():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = [torch.randn(5, 4) for _ in range(4)]
    want = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in inputs]
    failures = []

    def work(index):
        try:
            for _ in range(30):
                loss = model(inputs[index]).sum()
                if index % 2:
                    with ca.enable(identity):
                        got = torch.autograd.grad(loss, list(model.parameters()))
                else:
                    got = torch.autograd.grad(loss, list(model.parameters()))
                for a, b in zip(got, want[index]):
                    torch.testing.assert_close(a, b)
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


def test_09_enable_nests_and_disable_wins():
    used = []

    def note(name):
        def compiler(gm):
            used.append(name)
            return gm

        return compiler

    outer, inner = note("outer"), note("inner")
    x = torch.randn(3, requires_grad=True)
    with ca.enable(outer):
        (x * 2).sum().backward()
        with ca.enable(inner):
            x.grad = None
            (x * 2).sum().backward()
            with ca.disable():
                (x * 7).sum().backward()
        x.grad = None
        (x * 2).sum().backward()
    x.grad = None
    (x * 9).sum().backward()
    assert used == ["outer", "inner"]
    assert ca.counters["compiled_autograd"]["captures"] == 1
    assert torch.equal(x.grad, torch.full((3,), 9.0))


def test_10_compiler_that_raises():
    x = torch.randn(3, requires_grad=True)

    def broken(gm):
        raise LookupError("no compiler today")

    loss = (x * 2).sum()
    with ca.enable(broken), pytest.raises(LookupError, match="today"):
        loss.backward()
    with ca.enable(identity):
        loss.backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_11_compiler_must_be_callable():
    with pytest.raises(TypeError, match="graph module"):
        ca.enable(3).__enter__()


def test_12_torch_dynamo_is_not_imported():
    code = """
import sys, torch
import weft_compiled_autograd as ca
from torch.nn import *
model = Sequential(Linear(4, 8), GELU(), LayerNorm(8), Linear(8, 2))
for n in (3, 5, 3):
    with ca.enable(lambda gm: gm):
        model(torch.randn(n, 4)).sum().backward()
assert ca.counters["compiled_autograd"]["captures"] >= 2, ca.counters
assert ca.counters["compiled_autograd"]["eager"] == 0
bad = [m for m in sys.modules if m.startswith(("torch._dynamo", "torch._inductor"))]
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_13_dispatch_mode_and_functional_transforms():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, requires_grad=True)
    with ca.enable(identity):
        loss = (x * 2).sum()
        with Count():
            loss.backward()
        got = torch.func.grad(lambda v: (v**2).sum())(x.detach())
    assert Count.calls > 0
    torch.testing.assert_close(got, 2 * x.detach())


def test_14_complex_and_unusual_ops():
    def program():
        x = torch.randn(4, 4, dtype=torch.cfloat, requires_grad=True)
        w = torch.randn(4, 4, requires_grad=True)
        y = torch.fft.fft(x).abs().sum() + torch.linalg.solve(w + 5 * torch.eye(4), w).sum()
        y = (
            y
            + w.cumprod(0).sum()
            + w.sort(1).values[:, 0].sum()
            + w.std(0).sum()
            + w.max(1)[0].prod()
        )
        y = y + torch.where(w > 0, w, w * w).index_select(0, torch.tensor([0, 2, 2])).sum()
        y = (
            y
            + nn.functional.pad(w, (1, 1)).unfold(1, 3, 1).norm()
            + w[w > 0].sum()
            + w.roll(1).diagonal().sum()
        )
        y.backward()
        return [x.grad, w.grad]

    compare(program)
    assert ca.counters["compiled_autograd"]["captures"] == 1


def test_15_rnn_and_shared_intermediate():
    def program():
        cell = nn.LSTMCell(3, 4)
        h = c = torch.zeros(2, 4)
        x = torch.randn(6, 2, 3)
        for step in x:
            h, c = cell(step, (h, c))
        (h * c).sum().backward()
        return [p.grad for p in cell.parameters()]

    compare(program)


class Half(torch.autograd.Function):
    """Gives a gradient where it is asked for one, or leaves the first one out."""

    @staticmethod
    def forward(ctx, x, y, leave_out):
        ctx.save_for_backward(x, y)
        ctx.leave_out = leave_out
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        gx = g * y if ctx.needs_input_grad[0] and not ctx.leave_out else None
        gy = g * x if ctx.needs_input_grad[1] else None
        return gx, gy, None


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("y_needs", [False, True])
def test_16_a_gradient_that_is_left_out_stays_none(leave_out, y_needs):
    def run(scope):
        x = torch.ones(3, requires_grad=True)
        y = torch.full((3,), 2.0, requires_grad=y_needs)
        loss = Half.apply(x * 1, y * 1, leave_out).sum() + (y * x.detach()).sum() * y_needs
        with scope:
            loss.backward() if loss.requires_grad else None
        return x.grad, y.grad

    want = run(ca.disable())
    for _ in range(3):
        for got, expected in zip(run(ca.enable(identity)), want, strict=True):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)
    made = ca.counters["compiled_autograd"]
    assert made["captures"] == 1 and made["eager"] == 0
    assert (made["node_by_node"], made["graphs"]) == (int(leave_out), 1)


class KeepsNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return None if g is None else g * 2


class WantsZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize("before", [torch.sin, KeepsNone.apply, WantsZeros.apply])
@pytest.mark.parametrize("pieces", [False, True])
def test_17_a_gradient_that_is_left_out_later(before, pieces):
    backend = ca.graph_compiler(lambda gm, inputs: gm.forward)
    compiler = backend if pieces else identity

    def run(leave_out, scope):
        torch.manual_seed(0)
        x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
        log = []
        z.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
        loss = (Half.apply(before(x), y * z, leave_out) * z.exp()).sum()
        with scope:
            loss.backward()
        return [x.grad, y.grad, z.grad, *log]

    for leave_out in (False, False, True, False, True):
        want, got = run(leave_out, ca.disable()), run(leave_out, ca.enable(compiler))
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    made = ca.counters["compiled_autograd"]
    assert (made["captures"], made["graphs"], made["eager"], made["node_by_node"]) == (1, 1, 0, 1)
