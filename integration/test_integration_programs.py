"""Functions rather than models: dicts, branches, sizes that change, hooks, state, threads."""

import threading

import pytest
import torch
import weft
from models import ZOO
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging


def test_dict_with_a_data_dependent_branch_and_two_sizes():
    def step(batch):
        y = batch["x"] * 2 + batch["bias"]
        if y.sum() > 0:
            return {"y": y.relu(), "positive": True}
        return {"y": -y, "positive": False}

    compiled = weft.compile(step)
    for size in (4, 7, 9):
        for sign in (1.0, -1.0):
            batch = {"x": torch.full((size, 3), sign), "bias": torch.ones(3) * 0.5}
            want, got = step(batch), compiled(batch)
            assert got["positive"] is want["positive"]
            torch.testing.assert_close(got["y"], want["y"])
    assert weft.counters["graph_break"].total() >= 1
    # Two graphs a path at most: one for the first size, one for every other.
    assert weft.counters["stats"]["unique_graphs"] <= 6


def test_the_second_size_is_the_last_compile():
    compiled = weft.compile(lambda x: (x @ x.T).softmax(-1))
    for size in (3, 5, 6, 7, 8):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), (x @ x.T).softmax(-1))
    assert weft.counters["stats"]["unique_graphs"] == 2


def test_dynamic_false_specialises_each_size_and_true_compiles_once():
    for dynamic, graphs in ((False, 3), (True, 1)):
        weft.reset()
        compiled = weft.compile(lambda x: x * 2 + 1, dynamic=dynamic)
        for size in (3, 5, 6):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 3.0))
        assert weft.counters["stats"]["unique_graphs"] == graphs


def test_a_compiled_module_is_the_same_module():
    model = ZOO["tiny_mlp"].model()
    compiled = weft.compile(model)
    assert isinstance(compiled, type(model))
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [p is q for p, q in zip(compiled.parameters(), model.parameters(), strict=True)]
    compiled.train()
    assert model.training
    x = torch.randn(4, 16)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    torch.testing.assert_close(compiled(x), model(x))
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    torch.testing.assert_close(compiled(x), model(x))


def test_training_flag_is_guarded():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    compiled = weft.compile(model)
    x = torch.randn(3, 8)
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))
    model.train()
    assert (compiled(x) == 0).any()
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))


def test_decorator_method_and_disable():
    @weft.compile(fullgraph=True)
    def double(x, *, plus=1):
        return x * 2 + plus

    class Scaler:
        factor = 3.0

        @weft.compile
        def scale(self, x):
            return x * self.factor

        def shift(self, x):
            return x + self.factor

    x = torch.randn(5)
    assert double.__name__ == "double"
    torch.testing.assert_close(double(x, plus=2), x * 2 + 2)
    scaler = Scaler()
    torch.testing.assert_close(scaler.scale(x), x * 3)
    torch.testing.assert_close(weft.compile(scaler.shift)(x), x + 3)
    scaler.factor = 4.0
    torch.testing.assert_close(scaler.scale(x), x * 4)

    def plain(x):
        return x

    assert weft.compile(plain, disable=True) is plain


def test_side_effects_happen_in_order():
    log = []

    @weft.compile
    def step(x, state):
        log.append("start")
        state["n"] = state.get("n", 0) + 1
        y = x * state["n"]
        log.append("end")
        return y

    state = {}
    for n in (1, 2, 3):
        assert torch.equal(step(torch.ones(2), state), torch.full((2,), float(n)))
        assert state["n"] == n
    assert log == ["start", "end"] * 3


def test_gradients_reach_inputs_and_accumulate():
    compiled = weft.compile(lambda x, w: (x @ w).relu().sum())
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    for _ in range(2):
        compiled(x, w).backward()
    got = x.grad, w.grad
    x.grad = w.grad = None
    for _ in range(2):
        (x @ w).relu().sum().backward()
    torch.testing.assert_close(got, (x.grad, w.grad))


def test_input_mutation_and_views():
    @weft.compile
    def step(x):
        x.add_(1)
        return x[1:], x.t()

    x = torch.zeros(3, 4)
    tail, turned = step(x)
    assert torch.equal(x, torch.ones(3, 4))
    x.fill_(5)
    assert (tail == 5).all() and (turned == 5).all()


