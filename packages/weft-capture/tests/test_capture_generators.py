"""A generator that has started when the graph breaks goes on behind the break as eager's does."""

import contextlib
import inspect
import warnings

import pytest
import torch
import weft_capture
from capture_check import X, eager_backend


def counting(log):
    total = 0
    for i in range(4):
        got = yield total + i
        total += 0 if got is None else got
    return total


def nested_loops(log):
    for i in range(3):
        for j in (10, 20):
            log.append((i, j))
            yield [i + j for _ in range(2)]


def guarded(log):
    try:
        yield 1
        try:
            yield 2
        except KeyError as error:
            log.append(error.args)
            yield 3
        finally:
            log.append("inner")
        yield 4
    finally:
        log.append("outer")


def delegating(log):
    with contextlib.suppress(ValueError):
        log.append((yield from counting(log)))
    yield from [7, 8]
    yield from guarded(log)


def with_cells(log):
    kept = 5

    def add(n):
        nonlocal kept
        kept += n
        return kept

    yield add(1)
    yield add(2), kept
    log.append(add(3))


def in_call(log):
    log.append(str((yield 1)) + repr((yield 3)))
    log.append(f"{(yield 'a')}-{(yield 'b')}")


def tensors(log):
    x = torch.ones(2)
    while True:
        with torch.no_grad():
            got = yield x, torch.is_grad_enabled()
        x = x * 2 if got is None else x + got
        log.append(torch.is_grad_enabled())


GENERATORS = (counting, nested_loops, guarded, delegating, with_cells, in_call, tensors)


def outcome(step):
    try:
        return "yields", step()
    except StopIteration as stop:
        return "returns", stop.value
    except (KeyError, ValueError, RuntimeError, AttributeError) as error:
        return "raises", type(error), error.args


def program(function, before, way, x):
    """Step `before` times, break, and go on one way and then to the end."""
    log = []
    generator = function(log)
    seen = [outcome(lambda: next(generator)) for _ in range(before)]
    weft_capture.graph_break()
    seen.append(inspect.getgeneratorstate(generator))
    if way == "send" and before:
        seen.append(outcome(lambda: generator.send(3)))
    if way == "throw":
        seen.append(outcome(lambda: generator.throw(KeyError("thrown"))))
    if way == "throw value":
        seen.append(outcome(lambda: generator.throw(ValueError("thrown"))))
    if way == "close":
        seen.append(outcome(lambda: generator.close()))
    for _ in range(7):
        seen.append(outcome(lambda: next(generator)))
    seen.append((generator.__name__, generator.__qualname__))
    generator.close()
    return seen, log, x + 1


@pytest.mark.every(3)
@pytest.mark.sampled
@pytest.mark.parametrize("way", ["next", "send", "throw", "throw value", "close"])
@pytest.mark.parametrize("function", GENERATORS, ids=lambda function: function.__name__)
def test_a_started_generator_goes_on_behind_a_break(function, way):
    for before in range(6):
        expected = program(function, before, way, X)
        compiled = weft_capture.capture(program, eager_backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # handlers that run eagerly
            for _ in range(2):
                found = compiled(function, before, way, X)
                assert repr(found) == repr(expected), before
        codes = [record.code for record in compiled._weft_capture.breaks]
        assert codes[0] == "graph-break", codes


def dropped(function, before, x):
    log = []
    generator = function(log)
    for _ in range(before):
        next(generator, None)
    generator = None
    log.append("after")
    return log, len(x + 1)


@pytest.mark.slow
@pytest.mark.parametrize("function", GENERATORS, ids=lambda function: function.__name__)
def test_a_dropped_generator_runs_its_handlers(function):
    for before in range(4):
        expected = dropped(function, before, X)
        compiled = weft_capture.capture(dropped, eager_backend)
        for _ in range(2):
            assert compiled(function, before, X) == expected, before
            assert torch.is_grad_enabled()


def test_a_generator_inside_of_autocast_is_made_for_real():
    def block():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield torch.ones(2, 2) @ torch.ones(2, 2)

    def run():
        generator = block()
        y = next(generator)
        weft_capture.graph_break()
        inside = torch.is_autocast_enabled("cpu")
        generator.close()
        return y.dtype, inside, torch.is_autocast_enabled("cpu")

    compiled = weft_capture.capture(run, eager_backend)
    assert compiled() == run() == (torch.bfloat16, True, False)
    reasons = [(record.code, record.detail) for record in compiled._weft_capture.breaks]
    assert any(code == "generator" and "graph's mode" in detail for code, detail in reasons)
