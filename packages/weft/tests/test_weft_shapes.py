"""Dynamic shapes through `weft.compile`: specs, shared symbols, and random programs."""

import importlib
import math

import numpy as np
import pytest
import torch
import weft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental import _config
from weft_core.errors import InvalidOption

try:
    torch_spec = importlib.import_module("torch.fx.experimental.dynamic_spec")
except ImportError:  # torch before 2.13
    torch_spec = None


@pytest.fixture(autouse=True)
def fresh():
    weft.reset()
    yield
    weft.reset()


def graphs(function, **arguments):
    """Compile a function; returns it and the list of graphs it made."""
    made = []

    def backend(gm, inputs):
        made.append(gm)
        return gm.forward

    return weft.compile(function, backend=backend, **arguments), made


def z(*sizes):
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)


NUMBERS = {
    "scaled": lambda n: int(n * 1.5),
    "halved": lambda n: math.ceil(0.5 * n),
    "third": lambda n: math.floor(n / 3),
    "quotient": lambda n: math.ceil((n + 1) / 4),
    "distance": lambda n: abs(n - 8),
    "root": lambda n: math.sqrt(n),
    "logarithm": lambda n: math.log2(n),
    "cosine": lambda n: math.cos(n),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_made_of_sizes_are_in_generated_code(name, monkeypatch):
    """As factors and, if whole, as sizes; with gradients on odd sizes."""

    def program(x):
        number = NUMBERS[name](x.shape[0])
        wide = x.new_ones(number) if isinstance(number, int) else x.exp()
        return wide * number + x.sum()

    monkeypatch.delattr("weft_codegen.compile.Eager")  # what runs a graph without such code
    compiled = weft.compile(program, dynamic=True)
    for size in (6, 9, 10, 37):
        x = z(size).requires_grad_(size % 2 == 1)
        got, wanted = compiled(x), program(x)
        torch.testing.assert_close(got, wanted)
        if x.requires_grad:
            grads = [torch.autograd.grad(one.sum(), x)[0] for one in (got, wanted)]
            torch.testing.assert_close(*grads)


BITS = [lambda n: n & 6, lambda n: n | 1, lambda n: n ^ 3, lambda n: ~n, lambda n: (n + 7) & ~7]


@pytest.mark.parametrize("number", BITS)
def test_bits_of_sizes(number):
    compiled, made = graphs(lambda x: x * number(x.shape[0]), dynamic=True)
    for size in (6, 9, 16):
        assert torch.equal(compiled(z(size)), z(size) * number(size))
    assert len(made) == 1


# ---- shapes_spec


def scaled(x, n=3, *args, **kwargs):
    out = x * n if x.shape[0] > 3 else x + n
    for one in (*args, *kwargs.values()):
        out = out + one.sum()
    return out


def test_what_a_spec_names_varies_and_the_rest_is_static():
    compiled, made = graphs(scaled, shapes_spec={"x": [weft.varying(), None]})
    for size in (4, 5, 6):
        assert torch.equal(compiled(z(size, 2)), scaled(z(size, 2)))
    assert len(made) == 1
    compiled(z(4, 3))  # another size where the spec has None
    compiled(z(4, 4))
    assert len(made) == 3
    compiled(z(4, 4), 4)  # an int that is not named
    compiled(z(4, 4), 5)
    assert len(made) == 5


def test_ints_and_starred_arguments():
    spec = {
        "n": weft.varying(min=2, max=9),
        "*args": [None, [weft.varying()]],
        "**kwargs": {"last": [weft.varying(), 2]},
    }
    compiled, made = graphs(scaled, shapes_spec=spec)
    for k in (2, 5, 9):
        args, kwargs = (z(4), k, z(3), z(k)), {"last": z(k, 2)}
        assert torch.equal(compiled(*args, **kwargs), scaled(*args, **kwargs))
    assert len(made) == 1
    with pytest.raises(InvalidOption, match="says 2 to 9 for n, which is 10"):
        compiled(z(4), 10, z(3), z(5), last=z(5, 2))
    with pytest.raises(InvalidOption, match=r"says 2 to 2 for kwargs\['last'\]\[1\], which is 3"):
        compiled(z(4), 5, z(3), z(5), last=z(5, 3))


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 3
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, batch):
        return self.inner(batch["x"]) * batch["items"][1].sum()


def test_nested_parts_of_a_module_s_arguments():
    spec = {"batch": {"x": [weft.varying(), 2], "items": [None, [weft.varying()]]}}
    module = Scale()
    compiled, made = graphs(module, shapes_spec=spec)
    for size in (3, 4, 7):
        batch = {"x": z(size, 2), "items": (z(1), z(size + 1))}
        torch.testing.assert_close(compiled(batch), module(batch))
    assert len(made) == 1


