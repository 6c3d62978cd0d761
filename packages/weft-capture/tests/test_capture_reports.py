"""What became of each frame is told: in the report, and once in a warning where it is lost."""

import collections
import enum
import functools
import gc
import warnings

import pytest
import torch
import weft_capture
from capture_check import X, eager_backend, same
from weft_capture import capture, graph_break, report, reset
from weft_core.errors import Unsupported
from weft_core.events import counters, set_logs
from weft_guards import CacheRules


@pytest.fixture(autouse=True)
def _clean():
    reset()
    yield
    reset()


def rows(x):
    yield x + 1
    yield x * 2


def helper(x):
    x = x * 2
    graph_break()
    return x + 1


def function(x, scale):
    x = helper(x) * scale
    return x - 1


def frame_of(name):
    (found,) = [frame for frame in report().frames if frame.name == name]
    return found


def test_report_lists_graphs_ops_breaks_guards_and_hits():
    optimised = capture(function, eager_backend, rules=CacheRules(dynamic=False))
    for _ in range(3):
        optimised(X, 2.0)
    optimised(X.double(), 2.0)
    outer = frame_of("function")
    inner = frame_of("helper")
    assert (outer.pieces, outer.graphs, outer.ops) == (2, 4, 6)
    assert (inner.pieces, inner.graphs, inner.ops) == (1, 2, 2)
    assert [record.code for record in outer.breaks] == ["graph-break"] * 2
    assert outer.breaks[0].user_stack[-1].name == "helper"
    assert outer.guards > 0
    assert outer.hits >= 4
    assert len(outer.recompiles) == 2
    text = str(report())
    assert text.startswith("2 frames, 6 graphs, 2 breaks, 0 frames partly or wholly eager")
    assert f"[graph-break] at {__file__}" in text
    assert "(2 times)" in text


def test_reset_drops_the_records():
    capture(function, eager_backend)(X, 2.0)
    kept = capture(function, eager_backend)
    kept(X, 2.0)
    assert report().frames
    reset()
    assert not report().frames


def test_frame_that_cannot_be_rebuilt_is_reported_once(monkeypatch):
    def refuse(*args, **kwargs):
        raise weft_capture.Break("cannot-rebuild", "rebuilding this")

    monkeypatch.setattr("weft_capture.convert.Assembly.draft", refuse)
    optimised = capture(helper, eager_backend)
    with pytest.warns(UserWarning, match=r"\[cannot-rebuild\] helper runs eagerly") as caught:
        for _ in range(3):
            assert same(optimised(X), helper(X))
    assert len(caught) == 1
    assert "What to do" in str(caught[0].message)
    assert [record.code for record in frame_of("helper").lost] == ["cannot-rebuild"]
    assert report().lost


def test_recompile_limit_is_in_the_report():
    def shifted(x, items):
        return x + len(items)

    optimised = capture(shifted, eager_backend)
    with pytest.warns(UserWarning, match="recompile-limit"):
        for n in range(10):
            optimised(X, (None,) * n)
    frame = frame_of("test_recompile_limit_is_in_the_report.<locals>.shifted")
    assert [record.code for record in frame.lost] == ["recompile-limit"]


def test_open_generator_breaks_where_it_was_made():
    """Its frame goes on compiled; nothing is lost."""

    def program(x):
        y = x + 1
        out = []
        for row in rows(y):
            graph_break()
            out.append(row * 3)
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimised = capture(program, eager_backend)
        assert same(optimised(X), program(X))
    assert not report().lost
    assert report().graph_count >= 2


def caught(x, y):
    try:
        int("none")
    except ValueError as error:
        kept = error
    graph_break()
    return x + y, kept.__traceback__.tb_lineno


def holds_itself(x, y):
    kept = collections.deque([1])
    kept.append(kept)
    graph_break()
    return x + y, kept[1] is kept


