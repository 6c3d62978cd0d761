"""Writes in place to tensors from outside that have a history, as autograd records them."""

import pytest
import torch
import weft


def written_all(h):
    h.add_(1)
    h[h.detach() > 0] = 0
    h[:, 1].mul_(3)
    return h * 2, h


def written_and_read(h):
    before, row = h + 1, h[0]
    h.mul_(2)
    return before, row * 3, h.sin(), h.is_leaf


def written_in_a_loop(h):
    for i in range(1, 3):
        h[i] = h[i - 1] * 2


def written_beside_a_branch(h):
    h.mul_(2)
    y = h * 3 if h.sum() > 0 else h * 4
    with torch.no_grad():
        h.add_(1)
    return y, h


def saved_and_written(h):
    y = h * h
    h.add_(1)
    return y


def written_through_others(h, other):
    other.mul_(h.detach().sum())
    return h.requires_grad, other.requires_grad, h * h


def watched(h):
    h.retain_grad()
    return (h,)


ONE = [
    lambda w, x: (x @ w,),
    lambda w, x: ((x @ w).t().t(),),
    lambda w, x: ((x @ torch.cat([w, w], 1))[:, 4:],),
    lambda w, x: watched(x @ w),
    lambda w, x: (x.view(3, 4),),
    lambda w, x: (x,),
    lambda w, x: ((x @ w).split(3)[0],),
    lambda w, x: (torch.ones(3, 4),),
]
TWO = [
    lambda w, x: (lambda b: (b[0], b))(x @ w),
    lambda w, x: (lambda b: (b, b[0]))(x @ w),
    lambda w, x: (lambda b: (b.view(12), b.t()))(x @ w),
    lambda w, x: (x @ w,) * 2,
    lambda w, x: (lambda b: (b[0], b.mul_(w[:3])))(torch.ones(3, 4)),
]
PROGRAMS = {
    written_all: ONE, written_and_read: ONE, written_in_a_loop: ONE, saved_and_written: ONE,
    written_beside_a_branch: ONE, written_through_others: TWO,
}  # fmt: skip


def outcome(function, make, create_graph):
    """What a call did, as states and numbers: to its results, its arguments, earlier leaves."""
    w, x = (torch.arange(n * 4.0).view(n, 4).cos().requires_grad_() for n in (4, 3))
    numbers, given = [], make(w, x)
    for tensor in given:
        if not tensor.is_leaf and not tensor.retains_grad and not tensor._is_view():
            tensor.register_hook(lambda grad: numbers.append(grad.detach().clone()))
    try:
        found = function(*given)
        results = [*(found if isinstance(found, tuple) else (found,)), *given]
        tensors = [t for t in results if isinstance(t, torch.Tensor)]
        states = [r for r in results if not isinstance(r, torch.Tensor)]
        states += [(t.requires_grad, t.is_leaf, t._is_view(), t.stride()) for t in tensors]
        numbers += [t.detach().clone() for t in tensors]
        total = sum(t.square().sum() for t in tensors if t.requires_grad) + 0 * w.sum()
        grads = torch.autograd.grad(total, [w, x], create_graph=create_graph, allow_unused=True)
        numbers += [t for t in grads if t is not None]
        if create_graph:
            grads[0].square().sum().backward()
    except RuntimeError as error:
        return str(error)[:30], [t.detach().clone() for t in given]
    return states, [*numbers, *(t.grad for t in (w, x, *given) if t.is_leaf or t.retains_grad)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_writes_to_each_kind_of_tensor(program, dynamic):
    compiled = weft.compile(program, dynamic=dynamic, backend="aot_eager")
    for make in [*PROGRAMS[program], *PROGRAMS[program]]:
        # Where the gradient depends on what was written, the graph cannot run again.
        twice = program in (written_in_a_loop, written_beside_a_branch) and make is ONE[0]
        got, want = (outcome(function, make, twice) for function in (compiled, program))
        assert got[0] == want[0]
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dynamic", [None, True])
def test_diagonals_of_views_are_filled(dynamic):
    def fill(x, number):
        return x.fill_diagonal_(number).sum()

    compiled = weft.compile(fill, dynamic=dynamic, backend="aot_eager")
    for number in (3, 2.5):
        whole, other = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
        assert fill(whole[1:3, 2:5], number) == compiled(other[1:3, 2:5], number)
        assert torch.equal(whole, other)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("sizes", "mask", "value"),
    [
        ((4, 5), (4,), (5,)), ((4, 5), (4,), (1, 1)), ((4, 5), (4, 5), ()),
        ((4, 5, 3), (4, 5), (3,)), ((4, 5, 3), (4, 5), (None, 3)),
        ((4, 5), (4,), (None, 1)), ((4, 5), (4, 5), (None,)),
    ],
)  # fmt: skip
def test_what_a_mask_sets_everywhere_has_a_gradient_in_the_graph(
    sizes, mask, value, dynamic, caplog
):
    def program(x, mask, value):
        y = x * 1.5
        y[mask] = value * 2
        return y.sin()

    compiled = weft.compile(program, dynamic=dynamic)
    for share in (0.5, 0.0, 1.0):
        chosen = torch.rand(mask) < share
        rows = [chosen.sum().item() if size is None else size for size in value]
        x, given = torch.randn(sizes).requires_grad_(), torch.randn(rows).requires_grad_()
        results = [each(x, chosen, given) for each in (compiled, program)]
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(one.sum(), (x, given)) for one in results]
        torch.testing.assert_close(*grads)
    assert "without compiling" not in caplog.text


