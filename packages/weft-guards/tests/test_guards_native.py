"""The C form: what it refuses, what it leaves to Python, and that both forms agree."""

import ctypes
import gc
import operator
import random
import struct
import sys
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from weft_guards import GuardSet, compile_check
from weft_guards.abi import _metadata, dispatch_keys, extension, state_words
from weft_guards.check import describe_check
from weft_guards.config import settings
from weft_guards.payloads import DictKeys
from weft_guards.sources import (
    CallSource,
    InstanceAttrSource,
    ItemSource,
    LocalSource,
    TorchStateSource,
)

pytestmark = pytest.mark.skipif(extension() is None, reason="the C extension was not built")
native = extension()
X = LocalSource("x")


@pytest.fixture(autouse=True)
def form():
    """Instead of both forms."""
    with settings.patch(native_checks=True):
        yield


def function(x):
    return x


def test_small_checks_run_in_c_alone():
    guards = GuardSet()
    guards.add(X, "TENSOR", torch.zeros(2))
    check = compile_check(guards, ("x",))
    assert isinstance(check, native.Check)
    assert check.residual is None
    assert "TENSOR" in describe_check(check)


def test_what_c_lacks_runs_in_python_after_it():
    guards = GuardSet()
    guards.add(X, "TYPE", list)
    guards.add(CallSource(sum, (X,)), "CONST", 6)
    check = compile_check(guards, ("x",))
    assert check(function, [1, 2, 3])
    assert not check(function, [1, 2])
    assert not check(function, (1, 2, 3))
    assert "def check" in describe_check(check)


class Hashed(torch.nn.Parameter):
    """Hashes by what Python says."""

    def __hash__(self):
        return -id(self)


@pytest.mark.parametrize("make", [torch.nn.Parameter, Hashed])
@pytest.mark.parametrize("kind", [dict, lambda items: defaultdict(dict, items)])
def test_what_is_kept_for_tensors_is_read_in_c(make, kind):
    keys = [make(torch.zeros(2)) for _ in range(2)]
    state = kind({key: {"mean": torch.zeros(3), "step": k} for k, key in enumerate(keys)})
    guards = GuardSet()
    where, params = ItemSource(X, "state"), ItemSource(X, "params")
    guards.add(X, "TYPE", dict)
    guards.add(where, "TYPE", type(state))
    guards.add(where, "DICT_KEYS", DictKeys.of(state))
    for k, key in enumerate(keys):
        entry = CallSource(operator.getitem, (where, ItemSource(params, k)))
        guards.add(entry, "TYPE", dict)
        guards.add(ItemSource(entry, "step"), "CONST", k)
        guards.add(ItemSource(entry, "mean"), "TENSOR", state[key]["mean"])
    check = compile_check(guards, ("x",))
    assert check.residual is None
    now = {"state": state, "params": keys}
    for _ in range(4):  # the program, then what it remembers
        assert check(function, now)
    state[keys[1]]["mean"] = torch.zeros(4)
    assert not check(function, now)
    state[keys[1]]["mean"] = torch.zeros(3)
    assert check(function, now)
    assert not check(function, {"state": state, "params": keys[::-1]})
    other = make(torch.zeros(2))
    assert not check(function, {"state": state, "params": [keys[0], other]})
    assert len(state) == 2
    state[other] = state.pop(keys[1])
    assert not check(function, now)


LAYOUTS = [
    lambda: torch.zeros(3, 4),
    lambda: torch.zeros(3, 4).t(),
    lambda: torch.zeros(4, 3),
    lambda: torch.zeros(3, 4, dtype=torch.float64),
    lambda: torch.zeros(3, 4, dtype=torch.bfloat16),
    lambda: torch.zeros(3, 4, requires_grad=True),
    lambda: torch.zeros(3, 4, device="meta"),
    lambda: torch.zeros(3, 4, dtype=torch.complex64),
    lambda: torch.zeros(3, 4, dtype=torch.complex64).conj(),
    lambda: torch.zeros(3, 4, dtype=torch.complex64).conj().imag,
    lambda: torch.zeros(3, 4).to_sparse(),
    lambda: torch.nn.Parameter(torch.zeros(3, 4)),
    lambda: torch.zeros(()),
    lambda: torch.zeros(0, 4),
    lambda: torch.zeros(1, 4).expand(3, 4),
    lambda: torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    lambda: inference_tensor(),
]


def inference_tensor():
    with torch.inference_mode():
        return torch.zeros(3, 4)


def test_both_forms_tell_the_same_tensors_apart():
    tensors = [make() for make in LAYOUTS]
    for index, tensor in enumerate(tensors):
        guards = GuardSet()
        guards.add(X, "TENSOR", tensor)
        in_c = compile_check(guards, ("x",))
        with settings.patch(native_checks=False):
            in_python = compile_check(guards, ("x",))
        for other_index, other in enumerate(tensors):
            answers = in_c(function, other), in_python(function, other)
            assert answers == (index == other_index,) * 2, (tensor, other)


