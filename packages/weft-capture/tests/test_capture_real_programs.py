"""Small programs with what libraries and training scripts do, which once broke or were wrong."""

import collections
import functools
import importlib.metadata
import itertools
import operator
import textwrap
import threading

import numpy as np
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


class Marking(type):
    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.is_marked = True
        return made


class Positive(metaclass=Marking):
    def __init__(self, x):
        self.value = x * 2
        if x.sum() < 0:
            self.value = -self.value


def test_metaclass_calls_a_constructor_that_breaks():
    def step(x):
        made = Positive(x)
        return made.value + 1, made.is_marked

    captured = weft_capture.capture(step, eager_backend)
    for x in (torch.ones(2), -torch.ones(2), torch.ones(2)):
        assert same(captured(x), step(x))
    assert {record.code for record in captured._weft_capture.breaks} == {"data-dependent-branch"}


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


ITERATORS = {
    "chain": lambda: itertools.chain([1], (2, 3)),
    "islice": lambda: itertools.islice(itertools.count(), 3),
    "product": lambda: itertools.product([1, 2], [3]),
    "ordered": lambda: iter(collections.OrderedDict(a=1, b=2).items()),
    "deque": lambda: iter(collections.deque([1, 2])),
    "bytes": lambda: iter(b"ab"),
    "callable": lambda: iter([1, 2, 0].copy().pop, 1),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_loop_over_an_iterator_from_outside(name):
    def step(x, items):
        found = []
        for item in items:
            x = x + 1
            found.append(item)
        return x, found

    captured = weft_capture.capture(step, eager_backend)
    for _ in range(2):
        assert same(
            captured(torch.ones(2), ITERATORS[name]()), step(torch.ones(2), ITERATORS[name]())
        )
    assert {record.code for record in captured._weft_capture.breaks} == {"loop"}


# ---- generators of random numbers


class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.generator)
        return x + noise, torch.rand(2), torch.randperm(3, generator=self.generator)


def test_generator_of_a_module_is_drawn_from_in_each_call():
    eager, x = Noise(), torch.ones(2, 3)
    captured = weft_capture.capture(Noise(), eager_backend, fullgraph=True)
    found = []
    for program in (eager, captured):
        torch.manual_seed(0)
        found.append([program(x) for _ in range(3)])
    assert same(*found)


def test_generator_made_and_seeded_in_the_frame():
    def step(x):
        generator = torch.Generator(device="cpu")
        generator.manual_seed(7)
        drawn = torch.randint(0, 9, (4,), generator=generator)
        return x + drawn, generator.device, generator.initial_seed()

    check(step, torch.ones(4))


def test_default_generator_and_the_graph_draw_in_order():
    def step(x, generator):
        return x + torch.rand(2), torch.rand(2, generator=generator), torch.rand(2)

    captured = weft_capture.capture(step, eager_backend)
    found = []
    for program in (step, captured):
        torch.manual_seed(0)
        generators = torch.Generator().manual_seed(1), torch.default_generator, None
        found.append([program(torch.ones(2), generator) for generator in generators])
    assert same(*found)


def test_generator_with_sizes_that_vary():
    def step(x, generator):
        noise = torch.randn(x.shape, generator=generator)
        order = torch.randperm(x.shape[0], generator=generator)
        filled = torch.empty_like(x.t()).uniform_(-1, 1, generator=generator)
        normal = torch.normal(0.0, 2.0, (x.shape[0] * 2,), generator=generator)
        x = x.clone().exponential_(generator=generator)
        return x[order] + noise, torch.rand(x.shape[0] + 1, generator=generator), filled, normal

    captured = weft_capture.capture(
        step, eager_backend, fullgraph=True, rules=CacheRules(dynamic=True)
    )
    for size in (2, 3, 20):
        generators = [torch.Generator().manual_seed(size) for _ in range(2)]
        x = torch.ones(size, 3)
        assert same(captured(x, generators[0]), step(x, generators[1]))
        assert same(*(generator.get_state() for generator in generators))
    assert len(captured._weft_capture.graphs) == 1


def test_generators_of_numpy():
    def step(x, outside):
        own = np.random.default_rng(5)
        kept = torch.from_numpy(own.random(3) > 0.5)
        drawn = outside.normal(0, 1, size=(2, 3)).astype(np.float32)
        return x * kept + torch.from_numpy(drawn), own.integers(9), outside.permutation(3)

    captured = weft_capture.capture(step, eager_backend, fullgraph=True)
    found = []
    for program in (step, captured):
        outside = np.random.default_rng(0)
        found.append([program(torch.ones(2, 3), outside) for _ in range(3)])
    assert same(*found)


# ---- orders, matrices, modes


def orders(x):
    array = x.numpy()
    return array[:, 0].argsort(), np.argsort(array, axis=None), np.argsort(array, 0)


@pytest.mark.parametrize("special", [None, 0.5, float("nan"), float("inf")])
def test_argsort_of_numpy_where_elements_are_equal(special):
    torch.manual_seed(0)
    other, x = torch.randn(5, 3), torch.randn(5, 3)
    if special is not None:
        x[1:3, :2] = special
    captured = weft_capture.capture(orders, eager_backend, fullgraph=True)
    for tensor in (other, x):
        assert same(captured(tensor), orders(tensor))


def test_stable_argsort_of_numpy():
    check(lambda x: np.argsort(x.numpy(), kind="stable"), torch.tensor([2, 1, 2, 0, 1]))