def test_explain_names_graphs_and_breaks():
    def step(x):
        y = x + 1
        weft.graph_break()
        return y * 2

    report = weft.explain(step)(torch.ones(3))
    assert report.graph_count == 2
    assert report.graph_break_count == 1
    assert "test_integration_programs.py" in str(report)


def test_recompile_limit_falls_back_to_eager():
    @weft.compile
    def step(x, n):
        return x * sum(n)

    with (
        weft.config.patch(recompile_limit=2),
        pytest.warns(UserWarning, match=r"L\['n'\]"),
    ):
        for n in ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)):
            want = torch.ones(2) * sum(n)
            assert torch.equal(step(torch.ones(2), n), want)
    assert weft.counters["stats"]["unique_graphs"] <= 2


def test_recompiles_say_why(caplog):
    compiled = weft.compile(lambda x, n: x + n.count("a"))
    weft.set_logs(recompiles=True)
    try:
        with caplog.at_level("INFO", logger="weft"):
            compiled(torch.ones(2), "a")
            compiled(torch.ones(2), "aab")
    finally:
        weft.set_logs(recompiles=False)
    assert "'a'" in caplog.text and "'aab'" in caplog.text


def test_threads_may_call_at_once():
    compiled = weft.compile(lambda x: (x.sin() + x.cos()).sum(-1))
    wrong = []

    def work(seed):
        x = torch.randn(4, seed + 2)
        for _ in range(5):
            if not torch.allclose(compiled(x), (x.sin() + x.cos()).sum(-1), atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_compiled_autograd_captures_a_backward():
    model = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    model(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with weft.config.patch(compiled_autograd=True):
        model(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], want)
    assert weft.counters["compiled_autograd"]["captures"] == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_run_on_cpu(mode):
    compiled = weft.compile(lambda x: x.relu() + 1, mode=mode)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_two_backends_on_one_function():
    called = []

    def step(x):
        return x * 2 + 1

    def backend(name):
        def compile_graph(gm, inputs):
            called.append(name)
            return gm.forward

        return compile_graph

    x = torch.ones(3)
    first, second = (weft.compile(step, backend=backend(name)) for name in "ab")
    for compiled in (first, second, first, second):
        assert torch.equal(compiled(x), step(x))
    assert called == ["a", "b"]


@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_checkpointed_blocks_save_what_eager_saves(backend):
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))
        for _ in range(3)
    )

    def step(x):
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.sum()

    def saved_and_gradients(function):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        known = {t.data_ptr() for t in (x, *blocks.parameters())}
        shapes = []

        def pack(t):
            shapes.extend([t.shape] if t.numel() and t.data_ptr() not in known else [])
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = function(x)
        return shapes, torch.autograd.grad(loss, [x, *blocks.parameters()])

    want, gradients = saved_and_gradients(step)
    got, compiled_gradients = saved_and_gradients(weft.compile(step, backend=backend))
    assert sorted(got) == sorted(want) == [torch.Size([4, 8])] * 2
    torch.testing.assert_close(compiled_gradients, gradients)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_a_checkpointed_region_with_effects_has_them_twice(backend, reentrant, capsys):
    """It breaks the graph, and runs as it is both times: what the two save has to match."""

    class Noisy(nn.Sequential):
        def forward(self, x):
            print("runs")
            return super().forward(x)

    def train(compiled):
        torch.manual_seed(0)
        model = Noisy(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())

        def step(x):
            y = checkpoint(model, x * 2, use_reentrant=reentrant)
            return (y * 3).sum()

        function = weft.compile(step, backend=backend) if compiled else step
        for _ in range(2):
            function(torch.randn(6, 4, requires_grad=True)).backward()
        return [*model.state_dict().values(), *[p.grad for p in model.parameters()]]

    for got, want in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(got, want)
    assert capsys.readouterr().out == "runs\n" * 8
    assert weft.counters["graph_break"]["higher-order-op"] >= 1


