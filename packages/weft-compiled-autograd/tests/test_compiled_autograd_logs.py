"""What is printed: graphs with their autograd nodes, miss reasons in the documented words."""

import logging
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
import weft_compiled_autograd as ca
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weft_core.events import set_logs


@pytest.fixture(autouse=True)
def fresh():
    ca.reset()
    yield
    set_logs(compiled_autograd=False, compiled_autograd_verbose=False)
    ca.reset()


def run(loss):
    with ca.enable(lambda gm: gm):
        loss.backward()


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_01_nothing_is_printed_by_default(caplog):
    caplog.set_level(logging.DEBUG)
    run((torch.randn(3, requires_grad=True) * 2).sum())
    assert [m for m in messages(caplog) if "autograd" in m] == []


def test_02_the_graph_with_its_autograd_nodes(caplog):
    set_logs(compiled_autograd=True)
    run((torch.randn(3, requires_grad=True) * 2).sum())
    (text,) = [m for m in messages(caplog) if m.startswith("Compiled autograd graph")]
    assert re.search(r"# MulBackward0 \(NodeCall 2\)\n +mul: \"f32\[3\]\" = torch.ops.aten", text)
    assert "autograd:0" not in text and "stacktrace" not in text


def test_03_verbose_adds_layouts_and_the_new_node(caplog):
    set_logs(compiled_autograd_verbose=True)
    x = torch.randn(4, 3, requires_grad=True)
    run((x * 2).sum())
    assert 'mul: "f32[4, 3][3, 1]cpu"' in caplog.text
    caplog.clear()
    x.grad = None
    run((x - 2).sum())
    found = re.search(
        r"Cache miss due to new autograd node: SubBackward0 \(NodeCall 2\) with key size \d+, "
        r"previous key sizes=\[.*\]",
        caplog.text,
    )
    assert found


def test_04_a_size_that_changed(caplog):
    set_logs(compiled_autograd_verbose=True)
    for size in (10, 100, 10, 37):
        run((torch.randn(size, requires_grad=True) * 2).sum())
    lines = [m for m in messages(caplog) if "changed shapes" in m]
    assert lines[0] == (
        "Cache miss due to changed shapes: marking size idx 0 of SumBackward0 (NodeCall 1) "
        "as dynamic"
    )
    assert len(set(lines)) == len(lines)
    assert ca.counters["compiled_autograd"]["captures"] == 2


def test_04b_the_documented_words_to_the_letter(caplog):
    set_logs(compiled_autograd_verbose=True)
    for size in (10, 100, 10, 37):
        x = torch.randn(size, requires_grad=True)
        with ca.enable(lambda gm: gm):
            (x * 2).backward(torch.ones(size))
    lines = [m for m in messages(caplog) if m.startswith("Cache miss")]
    assert (
        "Cache miss due to changed shapes: marking size idx 0 of "
        "torch::autograd::GraphRoot (NodeCall 0) as dynamic"
    ) in lines
    assert ca.counters["compiled_autograd"]["captures"] == 2
    caplog.clear()
    for operator in (torch.mul, torch.sub):
        run(operator(torch.randn(10, requires_grad=True), 2).sum())
    lines = [m for m in messages(caplog) if m.startswith("Cache miss")]
    (line,) = [line for line in lines if "SubBackward0" in line]
    assert re.sub(r"key size \d+", "key size 56", line) == (
        "Cache miss due to new autograd node: SubBackward0 (NodeCall 2) with key size 56, "
        "previous key sizes=[]"
    )


def test_05_reasons_for_the_eager_engine_are_told_once(caplog):
    x = torch.randn(3, requires_grad=True)
    with ca.enable(lambda gm: gm):
        for _ in range(3):
            torch.autograd.grad((x * x).sum(), x, create_graph=True)
    told = [m for m in messages(caplog) if "eager engine" in m]
    assert len(told) == 1 and "create_graph" in told[0]
    assert ca.counters["compiled_autograd"]["eager"] == 3


def second_order(x):
    torch.autograd.grad((x * x).sum(), x, create_graph=True)


