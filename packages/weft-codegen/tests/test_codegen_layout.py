"""Values of inference graphs lie as suits their readers; nobody sees it in the results."""

import pytest
import torch
import torch.nn.functional as F
from codegen_check import dynamic_trace, trace
from torch import nn
from weft_codegen import layout
from weft_codegen.compile import compile_graph
from weft_codegen.layout import laid_out

torch.manual_seed(0)
X = torch.randn(2, 6, 12, 10)
W = torch.randn(8, 6, 3, 3) / 8
V = torch.randn(8, 8, 3, 3) / 8
NORM = nn.BatchNorm2d(8).eval()
NORM.running_mean.normal_()
NORM.running_var.uniform_(0.5, 2)


def tower(x, w, v, normalise=NORM):
    y = F.relu(normalise(F.conv2d(x, w, padding=1)))
    return F.relu(normalise(F.conv2d(y, v, padding=1)) + y)


def stream(x, w, v):
    """Residuals after a permuted convolution of one dimension, as encoders of sound have them."""
    y = F.conv1d(x.flatten(2), w.flatten(2)[..., :3]).transpose(1, 2) + 1
    y = y + F.layer_norm(y, (8,)) @ v[0, :, :, 0].repeat(1, 3)[:, :8]
    return F.layer_norm(y, (8,))


def attention(x, w, v):
    """Heads that are copied before and after attention."""
    q = (x.reshape(2, 120, 2, 3) * 2).transpose(1, 2).contiguous()
    y = F.scaled_dot_product_attention(q, q, q.sin())
    return y.transpose(1, 2).contiguous().view(2, 120, 6)


PROGRAMS = {
    "tower": tower,
    "stream": stream,
    "a stream that is returned": lambda x, w, v: (lambda y: (y, F.layer_norm(y, (6,))))(
        x.flatten(2).transpose(1, 2) + 1
    ),
    "attention": attention,
    "strides and dilation": lambda x, w, v: F.conv2d(
        F.conv2d(x, w, stride=2, padding=2), v, dilation=2, padding=2
    ),
    "groups": lambda x, w, v: F.conv2d(F.conv2d(x, w[:, :3], groups=2), v[:, :1], groups=8),
    "flattened": lambda x, w, v: F.conv2d(x, w).flatten(1) @ torch.ones(640, 3),
    "view of pooled": lambda x, w, v: F.max_pool2d(F.conv2d(x, w), 2).view(2, -1),
    "two layouts": lambda x, w, v: (F.conv2d(x, w), F.conv2d(x, w).permute(0, 2, 3, 1) * 2),
    "concatenation": lambda x, w, v: torch.cat([F.conv2d(x, w, padding=1), x], 1).mean((2, 3)),
    "upsampled": lambda x, w, v: F.interpolate(F.conv2d(x, w), scale_factor=2.0) * 2,
    "reinterpreted": lambda x, w, v: F.conv2d(x, w).view(torch.int32),
    "split heads": lambda x, w, v: F.conv2d(x, w).reshape(2, 2, 4, -1).softmax(-1).sum(1),
    "added and activated": lambda x, w, v: F.relu(
        F.conv2d(x, w, padding=1) + x[:, :1].expand_as(torch.empty(2, 8, 12, 10))
    ),
    "residual": lambda x, w, v: torch.sigmoid(
        F.conv2d(F.conv2d(x, w), v, padding=1) + F.conv2d(x, w)
    ),
    "added to itself": lambda x, w, v: (lambda y: F.relu(y + y))(F.conv2d(x, w)),
    "several users": lambda x, w, v: (lambda y: (F.relu(y), y * 2))(F.conv2d(x, w)),
    "scaled sum": lambda x, w, v: torch.add(F.conv2d(x, w), F.conv2d(x, w), alpha=2).relu(),
    "softmax over channels": lambda x, w, v: F.conv2d(x, w).softmax(1).argmax(1),
}
INPUTS = {
    "dense": (X, W, V),
    "channels last": (X.to(memory_format=torch.channels_last), W, V),
    "gaps": (torch.randn(2, 12, 12, 20)[:, ::2, :, ::2], W, V),
    "bfloat16": tuple(t.bfloat16() for t in (X, W, V)),
    "float64": tuple(t.double() for t in (X, W, V)),
}


def calls(gm, target):
    return [node for node in gm.graph.nodes if node.target is target]


def check(function, inputs, **close):
    compiled = compile_graph(trace(function, inputs), list(inputs), inference=True)
    with torch.no_grad():
        expected = function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, want in zip(compiled(*inputs), expected, strict=True):
        torch.testing.assert_close(got, want, **close)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_strides_are_eagers(name):
    close = {"rtol": 1e-4, "atol": 1e-4}
    if name == "reinterpreted":
        close = {"rtol": 1e-4, "atol": 64}  # units in the last place
    check(PROGRAMS[name], INPUTS["dense"], **close)


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_every_kind(kind):
    low = INPUTS[kind][0].dtype is torch.bfloat16
    close = {"rtol": 5e-2, "atol": 5e-2} if low else {"rtol": 1e-4, "atol": 1e-4}
    check(lambda x, w, v: F.relu(F.conv2d(F.conv2d(x, w), v)), INPUTS[kind], **close)


def test_the_layout_is_made_once():
    gm = trace(tower, (X, W, V))
    changed = laid_out(gm)
    for node in calls(changed, torch.ops.aten.convolution.default):
        fake = node.args[0].meta["val"]
        assert fake.is_contiguous(memory_format=torch.channels_last)
    # one for the input, one for the result
    assert len(calls(changed, torch.ops.aten.clone.default)) == 2
    assert not calls(gm, torch.ops.aten.clone.default)


