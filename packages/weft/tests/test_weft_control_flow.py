"""torch.cond, while_loop, map and scans in one graph, next to the same program in plain Python.

Eager's own torch.cond would compile with torch.compile, so Python's `if` and `while` are the peer.
"""

import subprocess
import sys

import pytest
import torch
import weft
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows

BACKENDS = ["eager", "aot_eager", "codegen"]


def choose(pred, true_fn, false_fn, operands):
    return true_fn(*operands) if pred else false_fn(*operands)


def loop(cond_fn, body_fn, carried):
    while cond_fn(*carried):
        carried = body_fn(*carried)
    return carried


@pytest.fixture(params=BACKENDS)
def backend(request):
    weft.reset()
    return request.param


def same_with_gradients(left, right, args):
    """Compare tuples of tensors, and the gradients of `args` through them."""
    found = []
    for outs in (left, right):
        torch.testing.assert_close(outs, right)
        total = sum((i + 1) * out.float().sum() for i, out in enumerate(outs))
        found.append(torch.autograd.grad(total, args, allow_unused=True))
    zeros = [[torch.zeros_like(a) if g is None else g for a, g in zip(args, gs)] for gs in found]
    torch.testing.assert_close(*zeros)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond_with_trees_closures_and_gradients(backend, sign):
    w = torch.full((3,), 2.0, requires_grad=True)
    x = (torch.arange(1.0, 4.0) * sign).requires_grad_()

    def program(cond, x):
        z = x * w

        def positive(tree):
            return {"a": tree["p"].log() * z, "b": (tree["q"][0] + w, 3)}

        def negative(tree):
            return {"a": tree["p"].exp() + w, "b": (tree["q"][0] * x, 3)}

        result = cond((x > 0).all(), positive, negative, ({"p": x, "q": [z]},))
        return result["a"] + 1, result["b"][0] * result["b"][1]

    compiled = weft.compile(lambda x: program(torch.cond, x), backend=backend, fullgraph=True)
    for _ in range(2):
        same_with_gradients(compiled(x), program(choose, x), (x, w))


class Routed(torch.nn.Module):
    """A layer by the data's sign, and another choice in it."""

    def __init__(self, cond):
        super().__init__()
        self.cond = cond
        self.left, self.right = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        def inner(y):
            return self.cond(y.max() > 1, lambda z: self.left(z) * x, lambda z: self.left(z), (y,))

        return torch.relu(self.cond(x.sum() > 0, inner, lambda y: self.right(y), (x,))) + x


@pytest.mark.slow
@pytest.mark.parametrize("value", [2.0, 0.5, -1.0])
def test_nested_cond_in_a_module(backend, value):
    model, plain = Routed(torch.cond), Routed(choose)
    plain.load_state_dict(model.state_dict())
    x = torch.full((2, 3), value)
    compiled = weft.compile(model, backend=backend, fullgraph=True)
    for one in (compiled, plain):
        one(x).square().sum().backward()
    torch.testing.assert_close(compiled(x), plain(x))
    for found, expected in zip(model.parameters(), plain.parameters()):
        if expected.grad is None:
            assert found.grad is None or not found.grad.any()
        else:
            torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.slow
def test_cond_gives_new_tensors_and_is_known_where_the_condition_is(backend):
    def program(x):
        first = torch.cond(x.sum() > 0, lambda y: y, lambda y: y + 1, (x,))
        return first, torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,))

    x = torch.ones(3)
    first, second = weft.compile(program, backend=backend, fullgraph=True)(x)
    first.zero_()
    assert torch.equal(x, torch.ones(3))
    torch.testing.assert_close(second, x.sin())


@pytest.mark.slow
def test_modes_around_cond_hold_in_its_branches(backend):
    x, w = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)

    def program(cond, x):
        with torch.no_grad():
            first = cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = cond(x.sum() > 0, lambda y: y @ w, lambda y: y @ w * 2, (x,))
        return first * x, second, x @ w

    found = weft.compile(lambda x: program(torch.cond, x), backend=backend, fullgraph=True)(x)
    expected = program(choose, x)
    assert found[1].dtype is torch.bfloat16
    same_with_gradients(found, expected, (x,))


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 7])
def test_while_loop_with_gradients(backend, start):
    def program(loop, i, x):
        i, y = loop(lambda i, y: i < 5, lambda i, y: (i + 1, (y * 0.5 + x).sin()), (i, x))
        return y + 1, i

    i, x = torch.tensor(start), torch.arange(3.0, requires_grad=True)
    compiled = weft.compile(lambda i, x: program(while_loop, i, x), backend=backend, fullgraph=True)
    found, expected = compiled(i, x), program(loop, i, x)
    assert torch.equal(found[1], expected[1])
    same_with_gradients(found[:1], expected[:1], (x,))


def test_while_loop_over_a_number_is_unrolled(backend):
    def program(x):
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (0, x))

    assert_equal = torch.testing.assert_close
    assert_equal(weft.compile(program, backend=backend, fullgraph=True)(torch.ones(2))[1],
                 torch.full((2,), 8.0))  # fmt: skip


@pytest.mark.slow
def test_map_and_scans_are_unrolled(backend):
    x = torch.arange(1.0, 13.0).reshape(4, 3).requires_grad_()
    w = torch.full((3,), 2.0, requires_grad=True)

    def program(x):
        mapped = map_rows(lambda row, k: {"a": row["b"].sin() * k}, {"b": x}, w)["a"]
        carry, outs = scan(lambda c, row: (c + row, c * row), torch.zeros(3), x, reverse=True)
        products = associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic")
        return mapped, carry, outs, products

    rest = x.flip(0).cumsum(0).flip(0) - x
    expected = (x.sin() * w, x.sum(0), rest * x, x.cumprod(0))
    found = weft.compile(program, backend=backend, fullgraph=True)(x)
    same_with_gradients(found, expected, (x, w))


@pytest.mark.slow
def test_sizes_that_change(backend):
    def program(cond, x):
        return cond(x.sum() > 0, lambda y: y.sin().sum(0), lambda y: y.cos().sum(0), (x,)) + 1

    compiled = weft.compile(lambda x: program(torch.cond, x), backend=backend, fullgraph=True)
    for size in (3, 4, 5, 6):
        x = torch.linspace(-1, 2, size * 2).reshape(size, 2)
        torch.testing.assert_close(compiled(x), program(choose, x))


def test_what_a_branch_may_not_do():
    seen = []

    def effects(y):
        seen.append(1)
        return y.sin()

    for branch in (effects, lambda y: y.add_(1), lambda y: y.double(), lambda y: (y, y)):
        compiled = weft.compile(
            lambda x, b=branch: torch.cond(x.sum() > 0, b, torch.cos, (x,)), fullgraph=True
        )
        with pytest.raises(weft.Unsupported, match=r"torch\.cond"):
            compiled(torch.ones(3))
    assert not seen


@pytest.mark.slow
def test_nothing_of_dynamo_is_loaded():
    code = """if True:
        import sys, torch, weft
        f = weft.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
        f(torch.ones(3, requires_grad=True)).sum().backward()
        sys.exit("torch._dynamo" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_without_memory_are_left_to_torch():
    def function(x):
        return torch.ones(3, device="meta") + 1, x + 1

    found = weft.compile(function, fullgraph=True)(torch.ones(2))
    assert found[0].device.type == "meta"
    torch.testing.assert_close(found[1], torch.full((2,), 2.0))
