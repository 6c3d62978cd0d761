"""Breaks inside inlined calls, at any depth: each frame goes on compiled, with its own handlers."""

import contextlib
import sys
import traceback

import pytest
import torch
from capture_check import Manager, X, check, eager_backend, same
from weft_capture import Break, capture, disable, graph_break, reset
from weft_capture.bytecode import decode
from weft_capture.execution.stepping import OuterFrame
from weft_core.events import counters

W = torch.tensor(3.0)
pytestmark = pytest.mark.filterwarnings(r"ignore:\[handler\]")  # of raised_in_callee


def ops(state):
    return sum(node.op == "call_function" or node.op == "call_method"
               for graph in state.graphs for node in graph.graph.nodes)  # fmt: skip


def shape(state):
    """Graphs, operations in them, breaks."""
    return len(state.graphs), ops(state), len(state.breaks)


# Each program: x -> result, its log last.


def leaf(x, log):
    x = x.sin()
    graph_break()
    log.append("leaf")
    return x.cos()


def middle(x, log, scale=2):
    y = x * scale
    x = leaf(y + 1, log)
    log.append("middle")
    return x - y


def three_deep(x):
    log = []
    y = x + 1
    z = middle(x, log, scale=3) * y
    return z.exp(), log


def twice(x):
    log = []
    return middle(x, log) + middle(x + 1, log), log


def loop_in_callee(x):
    def total(values, log):
        result = values[0] * 0
        for i, value in enumerate(values):
            result = result + value * i
            graph_break()
            log.append(i)
        return result * 2

    log = []
    x = x + 1
    return total([x, x * 2, x * 3], log) - 1, log


def call_in_loop(x):
    log = []
    for i in range(3):
        x = leaf(x + i, log) * 2
    return x, log


def with_in_callee(x):
    def inner(x, log):
        with Manager(log), torch.no_grad():
            x = x * 2
            graph_break()
            log.append(torch.is_grad_enabled())
            x = x * 3
        return x + 1

    log = []
    return inner(x + 1, log) * W, log, torch.is_grad_enabled()


def with_in_caller(x):
    log = []
    with torch.no_grad():
        with Manager(log):
            y = leaf(x + 1, log) * 2
        log.append(torch.is_grad_enabled())
    return y + x, log


def autocast_in_caller(x):
    log = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        y = leaf(y, log) @ y
    return y, log, (y.T @ y).dtype


def finally_in_callee(x):
    def inner(x, log):
        try:
            x = x * 2
            graph_break()
            return x + 1
        finally:
            log.append("finally")

    log = []
    return inner(x, log) * 2, log


def raised_in_callee(x):
    def fails(x, log):
        x = x * 2
        graph_break()
        log.append("raising")
        raise ValueError("from callee")

    def between(x, log):
        try:
            return fails(x, log)
        finally:
            log.append("between")

    log = []
    try:
        x = between(x + 1, log)
    except ValueError as error:
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        log.append((str(error), names[-2:]))
        x = x * 5
    return x, log


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3) * 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = x * self.weight
        return self.tail(x)

    def tail(self, x):
        graph_break()
        self.calls += 10
        return x + self.weight


class Child(Counter):
    def tail(self, x):
        return super().tail(x * 2) - 1


MODULES = torch.nn.ModuleList([Counter(), Child(), Counter()])


def modules(x):
    for module in MODULES:
        x = module(x + 1)
    calls = [module.calls for module in MODULES]
    for module in MODULES:
        module.calls = 0
    return x, calls


def nonlocal_in_callee(x):
    count = 0

    def add(v):
        nonlocal count
        count += 1
        graph_break()
        count += 10
        return v + count

    y = add(x)
    return add(y * 2), count


def closure_made_in_callee(x):
    def maker(x):
        kept = x * 2

        def get():
            return kept

        graph_break()
        kept = kept + 1
        return get, get()

    get, first = maker(x + 1)
    return get() + first


def recursion(x, depth=4):
    if depth == 0:
        graph_break()
        return x.sin()
    return recursion(x * 2, depth - 1) + depth


def with_keywords(x):
    def callee(a, *rest, flag=False, **others):
        a = a * 2
        graph_break()
        return a + sum(rest) if flag else a - others["other"]

    return callee(x, 1, 2, flag=True) + callee(x, other=x)


def mutation_pending(x):
    def callee(items, table):
        items.append(items[0] + 1)
        graph_break()
        table["n"] = len(items)
        return items[-1]

    items, table = [x * 2], {}
    y = callee(items, table)
    items.append(y)
    return items, table