def test_values_that_no_place_takes_are_refused_as_in_eager():
    def program(x, mask, value):
        y = x * 1.5
        y[mask] = value
        return y

    x, mask = torch.randn(4, 5), torch.tensor([True, False, True, False])
    for value in (torch.randn(2, 5), torch.randn(3, 5), torch.randn(4)):
        results = []
        for each in (program, weft.compile(program, backend="aot_eager")):
            try:
                results.append(each(x, mask, value.clone().requires_grad_()).tolist())
            except RuntimeError as error:
                results.append(str(error))
        assert results[0] == results[1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: x.add_(1) * y,
        lambda x, y: (x.mul_(2), x[:, 0].add_(y), x.sin())[2],
        lambda x, y: (x.transpose(0, 1)[1:].mul_(y), x.diagonal().add_(2), x.cumsum_(0))[2],
        lambda x, y: (x.detach().add_(y), x.is_contiguous(), x + 1)[2],
        lambda x, y: (x.__setitem__((0, 1), y), torch.add(x, y, out=x), x.reshape(-1))[2],
    ],
)
def test_inputs_with_gaps_in_memory_are_written_in_the_graph(program, dynamic, caplog):
    compiled = weft.compile(program, dynamic=dynamic)
    for cut in (lambda base: base[:, :, :3], lambda base: base.transpose(0, 2)[1:4, ::2]):
        bases = [torch.arange(120.0).view(4, 5, 6) for _ in range(2)]
        views, y = [cut(base) for base in bases], torch.tensor(1.5)
        torch.testing.assert_close(compiled(views[0], y), program(views[1], y))
        assert torch.equal(*bases) and views[0].stride() == views[1].stride()
    assert "without compiling" not in caplog.text


def test_tensors_sized_by_data_are_written_in_the_graph():
    def program(x, mask):
        y = x[mask]
        y.add_(1)
        y[:, :2].mul_(2)
        z = x.clone()
        z[mask] = y
        return y.clamp_(-1, 3), y[:, 1:], z

    compiled = weft.compile(program, fullgraph=True)
    with weft.config.patch(capture_scalar_outputs=True):
        for share in (0.5, 0.9, 0.0):
            x, mask = torch.randn(12, 4).requires_grad_(), torch.rand(12) < share
            results = [each(x, mask) for each in (compiled, program)]
            torch.testing.assert_close(*results)
            grads = [torch.autograd.grad(sum(part.sum() for part in each), x) for each in results]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.unsafe_chunk(x, 2)[0],
        lambda x: x.unsafe_split(2)[1],
        lambda x: torch.unsafe_split_with_sizes(x, (1, 3))[1],
    ],
)
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_writes_through_views_that_autograd_does_not_know(view):
    def write(x):
        return view(x).mul_(3) + 1

    ours, theirs = torch.ones(4, 3), torch.ones(4, 3)
    torch.testing.assert_close(weft.compile(write)(ours), write(theirs))
    assert torch.equal(ours, theirs)
