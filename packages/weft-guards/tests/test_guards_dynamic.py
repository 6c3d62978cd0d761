"""Which sizes become symbolic: automatic policy and marks. No sympy in this."""

import subprocess
import sys

import pytest
import torch
from weft_core.errors import Unsupported
from weft_guards.config import settings
from weft_guards.dimension_marks import mark_dynamic, mark_static, maybe_mark_dynamic
from weft_guards.dynamic import DynamicPolicy
from weft_guards.sources import LocalSource

X, Y = LocalSource("x"), LocalSource("y")
S, D = False, True  # static, dynamic


def shape(*sizes):
    return torch.empty(sizes, device="meta")


def test_a_size_that_changes_becomes_dynamic_and_stays_so():
    policy = DynamicPolicy()
    assert policy.dims(X, shape(4, 8)) == (S, S)
    assert policy.dims(X, shape(4, 8)) == (S, S)
    assert policy.dims(X, shape(5, 8)) == (D, S)
    assert policy.dims(X, shape(4, 8)) == (D, S)
    assert policy.dims(X, shape(6, 9)) == (D, D)


def test_sources_and_ranks_are_apart():
    policy = DynamicPolicy()
    policy.dims(X, shape(4))
    assert policy.dims(Y, shape(5)) == (S,)
    assert policy.dims(X, shape(4, 4)) == (S, S)
    assert policy.dims(X, shape(5)) == (D,)


@pytest.mark.parametrize("small", [0, 1])
def test_zero_and_one_stay_constants(small):
    policy = DynamicPolicy(True)
    assert policy.dims(X, shape(small, 7)) == (S, D)
    policy = DynamicPolicy()
    policy.dims(X, shape(3))
    assert policy.dims(X, shape(small)) == (S,)
    assert policy.dims(X, shape(5)) == (D,)


def test_dynamic_true_and_false():
    assert DynamicPolicy(True).dims(X, shape(4)) == (D,)
    never = DynamicPolicy(False)
    never.dims(X, shape(4))
    assert never.dims(X, shape(5)) == (S,)
    with settings.patch(automatic_dynamic_shapes=False):
        automatic = DynamicPolicy()
        automatic.dims(X, shape(4))
        assert automatic.dims(X, shape(5)) == (S,)


def test_parameters_are_static_unless_marked():
    weight = torch.nn.Parameter(torch.zeros(4))
    policy = DynamicPolicy(True)
    assert policy.dims(X, weight) == (S,)
    mark_dynamic(weight, 0)
    assert policy.dims(X, weight) == (D,)


def test_marks():
    x = shape(4, 5, 6, 7)
    mark_dynamic(x, 0)
    maybe_mark_dynamic(x, -1)
    mark_static(x, [1])
    assert DynamicPolicy().dims(X, x) == (D, S, S, D)
    assert DynamicPolicy(True).dims(X, x) == (D, S, D, D)
    assert DynamicPolicy(False).dims(X, x) == (D, S, S, D)
    with pytest.raises(Unsupported, match=r"dimension 0 of L\['x'\] .* needs it to be 4"):
        DynamicPolicy().check(X, x, x.shape)
    mark_static(x)
    assert DynamicPolicy(True).dims(X, x) == (S, S, S, S)
    with pytest.raises(IndexError, match="dimension 4"):
        mark_dynamic(x, 4)


def test_marks_of_programs_written_for_torch_compile():
    x = shape(4, 5)
    x._dynamo_dynamic_indices = {1}
    assert DynamicPolicy().dims(X, x) == (S, D)


def test_ints():
    policy = DynamicPolicy()
    assert not policy.int_is_dynamic(X, 5)
    assert not policy.int_is_dynamic(X, 5)
    assert policy.int_is_dynamic(X, 6)
    assert policy.int_is_dynamic(X, 5)
    assert not policy.int_is_dynamic(X, 1)
    assert DynamicPolicy(True).int_is_dynamic(X, 5)
    with settings.patch(specialize_int=True):
        assert not DynamicPolicy(True).int_is_dynamic(X, 5)


def test_floats():
    policy = DynamicPolicy()
    assert not policy.data_is_dynamic(X, 0.5)
    assert policy.data_is_dynamic(X, 0.25)
    assert DynamicPolicy().data_is_dynamic(X, 0.5, varies=True)
    with settings.patch(specialize_float=True):
        assert not policy.data_is_dynamic(X, 0.125)
        assert not policy.data_is_dynamic(X, 0.5, varies=True)


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        ("L['x']", (D, D)),
        ("L['x']:1", (S, D)),
        ("L['y'], L['x']:0,", (D, S)),
        (r"L\['.'\]", (D, D)),
        (r".*:0", (D, S)),
        ("L['xy']", (S, S)),
        ("", (S, S)),
    ],
)
def test_listed_sources_are_dynamic_whatever_else_is_said(listed, wanted):
    x = shape(4, 5)
    mark_static(x, 0)
    with settings.patch(dynamic_sources=listed):
        assert DynamicPolicy(False).dims(X, x) == wanted
        assert DynamicPolicy(False).int_is_dynamic(X, 5) is any(wanted)
        assert not DynamicPolicy(False).int_is_dynamic(X, 1)


def test_listed_sources_are_unbacked():
    with settings.patch(unbacked_sources="L['x']:1"):
        assert {
            dim: mark.kind.value for dim, mark in DynamicPolicy().marks(X, shape(4, 5)).items()
        } == {1: "mark_unbacked"}
        assert DynamicPolicy().dims(X, shape(4, 5)) == (S, D)


def test_static_programs_do_not_load_sympy():
    program = """
import sys, torch
from weft_guards import GuardSet, DynamicPolicy, compile_check, CodeCache, explain_miss
from weft_guards.sources import LocalSource, TorchStateSource
def f(x): return x
x = torch.zeros(3)
guards = GuardSet()
guards.add(LocalSource("x"), "TENSOR", x)
guards.add(TorchStateSource(), "GLOBAL_STATE")
cache = CodeCache(f.__code__)
cache.policy.dims(LocalSource("x"), x)
cache.add(compile_check(guards, ("x",)), f.__code__, guards)
assert cache.lookup(f, x) and not cache.lookup(f, x[1:])
assert explain_miss(guards, f, (x[1:],))
loaded = [m for m in sys.modules if m.split(".")[0] == "sympy" or m.startswith("torch._dynamo")]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stride_that_no_size_decides_varies_by_itself():
    policy = DynamicPolicy()
    assert policy.free_strides(X, torch.zeros(2, 40)[:, -32:]) == ()
    assert policy.free_strides(X, torch.zeros(2, 40)[:, -32:]) == ()
    assert policy.free_strides(X, torch.zeros(2, 41)[:, -32:]) == (0,)
    assert policy.free_strides(X, torch.zeros(2, 40)[:, -32:]) == (0,)
    assert policy.free_strides(X, torch.zeros(40, 2).t()) == ()  # another order in memory


def test_the_strides_of_whole_tensors_follow_their_sizes():
    policy = DynamicPolicy()
    for rows in (3, 4, 5):
        assert policy.free_strides(X, torch.zeros(2, rows, 4)) == ()
    assert policy.free_strides(X, torch.zeros(2, 9, 4)[:, :5]) == (0,)
    assert policy.free_strides(X, torch.nn.Parameter(torch.zeros(2, 8, 4)[:, :5])) == ()
    assert DynamicPolicy(False).free_strides(X, torch.zeros(2, 9)[:, :5]) == ()
    assert DynamicPolicy(True).free_strides(X, torch.zeros(2, 9)[:, :5]) == (0,)
