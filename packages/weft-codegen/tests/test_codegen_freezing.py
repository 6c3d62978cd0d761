"""`freezing`: parameters are folded once, until one changes; results stay eager's."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import weft_codegen
from codegen_check import dynamic_trace, trace
from torch import nn
from weft_codegen.compile import compile_graph
from weft_codegen.config import Options
from weft_codegen.freezing import Frozen
from weft_core import events
from weft_core.errors import BackendCompilerError

FREEZING = Options(freezing=True)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Block(nn.Module):
    """Convolutions and BatchNorms of every shape that folds, and one that does not."""

    def __init__(self, bias=False, groups=1, stride=1, dilation=1, activation=F.relu):
        super().__init__()
        torch.manual_seed(0)
        size = {"padding": dilation, "dilation": dilation, "groups": groups, "bias": bias}
        self.first = nn.Conv2d(8, 16, 3, stride, **size)
        self.second = nn.Conv2d(16, 16, 3, **size)
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16, affine=False)
        self.shortcut = nn.Conv2d(8, 16, 1, stride)
        self.head = nn.Linear(16, 5)
        self.activation = activation
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(self.norm1.weight)
        self.eval().requires_grad_(False)

    def forward(self, x):
        y = self.activation(self.norm1(self.first(x)))
        y = self.activation(self.norm2(self.second(y)) / 3 + self.shortcut(x))
        return self.head(y.mean((2, 3)) * self.head.weight.sum())


def frozen(model, x, folds=True):
    """`model` compiled with its state as frozen inputs, and a function that calls it."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def function(x, *values):
        return torch.func.functional_call(model, dict(zip(state, values, strict=True)), (x,))

    values = list(state.values())
    gm = trace(function, [x, *values])
    fixed = {1 + k: value for k, value in enumerate(values)}
    run = compile_graph(gm, [x, *values], options=FREEZING, inference=True, frozen=fixed)
    assert isinstance(run, Frozen) == folds

    def call(x):
        current = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return run(x, *current.values())[0]

    return run, call