def test_a_range_settles_branches_and_others_are_refused():
    compiled, made = graphs(scaled, shapes_spec={"x": [weft.varying(min=4, max=20)]})
    for size in (5, 4, 20):
        assert torch.equal(compiled(z(size)), scaled(z(size)))
    assert len(made) == 1
    for size in (3, 21, 1, 0):
        with pytest.raises(InvalidOption, match=rf"says 4 to 20 for x\[0\], which is {size}"):
            compiled(z(size))
    assert torch.equal(compiled(z(7)), scaled(z(7)))
    with pytest.raises(InvalidOption, match="has 1 dimensions for x, which has 2"):
        compiled(z(7, 7))


def test_a_size_that_the_program_fixes_cannot_vary():
    compiled, _ = graphs(lambda x: x + z(4), shapes_spec={"x": [weft.varying()]})
    with pytest.raises(weft.Unsupported, match="dimension 0"):
        compiled(z(4))


def test_a_graph_of_numbers_alone():
    def weights(size):
        return torch.arange(-(size - 1) / 2, (size - 1) / 2 + 1, dtype=torch.float32)

    compiled = weft.compile(weights, dynamic=True, fullgraph=True)
    for size in (5, 8, 9):
        torch.testing.assert_close(compiled(size), weights(size))


def test_tensors_of_arrays_whose_sizes_vary():
    def tensors(array):
        return torch.tensor(array), torch.as_tensor(array, dtype=torch.float64) + len(array)

    compiled = weft.compile(tensors, dynamic=True, fullgraph=True)
    for size in (5, 8, 9):
        array = np.arange(size, dtype=np.float32)
        torch.testing.assert_close(compiled(array), tensors(array))


def test_other_functions_are_not_meant():
    """The rest of a function behind a break, and functions that it calls there, vary as always."""

    def broken(x):
        print(end="")
        x = x[:2]
        weft.graph_break()
        return x + 1

    compiled, _ = graphs(broken, shapes_spec={"x": [weft.varying(min=3)]})
    for size in (3, 4, 9):
        assert torch.equal(compiled(z(size)), broken(z(size)))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"y": [None]}, r"names 'y'; the parameters are x, n, \*args, \*\*kwargs"),
        ({"x": ["batch"]}, r"has 'batch' for x\[0\]; it takes None, an int, or weft.varying"),
        ({"x": 2.5}, "has 2.5 for x"),
        ([None], r"is a dict of parameters, not \[None\]"),
    ],
)
def test_wrong_specs(spec, text):
    with pytest.raises(InvalidOption, match=text):
        weft.compile(scaled, shapes_spec=spec)


def test_a_spec_and_dynamic():
    with pytest.raises(InvalidOption, match="give dynamic or shapes_spec, not both"):
        weft.compile(scaled, shapes_spec={}, dynamic=True)


@pytest.mark.skipif(torch_spec is None, reason="torch.compile has no specs before 2.13")
def test_torch_s_own_types():
    batch, count = torch_spec.ShapeVar("batch", max=64), torch_spec.IntVar("count")
    spec = torch_spec.ShapesSpec(
        {
            "x": torch_spec.TensorSpec([batch, None]),
            "n": count,
            "*args": [torch_spec.TensorSpec([batch * 2])],
            "**kwargs": {"a": torch_spec.TensorSpec([3])},
        },
        assumptions=[batch > count],
    )
    compiled, made = graphs(scaled, shapes_spec=spec)
    for size in (5, 6, 40):
        args, kwargs = (z(size, 2), size - 1, z(2 * size)), {"a": z(3)}
        assert torch.equal(compiled(*args, **kwargs), scaled(*args, **kwargs))
    assert len(made) == 1
    with pytest.raises(InvalidOption, match=r"says 0 to 64 for x\[0\], which is 65"):
        compiled(z(65, 2), 4, z(130), a=z(3))
    parts = torch_spec.ParamsSpec({"batch": torch_spec.DictSpec({
        "x": torch_spec.TensorSpec([batch, 2]),
        "items": torch_spec.SeqSpec([None, torch_spec.TensorSpec([batch])]),
    })})  # fmt: skip
    module = Scale()
    compiled, made = graphs(module, shapes_spec=parts)
    for size in (3, 4, 7):
        inputs = {"x": z(size, 2), "items": (z(1), z(size))}
        torch.testing.assert_close(compiled(inputs), module(inputs))
    assert len(made) == 1


# ---- sizes that are equal share a symbol


def apart(x, y):
    return x * 2, y.sum() + y.shape[0]


def check(compiled, function, *inputs):
    for got, wanted in zip(compiled(*inputs), function(*inputs), strict=True):
        assert torch.equal(got, wanted)


