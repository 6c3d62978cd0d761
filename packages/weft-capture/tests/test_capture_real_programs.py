"""Small programs with what libraries and training scripts do, which once broke or were wrong."""

import functools
import importlib.metadata
import textwrap
import threading

import pytest
import torch
import weft_capture
from capture_check import check, eager_backend, same
from weft_guards import CacheRules


class Registry(type):
    instances = {}
    made = None

    def __call__(cls, *args, **kwargs):
        if cls not in cls.instances:
            cls.instances[cls] = super().__call__(*args, **kwargs)
        return cls.instances[cls]


class Counter(metaclass=Registry):
    def __init__(self):
        self.count = 0


def count(x):
    counter = Counter()
    counter.count += 1
    return x + counter.count


def test_dict_of_a_metaclass_is_read_in_each_call():
    Registry.instances.clear()
    counted = weft_capture.capture(count, eager_backend, fullgraph=True)
    assert [counted(torch.zeros(1)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert Registry.instances.pop(Counter).count == 4
    assert counted(torch.zeros(1)).item() == 1


def test_attribute_of_a_metaclass_written_in_the_frame():
    def step(x):
        if Registry.made is None:
            Registry.made = 0
        Registry.made += 1
        return x + Registry.made + Counter.made

    Registry.made = None
    captured = weft_capture.capture(step, eager_backend, fullgraph=True)
    assert [captured(torch.zeros(1)).item() for _ in range(3)] == [2, 4, 6]


class Flags(threading.local):
    def __init__(self):
        self.recording = False


FLAGS = Flags()


def test_subclass_of_threading_local_is_read_in_the_thread_that_runs():
    captured = weft_capture.capture(
        lambda x: x + 1 if FLAGS.recording else x - 1, eager_backend, fullgraph=True
    )
    found = [captured(torch.zeros(1)).item()]
    FLAGS.recording = True
    found.append(captured(torch.zeros(1)).item())
    other = threading.Thread(target=lambda: found.append(captured(torch.zeros(1)).item()))
    other.start()
    other.join()
    FLAGS.recording = False
    assert found == [-1, 1, -1]


def test_subclass_of_threading_local_is_written():
    def step(x):
        before = FLAGS.recording
        FLAGS.recording = not before
        return x + FLAGS.recording

    captured = weft_capture.capture(step, eager_backend)
    assert [captured(torch.zeros(1)).item() for _ in range(3)] == [1, 0, 1]
    assert FLAGS.recording
    FLAGS.recording = False


def is_installed(package):
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_missing_package_raises_as_in_eager():
    check(lambda x: x + 1 if is_installed("no-such-package") else x - 1, torch.ones(2))


def test_globals_dict_survives_a_break():
    def inner(x, names):
        weft_capture.graph_break()
        return x + len(names["__name__"])

    def step(x):
        return inner(x, globals()) * 2

    check(step, torch.ones(2), fullgraph=False)


LIBRARY = """
    import functools

    class Recipe:
        def __init__(self, heads):
            self.heads = heads

    @functools.lru_cache
    def recipe_of(heads):
        return Recipe(heads)

    @functools.lru_cache
    def shapes(recipe, shape):
        *outer, width = shape
        if width % recipe.heads != 0:
            raise ValueError(f"{width} is no multiple of {recipe.heads}")
        return [*outer, recipe.heads, width // recipe.heads], None

    def split_heads(x, heads):
        new_shape, _ = shapes(recipe_of(heads), x.shape)
        return x.reshape(new_shape)
"""


@pytest.fixture
def library(tmp_path):
    """A module that looks like an installed one."""
    path = tmp_path / "site-packages" / "shape_library.py"
    path.parent.mkdir()
    path.write_text(textwrap.dedent(LIBRARY))
    namespace = {"__name__": "shape_library"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace


def test_library_caches_shapes_by_the_identity_of_an_object(library):
    split = library["split_heads"]
    captured = weft_capture.capture(
        lambda x: split(x, 2), eager_backend, rules=CacheRules(dynamic=True)
    )
    for size in ((2, 4), (3, 6), (5, 8)):
        x = torch.randn(size)
        assert same(captured(x), split(x, 2))
    assert not captured._weft_capture.breaks
    with pytest.raises(ValueError, match="7 is no multiple of 2"):
        captured(torch.randn(2, 7))


def test_object_of_the_program_may_change_behind_its_cache():
    class Recipe:
        heads = 2

    recipe = Recipe()

    @functools.lru_cache
    def shapes(recipe, shape):
        return [shape[0], recipe.heads, shape[1] // recipe.heads]

    def step(x):
        return x.reshape(shapes(recipe, x.shape))

    first = step(torch.ones(2, 8)).shape
    recipe.heads = 4
    captured = weft_capture.capture(step, eager_backend, rules=CacheRules(dynamic=True))
    assert captured(torch.ones(2, 8)).shape == first  # the cache has the old one
    assert captured(torch.ones(3, 8)).shape == (3, 4, 2)
