"""Random mutations of program state: the check must agree with a full comparison of the state."""

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weft_guards import CodeCache, GuardSet, compile_check
from weft_guards.sources import InstanceAttrSource, ItemSource, LocalSource

X = LocalSource("x")
scalars = st.one_of(
    st.integers(-2, 2),
    st.booleans(),
    st.none(),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), "a", "b", ""]),
)
tensors = st.builds(
    lambda sizes, dtype, grad, flip: _tensor(sizes, dtype, grad, flip),
    st.lists(st.integers(0, 2), max_size=2),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.booleans(),
)
values = st.recursive(
    st.one_of(scalars, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 1, True]), inner, max_size=3),
        st.dictionaries(st.sampled_from("pqr"), inner, max_size=3).map(lambda d: Box(d)),
    ),
    max_leaves=6,
)


# What the imaginary program reads of a Box.
NAMES = "apqr"


class Box:
    def __init__(self, attributes):
        self.__dict__.update(attributes)

    def __repr__(self):
        return f"Box({self.__dict__})"


def _tensor(sizes, dtype, grad, flip):
    base = torch.zeros(sizes, dtype=dtype)
    return (base.t() if flip and len(sizes) == 2 else base).requires_grad_(grad)


def guard_fully(guards, source, value):
    """Guard everything about a value, as capture does when a program uses all of it."""
    if isinstance(value, torch.Tensor):
        guards.add(source, "TENSOR", value)
    elif isinstance(value, list | tuple):
        guards.add(source, "TYPE", type(value))
        guards.add(source, "LEN", len(value))
        for index, item in enumerate(value):
            guard_fully(guards, ItemSource(source, index), item)
    elif isinstance(value, dict):
        guards.add(source, "TYPE", dict)
        guards.add(source, "DICT_KEYS", value)
        for key, item in value.items():
            guard_fully(guards, ItemSource(source, key), item)
    elif isinstance(value, Box):
        guards.add(source, "TYPE", Box)
        for name in NAMES:
            if name in value.__dict__:
                guard_fully(guards, InstanceAttrSource(source, name), value.__dict__[name])
            else:
                guards.add(source, "ATTR_ABSENT", name)
    else:
        guards.add(source, "CONST", value)


def state(value):
    """An independent description: equal exactly when a program cannot tell two values apart."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(state, value))
    if isinstance(value, dict):
        return ("dict", *((type(k).__name__, k, state(v)) for k, v in value.items()))
    if isinstance(value, Box):
        return ("box", *((k, state(value.__dict__[k])) for k in NAMES if k in value.__dict__))
    return (type(value).__name__, repr(value))


def function(x):
    return x


def compiled(value):
    guards = GuardSet()
    guard_fully(guards, X, value)
    return compile_check(guards, ("x",)), guards


@settings(max_examples=150, deadline=None)
@given(values, values)
def test_check_says_yes_exactly_for_equal_states(first, second):
    check, _ = compiled(first)
    assert check(function, first)
    assert check(function, second) == (repr(state(first)) == repr(state(second)))


@settings(max_examples=100, deadline=None)
@given(values, st.data())
def test_check_notices_mutation_and_its_undoing(value, data):
    check, _ = compiled(value)
    before = repr(state(value))
    containers = list(find_containers(value))
    if not containers:
        return
    target = data.draw(st.sampled_from(containers))
    saved = copy.copy(target)
    replacement = data.draw(values)
    key = data.draw(st.sampled_from(["a", "p", 1, 0]))
    mutate(target, key, replacement)
    assert check(function, value) == (repr(state(value)) == before)
    target.clear()
    target.update(saved) if isinstance(target, dict) else target.extend(saved)
    assert check(function, value)


def find_containers(value):
    if isinstance(value, Box):
        value = value.__dict__
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from find_containers(item)


def mutate(target, key, value):
    if isinstance(target, dict):
        target[key] = value
    elif target and isinstance(key, int):
        target[key % len(target)] = value
    else:
        target.append(value)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=6))
def test_cache_answers_with_the_entry_made_for_the_same_state(history):
    cache = CodeCache(function.__code__)
    made = {}
    for value in history:
        key = repr(state(value))
        code = cache.lookup(function, value)
        assert (code is None) == (key not in made)
        if code is None:
            check, guards = compiled(value)
            made[key] = function.__code__.replace(co_name=f"entry{len(made)}")
            cache.add(check, made[key], guards)
        else:
            assert code is made[key]
