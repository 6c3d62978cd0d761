"""A linear layer and its cross entropy in chunks: results, gradients, and what is in memory."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
import weft
import weft_core.fake
from torch import nn

BATCH, LENGTH, WIDTH, CLASSES = 3, 10, 8, 40


class Model(nn.Module):
    """Hidden states, a head, and a loss that a test chooses."""

    def __init__(self, loss, bias=False):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = loss

    def forward(self, x, labels):
        return self.loss(self.body(x).tanh(), self.head, labels)


def _plain(hidden, head, labels):
    return F.cross_entropy(head(hidden).view(-1, CLASSES), labels.view(-1))


def _shifted(hidden, head, labels):
    logits = head(hidden)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES).float(), labels[..., 1:].reshape(-1))


def _summed(hidden, head, labels):
    logits = head(hidden).flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten(), ignore_index=7, reduction="sum") / 5


def _smoothed(hidden, head, labels):
    logits = head(hidden).transpose(1, 2)
    return nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)(logits, labels)


def _rows(hidden, head, labels):
    loss = F.cross_entropy(head(hidden).permute(0, 2, 1), labels, reduction="none")
    return (loss * torch.arange(loss.numel()).view(loss.shape)).sum() / 9


def _capped(hidden, head, labels):
    logits = torch.tanh(head(hidden) / 3.0) * 3.0
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1))


def _log_softmax(hidden, head, labels):
    rows = F.log_softmax(hidden @ head.weight.t(), dim=-1).view(-1, CLASSES)
    return F.nll_loss(rows, labels.view(-1))


def _einsum(hidden, head, labels):
    logits = torch.einsum("btc,vc->btv", hidden, head.weight)
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def _addmm(hidden, head, labels):
    logits = torch.addmm(torch.ones(CLASSES), hidden.flatten(0, 1), head.weight.t())
    return F.cross_entropy(logits, labels.view(-1))


def _weighted(hidden, head, labels):
    weight = torch.linspace(0.5, 2, CLASSES)
    return F.cross_entropy(head(hidden).view(-1, CLASSES), labels.view(-1), weight)


def _last_row(hidden, head, labels):
    return F.cross_entropy(head(hidden)[:, -1], labels[:, 0], reduction="sum")


LOSSES = [
    _plain, _shifted, _summed, _smoothed, _rows, _capped, _log_softmax, _einsum, _addmm, _weighted,
    _last_row,
]  # fmt: skip


def _data(dtype=torch.float32):
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (BATCH, LENGTH))
    labels[0, :4] = -100
    labels[1, 3], labels[2, 1] = 7, 3
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True), labels


def _step(function, model, x, labels):
    model.zero_grad()
    x.grad = None
    loss = function(x, labels)
    loss.backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return [loss.detach(), *(grad.clone() for grad in gradients if grad is not None)]


def _usable(loss, labels):
    """Labels without those that a loss without `ignore_index` takes for a class."""
    return labels.clamp(min=0) if loss in (_rows, _last_row, _summed, _smoothed) else labels


@pytest.mark.parametrize(
    ("loss", "dynamic"),
    [*itertools.product(LOSSES, [False]), *itertools.product([_shifted, _smoothed, _rows], [True])],
)
def test_chunks_give_the_results_and_gradients_of_eager(loss, dynamic):
    x, labels = _data()
    labels = _usable(loss, labels)
    model = Model(loss, bias=loss is not _einsum)
    before = weft.counters["aot"]["rewrites"]
    with weft.config.patch(chunk_cross_entropy=True):
        compiled = weft.compile(model, backend="aot_eager", dynamic=dynamic, fullgraph=True)
        found = _step(compiled, model, x, labels)
    assert weft.counters["aot"]["rewrites"] == before + 1
    expected = _step(model, model, x, labels)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, labels), expected[0])


@pytest.mark.parametrize("autocast", [False, True])
def test_generated_code_is_as_accurate_as_eager(autocast):
    x, labels = _data()
    model = Model(_shifted)
    with weft.config.patch(chunk_cross_entropy=True), torch.autocast("cpu", enabled=autocast):
        found = _step(weft.compile(model), model, x, labels)
    with torch.autocast("cpu", enabled=autocast):
        eager = _step(model, model, x, labels)
    expected = _step(model.double(), model, x.detach().double().requires_grad_(), labels)[0]
    assert abs(found[0] - expected) <= abs(eager[0] - expected) + 1e-6
    for ours, theirs in zip(found, eager, strict=True):
        assert ours.dtype is theirs.dtype
        tolerance = 2e-2 * theirs.abs().max().item() if autocast else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=tolerance)


def test_weights_in_bfloat16_have_gradients_as_accurate_as_eager():
    x, labels = _data(torch.bfloat16)
    model = Model(_plain, bias=True).bfloat16()
    with weft.config.patch(chunk_cross_entropy=True):
        found = _step(weft.compile(model), model, x, labels)
    eager = _step(model, model, x, labels)
    assert all(gradient.dtype is torch.bfloat16 for gradient in found)
    exact = _step(model.double(), model, x.detach().double().requires_grad_(), labels)
    errors = [
        sum((g - e).norm() / e.norm() for g, e in zip(tensors, exact, strict=True))
        for tensors in (found, eager)
    ]
    assert errors[0] <= 1.1 * errors[1]


def test_a_step_captured_as_one_graph_is_chunked():
    x, labels = _data()
    model = Model(_plain)

    def step(x, labels):
        loss = model(x, labels)
        loss.backward()
        return loss.detach()

    before = weft.counters["aot"]["rewrites"]
    with weft.config.patch(chunk_cross_entropy=True):
        loss = weft.compile(step, backend="aot_eager", fullgraph=True)(x, labels)
    assert weft.counters["aot"]["rewrites"] == before + 1
    found = [loss, *(p.grad.clone() for p in model.parameters())]
    expected = _step(model, model, x, labels)
    torch.testing.assert_close(found, [expected[0], *expected[2:]])


def test_rows_that_are_all_ignored_give_nan_and_gradients_of_zero():
    x, labels = _data()
    model = Model(_plain)
    labels.fill_(-100)
    with weft.config.patch(chunk_cross_entropy=True):
        loss, *gradients = _step(weft.compile(model, backend="aot_eager"), model, x, labels)
    assert math.isnan(loss)
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
def test_a_label_that_is_no_class_raises(backend):
    x, labels = _data()
    labels[2, 2] = CLASSES
    with weft.config.patch(chunk_cross_entropy=True), pytest.raises(IndexError):
        weft.compile(Model(_plain), backend=backend)(x, labels)


def test_second_derivatives_are_eagers():
    x, labels = _data()
    model = Model(_plain)
    with weft.config.patch(chunk_cross_entropy=True):
        compiled = weft.compile(model, backend="aot_eager")
        (found,) = torch.autograd.grad(compiled(x, labels), x, create_graph=True)
    (expected,) = torch.autograd.grad(model(x, labels), x, create_graph=True)
    pair = [torch.autograd.grad(g.square().sum(), x)[0] for g in (found, expected)]
    torch.testing.assert_close(*pair)


def test_a_checkpointed_loss_is_chunked_in_the_backward():
    x, labels = _data()
    model = Model(_plain)

    def checkpointed(x, labels):
        return torch.utils.checkpoint.checkpoint(model, x, labels, use_reentrant=False)

    before = weft.counters["aot"]["rewrites"]
    with weft.config.patch(chunk_cross_entropy=True):
        found = _step(weft.compile(checkpointed, backend="aot_eager"), model, x, labels)
    assert weft.counters["aot"]["rewrites"] == before + 1
    torch.testing.assert_close(found, _step(model, model, x, labels))


def _reads_logits(hidden, head, labels):
    logits = head(hidden).view(-1, CLASSES)
    return F.cross_entropy(logits, labels.view(-1)) + logits.square().mean()


def _probabilities(hidden, head, labels):
    target = F.one_hot(labels.view(-1), CLASSES).float()
    return F.cross_entropy(head(hidden).view(-1, CLASSES), target)


def _written(hidden, head, labels):
    logits = head(hidden).view(-1, CLASSES)
    hidden.mul_(2)
    return F.cross_entropy(logits, labels.view(-1)) + hidden.sum()


def _by_class(hidden, head, labels):
    logits = head(hidden).view(-1, CLASSES) * torch.arange(CLASSES)
    return F.cross_entropy(logits, labels.view(-1))


@pytest.mark.parametrize("loss", [_reads_logits, _probabilities, _written, _by_class])
def test_what_else_reads_logits_or_changes_their_sources_keeps_them(loss):
    x, labels = _data()
    model, labels = Model(loss), labels.clamp(min=0)
    before = weft.counters["aot"]["rewrites"]
    with weft.config.patch(chunk_cross_entropy=True), torch.no_grad():
        found = weft.compile(model, backend="aot_eager")(x, labels)
        torch.testing.assert_close(found, model(x, labels))
    assert weft.counters["aot"]["rewrites"] == before


class _Loss(nn.Module):
    def forward(self, hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight), labels)


@pytest.mark.parametrize(("rows", "chunked"), [(64, False), (2048, True)])
def test_large_logits_are_chunked_by_themselves(rows, chunked):
    with weft_core.fake.fake_mode():
        hidden, weight = torch.empty(rows, 16), torch.empty(16384, 16, requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64)
    backend = weft.aot_autograd(fw_compiler=lambda gm, _: gm.forward)
    before = weft.counters["aot"]["rewrites"]
    backend(torch.fx.symbolic_trace(_Loss()), [hidden, weight, labels])
    assert weft.counters["aot"]["rewrites"] == before + chunked


@pytest.mark.parametrize("loss", [_plain, _rows])
def test_no_graph_holds_the_logits_of_more_than_a_chunk(loss, monkeypatch):
    """Bytes of what the aten graphs make, in their order, each until its last use."""
    graphs = []
    backend = weft.aot_autograd(fw_compiler=lambda gm, _: graphs.append(gm) or gm.forward)
    rows, classes = 512, 4 * CLASSES
    x, labels = torch.randn(rows, 4, requires_grad=True), torch.randint(0, classes, (1, rows))
    head = nn.Linear(4, classes)
    monkeypatch.setattr(f"{__name__}.CLASSES", classes)
    with weft.config.patch(chunk_cross_entropy=True):
        loss_of = weft.compile(lambda x: loss(x.unsqueeze(0), head, labels), backend=backend)
        loss_of(x).backward()
    assert len(graphs) == 2
    logits = 4 * rows * classes
    for graph in graphs:
        assert max(v.numel() * v.element_size() for v in _tensors(graph)) <= logits / 4
    saved = graphs[0].graph.output_node().args[0]
    assert sum(v.meta["val"].numel() * 4 for v in saved if v is not None) < logits / 4


def _tensors(module):
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            yield value