def test_equal_sizes_share_a_symbol():
    """Then different ones are compiled once more, and that code serves equal ones too."""
    compiled, made = graphs(apart, dynamic=True)
    for sizes, count in (((4, 4), 1), ((6, 6), 1), ((6, 7), 2), ((7, 6), 2), ((9, 9), 2)):
        check(compiled, apart, *map(z, sizes))
        assert len(made) == count, sizes


def test_equal_sizes_of_one_tensor():
    def area(x):
        return (x.t() * 2, x.sum() * (x.shape[0] * 10 + x.shape[1]))

    compiled, made = graphs(area, dynamic=True)
    for sizes, count in (((3, 3), 1), ((5, 5), 1), ((5, 6), 2), ((6, 5), 2)):
        check(compiled, area, z(*sizes))
        assert len(made) == count, sizes


def test_symbols_are_not_shared_where_torch_is_told_so():
    with _config.patch(use_duck_shape=False):
        compiled, made = graphs(apart, dynamic=True)
        for sizes in ((4, 4), (6, 6), (6, 7), (7, 6)):
            check(compiled, apart, *map(z, sizes))
        assert len(made) == 1


def test_sizes_that_happen_to_equal_an_int_do_not_share_with_it():
    def add(x, n):
        return (x + n,)

    compiled, made = graphs(add, dynamic=True)
    for size, n in ((4, 4), (5, 9), (9, 5)):
        check(compiled, add, z(size), n)
    assert len(made) == 1


# ---- random programs

_VIEWS = (
    "t.reshape(-1)", "t.transpose(0, -1)", "t[1:]", "t[::2]", "t[: y.shape[0]]", "t.flip(0)",
    "t.narrow(0, 0, min(t.shape[0], z.shape[0]))", "torch.cat([t.reshape(-1), y])",
    "t.unsqueeze(0)", "t * t.shape[0]", "t.flatten()[-3:]", "t.contiguous()",
    "t.expand(2, *t.shape)[0]",
    "t.reshape(-1)[x.shape[0] // 2 :]", "t.new_ones(y.shape[0] + n) * t.sum()", "t.chunk(2)[0]",
    "t.reshape(-1, 2) if t.numel() % 2 == 0 else t.reshape(1, -1)", "torch.where(z > 0, z, y)",
    "z + y", "x @ y if x.shape[1] == y.shape[0] else x.sum(1)", "x.sum(1) + z", "y[: x.shape[0]]",
)  # fmt: skip
_AMOUNTS = ("x.shape[0]", "y.shape[0]", "z.shape[0]", "x.shape[1]", "x.numel()", "n", "2", "3", "5")
sums = st.tuples(st.sampled_from(_AMOUNTS), st.sampled_from("+-*"), st.sampled_from(_AMOUNTS))
folded = st.tuples(st.sampled_from(_AMOUNTS), st.sampled_from(("//", "%")), st.sampled_from("234"))
amounts = st.sampled_from(_AMOUNTS) | (sums | folded).map(lambda row: f"({' '.join(row)})")
branches = st.tuples(amounts, st.sampled_from(("<", "<=", "==", "!=")), amounts).map(" ".join)
steps = st.tuples(st.none() | branches, st.sampled_from(_VIEWS))
small = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8))
shapes = st.tuples(small, small, small, small, st.integers(-2, 7)) | small.map(lambda s: (s,) * 5)


def outcome(function, a, b, c, d, n):
    """What a call gives: values with shapes and strides, or the type of its error."""
    try:
        results = function(z(a, b), z(c), z(d), n)
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError, TypeError) as error:
        return type(error)
    return [
        (r.shape, r.stride(), r.tolist()) if isinstance(r, torch.Tensor) else r for r in results
    ]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(steps, min_size=1, max_size=5),
    amounts,
    st.lists(shapes, min_size=2, max_size=7),
    st.sampled_from((None, True)),
)
def test_random_programs_over_random_sizes(rows, last, calls, dynamic):
    """Views, and branches on sizes, of three tensors and an int: as eager for every shape."""
    lines = ["def program(x, y, z, n):", "    t = x.clone()"]
    for branch, view in rows:
        lines.append(f"    {f'if {branch}: ' if branch else ''}t = {view}")
    lines.append(f"    return t, {last}")
    names = {"torch": torch}
    exec("\n".join(lines), names)
    program = names["program"]
    weft.reset()
    with weft.config.patch(recompile_limit=64):
        compiled = weft.compile(program, backend="eager", dynamic=dynamic)
        for call in calls:
            assert repr(outcome(compiled, *call)) == repr(outcome(program, *call)), (lines, call)