def test_large_models():
    """More registers than fit on the C stack."""
    modules = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(300))
    guards = GuardSet()
    inner = InstanceAttrSource(X, "_modules")
    for name, module in modules._modules.items():
        source = ItemSource(inner, name)
        guards.add(source, "TYPE", type(module))
        for key, value in module._parameters.items():
            guards.add(ItemSource(InstanceAttrSource(source, "_parameters"), key), "TENSOR", value)
    check = compile_check(guards, ("x",))
    assert check(function, modules)
    victim = random.Random(0).choice(list(modules))
    victim.weight.requires_grad_(False)
    assert not check(function, modules)
    victim.weight.requires_grad_(True)
    assert check(function, modules)
    victim.bias = None
    assert not check(function, modules)


def test_checks_are_collected():
    """Also in a cycle through an object that the program holds."""

    def holder():
        pass

    guards = GuardSet()
    guards.add(CallSource(holder, ()), "NONE")
    check = compile_check(guards, ("x",))
    holder.check = check
    gone = weakref.ref(holder)
    del check, holder, guards
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "row",
    [
        (native.TYPE if native else 0, 1, 0, int),  # register 1 is not filled yet
        (native.ARG if native else 0, 0, 1, None),
        (-1, 0, 0, None),
        (999, 0, 0, None),
        (native.STATE if native else 0, 0, 0, b"short"),
        (native.TENSOR if native else 0, 0, 0, ()),
        (native.SIZE if native else 0, 0, 0, None),  # of no tensor that was tested
        (native.SHAPE if native else 0, 0, 0, struct.pack("=2q", 0, 0)),  # an amount not read
        (native.SHAPE if native else 0, 0, 0, struct.pack("=1q", 2)),  # adds nothing to nothing
        (native.SHAPE if native else 0, 0, 0, b""),
        "nonsense",
    ],
)
def test_bad_programs_are_refused(row):
    with pytest.raises((ValueError, TypeError)):
        native.Check(((native.ARG, 0, 0, None), row), 1, None, bool)


def test_wrong_number_of_values_is_an_error():
    check = native.Check((), 1, None)
    assert check(function, 1)
    for values in ((), (1, 2)):
        with pytest.raises(TypeError, match="1 values"):
            check(function, *values)


def test_no_references_are_lost():
    """Passing and failing runs leave reference counts as they were."""
    import sys

    value = [object(), {"k": object()}]
    guards = GuardSet()
    guards.add(X, "TYPE", list)
    guards.add(ItemSource(X, 0), "TYPE", object)
    guards.add(ItemSource(ItemSource(X, 1), "k"), "NONE")
    check = compile_check(guards, ("x",))
    before = [sys.getrefcount(o) for o in (value, value[0], value[1], value[1]["k"])]
    for _ in range(100):
        assert not check(function, value)
        assert not check(function, None)
    assert before == [sys.getrefcount(o) for o in (value, value[0], value[1], value[1]["k"])]


def test_state_is_read_in_c():
    guards = GuardSet()
    guards.add(TorchStateSource(), "GLOBAL_STATE")
    guards.add(TorchStateSource(), "GRAD_MODE", False)
    if state_words() is None:
        pytest.skip("this torch exports no state")
    with torch.no_grad():
        check = compile_check(guards, ("x",))
        assert check(function, 0)
    assert [row[0] for row in check.program] == [native.GRAD, native.STATE]
    assert not check(function, 0)


@pytest.mark.parametrize(
    "change",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.device("meta"),
        torch._C.DisableTorchFunctionSubclass,
        torch._C.DisableTorchFunction,
        torch.utils._python_dispatch.TorchDispatchMode,
    ],
)
def test_both_forms_agree_on_state(change):
    guards = GuardSet()
    guards.add(TorchStateSource(), "GLOBAL_STATE")
    forms = []
    for native_checks in (True, False):
        with settings.patch(native_checks=native_checks):
            forms.append(compile_check(guards, ("x",)))
    assert [check(function, 0) for check in forms] == [True, True]
    with change():
        inside = [check(function, 0) for check in forms]
    assert inside == [change is torch.no_grad] * 2
    assert [check(function, 0) for check in forms] == [True, True]


def test_state_is_per_thread():
    guards = GuardSet()
    guards.add(TorchStateSource(), "GLOBAL_STATE")
    check = compile_check(guards, ("x",))
    with torch.autocast("cpu"), ThreadPoolExecutor(1) as pool:
        assert not check(function, 0)
        assert pool.submit(check, function, 0).result()


@pytest.mark.skipif(sys.platform == "win32", reason="needs the C library's malloc")
def test_metadata_is_found_whatever_freed_memory_holds():
    """Places in a tensor for more dimensions than it has are not written."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    tensor = torch.empty(3, 5)
    memory = list(memoryview(ctypes.string_at(tensor._cdata, 192)).cast("Q"))
    keys = 8 * memory.index(dispatch_keys(tensor))
    wanted = _metadata(keys)
    order = random.Random(0)
    for _ in range(60):
        for size in range(160, 288, 16):
            blocks = [library.malloc(size) for _ in range(order.randrange(1, 12))]
            for block in blocks:
                ctypes.memset(block, order.randrange(256), size)
            for block in order.sample(blocks, len(blocks)):
                library.free(block)
        assert _metadata(keys) == wanted
