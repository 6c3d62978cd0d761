"""Graph breaks inside exception handlers and with blocks: the interpreter's state must be real."""

import sys
import traceback

import pytest
import torch
from weft_capture import capture, graph_break, reset
from weft_capture.bytecode import decode
from weft_capture.execution.stepping import OuterFrame

# Handlers that break the graph run eagerly from there on, and say so.
pytestmark = pytest.mark.filterwarnings(r"ignore:\[handler\]")


class Manager:
    """A context manager that logs, breaks the graph and swallows some exceptions."""

    def __init__(self, log, swallow=()):
        self.log = log
        self.swallow = swallow

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, kind, value, where):
        graph_break()
        self.log.append((kind, repr(value), where is not None))
        return kind is not None and issubclass(kind, self.swallow)


def handled(x, log):
    try:
        y = x + 1
        raise ValueError("a")
    except ValueError as error:
        graph_break()
        log.append((str(error), sys.exc_info()[0], error.__traceback__ is not None))
        return y * 2


def raised_again(x, log):
    try:
        raise ValueError("a")
    except ValueError:
        graph_break()
        try:
            raise
        except ValueError as error:
            log.append(repr(error))
            return x * 2


def context_of_another(x, log):
    try:
        raise ValueError("a")
    except ValueError:
        graph_break()
        try:
            raise KeyError("b")
        except KeyError as error:
            log.append(repr(error.__context__))
            return x * 2


def swallowed(x, log):
    with Manager(log, (KeyError,)):
        x = x + 1
        raise KeyError("k")
    return x * 2


def passed_on(x, log):
    with Manager(log):
        x = x + 1
        raise KeyError("k")
    return x * 2


def nested(x, log):
    with Manager(log, (ValueError,)), Manager(log):
        x = x + 1
        graph_break()
        if x.sum() > 0:
            raise ValueError("v")
        x = x - 1
    return x * 2


def finally_runs(x, log):
    try:
        int("q")
    finally:
        graph_break()
        log.append(x + 1)
    return x


def in_a_loop(x, log):
    for i in range(3):
        try:
            if i == 1:
                raise ValueError(i)
            log.append(x * i)
        except ValueError as error:
            graph_break()
            log.append((x + i, error.args))
            continue
        finally:
            graph_break()
    return x


def helper(x):
    if x.shape[0] == 3:
        raise KeyError("in")
    return x


def raised_by_an_inlined_call(x, log):
    try:
        return helper(x + 1)
    except KeyError as error:
        graph_break()
        log.append(len(traceback.extract_tb(error.__traceback__)))
        return x - 1


def grad_mode_object(x, log):
    mode = torch.no_grad()
    with mode:
        y = x * 2
        graph_break()
        log.append(torch.is_grad_enabled())
        z = y * 3
    log.append(torch.is_grad_enabled())
    return z + x


def autocast_block(x, log):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x[None] @ x[:, None]
        graph_break()
        z = y @ y
    log.append(z.dtype)
    return z.float() @ y.float()


PROGRAMS = [
    handled, raised_again, context_of_another, swallowed, passed_on, nested, finally_runs,
    in_a_loop, raised_by_an_inlined_call, grad_mode_object, autocast_block,
]  # fmt: skip


def outcome(function):
    """Result or exception with its lines in this file, the log, and the grad mode after it."""
    log: list = []
    x = torch.ones(3, requires_grad=True)
    try:
        result = repr(function(x, log))
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == __file__ and frame.name != "outcome"
        ]
        result = (type(error), str(error), lines)
    return result, repr(log), torch.is_grad_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_break_inside(program):
    expected = outcome(program)
    optimised = capture(program, lambda graph, inputs: graph.forward)
    assert outcome(optimised) == expected
    assert outcome(optimised) == expected


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_break_forced_at_every_instruction(program, monkeypatch):
    expected = outcome(program)
    step_until_break = OuterFrame.step_until_break
    names = [instr.opname for instr in decode(program.__code__).instrs]
    for forced in range(names.index("RESUME") + 1, len(names)):

        def step(frame, forced=forced):
            if frame.function.code is program.__code__ and frame.tx.steps.break_at < 0:
                frame.tx.steps.break_at = forced
            return step_until_break(frame)

        monkeypatch.setattr(OuterFrame, "step_until_break", step)
        optimised = capture(program, lambda graph, inputs: graph.forward)
        assert outcome(optimised) == expected, forced
        assert outcome(optimised) == expected, forced
        reset()