def in_comprehension(x):
    return [leaf(row, []) * 2 for row in (x, x + 1)]


def in_arguments(x):
    log = []
    return torch.add(x * 2, leaf(x, log)) + middle(leaf(x, log), log), log


def in_generator(x):
    def rows(x):
        for row in x:
            yield leaf(row * 2, [])

    y = x + 1
    return sum(rows(y)) * 2


def generator_open_at_break(x):
    def rows(x):
        yield x + 1
        yield x + 2

    out = []
    for row in rows(x * 2):
        graph_break()
        out.append(row * 3)
    return out


@contextlib.contextmanager
def scope(log):
    log.append("in")
    yield 3
    log.append("out")


def contextlib_in_callee(x):
    def inner(x, log):
        with scope(log) as n:
            x = x * n
            graph_break()
            x = x + n
        return x * 2

    log = []
    return inner(x + 1, log) - 1, log


def data_dependent_in_callee(x):
    def clip(x, low):
        x = x * 2
        if x.sum() > low:
            x = x / 2
        return x + 1

    return clip(clip(x, 0), 100) * 3


def break_in_key_function(x):
    def key(item):
        graph_break()
        return -item[0]

    y = x + 1
    return [v for _, v in sorted([(1, y), (2, y * 2)], key=key)]


def while_in_callee(x):
    def inner(x):
        n = 0
        while x.sum() < 100:
            x = x * 2
            n += 1
        return x, n

    y, n = inner(x + 1)
    return y - 1, n


def decorated(x):
    @torch.no_grad()
    def inner(x):
        y = x * 2
        graph_break()
        return y + 1, torch.is_grad_enabled()

    y, enabled = inner(x)
    return y * 2, enabled, torch.is_grad_enabled()


def grad_mode_blocks(x):
    x = x.clone().requires_grad_()
    with torch.set_grad_enabled(False):
        y = x * 2
        graph_break()
        y = y + 1
    manager = torch.set_grad_enabled(False)
    z = x * 3
    graph_break()
    with manager, torch.enable_grad():
        w = leaf(x, [])
    return [t.requires_grad for t in (y, z, w)], torch.is_grad_enabled(), w.detach()


def set_grad_enabled_block(x):
    x = x.clone().requires_grad_()
    with torch.set_grad_enabled(False):
        y = x * 2
    graph_break()
    return y, torch.is_grad_enabled()


PROGRAMS = [
    grad_mode_blocks, set_grad_enabled_block,
    three_deep, twice, loop_in_callee, call_in_loop, with_in_callee, with_in_caller,
    autocast_in_caller, finally_in_callee, raised_in_callee, modules, nonlocal_in_callee,
    closure_made_in_callee, recursion, with_keywords, mutation_pending, in_comprehension,
    in_arguments, in_generator, generator_open_at_break, contextlib_in_callee,
    data_dependent_in_callee, break_in_key_function, while_in_callee, decorated,
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_nested_break_gives_eager_results(program):
    state = check(program, X + 0.5, fullgraph=False)
    assert state.breaks
    assert state.graphs


def test_parts_before_and_after_are_compiled_in_every_frame():
    """One graph before the break; behind it one in each of the three frames."""
    assert shape(check(three_deep, X, fullgraph=False)) == (4, 8, 1)


def test_loop_in_a_callee_is_compiled_once():
    shapes = []
    for n in (3, 40):

        def function(x, n=n):
            def inner(x):
                for i in range(n):
                    x = x * 2 + 1
                    graph_break()
                    x = x - i
                return x - 1

            return inner(x + 1) * 3

        optimised = capture(function, eager_backend)
        assert same(optimised(X), function(X))
        assert same(optimised(X + 1), function(X + 1))
        shapes.append(shape(optimised._weft_capture))
    assert shapes[0] == shapes[1]


def test_layers_share_the_code_behind_the_break():
    shapes = []
    for count in (2, 12):
        layers = torch.nn.ModuleList([Counter() for _ in range(count)])

        def function(x, layers=layers):
            for layer in layers:
                x = layer(x) * 0.5
            return x

        optimised = capture(function, eager_backend)
        assert same(optimised(X), function(X))
        shapes.append(shape(optimised._weft_capture))
    assert shapes[0] == shapes[1]


def test_a_loop_over_indices_stays_below_the_recompile_limit():
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(12)])

    def function(x):
        for i in range(12):
            x = layers[i](x)
            graph_break()
        return x

    optimised = capture(function, eager_backend)
    assert same(optimised(X), function(X))
    count = len(optimised._weft_capture.graphs)
    assert same(optimised(X), function(X))
    assert len(optimised._weft_capture.graphs) == count


