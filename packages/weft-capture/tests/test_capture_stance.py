"""Every stance, as a function, a block and a decorator."""

import pytest
import torch
import weft_capture
from weft_capture import set_stance
from weft_capture.policy import stance
from weft_core.errors import InvalidOption, WeftError


@pytest.fixture(autouse=True)
def default():
    yield
    set_stance("default")


class Backend:
    """Counts compilations and calls of compiled code, and keeps the graphs' inputs."""

    def __init__(self):
        self.inputs = []
        self.calls = 0

    def __call__(self, graph, inputs):
        self.inputs.append(inputs)

        def run(*args):
            self.calls += 1
            return graph(*args)

        return run


def program(x):
    return x.sin() + 1


def make(function=program, **options):
    backend = Backend()
    return weft_capture.capture(function, backend, **options), backend


def call(compiled, size=3):
    x = torch.ones(size)
    assert torch.equal(compiled(x), program(x))


def test_force_eager():
    compiled, backend = make()
    with set_stance("force_eager"):
        call(compiled)
        assert stance.active.name == "force_eager"
    assert (len(backend.inputs), backend.calls, stance.active) == (0, 0, None)
    call(compiled)
    assert backend.calls == 1


def test_eager_on_recompile_uses_what_is_there():
    compiled, backend = make()
    call(compiled, 3)
    with set_stance("eager_on_recompile"):
        call(compiled, 3)
        call(compiled, 4)
        call(make()[0])
    assert (len(backend.inputs), backend.calls) == (1, 2)


def test_fail_on_recompile_tells_the_guard():
    compiled, backend = make()
    call(compiled, 3)
    with set_stance("fail_on_recompile"):
        call(compiled, 3)
        with pytest.raises(WeftError, match="size of dim 0 of .*3 -> 4"):
            call(compiled, 4)
        with pytest.raises(WeftError, match="program would be compiled"):
            call(make()[0])
    call(compiled, 4)
    assert len(backend.inputs) == 2


def test_eager_then_compile_knows_two_sizes_at_the_first_compile():
    compiled, backend = make()
    with set_stance("eager_then_compile"):
        call(compiled, 3)
        assert not backend.inputs
        for size in (4, 5, 6):
            call(compiled, size)
    assert (len(backend.inputs), backend.calls) == (1, 3)


def test_aot_eager_then_compile_compiles_the_first_call_otherwise():
    first = Backend()
    compiled, backend = make(first_backend=first)
    with set_stance("aot_eager_then_compile"):
        for size in (3, 4, 5):
            call(compiled, size)
    assert (first.calls, len(backend.inputs), backend.calls) == (1, 1, 2)
    call(compiled, 6)
    assert (first.calls, len(backend.inputs)) == (1, 1)


def test_force_backend():
    compiled, backend = make()
    other = Backend()
    with set_stance(force_backend=other):
        call(compiled)
        call(compiled)
    call(compiled)
    assert (other.calls, len(other.inputs), backend.calls) == (2, 1, 1)
    with pytest.raises(WeftError, match="force_backend"):
        set_stance("force_eager", force_backend=other)


def test_as_a_decorator_it_holds_during_calls():
    compiled, backend = make()

    @set_stance("force_eager")
    def caller():
        call(compiled)
        return stance.active.name

    assert stance.active is None
    assert caller() == "force_eager"
    assert stance.active is None
    assert backend.calls == 0


def test_as_a_function_it_holds_for_good():
    compiled, backend = make()
    set_stance("force_eager")
    call(compiled)
    set_stance("default")
    call(compiled)
    assert backend.calls == 1


def test_unknown_stances_are_refused():
    with pytest.raises(InvalidOption, match="force_eager"):
        set_stance("force_eagre")
    assert stance.active is None
