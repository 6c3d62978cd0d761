"""Views of inputs with offsets, layouts changed in place, layouts of what is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import weft


def told(tensors, inputs):
    """Values, layouts, sharing and identity of results, and the memory of all inputs.

    Generated code may choose the strides of dimensions of size one.
    """
    rows = [
        (
            t.shape,
            [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1],
            t.storage_offset(),
            t.detach().tolist(),
        )
        for t in tensors
    ]
    memory = [t.untyped_storage().tolist() for t in inputs]
    shared = [
        (a is b, a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
        for i, a in enumerate(tensors)
        for b in tensors[:i]
    ]
    return rows, memory, shared


def compare(program, makers, backend, dynamic):
    """Call a program and its compiled twin with inputs of each maker in turn."""
    compiled = weft.compile(program, backend=backend, dynamic=dynamic)
    for maker in makers:
        found = []
        for function in (program, compiled):
            inputs = maker()
            results = function(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            found.append(told([*results, *inputs], inputs))
        assert found[0] == found[1]


def counted(*shape):
    """Return a maker of a tensor with an offset in larger memory."""
    size = torch.Size(shape)
    return lambda: (torch.arange(float(size.numel() + 5))[3 : 3 + size.numel()].view(size),)


def turned(*shape):
    return lambda: (counted(*shape[::-1])()[0].t(),)


def shared_base():
    base = torch.arange(12.0)
    return base[2:6].view(2, 2), base[6:10].view(2, 2)


def reshaped(name, *args):
    """Return a program that changes the layout of its input in place, between reads and writes."""

    def program(x):
        early = x[0]
        early.mul_(2)
        getattr(x, name)(*args)
        x.add_(1)
        return early, x[-1], x * 3

    return program


def changed_only(name, *args):
    def program(x):
        early = x[:1]
        getattr(x, name)(*args)
        return x + 1, early, x

    return program


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["aot_eager", "codegen"])
class TestInputs:
    @pytest.mark.every(3)
    @pytest.mark.parametrize("make", [reshaped, changed_only])
    @pytest.mark.parametrize(
        "how",
        [("t_",), ("transpose_", 0, 1), ("swapaxes_", 0, -1), ("squeeze_",), ("squeeze_", 1),
         ("unsqueeze_", 0), ("unsqueeze_", -1)],
        ids=str,
    )  # fmt: skip
    def test_layout_changed_in_place(self, make, how, backend, dynamic):
        makers = [counted(3, 2), counted(5, 2), counted(4, 1), turned(4, 3)]
        compare(make(*how), makers, backend, dynamic)

    def test_size_that_is_one_later(self, backend, dynamic):
        def program(x):
            view = x[0]
            x.squeeze_()
            return x + 1, view

        compare(program, [counted(3, 2), counted(5, 2), counted(1, 2)], backend, dynamic)

    def test_new_layout_beside_what_has_the_old_shape(self, backend, dynamic):
        def program(x):
            y = x + torch.zeros(x.shape)
            x.t_()
            return y, x * 2

        compare(program, [counted(2, 3), counted(2, 4)], backend, dynamic)

    @pytest.mark.parametrize(
        "program",
        [
            lambda a, b: (a.squeeze_(), b[1:], b.t()),
            lambda a, b: (a.t_(), a + b, b.unsqueeze(0)[0]),
            lambda a, b: (a.mul_(2), b + 1),
            lambda a, b: (a.add_(b), b.sub_(a), a[0], b[1:]),
        ],
    )
    def test_inputs_of_one_base(self, program, backend, dynamic):
        def columns():
            return torch.arange(12.0).view(2, 6)[:, 1:5].chunk(2, 1)

        compare(program, [shared_base, columns], backend, dynamic)

    @pytest.mark.parametrize("drop", [F.dropout, torch.dropout])
    def test_dropout_that_drops_nothing(self, drop, backend, dynamic):
        compare(lambda x: drop(x, 0.5, False), [counted(2, 3)], backend, dynamic)

    @pytest.mark.parametrize(
        "program",
        [
            lambda x: torch.as_strided(x, (3,), (1,), 0) * 1,
            lambda x: x[1:3].as_strided((2,), (1,), 0) * 2,
            lambda x: x[1:3].as_strided((2,), (2,)) * 2,
            lambda x: (x + 1)[1:3].as_strided((3,), (1,), 0) * 2,
            lambda x: torch.as_strided_copy(x, (3,), (1,), 1),
            lambda x: x.as_strided((x.shape[0] - 1, 2), (1, 1)) * 1,
            lambda x: x.add_(1).as_strided((2,), (1,), 1).mul_(2),
            lambda x: x.as_strided((4,), (1,), 1),
        ],
    )
    def test_as_strided(self, program, backend, dynamic):
        def whole():
            return (torch.arange(6.0),)

        compare(program, [counted(6), whole, counted(7)], backend, dynamic)

    @pytest.mark.parametrize(
        "program",
        [
            lambda x: torch.neg(x.reshape(x.shape), out=x).squeeze_(),
            lambda x: torch.atleast_1d(x.view(-1), x)[1].add_(1),
        ],
    )
    def test_results_that_are_arguments(self, program, backend, dynamic):
        compare(program, [counted(3, 1), counted(4, 1)], backend, dynamic)

    @pytest.mark.parametrize(
        "program",
        [
            lambda x: (lambda y: (y.view(-1), y.resize_(2)))(x + 1),
            lambda x: (lambda y: (y.t().resize_(x.shape[0]), y))(x + 1),
            lambda x: (lambda y: (y, y.resize_(y.shape).add_(1)))(x.reshape(x.shape)),
            lambda x: (x + 1).resize_(2).mul_(2),
        ],
    )
    def test_resized(self, program, backend, dynamic):
        compare(program, [counted(3, 1), counted(4, 2)], backend, dynamic)

    def test_windows_that_are_one(self, backend, dynamic):
        compare(lambda x: x.unfold(0, 2, 1).zero_(), [counted(2), counted(3)], backend, dynamic)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.cumsum_(0),
        lambda x: x.triu_(1),
        lambda x: x.masked_fill_(x > 2, 0),
        lambda x: x.mul_(torch.ones(x.shape)),
        lambda x: torch.neg(x.contiguous(), out=x),
        lambda x: torch.max(x.contiguous(), 0, out=(x[0], torch.zeros(x.shape[1]).long())),
        lambda x: x.__setitem__(0, 7),
        lambda x: x.index_fill_(0, torch.tensor([1]), 3),
    ],
)
def test_written_tensor_keeps_its_strides(write, dynamic):
    def program(x):
        x = x.clone()
        write(x)
        return x, x.t().view(-1)

    def program_of_a_view(x):
        x = x.clone()
        view = x[:, : x.shape[1]]
        write(view)
        return x, view.t().view(-1), view.ravel()

    compare(program, [turned(3, 2)], "codegen", dynamic)
    compare(program_of_a_view, [turned(3, 2)], "codegen", dynamic)


def test_layout_changed_in_place_with_a_gradient():
    def change(x):
        early = x[0]
        x.t_()
        x.mul_(3)
        return early, x.exp()

    found = []
    for program in (change, weft.compile(change)):
        w = torch.arange(6.0).view(2, 3).div(9).requires_grad_()
        x = w * 2
        early, result = program(x)
        (result.sum() + early.sum() + (x * x).sum()).backward()
        found.append([x.detach(), early.detach(), result.detach(), w.grad])
    torch.testing.assert_close(found[0], found[1])


def test_layout_changed_in_place_of_what_is_split():
    def change(x):
        x.t_()
        return x.chunk(2)[-1]

    w = torch.arange(6.0, requires_grad=True)
    for program in (change, weft.compile(change)):
        piece = program((w * 2)[:5].view(1, 5))
        assert torch.equal(piece, torch.tensor([[6.0], [8.0]]))
        assert torch.equal(
            torch.autograd.grad(piece.sum(), w)[0], torch.tensor([0, 0, 0, 2.0, 2, 0])
        )


def test_a_trace_leaves_the_versions_of_the_fakes_of_capture():
    """Where it counts its writes on them, autograd no longer follows views that were made after."""

    def change(x):
        with torch.no_grad():
            x += 1
        return x.unbind(0)[0], x * x

    weft.counters.clear()
    w = torch.arange(6.0, requires_grad=True)
    for program in (change, weft.compile(change)):
        piece, square = program((w * 2).view(2, 3))
        assert torch.equal(piece, torch.tensor([1.0, 3, 5]))
        gradient = torch.autograd.grad(square.sum(), w)[0]
        assert torch.equal(gradient, 4 * (2 * w + 1))
    assert not weft.counters["graph_break"]


def test_tensors_without_memory_of_their_own_run_eagerly():
    compiled = weft.compile(lambda x: x + 1)
    plain = compiled(torch.ones(2))
    functional = compiled(torch._to_functional_tensor(torch.ones(2)))
    assert torch.equal(torch._from_functional_tensor(functional), plain)
    assert torch.equal(compiled(torch._efficientzerotensor(2)), torch.ones(2))


@pytest.mark.parametrize(
    "reshape", [lambda b: b.transpose_(0, 1), lambda b: b.t_(), lambda b: b.unsqueeze_(0)]
)
def test_views_made_before_their_base_is_reshaped_in_place(reshape):
    def function(a):
        base = a * 1
        part = base[1:]
        reshape(base)
        part.mul_(3)
        return part * 2, base.sin()

    grads = []
    for run in (function, weft.compile(function, fullgraph=True)):
        a = torch.arange(6.0).view(3, 2).requires_grad_()
        results = run(a)
        weights = [torch.arange(1.0, one.numel() + 1).view(one.shape) for one in results]
        grads.append((*results, *torch.autograd.grad(results, a, weights)))
    torch.testing.assert_close(*grads)
