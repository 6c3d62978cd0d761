"""Products whose rows a GPU cannot read 16 bytes at a time."""

import copy
import itertools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from weft_codegen import make_program, padded_products
from weft_codegen.padded_products import pad_products

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default)


def traced(function, *sizes, dtype=torch.bfloat16, device="cuda", tracing_mode="real"):
    with FakeTensorMode():
        fakes = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
        return make_fx(function, tracing_mode=tracing_mode)(*fakes)


def products(gm):
    return [tuple(node.meta["val"].shape) for node in gm.graph.nodes if node.target in PRODUCTS]


def calls(gm, target):
    return len(gm.graph.find_nodes(op="call_function", target=target))


def test_the_head_of_a_language_model_is_padded():
    def head(hidden, weight):
        return [(hidden.sin() @ weight.cos().t()).float().logsumexp(-1)]

    gm = traced(head, (8192, 768), (50257, 768))
    before = str(gm.graph)
    padded = pad_products(gm)
    assert str(gm.graph) == before
    assert products(padded) == [(8192, 50264)]
    assert calls(padded, aten.constant_pad_nd.default) == 1  # the features are aligned
    assert make_program(padded, ()).kernels


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        pytest.param(lambda a, b: [a @ b], [(1024, 1024)] * 2, id="aligned"),
        pytest.param(lambda a, b: [a @ b], [(8192, 1024), (1024, 10)], id="few-features"),
        pytest.param(lambda a, b: [a @ b], [(8, 4096), (4096, 32001)], id="the-copy-costs-more"),
        pytest.param(lambda a, b: [a @ b], [(96, 197, 64), (96, 64, 197)], id="small-matrices"),
    ],
)
def test_what_is_left_as_it_is(function, sizes):
    gm = traced(function, *sizes)
    assert pad_products(gm) is gm


def test_other_devices_and_dtypes_are_left_as_they_are():
    def square(a):
        return [a @ a]

    for given in {"device": "cpu"}, {"dtype": torch.float64}, {"dtype": torch.float32}:
        gm = traced(square, (4095, 4095), **given)
        assert pad_products(gm) is gm
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert products(pad_products(gm)) == [(4095, 4096)]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_a_tensor_is_padded_once():
    def both(a, b):
        a = a.sin()
        return [(a @ b).cos().sum(), (a.t() @ b).cos().sum()]

    padded = pad_products(traced(both, (4095, 4095), (4095, 4096)))
    assert calls(padded, aten.constant_pad_nd.default) == 2
    assert products(padded) == [(4095, 4096), (4096, 4096)]


def test_only_the_dimension_along_a_row_counts():
    def turned(a, b):
        return [(a.t() @ b).sin()]

    gm = traced(turned, (4095, 4096), (4095, 4096))  # inner dimension 4,095, along no row
    assert pad_products(gm) is gm


LAYOUTS = list(itertools.product([False, True], repeat=2))


def turned(values, is_turned):
    return values.mT.contiguous().mT if is_turned else values


@pytest.mark.parametrize("kind", ["mm", "addmm", "bmm"])
@pytest.mark.parametrize(("left", "right"), LAYOUTS)
def test_results_are_those_of_the_product(monkeypatch, kind, left, right):
    monkeypatch.setattr(padded_products, "alignment", lambda value: 8)
    monkeypatch.setattr(padded_products, "_PER_PRODUCT", 1.0)
    batch = (3,) if kind == "bmm" else ()
    a = turned(torch.randn(*batch, 9, 13, dtype=torch.float64), left)
    b = turned(torch.randn(*batch, 13, 17, dtype=torch.float64), right)
    bias = torch.randn(17, dtype=torch.float64)

    def run(a, b, bias):
        product = torch.addmm(bias, a, b) if kind == "addmm" else a @ b
        return [product, product.reshape(-1).sin(), product.mT.cos()]

    gm = make_fx(run, tracing_mode="fake")(a, b, bias)
    padded = pad_products(gm)
    assert padded is not gm
    expected = run(a, b, bias)
    for result, wanted in zip(padded(a, b, bias), expected, strict=True):
        torch.testing.assert_close(result, wanted)
        assert result.stride() == wanted.stride()
    for node in padded.graph.nodes:
        assert node.op == "output" or "val" in node.meta
    interpreted = fx.Interpreter(copy.deepcopy(padded)).run(a, b, bias)
    torch.testing.assert_close(interpreted, expected)


def test_symbolic_sizes_stay(monkeypatch):
    monkeypatch.setattr(padded_products, "alignment", lambda value: 8)
    monkeypatch.setattr(padded_products, "_PER_PRODUCT", 1.0)
    gm = make_fx(lambda a, b: [a @ b], tracing_mode="symbolic")(
        torch.ones(9, 13), torch.ones(13, 17)
    )
    assert pad_products(gm) is gm