def normal(mean, factor):
    covariance = factor @ factor.mT + torch.eye(3)
    # torch's Dynamo, once loaded, turns off what is not asked for.
    distribution = torch.distributions.MultivariateNormal(mean, covariance, validate_args=True)
    return distribution.log_prob(mean + 1), distribution.entropy()


def test_multivariate_normal_checks_its_covariance_in_the_graph():
    torch.manual_seed(0)
    check(normal, torch.randn(3), torch.randn(3, 3))
    check(normal, torch.randn(4, 3), torch.randn(4, 3, 3))


@pytest.mark.parametrize(
    "matrix",
    [-torch.eye(2), torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.full((2, 2), float("nan"))],
    ids=["negative", "asymmetric", "nan"],
)
def test_matrix_that_is_no_covariance_raises_as_in_eager(matrix):
    def step(matrix):
        normal = torch.distributions.MultivariateNormal(torch.zeros(2), matrix, validate_args=True)
        return normal.entropy()

    captured = weft_capture.capture(step, eager_backend, fullgraph=True)
    captured(torch.eye(2))
    with pytest.raises(ValueError, match="to satisfy the constraint PositiveDefinite"):
        captured(matrix)


@pytest.mark.parametrize("name", ["symmetric", "positive_semidefinite", "positive_definite"])
def test_checks_of_matrices(name):
    matrices = torch.stack([torch.eye(2), -torch.eye(2), torch.zeros(2, 2), torch.ones(2, 2)])
    asymmetric = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    constraint = getattr(torch.distributions.constraints, name)
    for value in (matrices, torch.stack([asymmetric, torch.eye(2)]), torch.ones(3, 2)):
        check(constraint.check, value)


def test_hooks_on_saved_tensors_break_with_their_remedy():
    def step(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            return x.sin().exp()

    captured = weft_capture.capture(step, eager_backend)
    assert same(captured(torch.ones(3)), step(torch.ones(3)))
    assert {record.code for record in captured._weft_capture.breaks} == {"autograd-mode"}


def test_fork_rng_that_is_disabled():
    def step(x):
        with torch.random.fork_rng(enabled=False):
            return x + 1

    check(step, torch.ones(2))


# ---- audio


def pad_to_power(x):
    size = 1 << (x.shape[0] - 1).bit_length()
    other = 2 ** (x.shape[0] - 1).bit_length()
    return torch.nn.functional.pad(x, (0, size - x.shape[0])) + other, size, x.shape[0] >> other


def test_powers_of_sizes_are_numbers_of_the_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    captured = weft_capture.capture(
        pad_to_power, backend, fullgraph=True, rules=CacheRules(dynamic=True)
    )
    for size in (5, 6, 9, 17):
        x = torch.ones(size)
        assert same(captured(x), pad_to_power(x))
    (graph,) = graphs
    assert {operator.lshift, operator.rshift, operator.pow}.isdisjoint(
        node.target for node in graph.graph.nodes
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"center": False},
        {"length": 30},
        {"normalized": True, "win_length": 6},
        {"onesided": False},
    ],
)
def test_inverse_transform_is_captured(options):
    def step(spectrum, window):
        return torch.istft(spectrum * 2, 8, 2, window=window, **options) + 1

    window = torch.hann_window(options.get("win_length", 8), periodic=False) + 0.1
    spectrum = torch.randn(2, 5 if options.get("onesided", True) else 8, 20, dtype=torch.cfloat)
    spectrum.requires_grad_()
    captured = weft_capture.capture(step, eager_backend, fullgraph=True)
    found = []
    for function in (step, captured):
        result = function(spectrum, window)
        found.append([result, *torch.autograd.grad(result.pow(2).sum(), spectrum)])
    torch.testing.assert_close(*found)
    captured = weft_capture.capture(step, eager_backend)  # gaps between the windows
    with pytest.raises(RuntimeError, match="window overlap add min"):
        captured(spectrum, torch.zeros_like(window))


def test_counts_below_a_known_length():
    def shares(labels, count):
        found = torch.bincount(labels, minlength=count)
        return found, labels.bincount(minlength=7) / labels.numel()

    captured = weft_capture.capture(shares, eager_backend)
    for labels in (torch.arange(5), torch.tensor([3, 3, 0, 1, 1, 1]), torch.tensor([1, 6, 2])):
        assert same(captured(labels, 5), shares(labels, 5))  # the last has one beyond
    assert captured._weft_capture.breaks == []
    with pytest.raises(RuntimeError, match="non-negative"):
        captured(torch.tensor([-1, 2, 3]), 5)


def test_inverse_transform_of_other_shapes_is_left_to_torch():
    captured = weft_capture.capture(torch.istft, eager_backend)
    for spectrum, size in ((torch.ones(5, 4), 8), (torch.ones(5, 4, dtype=torch.cfloat), 12)):
        with pytest.raises(RuntimeError, match="istft"):
            captured(spectrum, size)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_backward_over_a_weight_that_a_hook_computes():
    """The weight of the last call keeps the AccumulateGrad nodes of its parameters alive."""

    def train(wrap):
        torch.manual_seed(0)
        model = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        losses = [step(torch.randn(4, 3)) for _ in range(3)]
        return [*losses, *model.parameters(), model.weight]

    captured = train(lambda step: weft_capture.capture(step, eager_backend, fullgraph=True))
    torch.testing.assert_close(captured, train(lambda step: step))
