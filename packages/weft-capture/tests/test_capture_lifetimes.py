"""When objects die, and what a traceback still shows of frames that were split."""

import dataclasses
import gc
import itertools
import types
import weakref

import pytest
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


@pytest.mark.slow
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


class Loud:
    alive = 0

    def __del__(self):
        type(self).alive -= 1


def test_what_a_container_lets_go_of_dies_there():
    def function(x, held, named):
        y = x + 1
        named["one"] = None
        del named, held
        return y.tolist(), Loud.alive

    def fresh():
        Loud.alive = 3
        return [Loud(), Loud()], {"one": Loud()}

    assert function(X, *fresh()) == weft_capture.capture(function, run)(X, *fresh())


def test_reversed_reads_its_list_live():
    def function(x):
        items = [1, 2, 3, 4]
        backwards = reversed(items)
        first = next(backwards)
        items[:] = [10, 20, 30, 40, 50]
        print(end="")
        return first, list(backwards), type(backwards).__name__, (x + 1).tolist()

    agree(function, X)


def test_a_group_ends_when_the_next_is_asked_for():
    def function(x):
        groups = itertools.groupby([1, 1, 2, 2, 3])
        first = next(groups)
        second = next(groups)
        taken = next(second[1])
        return list(first[1]), taken, list(second[1]), [k for k, _ in groups], (x + 1).tolist()

    agree(function, X)


class Names(dict):
    pass


def test_a_mappingproxy_shows_what_is_written():
    def function(x, table):
        shown, seen = types.MappingProxyType(table), table.keys().mapping
        table["a"] = 1
        try:
            shown["b"] = 2
        except TypeError as error:
            text = str(error)
        return dict(shown), len(seen), text, shown == table, list(shown), (x + 1).tolist()

    agree(function, X, {})


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_views_of_a_dict_subclass_stay_views():
    def function(x):
        table = Names()
        keys = table.keys()
        torch._C._get_tracing_state()
        shown = keys.mapping
        table["a"] = x + 1
        return list(keys), len(shown), table["a"].tolist()

    agree(function, X)


def test_an_iterator_that_its_own_function_holds():
    def function(x):
        def ask():
            return x.tolist() and 2

        ask.iterator = iter(ask, 2)
        print(end="")
        return next(ask.iterator, "end"), ask.iterator is ask.iterator

    agree(function, X)


class Wrong(int):
    __eq__ = str.__eq__
    __hash__ = int.__hash__


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_method_of_another_class_refuses():
    def function(x):
        try:
            return Wrong(1) == Wrong(1)
        except TypeError as error:
            return str(error), (x + 1).tolist()

    agree(function, X)


def test_a_variable_that_nothing_reads_keeps_its_object():
    def hold(seen, one):
        inner = Held()
        seen += [weakref.ref(inner), weakref.ref(one)]
        return [reference() is None for reference in seen]

    def function(x, first):
        seen = [weakref.ref(first)]
        made, other = Held(), Held()
        seen.append(weakref.ref(other))
        while_held = hold(seen, made)
        other = None
        total = (x + 1).sum().item()
        return while_held, total, [reference() is None for reference in seen]

    expected = function(X, Held())
    assert expected[2] == [False, True, True, False]
    assert weft_capture.capture(function, run)(X, Held()) == expected


def test_a_tensor_that_nothing_reads_dies_at_the_break():
    def function(x, ask):
        big = x + 1
        seen = weakref.ref(big, dead.append)  # with a callback: it is made for real
        held = Held()
        ask(held)
        return seen() is None, x * 2

    ask = torch._C._get_tracing_state
    dead = []
    captured = weft_capture.capture(function, run)
    assert captured(X, lambda held: ask())[0]
    assert len(dead) == 1


def test_who_watches_an_object_hears_when_a_variable_lets_go_of_it():
    def function(x, registry):
        seen = []
        made = Held()
        registry["made"] = made
        reference = weakref.ref(made, seen.append)
        before = len(seen), len(registry)
        made = None
        return (x + 1).tolist(), before, len(seen), len(registry), reference() is None

    expected = function(X, weakref.WeakValueDictionary())
    assert expected[1:] == ((0, 1), 1, 0, True)
    captured = weft_capture.capture(function, run)
    for _ in range(2):
        assert captured(X, weakref.WeakValueDictionary()) == expected


@pytest.mark.slow
def test_a_weak_container_made_here_forgets_what_only_the_frame_held():
    def function(x):
        made, kept = Held(), Held()
        registry = weakref.WeakValueDictionary(made=made, kept=kept)
        return x + len(registry), registry, kept

    x, registry, kept = weft_capture.capture(function, run, fullgraph=True)(X)
    assert torch.equal(x, X + 2)
    gc.collect()
    assert dict(registry) == {"kept": kept}
    del kept
    assert len(registry) == 0


def test_what_a_capture_looked_at_dies_when_the_program_lets_go():
    def function(x):
        alive = []
        for _ in range(2):
            held = Loud()
            seen = []

            def ask(held=held, seen=seen):
                seen.append(held)
                return held

            ask()
            del ask, held
            seen.clear()
            alive.append(Loud.alive)
        return alive, (x + 1).tolist()

    gc.disable()
    try:
        Loud.alive = 2
        expected = function(X)
        Loud.alive = 2
        assert weft_capture.capture(function, run)(X) == expected
    finally:
        gc.enable()


def test_what_was_a_key_dies_when_the_program_lets_go():
    def function(x, table):
        return x + len(dict(table)), list(set(table))

    gc.disable()
    try:
        key = Held()
        table = weakref.WeakKeyDictionary({key: 1})
        x, keys = weft_capture.capture(function, run)(X, table)
        assert torch.equal(x, X + 1) and keys == [key]
        del key, keys
        assert len(table) == 0
    finally:
        gc.enable()


def closing(log):
    try:
        yield 1
        yield 2
    finally:
        log.append("closed")


def left_at_once(x, log):
    try:
        for _ in closing(log):
            raise ValueError
    except ValueError:
        log.append("handler")
    return x.tolist()


def left_after_a_break(x, log):
    try:
        for i, j in zip(closing(log), closing(log), strict=True):
            weft_capture.graph_break()
            if i + j > 2:
                raise ValueError
    except ValueError:
        log.append("handler")
    return x.tolist()


def left_by_a_callee(x, log):
    def callee():
        for i in closing(log):
            return i

    log.append(callee())
    return x.tolist()


def also_a_variable(x, log):
    kept = closing(log)
    try:
        for _ in kept:
            raise ValueError
    except ValueError:
        log.append("handler")
    return x.tolist()


def left_in_a_handler(x, log):
    for _ in closing(log):
        for _ in closing(log):
            try:
                log.append(1 // 0)
            except ZeroDivisionError:
                log.append("handler")
                break
        log.append("left")
    log.append("after")
    return x.tolist()


LEAVING = [left_at_once, left_after_a_break, left_by_a_callee, also_a_variable, left_in_a_handler]


@pytest.mark.slow
@pytest.mark.parametrize("function", LEAVING)
def test_a_generator_that_a_loop_leaves_ends_there(function):
    theirs, ours = [], []
    gc.disable()  # nothing waits for it
    try:
        assert function(X, theirs) == weft_capture.capture(function, run)(X, ours)
        assert theirs == ours
        gc.collect()
        assert theirs == ours
    finally:
        gc.enable()


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("function", LEAVING)
def test_a_capture_leaves_no_frame_to_the_collector(function):
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        weft_capture.capture(function, run)(X, [])
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, types.FrameType)]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