BLOCKS = {
    "plain": {},
    "bias": {"bias": True},
    "groups": {"groups": 4},
    "depthwise": {"groups": 8, "bias": True},
    "stride": {"stride": 2},
    "dilation": {"dilation": 2},
    "sigmoid": {"activation": torch.sigmoid},
    "other activation": {"activation": F.gelu},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_folded_blocks_match_eager(name):
    model, x = Block(**BLOCKS[name]), torch.randn(3, 8, 10, 12)
    events.counters.clear()
    _, call = frozen(model, x)
    for given in (x, x.to(memory_format=torch.channels_last), torch.randn(3, 8, 10, 24)[..., ::2]):
        torch.testing.assert_close(call(given), model(given), **CLOSE)
    counted = events.counters["extern"]
    convolutions = [op for op in counted if "mkldnn._convolution_pointwise" in op]
    assert sum(counted[op] for op in convolutions) == 3
    assert "aten.convolution.default" not in counted


class Linears(nn.Module):
    """Products with and without bias, with a weight as it is and turned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(48, 64), nn.Linear(64, 32, bias=False)
        self.third = nn.Parameter(torch.randn(32, 32))
        self.requires_grad_(False)

    def forward(self, x):
        return self.second(F.gelu(self.first(x))) @ self.third


@pytest.mark.parametrize(("least", "packed"), [(0, 3), (1 << 30, 0)])
def test_weights_of_large_products_are_packed(least, packed, monkeypatch):
    monkeypatch.setattr("weft_codegen.folding._LEAST", least)
    model, x = Linears(), torch.randn(2, 9, 48)
    events.counters.clear()
    _, call = frozen(model, x, packed > 0)
    for value in (0.0, float("nan"), float("inf")):
        x[0, 0, 0] += value
        torch.testing.assert_close(call(x), model(x), equal_nan=True, **CLOSE)
    model.first.weight.mul_(2)
    torch.testing.assert_close(call(x), model(x), equal_nan=True, **CLOSE)
    assert events.counters["extern"]["mkldnn._linear_pointwise.default"] == 2 * packed


def test_what_wefts_own_product_takes_is_not_packed(monkeypatch):
    for module in ("folding", "compile"):
        monkeypatch.setattr(f"weft_codegen.{module}.linear_wins", lambda *_, **__: True)
    monkeypatch.setattr("weft_codegen.folding._LEAST", 0)
    model, x = Linears(), torch.randn(20, 9, 48)
    events.counters.clear()
    run, call = frozen(model, x)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x), **CLOSE)
        model.first.weight.mul_(2)
    assert not any("mkldnn" in op for op in events.counters["extern"])
    assert events.counters["extern"]["weft_codegen.mm.default"] == 2
    memory = {t.untyped_storage().data_ptr() for t in model.parameters()}
    kept = [t.untyped_storage().data_ptr() for t in vars(run._main).values() if torch.is_tensor(t)]
    assert len(kept) == 1 and kept[0] not in memory  # `third`, turned around


def test_inputs_of_which_nothing_is_computed_stay_inputs():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.conv = nn.Linear(8, 5), nn.Conv2d(3, 8, 3, bias=False)
            self.eval().requires_grad_(False)

        def forward(self, x):
            return self.head(F.relu(self.conv(x)).mean((2, 3)))

    model, x = Mixed(), torch.randn(2, 3, 6, 6)
    run, call = frozen(model, x)
    assert [position for position, *_ in run._state[0]] == [3]
    for weight in (model.head.weight, model.head.bias, model.conv.weight):
        weight.mul_(2)
        torch.testing.assert_close(call(x), model(x), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, x = Block().to(dtype), torch.randn(3, 8, 10, 12, dtype=dtype)
    _, call = frozen(model, x)
    low = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else CLOSE
    torch.testing.assert_close(call(x), model(x), **low)


def test_changed_parameters_are_folded_again():
    model, x = Block(), torch.randn(2, 8, 6, 6)
    _, call = frozen(model, x)
    changes = [
        lambda: model.first.weight.mul_(2),
        lambda: model.norm2.running_mean.add_(1),
        lambda: setattr(model.head, "bias", nn.Parameter(torch.ones(5))),
        lambda: model.load_state_dict(Block(stride=2).state_dict()),
    ]
    for change in [lambda: None, *changes]:
        with torch.no_grad():
            change()
        torch.testing.assert_close(call(x), model(x), **CLOSE)


def test_results_do_not_share_memory_with_constants():
    weight, x = torch.randn(4, 4), torch.randn(4, 4)

    def function(x, w):
        return w * 2, x @ w, w.t().contiguous()

    gm = trace(function, [x, weight])
    run = compile_graph(gm, [x, weight], options=FREEZING, inference=True, frozen={1: weight})
    for _ in range(2):
        for got, want in zip(run(x, weight), function(x, weight), strict=True):
            torch.testing.assert_close(got, want)
            got.zero_()


def test_a_written_buffer_stays_an_input():
    count, x = torch.zeros(3), torch.randn(3)

    def function(x, count):
        count.copy_(count + 1)
        return x * count

    gm = trace(function, [x, count])
    run = compile_graph(gm, [x, count], options=FREEZING, inference=True, frozen={1: count})
    for calls in (1, 2, 3):
        torch.testing.assert_close(run(x, count)[0], x * calls)


def test_symbolic_batches():
    weight, norm, x = torch.randn(6, 4, 3, 3), torch.rand(6, 1, 1), torch.randn(5, 4, 8, 8)

    def function(x, w, s):
        return F.relu(F.conv2d(x, w) * s - s)

    gm, fakes = dynamic_trace(function, (x, weight, norm))
    held = {1: weight, 2: norm}
    run = compile_graph(gm, fakes, options=FREEZING, inference=True, frozen=held)
    sizes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    assert any(isinstance(size, torch.SymInt) for value in sizes for size in value.shape)
    for batch in (5, 2, 9):
        given = torch.randn(batch, 4, 8, 8)
        torch.testing.assert_close(
            run(given, weight, norm)[0], function(given, weight, norm), **CLOSE
        )


def test_a_scale_with_another_shape_is_not_folded():
    weight, x = torch.randn(6, 4, 3, 3), torch.randn(2, 4, 8, 8)
    for shape in [(6,), (1, 6), (2, 1, 1, 1), (6, 6), (1, 1, 1, 1, 1)]:
        scale = torch.rand(shape)

        def function(x, w, s):
            return F.relu(F.conv2d(x, w) * s + s)

        gm = trace(function, (x, weight, scale))
        held = {1: weight, 2: scale}
        run = compile_graph(gm, (), options=FREEZING, inference=True, frozen=held)
        torch.testing.assert_close(run(x, weight, scale)[0], function(x, weight, scale), **CLOSE)


def test_training_is_refused():
    gm = trace(lambda x: x.sin(), [torch.randn(3)])
    with pytest.raises(BackendCompilerError, match="no_grad"):
        compile_graph(gm, [torch.randn(3)], options=FREEZING)


def test_parameters_are_not_kept_alive():
    model, x = Block(), torch.randn(2, 8, 6, 6)
    run, call = frozen(model, x)
    dropped = weakref.ref(model.first.weight)
    model.first.weight = nn.Parameter(torch.randn(16, 8, 3, 3), requires_grad=False)
    torch.testing.assert_close(call(x), model(x), **CLOSE)
    gc.collect()
    assert dropped() is None and run is not None


def test_which_inputs_hold_still():
    graph = torch.fx.Graph()
    names = ["L['x']", "L['self'].__dict__['_buffers']['mean']", "L['weight']"]
    for position, name in enumerate(names):
        graph.placeholder(f"p{position}").meta["source_name"] = name
    graph.output(())
    inputs = [torch.ones(1), torch.ones(2), nn.Parameter(torch.ones(3))]
    found = weft_codegen.frozen_inputs(torch.fx.GraphModule({}, graph), inputs)
    assert sorted(found) == [1, 2]


def test_without_onednn_batchnorm_still_folds():
    model, x = Block(), torch.randn(3, 8, 10, 12)
    events.counters.clear()
    torch._C._set_mkldnn_enabled(False)
    try:
        _, call = frozen(model, x)
        torch.testing.assert_close(call(x), model(x), **CLOSE)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert events.counters["extern"]["aten.convolution.default"] == 3


def test_nan_and_infinity_pass_through():
    model, x = Block(), torch.randn(2, 8, 10, 12)
    x[0, 0, 4, 4], x[0, 1, 0, 0], x[1, 2, 9, 9] = torch.nan, torch.inf, -torch.inf
    _, call = frozen(model, x)
    assert model(x).isnan().any()
    torch.testing.assert_close(call(x), model(x), equal_nan=True, **CLOSE)