def test_a_write_through_data_is_not_counted():
    weight = torch.ones(3, requires_grad=True)

    def halve(p):
        p.data.mul_(0.5)
        return p.sum()

    compiled = weft.compile(halve, backend="aot_eager")
    for _ in range(2):
        loss = (weight * weight).sum()  # keeps `weight` for its backward
        torch.testing.assert_close(compiled(weight), weight.sum())
        loss.backward()
    assert weight._version == 0
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.25))
    shared = torch.ones(3)
    compiled_sum = weft.compile(lambda a, b: (a.data.mul_(2), b + 1)[1], backend="aot_eager")
    torch.testing.assert_close(compiled_sum(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))
    torch.testing.assert_close(compiled_sum(shared, shared), torch.full((3,), 3.0))


def test_an_operator_without_a_fake_kernel_runs_as_it_is():
    def trained(compiled):
        weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = torch.optim.Adam(weights, lr=0.1, fused=True)
        step = weft.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones(3)
            step()
        return [weight.detach() for weight in weights]

    torch.testing.assert_close(trained(True), trained(False))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_one_graph_scales_images_of_every_size(mode):
    def scaled(image):
        return nn.functional.interpolate(image.sin(), scale_factor=2, mode=mode)

    compiled = weft.compile(scaled)
    for height in (8, 9, 10, 11):
        image = torch.randn(2, 3, height, 8, requires_grad=True)
        expected, actual = scaled(image), compiled(image)
        torch.testing.assert_close(actual, expected)
        weights = torch.randn_like(expected)
        (want,) = torch.autograd.grad(expected, image, weights)
        (got,) = torch.autograd.grad(actual, image, weights)
        torch.testing.assert_close(got, want)
    assert weft.counters["stats"]["unique_graphs"] == 2


def masked_loss(x, target, mask):
    """Sizes out of data, with a gradient."""
    count = mask.sum().item()
    chosen = x[mask]
    return torch.nn.functional.cross_entropy(chosen, target[mask], reduction="sum") / max(count, 1)


def packed(x, lengths):
    """Pieces as long as a list out of a tensor says."""
    pieces = x.split(lengths.tolist())
    return torch.stack([(piece * piece).sum() for piece in pieces]).exp().sum()


def prefix(x, n):
    """A number as a size, with what is known of it."""
    k = n.item()
    torch._check(k <= x.shape[0], lambda: "too long")
    return x[:k].sin().sum() + torch.zeros(k, 2).sum() + x.repeat_interleave(n).mean() * k


def rows(x, n):
    """Rows that are not zero."""
    found = (x > 0).nonzero()
    return x[found[:, 0], found[:, 1]].sum() * found.shape[0] + torch.unique(n).sum()


