"""Hooks of every kind: same gradients, same calls, same order as the eager engine."""

import pytest
import torch
import weft_compiled_autograd as ca
from torch import nn


@pytest.fixture(autouse=True)
def fresh():
    ca.reset()
    yield
    ca.reset()


def both(program, compiler=lambda gm: gm, runs=2, warm=None):
    """Run `program(log) -> tensors` eagerly and captured; return the log and compare both."""
    logs, results = [], []
    for enabled in (False, True):
        for _ in range(runs if enabled else 1):
            torch.manual_seed(0)
            log = []
            if enabled:
                with ca.enable(compiler):
                    out = program(log)
            else:
                out = program(log)
            logs.append(log)
            results.append([None if t is None else t.detach().clone() for t in out])
    for log, result in zip(logs[1:], results[1:]):
        assert log == logs[0]
        for got, want in zip(result, results[0], strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want)
    return logs[0]


def test_01_tensor_hooks_that_scale_and_that_look():
    def program(log):
        x = torch.randn(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda g: g * 10)
        y.register_hook(lambda g: log.append(("y", g.tolist())))
        x.register_hook(lambda g: log.append(("x", g.tolist())))
        y.sin().sum().backward()
        return [x.grad]

    assert [name for name, _ in both(program)] == ["y", "x"]
    assert ca.counters["compiled_autograd"]["captures"] == 1


def test_02_hooks_are_nodes_of_the_graph():
    graphs = []

    def compiler(gm):
        graphs.append(gm)
        return gm

    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda g: g * 2)
    with ca.enable(compiler):
        (x * 3).sum().backward()
    kinds = [n.kwargs.get("hook_type") for n in graphs[0].graph.nodes if n.kwargs]
    assert kinds == ["tensor_pre_hook"]
    assert torch.equal(x.grad, torch.full((3,), 6.0))


def test_03_each_backward_runs_its_own_hooks():
    seen = []
    x = torch.randn(3, requires_grad=True)
    for step in range(3):
        y = x * 2
        y.register_hook(lambda g, step=step: seen.append(step) or g * step)
        x.grad = None
        with ca.enable(lambda gm: gm):
            y.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0 * step))
    assert seen == [0, 1, 2]
    assert ca.counters["compiled_autograd"]["captures"] == 1


def test_04_node_pre_and_post_hooks():
    def program(log):
        a = torch.randn(3, requires_grad=True)
        b = torch.randn(3, requires_grad=True)
        y = a * b
        y.grad_fn.register_prehook(lambda gs: log.append("pre") or (gs[0] * 3,))
        y.grad_fn.register_prehook(lambda gs: log.append("pre again"))
        y.grad_fn.register_hook(lambda ins, outs: log.append(("post", len(ins), len(outs))))
        y.grad_fn.register_hook(lambda ins, outs: (ins[0] + 1, ins[1] - 1))
        y.sum().backward()
        return [a.grad, b.grad]

    assert both(program) == ["pre", "pre again", ("post", 2, 1)]


def test_05_post_accumulate_hooks_see_the_gradient():
    def program(log):
        m = nn.Linear(3, 2)

        def hook(p):
            log.append((tuple(p.shape), p.grad.sum().item()))
            p.grad = None if p.dim() == 1 else p.grad * 2

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(hook)
        m(torch.randn(4, 3)).sum().backward()
        return [p.grad for p in m.parameters()]

    assert len(both(program)) == 2


@pytest.mark.parametrize("pieces", [False, True])
def test_05b_hooks_that_free_tensors(pieces):
    """As sharded training does: the gradient's memory, and the parameter's, go in the backward."""

    def program(log):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        x = torch.randn(5, 3, requires_grad=True)

        def free(p):
            log.append(p.grad.sum().item())
            p.grad.untyped_storage().resize_(0)
            p.grad = None
            p.data = torch.empty(0)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(free)
        model(x).square().sum().backward()
        return [x.grad]

    backend = ca.graph_compiler(lambda gm, inputs: gm.forward)
    assert len(both(program, backend if pieces else lambda gm: gm)) == 4


def test_06_optimizer_step_inside_the_backward():
    def program(log):
        m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        for p in m.parameters():
            opt = torch.optim.SGD([p], lr=0.1, momentum=0.9)
            p.register_post_accumulate_grad_hook(
                lambda p, opt=opt: (opt.step(), opt.zero_grad()) and None
            )
        for _ in range(3):
            m(torch.randn(4, 3)).sum().backward()
        return list(m.parameters())

    both(program)


def test_07_retain_grad():
    def program(log):
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        y.retain_grad()
        y.register_hook(lambda g: g * 2)
        (y * y).sum().backward()
        return [x.grad, y.grad]

    both(program)