def member_of_two(x, y):
    class Color(enum.Flag):
        RED = 1
        BLUE = 2

    kept = Color.RED | Color.BLUE
    graph_break()
    return x + y * kept.value, str(kept)


def named_by_its_class(x, y):
    class Kind:
        @functools.cached_property
        def scale(self):
            return 3

    kept = Kind()
    graph_break()
    return x + y * kept.scale, "scale" in vars(kept)


def hashes_itself(x, y):
    class Key:
        def __init__(self, number):
            self.number, self.seen = number, []

        def __hash__(self):
            return self.number

    kept = {Key(1): 2, Key(2): 3}
    graph_break()
    return x + y, list(kept.values())


def needs_its_place(x, y):
    kept = []
    for n in range(3):
        try:
            member_of_two(x, n)
            int("none")
        except ValueError as error:
            kept.append(error)
    graph_break()
    return x + y, [error.__traceback__.tb_lineno for error in kept]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [caught, holds_itself, member_of_two, named_by_its_class, hashes_itself, needs_its_place],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_what_cannot_be_rebuilt_loses_only_a_piece(program):
    def outer(x):
        y = x.sin() * 2
        first = program(x, y)
        return [*program(first[0], y), *first]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimised = capture(outer, eager_backend)
        for _ in range(2):
            assert same(optimised(X), outer(X))
    assert not report().lost
    assert report().graph_count >= 2