def nested(x):
    y = x * 2
    y.register_hook(
        torch.enable_grad()(lambda g: (x.detach().requires_grad_() * g).sum().backward())
    )
    y.sum().backward()


def anomaly(x):
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        (x * 2).sum().backward()


def under_a_mode(x):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    loss = (x * 2).sum()
    with Mode():
        loss.backward()


def compressed_input(x):
    matrix = torch.eye(3).to_sparse_csr()
    torch.sparse.mm(matrix, x.view(3, 1)).sum().backward()


def quantized_input(x):
    class Dequantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].dequantize()

    Dequantized.apply(x).sum().backward()


def subclass(x):
    class Mine(torch.Tensor):
        pass

    (x * x.detach().as_subclass(Mine)).sum().backward()


def transformed(x):
    loss = (x * 2).sum()

    def backward_inside(v):
        torch.autograd.grad(loss, x, retain_graph=True)
        return v.sum()

    torch.func.vmap(backward_inside)(torch.ones(2, 2))


def batched(x):
    y = x * x
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


def concurrent(x):
    """Two backwards at a time: the second runs while the first is in its hook."""
    y, z = x * 2, x.detach().requires_grad_()
    work = torch.enable_grad()(lambda: (z * 3).sum().backward())

    def hook(grad):
        with ca.disable():  # this thread's compiler is not the other's
            thread = threading.Thread(target=in_scope, args=(work,))
            thread.start()
            thread.join()

    y.register_hook(hook)
    y.sum().backward()
    assert torch.equal(z.grad, torch.full((3,), 3.0))


def in_scope(work):
    with ca.enable(lambda gm: gm):
        work()


def sparse_gradient(x):
    weight = torch.randn(5, 3, requires_grad=True)
    torch.nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()


def test_07_a_node_that_runs_as_it_is_is_told_once(caplog):
    for _ in range(3):
        with ca.enable(lambda gm: gm):
            sparse_gradient(torch.randn(3, requires_grad=True))
    (told,) = [m for m in messages(caplog) if "one node of it runs as it is" in m]
    assert "EmbeddingBackward0" in told and "sparse" in told
    assert ca.counters["compiled_autograd"] == {"captures": 1, "graphs": 1}


def recomputed(x):
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()


def boxed(x):
    class Boxed(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grads):
            return grads.pop() * 2

    Boxed.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def undefined(x):
    class Omits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return None

    class Takes(Omits):
        @staticmethod
        def backward(ctx, grad):
            return grad + 1

    Omits.apply(Takes.apply(x)).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Sparse CSR", "ignore:.*quantize")
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (second_order, "it runs on the eager engine: create_graph=True"),
        (nested, "it runs on the eager engine: a backward inside a compiled backward"),
        (anomaly, "it runs on the eager engine: anomaly mode"),
        (under_a_mode, "it runs on the eager engine: a TorchDispatchMode"),
        (compressed_input, "it runs on the eager engine: a tensor with layout torch.sparse_csr"),
        (quantized_input, "it runs on the eager engine: a quantized tensor"),
        (subclass, "it runs on the eager engine: a tensor of type Mine"),
        (transformed, "it runs on the eager engine: a torch.func transform is active"),
        (batched, "it runs on the eager engine: is_grads_batched=True"),
        (concurrent, "it runs on the eager engine: another backward runs at the same time"),
        (recomputed, "it runs node by node: saved-tensor hooks"),
        (undefined, "it runs node by node: an autograd.Function that leaves out a gradient"),
        pytest.param(
            boxed,
            "it runs on the eager engine: an autograd.Function with boxed_grads_call",
            marks=pytest.mark.skipif(
                not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="new in torch 2.13"
            ),
        ),
    ],
)
def test_06_each_reason_is_told_once(caplog, program, reason):
    for _ in range(3):
        with ca.enable(lambda gm: gm):
            program(torch.randn(3, requires_grad=True))
    (told,) = [m for m in messages(caplog) if "not captured" in m]
    assert told.startswith(f"backward not captured, {reason}")


def test_08_readme_runs():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