def test_08_module_full_backward_hooks():
    def program(log):
        m = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        m[0].register_full_backward_hook(
            lambda mod, gi, go: log.append(("first", go[0].sum().item()))
        )
        m[2].register_full_backward_pre_hook(lambda mod, go: (go[0] * 2,))
        m[2].register_full_backward_hook(
            lambda mod, gi, go: log.append(("last", go[0].sum().item()))
        )
        x = torch.randn(4, 3, requires_grad=True)
        m(x).sum().backward()
        return [x.grad, *[p.grad for p in m.parameters()]]

    assert [name for name, _ in both(program)] == ["last", "first"]


def test_09_order_of_hooks_across_branches():
    def program(log):
        x = torch.randn(3, requires_grad=True)
        w = torch.randn(3, requires_grad=True)
        note = lambda name: lambda g: log.append(name)  # noqa: E731
        a = x * 2
        b = w.sin()
        c = a + 1
        d = b * a
        e = c * d + c
        for name, t in dict(a=a, b=b, c=c, d=d, e=e, x=x, w=w).items():
            t.register_hook(note(name))
            if t.is_leaf:
                t.register_post_accumulate_grad_hook(note("acc " + name))
        e.sum().backward()
        return [x.grad, w.grad]

    assert len(both(program)) == 9


def test_10_a_hook_that_raises_leaves_everything_usable():
    x = torch.randn(3, requires_grad=True)
    y = x * 2

    def bad(g):
        raise ValueError("from the hook")

    y.register_hook(bad)
    with ca.enable(lambda gm: gm):
        with pytest.raises(ValueError, match="from the hook"):
            y.sum().backward()
        z = (x * 5).sum()
        z.backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))
    (x * 1).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 6.0))


@pytest.mark.parametrize(
    ("hook", "text"),
    [(lambda g: g[:1], "size"), (lambda g: g.double(), "type"), (lambda g: 3, "Variable")],
)
def test_11_results_that_the_engine_refuses(hook, text):
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    with ca.enable(lambda gm: gm), pytest.raises((RuntimeError, TypeError), match=text):
        y.sum().backward()


def test_12_hook_returns_another_layout():
    def program(log):
        x = torch.randn(3, 3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda g: (g * 2).t().contiguous().t())
        (y.view(9) * torch.arange(9.0)).sum().backward()
        return [x.grad]

    both(program)


@pytest.mark.parametrize("pack", ["array", "cast", "key"])
@pytest.mark.parametrize("pieces", [False, True])
def test_13_saved_tensor_hooks(pack, pieces):
    store = {}

    def program(log, size=3):
        def as_key(t):
            store[len(store)] = t
            return len(store) - 1

        packs = {
            "array": (lambda t: t.numpy().copy(), torch.from_numpy),
            "cast": (lambda t: (t.double(), "f32"), lambda item: item[0].float()),
            "key": (as_key, store.__getitem__),
        }
        pack_one, unpack_one = packs[pack]
        x = torch.randn(size, 4)
        w = torch.randn(4, 4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (log.append("pack"), pack_one(t.detach()))[1],
            lambda item: (log.append(("unpack", size)), unpack_one(item))[1],
        ):
            y = ((x @ w).exp() * x).tanh().sum()
        y.register_hook(lambda g: log.append("hook"))
        y.backward()
        return [w.grad]

    graphs = []

    def compiler(gm):
        graphs.append(gm)
        return gm

    made = ca.graph_compiler(lambda gm, inputs: compiler(gm)) if pieces else compiler
    for size in (3, 5, 3, 6):
        log = both(lambda log, size=size: program(log, size), made, runs=3)
        assert log.count(("unpack", size)) == 4
    assert bool(graphs) == (pack != "key")
    assert (ca.counters["compiled_autograd"]["node_by_node"] > 0) == (pack == "key")
    if graphs and not pieces:
        kinds = [n.kwargs.get("hook_type") for n in graphs[0].graph.nodes]
        assert kinds.count("unpack_hook") == 4


def test_14_hooks_removed_or_added_are_another_structure():
    x = torch.randn(3, requires_grad=True)
    handle = x.register_hook(lambda g: g * 2)
    with ca.enable(lambda gm: gm):
        (x * 1).sum().backward()
        handle.remove()
        x.grad = None
        (x * 1).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_15_queued_callbacks_run_at_the_end():
    order = []
    x = torch.randn(3, requires_grad=True)
    y = x * 2

    def hook(g):
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: order.append(x.grad.sum().item())
        )
        order.append("hook")

    y.register_hook(hook)
    with ca.enable(lambda gm: gm):
        y.sum().backward()
    assert order == ["hook", 6.0]


def test_16_nested_backward_in_a_hook():
    def program(log):
        x = torch.randn(3, requires_grad=True)
        z = torch.randn(3, requires_grad=True)
        y = x * 2
        y.register_hook(torch.enable_grad()(lambda g: (z.sin() * g).sum().backward()))
        y.sum().backward()
        return [x.grad, z.grad]

    both(program)