def test_what_follows_a_handler_is_compiled():
    def program(x, bad):
        for i in range(3):
            try:
                x = x * 2
                x = x + int("1" if i != bad else "none")
            except ValueError:
                x = x - 10
            x = x * 3
        return x

    optimised = capture(program, eager_backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in (1, 5, 0):
            assert same(optimised(X, bad), program(X, bad))
    assert not report().lost


def test_an_exception_that_a_handler_lets_through_loses_nothing():
    def program(x, table, key):
        x = x * 2
        try:
            x = x + table[len(str(key))].pop()
        except KeyError:
            x = x - 10
        return x * 3

    optimised = capture(program, eager_backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for table in ({1: []}, {}, {1: [2]}):
            for _ in range(2):
                outcomes = []
                for function in (program, optimised):
                    try:
                        outcomes.append(function(X, {k: list(v) for k, v in table.items()}, 1))
                    except IndexError as error:
                        outcomes.append(repr(error))
                assert same(*outcomes)
    assert not report().lost


def test_a_handler_that_breaks_is_reported():
    def program(x):
        try:
            x = x * 2
            int("none")
        except ValueError as error:
            gc.collect(len(error.args))
            x = x - 10
        return x * 3

    optimised = capture(program, eager_backend)
    with pytest.warns(UserWarning, match=r"\[handler\] .*program from line \d+ on"):
        assert same(optimised(X), program(X))
    assert same(optimised(X), program(X))
    assert len(report().lost) == 1


def test_loops_after_a_break_say_that_they_are_loops():
    def program(x):
        for i in range(3):
            x = x * 2
            graph_break()
            x = x + i
        return x

    counters["graph_break"].clear()
    assert same(capture(program, eager_backend)(X), program(X))
    assert counters["graph_break"]["loop"]
    assert not counters["graph_break"]["generator"]


class Gives:
    def __call__(self, x):
        return x * 2

    def times(self, x, k):
        return x * k

    twice = functools.partialmethod(times, k=2)


class Wraps(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


ENTRIES = [
    torch.relu,
    torch.nn.functional.gelu,
    torch.nn.functional.relu,
    torch.ops.aten.sin.default,
    X.add,
    functools.partial(torch.add, X),
    functools.partial(Gives()),
    Gives().twice,
    Wraps(Gives()).__call__,
    Wraps(Wraps(torch.nn.ReLU())).__call__,
    staticmethod(helper),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=map(str, range(len(ENTRIES))))
def test_what_has_no_frame_of_its_own_is_compiled_too(entry):
    assert same(capture(entry, eager_backend)(X), entry(X))
    assert sum(frame.graphs for frame in report().frames) > 0


@pytest.mark.filterwarnings("ignore:.*(deprecated|not supported in Python 3.14)")
def test_scripted_functions_are_refused_in_full_graphs():
    with pytest.raises(Unsupported, match="ScriptFunction"):
        capture(torch.jit.trace(torch.sin, X), eager_backend, fullgraph=True)(X)


class Slotted:
    __slots__ = ("inner", "weight")


def deep(holder):
    return holder.inner.inner.inner.weight * 2


def test_what_is_compiled_is_captured_wherever_its_tensors_are():
    holder = None
    for _ in range(4):
        outer = Slotted()
        outer.inner, outer.weight, holder = holder, X, outer
    assert torch.equal(capture(deep, eager_backend)(holder), X * 2)
    assert frame_of("deep").graphs == 1

    def outside(holder):
        graph_break()
        return (lambda one: one.weight + 1)(holder)

    assert torch.equal(capture(outside, eager_backend)(holder), X + 1)
    assert frame_of(
        "test_what_is_compiled_is_captured_wherever_its_tensors_are.<locals>.outside"
    ).ops


def test_what_reads_values_is_not_said_to_fail_in_eager():
    captured = weft_capture.capture(lambda x: torch.tensor([x[:1]]) + 1, lambda gm, _: gm.forward)
    assert captured(torch.ones(3)).tolist() == [2.0]
    assert [record.code for record in captured._weft_capture.breaks] == ["data-dependent-value"]
    with pytest.raises(Unsupported, match="view: shape") as caught:
        weft_capture.capture(lambda x: x.view(7), lambda gm, _: gm.forward, fullgraph=True)(
            torch.ones(3)
        )
    assert "if the operation raises there too" in str(caught.value)


class Counter:
    steps, kind = 0, None


counter, seen = Counter(), {}


def with_effects(x):
    print(f"at {counter.steps}")
    counter.steps += 1
    seen["last"] = "x"
    Counter.kind = "counts"
    y = x * 2
    print(f"sum {y.sum()}")
    return y


def test_the_log_of_side_effects_names_calls_and_writes_in_order(caplog):
    set_logs(side_effects=True)
    try:
        capture(with_effects, eager_backend)(X)
        capture(helper, eager_backend)(X)
    finally:
        set_logs(side_effects=False)
    first, *rest = (record.getMessage() for record in caplog.records)
    assert first.splitlines() == [
        "side effects of with_effects",
        "  call print before the graph",
        "  call print after the graph",
        "  write G['counter'] (Counter): steps",
        "  write G['seen'] (dict)",
        "  write Counter.kind",
    ]
    assert rest and all(text.splitlines()[1:] == ["  none"] for text in rest)
    assert (counter.steps, seen, Counter.kind) == (1, {"last": "x"}, "counts")


def item(x, items):
    return x + items[1] + items[-1] + len(items)


def test_an_item_of_a_list_is_read_without_a_guard_on_the_others():
    optimised = capture(item, eager_backend, rules=CacheRules(dynamic=False))
    items = list(range(1000))
    for index, graphs in ((0, 1), (500, 1), (-1, 2), (1, 3)):
        items[index] += 1
        assert torch.equal(optimised(X, items), item(X, items))
        assert frame_of("item").graphs == graphs
    assert frame_of("item").guards < 100


def test_a_list_that_was_read_item_by_item_is_read_whole():
    def function(x, items):
        first, last = items[0], items[-1]
        items[0].append(3)
        return x + sum(map(len, items)) + len(first) + len(last), first is items[0], items

    optimised = capture(function, eager_backend)
    for items in ([[1], [2, 2]], [[1], [2, 2], []]):
        ours = optimised(X, [list(one) for one in items])
        theirs = function(X, [list(one) for one in items])
        assert torch.equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]
