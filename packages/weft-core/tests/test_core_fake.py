"""Fake tensors mirror real ones, symbolic sizes behave, torch's compiler stays unloaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from weft_core.fake import detect_mode, fake_mode, make_shape_env, new_symint, to_fake


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(4, 1).expand(4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6),
        torch.tensor(2.0),
        torch.nn.Parameter(torch.randn(2)),
        torch.randn(2, requires_grad=True),
        torch.randn(2, requires_grad=True) * 2,
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}-{list(t.stride())}",
)
def test_twin_has_the_same_metadata(tensor: torch.Tensor) -> None:
    fake = to_fake(fake_mode(), tensor)
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert (fake.requires_grad, fake.is_leaf) == (tensor.requires_grad, tensor.is_leaf)
    assert isinstance(fake, torch.nn.Parameter) == isinstance(tensor, torch.nn.Parameter)


def test_ops_and_backward_propagate() -> None:
    mode = fake_mode()
    x = to_fake(mode, torch.randn(3, 8, requires_grad=True))
    with mode:
        torch.nn.functional.layer_norm(x, (8,)).relu().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (3, 8)
    assert detect_mode([1, x]) is mode


def test_symbolic_sizes_and_strides() -> None:
    env = make_shape_env()
    mode = fake_mode(env)
    real = torch.randn(6, 4, 5)
    x = to_fake(mode, real, [0, 1], "x")
    y = to_fake(mode, real.transpose(0, 1), [0, 1], "y")
    assert isinstance(x.shape[0], torch.SymInt)
    assert str(x.stride(0)) == f"5*{x.shape[1]}"
    with mode:
        joined = torch.cat([x, y.transpose(0, 1)])
    assert str(joined.shape[0]) == f"2*{x.shape[0]}"
    assert not env.guards
    assert x.shape[0] > 2  # decided by the hint, recorded as a guard or a known range
    assert bool(x.shape[0] % 2 == 0)
    assert len(env.guards) >= 1


def test_meta_kernels_that_call_other_operators_take_symbolic_sizes() -> None:
    mode = fake_mode(make_shape_env())
    a = to_fake(mode, torch.randn(3, 4, 4), [0, 1, 2], "a")
    b = to_fake(mode, torch.randn(4, 2), [0, 1], "b")
    with mode:
        padded = torch.nn.functional.pad(b, [1, 2])
        assert str(padded.shape[1]) == f"{b.shape[1]} + 3"
        assert torch.linalg.solve_triangular(a, b, upper=True).shape == (3, 4, 2)


def test_operators_that_read_sizes_as_plain_ints_take_symbolic_ones() -> None:
    x = to_fake(
        fake_mode(make_shape_env()), torch.randn(1, 2, 6, 8, requires_grad=True), [2, 3], "x"
    )
    with x.fake_mode:
        larger = torch.nn.functional.interpolate(x, size=x.shape[3], mode="bicubic", antialias=True)
        assert torch.autograd.grad(larger.sum(), x)[0].shape == x.shape
        for drawn in (torch.rand, torch.randn, lambda *a, **k: torch.randint(1, 5, *a, **k)):
            assert drawn(x.shape, generator=None).shape == x.shape


def test_negative_pads_of_symbolic_sizes_keep_the_layout() -> None:
    real = torch.randn(5, 7, 10).transpose(1, 2)
    x = to_fake(fake_mode(make_shape_env()), real, [0, 1, 2], "x")
    with x.fake_mode:
        cropped = torch.nn.functional.pad(x, [0, 0, -1, -2])
        padded = torch.nn.functional.pad(x, [0, 0, -1, 2])
    for fake, pads in ((cropped, [0, 0, -1, -2]), (padded, [0, 0, -1, 2])):
        want = torch.nn.functional.pad(real, pads)
        assert tuple(map(int, fake.shape)) == want.shape
        assert tuple(map(int, fake.stride())) == want.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_of_expanded_operands_have_the_strides_of_real_ones(dtype: torch.dtype) -> None:
    ones, matrix = torch.ones((), dtype=dtype).expand(3, 2), torch.ones(2, 3, dtype=dtype).t()
    mode = fake_mode()
    fakes = [to_fake(mode, tensor) for tensor in (ones, matrix)]
    for op in (torch.mul, torch.lt, torch.maximum):
        real = op(ones, matrix)
        with mode:
            fake = op(*fakes)
        assert (fake.stride(), fake.dtype) == (real.stride(), real.dtype) == ((1, 3), real.dtype)


def test_pointwise_results_of_references_have_the_strides_of_real_ones() -> None:
    """A reference of torch computes with operands that it made, in layouts of their own."""
    matrix, other = torch.ones(3, 8, 1, 1).permute(1, 0, 2, 3), torch.ones(8, 3, 1, 2)[..., :1]
    mode = fake_mode()
    for op, *operands in (
        (torch.copysign, matrix, other),
        (torch.logical_and, torch.tensor(1), matrix.bfloat16()),
        (torch.heaviside, matrix, other),
        (torch.where, matrix > 0, matrix, other),
        (torch.pow, 2.0, matrix),
        (torch.isin, matrix, other),
        (torch.ldexp, matrix[:1], matrix),
        (torch.ldexp, other, matrix),
        (torch.masked_fill, matrix, other > 0, 1.0),
        (torch.nn.functional.logsigmoid, matrix),
    ):
        with mode:
            fake = op(*(to_fake(mode, x) if torch.is_tensor(x) else x for x in operands))
        assert fake.stride() == op(*operands).stride(), op


def test_results_of_an_index_have_the_strides_of_real_ones() -> None:
    x = torch.ones(3, 4, 5).permute(2, 0, 1)
    index = torch.ones(2, 4, 3, dtype=torch.int64).permute(2, 0, 1)
    mode = fake_mode()
    fake_x, fake_index = to_fake(mode, x), to_fake(mode, index)
    for take in (
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: x[..., i[:, :1]],
        lambda x, i: x[i, :, i],
        lambda x, i: x[i, i.contiguous()],
        lambda x, i: x[i[0], None],
    ):
        with mode:
            fake = take(fake_x, fake_index)
        assert fake.stride() == take(x, index).stride()


@pytest.mark.parametrize("symbolic", [False, True])
def test_transforms_of_real_numbers_have_the_strides_of_real_ones(symbolic: bool) -> None:
    real = torch.randn(3, 5, 4, 6).permute(2, 0, 3, 1)
    mode = fake_mode(make_shape_env() if symbolic else None)
    x = to_fake(mode, real, [0, 1, 2, 3] if symbolic else [], "x")
    for dims in ((0,), (3,), (1, 2), (2, 1), (0, 3, 1), (3, 1, 2, 0)):
        want = torch.fft.rfftn(real, dim=dims)
        with mode:
            fake = torch.fft.rfftn(x, dim=dims)
        assert (*map(int, fake.shape), *map(int, fake.stride())) == (*want.shape, *want.stride())


def test_logsumexp_of_attention_is_as_wide_as_the_real_one(monkeypatch) -> None:
    monkeypatch.setattr(torch._prims_common, "get_computation_dtype", lambda _: torch.float32)
    mode = fake_mode()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        real = torch.randn(1, 2, 4, 8, dtype=dtype)
        with mode:
            fakes = flash(*[to_fake(mode, real)] * 3)
        for fake, want in zip(fakes, flash(real, real, real), strict=True):
            assert (fake.dtype, fake.stride()) == (want.dtype, want.stride())


def test_a_decision_on_data_has_its_own_error() -> None:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    mode = fake_mode(make_shape_env())
    number = to_fake(mode, torch.tensor(3))
    with mode, pytest.raises(GuardOnDataDependentSymNode):
        bool(torch.ops.aten._local_scalar_dense(number) == 1)


def test_guards_are_recorded_after_torch_failed_to_switch_them_on_again() -> None:
    broken = make_shape_env()
    broken._suppress_guards_enter()
    env = make_shape_env()
    assert new_symint(env, 5, "n") == 5
    assert len(env.guards) == 1
    broken._suppress_guards_exit()


@pytest.mark.parametrize("name", ["_unique", "_unique2", "unique_dim", "nonzero"])
def test_results_sized_by_data_have_no_fake(name: str) -> None:
    mode = fake_mode()
    fake = to_fake(mode, torch.tensor([2, 1, 2]))
    arguments = (0,) if name == "unique_dim" else ()
    with mode, pytest.raises(DynamicOutputShapeException):
        getattr(torch.ops.aten, name)(fake, *arguments)


def test_hints_zero_and_one_specialise() -> None:
    env = make_shape_env()
    assert new_symint(env, 1, "n") == 1
    assert type(new_symint(env, 1, "m")) is int or not env.var_to_range


def test_other_mode_and_missing_shape_env_are_errors() -> None:
    fake = to_fake(fake_mode(), torch.randn(2))
    with pytest.raises(ValueError, match="another fake mode"):
        to_fake(fake_mode(), fake)
    with pytest.raises(ValueError, match="shape environment"):
        to_fake(fake_mode(), torch.randn(2), [0])


_PROGRAM = """
import sys, torch
from weft_core.fake import fake_mode, to_fake, make_shape_env
mode = fake_mode()
x = to_fake(mode, torch.randn(3, 8, requires_grad=True))
with mode:
    torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (8,))).sum().backward()
    torch.nn.functional.scaled_dot_product_attention(*[torch.randn(1, 2, 3, 8)] * 3)
mode = fake_mode(make_shape_env())
y = to_fake(mode, torch.randn(6, 8), [0])
with mode:
    z = torch.cat([y, y]).reshape(-1)
assert y.shape[0] * 2 > 7 and z.shape[0] % 2 == 0
loaded = [m for m in sys.modules if m.startswith(("torch._dynamo", "torch._inductor"))]
assert not loaded, loaded
import torch._dynamo
assert type(torch._dynamo).__name__ == "module" and callable(torch._dynamo.optimize)
"""


@pytest.mark.slow
def test_nothing_of_torch_s_compiler_is_loaded_and_it_still_loads_when_asked() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_complex_numbers_that_a_real_operator_refuses() -> None:
    """Also where nothing uses the result: eager raises all the same."""
    x, mode = torch.ones(3, dtype=torch.complex64), fake_mode()
    fake, mode.is_checked = to_fake(mode, x), True
    for operator in (lambda x: x.min(0), lambda x: x.sort(), lambda x: x.cummax(0)):
        with pytest.raises((RuntimeError, TypeError)):  # the latter from torch 2.15 on
            operator(x)
        with mode, pytest.raises(RuntimeError):
            operator(fake)
    with mode:
        assert fake.sum(0).dtype is torch.complex64