DATA_PROGRAMS = {
    masked_loss: lambda k: (torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0]), torch.arange(5) < k),
    packed: lambda k: (torch.randn(5), torch.tensor([k, 5 - k])),
    prefix: lambda k: (torch.randn(5), torch.tensor(k)),
    rows: lambda k: (torch.randn(4, 3) - 2 + k, torch.arange(4) % k),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("backend", ["codegen", "aot_eager"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", DATA_PROGRAMS, ids=lambda program: program.__name__)
def test_numbers_and_sizes_out_of_data_are_one_graph(program, training, backend):
    torch.manual_seed(0)
    with weft.config.patch(capture_scalar_outputs=True):
        compiled = weft.compile(program, backend=backend, fullgraph=True)
        for k in (3, 1, 4, 2, 1):
            x, *rest = DATA_PROGRAMS[program](k)
            mine, theirs = (x.clone().requires_grad_(training) for _ in range(2))
            got, want = compiled(mine, *rest), program(theirs, *rest)
            torch.testing.assert_close(got, want)
            if training:
                got.backward()
                want.backward()
                torch.testing.assert_close(mine.grad, theirs.grad)
    assert weft.counters["graph_break"].total() == 0
    if backend == "aot_eager":
        assert weft.counters["stats"]["unique_graphs"] == 1
    else:  # what is between the numbers is captured again, and generated
        assert weft.counters["codegen"]["kernels"] > 0


def modes_between(x, w):
    with torch.no_grad():
        mask = x > 0
        z = x[mask] * 2
        total = z.sum().item()
    with torch.autocast("cpu", torch.bfloat16):
        product = w @ w
        kept = product[product > 0] + 1
    return (x[mask].sin() * total).sum(), z.requires_grad, kept.dtype, kept.shape


def test_modes_hold_between_numbers_out_of_data():
    compiled = weft.compile(modes_between, fullgraph=True)
    for size in (5, 9, 7):
        x, w = torch.randn(size, 3, requires_grad=True), torch.randn(3, 3)
        got, want = compiled(x, w), modes_between(x, w)
        torch.testing.assert_close(got[0], want[0])
        assert got[1:] == want[1:]
        grads = [torch.autograd.grad(result[0], x)[0] for result in (got, want)]
        torch.testing.assert_close(*grads)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_without_the_setting_a_number_out_of_data_breaks():
    assert weft.config.capture_scalar_outputs is False
    compiled = weft.compile(prefix)
    x, n = DATA_PROGRAMS[prefix](3)
    torch.testing.assert_close(compiled(x, n), prefix(x, n))
    assert weft.counters["graph_break"]["data-dependent-value"] == 1
    with pytest.raises(weft.InvalidOption):
        weft.config.capture_scalar_outputs = "yes"


def test_a_check_on_a_number_out_of_data_raises_when_it_fails():
    x = torch.randn(5)
    with weft.config.patch(capture_scalar_outputs=True):
        compiled = weft.compile(prefix, fullgraph=True)
        compiled(x, torch.tensor(2))
        with pytest.raises(RuntimeError, match=r"^too long"):
            compiled(x, torch.tensor(7))
    assert weft.counters["graph_break"].total() == 0


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_a_vectorised_jacobian_of_a_compiled_function(compiled_autograd):
    def function(x):
        return (x * x).sin()

    x = torch.linspace(0.1, 1, 3)
    want = torch.autograd.functional.jacobian(function, x)
    with weft.config.patch(compiled_autograd=compiled_autograd):
        compiled = weft.compile(function)
        got = torch.autograd.functional.jacobian(compiled, x, vectorize=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_two_networks_that_take_turns(compiled_autograd):
    """The sample is made once; the discriminator's loss must not use up its history."""

    def train(wrap):
        torch.manual_seed(0)
        maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizers = [
            torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (maker, judge)
        ]

        def step(x):
            sample = maker(x[:, :3])
            optimizers[1].zero_grad()
            loss = F.softplus(-judge(x)).mean() + F.softplus(judge(sample.detach())).mean()
            loss.backward()
            missing = maker.weight.grad is None
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-judge(sample)).mean().backward()
            optimizers[0].step()
            return loss.item(), missing

        step = wrap(step)
        torch.manual_seed(1)
        results = [step(torch.randn(5, 4)) for _ in range(3)]
        return results, [p.detach() for net in (maker, judge) for p in net.parameters()]

    with weft.config.patch(compiled_autograd=compiled_autograd):
        torch.testing.assert_close(train(weft.compile), train(lambda step: step))


@pytest.mark.parametrize("infinite_at", [None, 1])
def test_scaled_gradients(infinite_at):
    """The scaler's operator returns a list of tensors beside a tensor."""
    weft.reset()

    def train(wrap):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            return loss.item()

        step = wrap(step)
        inputs = [torch.ones(2, 4) * (torch.inf if i == infinite_at else 1) for i in range(3)]
        losses = [step(x) for x in inputs]
        return losses, [p.detach() for p in model.parameters()], scaler.get_scale()

    found, expected = train(weft.compile), train(lambda step: step)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not any(frame.uncompiled for frame in weft.report().frames)


def test_batched_gradients_inside_a_broken_function():
    """The backward graph runs operator by operator then; captured, it would read no memory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    seeds = torch.eye(3).unsqueeze(1).expand(3, 8, 3)

    def step(x):
        x = x.requires_grad_()
        y = model(x)
        weft.graph_break()
        return torch.autograd.grad(y, x, seeds, is_grads_batched=True)[0]

    for x in (torch.randn(8, 6), torch.randn(8, 6)):
        expected = step(x.clone())
        torch.testing.assert_close(weft.compile(step, dynamic=True)(x.clone()), expected)


def test_compiling_under_another_default_device():
    """The code generator's own constants do not follow the caller's `with torch.device`."""
    compiled = weft.compile(lambda x: (x * 2).sigmoid() + 1.5)
    x = torch.randn(5)
    with torch.device("meta"):
        found = compiled(x)
    torch.testing.assert_close(found, (x * 2).sigmoid() + 1.5)
    assert torch.ones(1).device.type == "cpu"


# ---- gradients of results that other results are made of, asked for after a break


def sets_hooks(x, seen):
    y = x * 2
    z = (y * 3).exp() * 2
    weft.graph_break()
    for one in (y, z):
        one.register_hook(lambda grad: seen.append(grad))
    return z.sum() + y.sum()


def keeps_gradients(x, seen):
    y = x.sin()
    parts = [(one * one).sum() for one in (y, y.cos())]
    weft.graph_break()
    y.retain_grad()
    sum(parts).backward(retain_graph=True)
    seen.append(y.grad)
    return sum(parts)


def asks_for_gradients(x, seen):
    y = x * 2
    z = (y * y).sum()
    weft.graph_break()
    seen.extend(torch.autograd.grad(z, y, retain_graph=True))
    return z * 2


def asks_for_gradients_of_what_it_wrote(x, seen):
    y = x * 2
    weft.graph_break()
    y.mul_(3)
    z = (y * y).sum()
    weft.graph_break()
    seen.extend(torch.autograd.grad(z, y, retain_graph=True))
    return z * 2


def sets_hooks_in_a_loop(x, seen):
    for i in range(1, 3):
        y = x * i
        x = y * 2 + y
        weft.graph_break()
        y.register_hook(lambda grad: seen.append(grad))
    return x.sum()


@pytest.mark.parametrize(
    "function",
    [
        *(sets_hooks, keeps_gradients, asks_for_gradients, sets_hooks_in_a_loop),
        asks_for_gradients_of_what_it_wrote,
    ],
)
def test_gradients_between_the_results_of_a_graph(function):
    found = []
    for run in (function, weft.compile(function, backend="aot_eager")):
        x, seen = torch.ones(2, requires_grad=True), []
        run(x, seen).backward()
        found.append([x.grad, *seen])
    torch.testing.assert_close(found[1], found[0])


def test_tensors_of_numbers_that_vary():
    def numbers(x, n, step):
        return torch.tensor(n), torch.tensor([n, 1]), torch.as_tensor(n), x.add(1, alpha=step)

    compiled = weft.compile(numbers)
    for n, step in ((2, 0.5), (3, 0.7), (2**40, 0.9), (-(2**33), 1.5)):
        got, want = (f(torch.ones(2), n, step) for f in (compiled, numbers))
        torch.testing.assert_close(got, want)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_a_function_that_gives_its_argument_has_a_gradient_of_its_own():
    found = []
    for function in (Reversed.apply, weft.compile(lambda x: Reversed.apply(x))):
        x = torch.ones(2, requires_grad=True)
        function(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_a_loss_of_a_tensor_of_inference_mode(backend):
    def loss(x, said):
        return (x * (said / 2).softmax(-1)).sum() + said.view(-1).sum()

    x = torch.randn(4, 3, requires_grad=True)
    with torch.inference_mode():
        said = torch.randn(4, 3)
    grads = [
        torch.autograd.grad(f(x, said), x) for f in (loss, weft.compile(loss, backend=backend))
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_level_is_left_open_where_a_graph_raises(backend):
    where = torch.tensor([0, 9])
    programs = (
        lambda x: torch.func.vmap(lambda row: row[where])(x[None]),
        torch.func.grad(lambda x: x[where].sum()),
        lambda x: torch.func.jvp(lambda y: y.sin()[where], (x,), (x,)),
    )
    for program in programs:
        with pytest.raises(IndexError):
            weft.compile(program, backend=backend)(torch.ones(3))
        assert torch._C._functorch.maybe_current_level() is None
        assert torch.autograd.forward_ad._current_level == -1


def test_a_library_that_warns_once_breaks_no_graph():
    logger = logging.get_logger("transformers.seen")

    def step(x):
        logger.warning_once("weft was here")
        return x + 1

    compiled = weft.compile(step, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