def test_group_norm_keeps_the_layout():
    norm = nn.GroupNorm(2, 8)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)

    def blocks(x, w, v):
        return F.conv2d(F.silu(norm(F.conv2d(x, w, padding=1))), v, padding=1)

    with torch.no_grad():
        changed = laid_out(trace(blocks, (X, W, V)))
        assert not calls(changed, torch.ops.aten.as_strided.default)
        assert len(calls(changed, torch.ops.aten.clone.default)) == 2
        check(blocks, (X, W, V), rtol=1e-4, atol=1e-4)


def test_what_is_copied_later_is_contiguous_at_once():
    changed = laid_out(trace(stream, (X, W, V)))
    clones = calls(changed, torch.ops.aten.clone.default)
    permuted = [node for node in clones if not node.args[0].meta["val"].is_contiguous()]
    assert len(clones) > len(permuted) == 1  # of the first sum; the stream stays contiguous


def test_attention_reads_heads_where_they_lie():
    changed = laid_out(trace(attention, (X, W, V)))
    (node,) = calls(changed, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert [used.target for used in node.args[:2]] == [torch.ops.aten.transpose.int] * 2


def backward(function):
    """Gradients of a function, too."""

    def run(*inputs):
        leaves = [t.detach().requires_grad_() for t in inputs]
        with torch.enable_grad():
            result = function(*leaves)
            return (
                result.detach(),
                *torch.autograd.grad(result.square().sum(), leaves, materialize_grads=True),
            )

    return run


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Convolutions of a CPU are laid out as those of a GPU."""
    monkeypatch.setattr(layout, "_is_cuda", lambda fake: fake.device.type == "cpu")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "name", ["tower", "residual", "upsampled", "strides and dilation", "view of pooled"]
)
def test_a_joint_graph_is_laid_out(name):
    function = backward(PROGRAMS[name])
    changed = laid_out(trace(function, (X, W, V)), joint=True)
    for target, count in layout._CONVOLUTIONS.items():
        for node in calls(changed, target):
            operands = [used.meta["val"] for used in node.args[:count]]
            assert all(one.is_contiguous(memory_format=torch.channels_last) for one in operands)
    compiled = compile_graph(changed, [X, W, V])
    for got, want in zip(compiled(X, W, V), function(X, W, V), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert got.stride() == want.stride()


def test_a_joint_graph_on_a_cpu_keeps_its_layout():
    gm = trace(backward(tower), (X, W, V))
    assert laid_out(gm, joint=True) is gm


@pytest.mark.usefixtures("as_on_a_gpu")
def test_groups_of_several_channels_keep_the_layout():
    gm = trace(PROGRAMS["groups"], (X, W, V))
    assert laid_out(gm, joint=True) is gm


READS_MEMORY = {
    "random": lambda x, w, v: F.dropout(F.conv2d(x, w)),
    "random attention": lambda x, w, v: F.scaled_dot_product_attention(
        *[F.conv2d(x, w).flatten(2).transpose(1, 2).contiguous()[None]] * 3, dropout_p=0.5
    ),
    "memory read": lambda x, w, v: F.conv2d(x, w).as_strided((4,), (2,)),
}


@pytest.mark.parametrize("name", READS_MEMORY)
def test_what_could_show_the_layout_reads_what_it_did(name):
    function = READS_MEMORY[name]
    gm = laid_out(trace(function, (X, W, V)))
    (node,) = calls(gm, torch.ops.aten.convolution.default)
    assert node.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)
    compiled = compile_graph(gm, [X, W, V], inference=True)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        expected = function(X, W, V)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(X, W, V)[0], expected, rtol=1e-4, atol=1e-4)


UNTOUCHED = {
    "no convolution": lambda x, w, v: x.sin(),
    "transposed": lambda x, w, v: F.conv_transpose2d(x, v[:6]),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_graph_that_gains_nothing_is_left_alone(name):
    gm = trace(UNTOUCHED[name], (X, W, V))
    assert laid_out(gm) is gm


def test_symbolic_sizes_are_left_alone():
    gm, _ = dynamic_trace(lambda x, w: F.conv2d(x, w), (X, W))
    assert laid_out(gm) is gm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_convolutions_that_the_library_lacks(dtype, monkeypatch):
    monkeypatch.setattr("weft_codegen.widened.lacks_16_bit", lambda: True)
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3), torch.randn(8)
    x, w, b = (t.to(dtype) for t in (x, w, b))
    programs = [
        (lambda x, w, b: F.conv2d(x, w, b, padding=1), (x, w, b)),
        (lambda x, w, b: F.conv2d(x, w, b), (x.to(memory_format=torch.channels_last), w, b)),
        (lambda x, w: F.conv2d(x, w, groups=2), (x, w[:, :2])),
        (lambda x, w: F.conv1d(x, w, stride=2), (x[0], torch.randn(5, 9, 3).to(dtype))),
        (F.conv_transpose2d, (x, torch.randn(4, 8, 3, 3).to(dtype))),
    ]
    for fn, args in programs:
        got = compile_graph(trace(fn, args), args, inference=True)(*args)[0]
        exact = fn(*(t.double() for t in args))
        bound = fn(*(t.double().abs() for t in args))
        assert got.dtype is dtype and got.stride() == fn(*args).stride()
        rounded = 0.5 * torch.finfo(dtype).eps * exact.abs()
        assert ((got - exact).abs() <= rounded + 1e-6 * bound).all()