def test_uncaught_exception_shows_each_frame_once():
    def fails(x):
        x = x * 2
        graph_break()
        raise KeyError("gone")

    def caller(x):
        return fails(x + 1) * 2

    def lines(function):
        with pytest.raises(KeyError, match="gone") as caught:
            function(X)
        return [(e.name, e.lineno) for e in traceback.extract_tb(caught.value.__traceback__)
                if e.filename == __file__ and e.name != "lines"]  # fmt: skip

    optimised = capture(caller, eager_backend)
    assert lines(optimised) == lines(caller)
    assert lines(optimised) == lines(caller)


def test_disabled_callee_of_a_callee():
    @disable
    def outside(x):
        return x + sys.getrecursionlimit() * 0

    def inner(x):
        return outside(x * 2) * 3

    def function(x):
        return inner(x + 1) - 1

    state = check(function, X, fullgraph=False)
    assert shape(state) == (3, 4, 1)


def test_gradients_flow_through_a_nested_break():
    grads = []
    for function in (three_deep, capture(three_deep, eager_backend)):
        x = X.clone().requires_grad_()
        function(x)[0].sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_each_instruction_is_traced_about_once():
    from weft_core.events import counters

    def block(x):
        x = x * 2
        x = x + 1
        graph_break()
        x = x * 3
        return x - 1

    def many(x):
        x = block(x)
        x = block(x)
        x = block(x)
        x = block(x)
        x = block(x)
        return x

    counters["capture"].clear()
    for _ in range(2):
        assert same(capture(many, eager_backend)(X), many(X))
    capture(many, eager_backend)(X)
    traced = counters["capture"]["instructions"] / 3
    executed = instructions_executed(many, X)
    assert traced < 1.5 * executed


def instructions_executed(function, *args):
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    # CPython 3.12 sends opcode events only if a frame wanted them before settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(None)
    return count


FORCED = [
    three_deep, with_in_callee, with_in_caller, raised_in_callee, nonlocal_in_callee,
    closure_made_in_callee, mutation_pending, in_comprehension, finally_in_callee,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("program", FORCED, ids=lambda p: p.__name__)
def test_all_is_taken_back_from_the_end_to_every_step(program, monkeypatch):
    """A break that is found out late gives eager's result, and nothing is executed again."""
    expected = program(X)
    step_until_break = OuterFrame.step_until_break
    ends = []

    def step(frame):
        stopped = step_until_break(frame)
        if frame.function.code is not program.__code__:
            return stopped
        ends.append(frame.tx.steps.now)
        stopped = frame.break_at(min(forced, ends[-1]), Break("graph-break"))
        breaking = stopped.frames[-1]
        if breaking.decoded.instrs[breaking.ip].opname in ("MAKE_CELL", "COPY_FREE_VARS"):
            # Nothing breaks here.
            return frame.break_at(stopped.frames[-2].step, stopped.error)
        return stopped

    monkeypatch.setattr(OuterFrame, "step_until_break", step)
    begun_again = counters["capture"]["begun_again"]
    first = [instr.opname for instr in decode(program.__code__).instrs].index("RESUME") + 1
    forced = first
    while not ends or forced <= ends[-1]:
        assert same(capture(program, eager_backend)(X), expected), forced
        forced += 1
    assert len(ends) == ends[0] - first + 1 > 15
    assert counters["capture"]["begun_again"] == begun_again
    reset()


@pytest.mark.slow
@pytest.mark.parametrize("program", FORCED, ids=lambda p: p.__name__)
def test_break_forced_at_every_step(program, monkeypatch):
    """Wherever capture stops, in whichever frame, the result is eager's."""
    expected = program(X)
    step_until_break = OuterFrame.step_until_break
    last = 0

    def step(frame):
        nonlocal last
        steps = frame.tx.steps
        if frame.function.code is program.__code__ and steps.break_at < 0:
            steps.break_at = forced
        stopped = step_until_break(frame)
        last = max(last, steps.now)
        return stopped

    monkeypatch.setattr(OuterFrame, "step_until_break", step)
    forced = 1
    while forced <= last + 1:
        assert same(capture(program, eager_backend)(X), expected), forced
        forced += 1
    assert forced > 20
    reset()
