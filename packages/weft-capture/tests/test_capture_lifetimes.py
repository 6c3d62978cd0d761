"""When objects die, and what a traceback still shows of frames that were split."""

import dataclasses
import gc
import weakref

import torch
import weft_capture

X = torch.ones(2)


def run(graph, inputs):
    return graph.forward


def agree(function, *args):
    """Check that a captured function does what it does as it is."""
    expected = function(*args)
    assert weft_capture.capture(function, run)(*args) == expected


class Held:
    pass


def test_an_empty_cell_of_the_frame_raises_as_there():
    def function(x):
        def inner():
            total = (x + 1).sum().item()
            print(later, total)  # noqa: F821

            def read():
                return later

            later = read

        try:
            inner()
        except NameError as error:
            return type(error), str(error), error.__traceback__.tb_next.tb_lineno

    agree(function, X)


def frames_of(error):
    trace, found = error.__traceback__.tb_next, []
    while trace:
        frame = trace.tb_frame
        found.append((trace.tb_lineno, frame.f_lineno, frame.f_code.co_name))
        trace = trace.tb_next
    return found


def ends_in_finally(x):
    try:
        (x + 1) / len(x[:0].tolist()) + [][1]
    finally:
        pass


def ends_in_another_handler(x):
    try:
        (x + 1).view(7)
    except TypeError:
        pass


def test_the_frame_of_an_exception_stands_where_it_ended():
    for function in (ends_in_finally, ends_in_another_handler):
        shown = []
        for one in (function, weft_capture.capture(function, run)):
            try:
                one(X)
            except (IndexError, RuntimeError) as error:
                shown.append([row for row in frames_of(error) if row[2] == function.__name__])
        assert shown[0] == shown[1]
        assert shown[0]


def test_a_function_that_was_captured_is_let_go():
    def function(x):
        held = Held()
        seen = []

        def inner():
            return held

        seen.append(inner() is held)
        torch._C._get_tracing_state()
        return x + len(seen), inner

    captured = weft_capture.capture(function, run)
    result = captured(X)
    reference = weakref.ref(result[1])
    del result
    gc.collect()
    assert reference() is None


def test_the_class_of_a_dataclass_is_the_class_it_was_made_of():
    def function(x):
        plain = type("Point", (), {"__annotations__": {"x": int}})
        made = dataclasses.dataclass(plain)
        print(end="")
        return made is plain, dataclasses.asdict(plain(1)), made == plain, (x + 1).tolist()

    agree(function, X)
