"""Output, clocks and random numbers: run in every call, in order, around one graph."""

import contextlib
import io
import logging
import os
import random
import sys
import time
import uuid
import warnings
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
import weft_capture
from capture_check import X, eager_backend, same
from weft_core.errors import Unsupported

LOG = logging.getLogger("weft_test.deferred_calls")
SEEN = []


@pytest.fixture(autouse=True)
def _logger():
    LOG.setLevel(logging.INFO)
    yield
    LOG.setLevel(logging.NOTSET)
    SEEN.clear()


def observe(function, args, calls=2):
    """Return what some calls did: results, text, records and warnings with their places."""
    random.seed(5)
    torch.manual_seed(5)
    SEEN.clear()
    outcomes = []
    for _ in range(calls):
        text = io.StringIO()
        handler = logging.StreamHandler(text)
        handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s:%(lineno)d %(message)s"))
        LOG.addHandler(handler)
        with contextlib.ExitStack() as stack:
            stack.callback(LOG.removeHandler, handler)
            stack.enter_context(contextlib.redirect_stdout(text))
            stack.enter_context(contextlib.redirect_stderr(text))
            warned = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            try:
                result = function(*[arg.clone() for arg in args])
            except (ValueError, KeyError, TypeError) as error:
                result = repr(error)
        places = [(str(w.message), w.category, w.filename, w.lineno) for w in warned]
        outcomes.append((result, text.getvalue(), places, list(SEEN)))
    return outcomes


def agrees(function, *args, whole=True):
    """Compare eager with captured code; `whole` demands that there is one graph and no break."""
    args = args or (X,)
    expected = observe(function, args)
    optimised = weft_capture.capture(function, eager_backend, fullgraph=whole)
    assert same(expected, observe(optimised, args))
    return expected, optimised._weft_capture


def breaks(function, code, *args):
    """The program breaks for this reason, and does what eager does."""
    _, state = agrees(function, *args, whole=False)
    assert code in [record.code for record in state.breaks]
    with pytest.raises(Unsupported) as caught:
        weft_capture.capture(function, eager_backend, fullgraph=True)(*(args or (X,)))
    assert caught.value.code == code


# ---- print


class Named:
    def __init__(self):
        self.number = 1

    def __str__(self):
        return f"Named {self.number}"


def prints_in_order(x):
    SEEN[:] = ["one"]
    print("seen", SEEN)
    y = x + 1
    SEEN.append("two")
    print("seen", SEEN, len(SEEN), sep="|", end="!\n")
    named = Named()
    print(named, [named.number])
    named.number = 2
    print(named, {"a": (1, None)}, x.shape, x.dtype)
    return y * 2


def prints_tensors(x):
    y = x * 2
    print(x, y.sum())
    print(f"mean {y.mean():.3f} of {y} and {y.sum().item():8.2f}", y.sum().item())
    return y


def prints_in_loops_and_calls(x):
    def inner(text, times):
        for i in range(times):
            print(text, i)
            yield i

    for i in inner("first", 2):
        x = x + i
        print("then", i)
    sys.stderr.write("error text")
    print("done", file=sys.stderr, flush=True)
    return x + sys.stdout.write("abc"), sorted([2, 1], key=lambda n: print("key", n) or n)


def prints_then_raises(x):
    print("before")
    y = x + 1
    print("sum", y.sum())
    raise ValueError("late")


def prints_in_a_handler(x):
    try:
        raise KeyError("k")
    except KeyError as error:
        print("caught", error)
    with torch.no_grad():
        print("inside")
        return x + 1


def formats_text(x):
    y = x.sum()
    return f"{y}", f"{y:.2f}", str(x), [f"{x.shape[0]}"]


@pytest.mark.parametrize(
    "function",
    [
        prints_in_order, prints_tensors, prints_in_loops_and_calls, prints_then_raises,
        prints_in_a_handler, formats_text,
    ],
)  # fmt: skip
def test_output_around_one_graph(function):
    expected, state = agrees(function, whole=function is not prints_then_raises)
    assert expected[0][1] or function is formats_text
    assert [one.code for one in state.breaks if one.code != "uncaught-exception"] == []


def test_print_goes_to_the_stream_of_the_call(capsys):
    def program(x):
        print("hello")
        return x + 1

    optimised = weft_capture.capture(program, eager_backend, fullgraph=True)
    optimised(X)
    assert capsys.readouterr().out == "hello\n"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        optimised(X)
    assert (text.getvalue(), capsys.readouterr().out) == ("hello\n", "")


def test_a_tensor_is_printed_as_it_was():
    def in_place(x):
        y = x + 1
        print(y)
        y.add_(1)
        return y

    def through_a_view(x):
        text = f"{x}"
        x[0].add_(1)
        print(text)
        return x * 2

    def number(x):
        total = x.double().sum()
        before = total.item()
        total.add_(1)
        print(before)
        return before

    breaks(in_place, "data-dependent-value")
    breaks(through_a_view, "data-dependent-value")
    agrees(number)


def test_the_history_of_a_tensor_is_shown_as_eager_shows_it():
    weight = torch.nn.Parameter(torch.ones(2))

    def program(x):
        y = (weight * 2).sum()
        print(y)
        return x + y.detach()

    breaks(program, "data-dependent-value")


def test_output_that_the_program_may_look_at_is_real():
    class Stream(io.StringIO):
        def write(self, text):
            SEEN.append(("written", len(SEEN)))
            return super().write(text)

    stream, buffer = Stream(), io.StringIO()

    def own_stream(x):
        SEEN.append("before")
        print("x", file=stream)
        SEEN.append("after")
        return x + 1

    def read_back(x):
        print("a", file=buffer)
        text = buffer.getvalue()[-2:]
        print("b", file=buffer)
        return x + 1, text

    def in_try(x):
        try:
            print("may fail")
        finally:
            SEEN.append("after")
        return x + 1

    def effect_in_text(x):
        class Loud:
            def __str__(self):
                print("inner")
                return "text"

        print("outer", Loud())
        return x + 1

    breaks(own_stream, "side-effect")
    breaks(read_back, "c-function")
    breaks(in_try, "side-effect")
    breaks(effect_in_text, "special-method")


def test_output_stays_on_its_side_of_a_break():
    def inner(x):
        print("in 1")
        x = x + 1
        if x.sum() > 0:
            print("in 2", random.randint(1, 9))
        print("in 3")
        return x

    def program(x):
        print("out 1")
        number = random.random()
        for i in range(3):
            x = inner(x)
            SEEN.append(i)
            print("out", i, SEEN)
        print("out 2", number)
        return x, number

    breaks(program, "data-dependent-branch")


def test_checkpointed_output_is_real():
    def noisy(x):
        print("ran")
        return x * 2

    def program(x):
        return torch.utils.checkpoint.checkpoint(noisy, x, use_reentrant=False)

    breaks(program, "higher-order-op")


# ---- logging and warnings


def logs(x):
    items = [1]
    LOG.info("items %s and %d", items, 3)
    items.append(2)
    LOG.warning("items %s", items)
    LOG.debug("not shown %s", x)
    y = x + 1
    LOG.info("loss %.2f", y.sum())
    return y + LOG.isEnabledFor(logging.DEBUG)


def test_records_know_their_place(caplog):
    agrees(logs)

    def program(x):
        LOG.info("hello %s", "you")
        return x + 1

    weft_capture.capture(program, eager_backend, fullgraph=True)(X)
    (record,) = [record for record in caplog.records if record.msg == "hello %s"]
    assert (record.funcName, record.args, record.filename) == (
        "program", ("you",), Path(__file__).name,
    )  # fmt: skip


def test_a_changed_level_is_seen():
    optimised = weft_capture.capture(logs, eager_backend, fullgraph=True)
    for level in (logging.DEBUG, logging.WARNING, logging.CRITICAL):
        LOG.setLevel(level)
        expected = observe(logs, (X,), calls=1)
        assert same(expected, observe(optimised, (X,), calls=1))

    def quiet(x):
        LOG.info("a")
        LOG.setLevel(logging.ERROR)
        LOG.info("b")
        LOG.setLevel(logging.INFO)
        LOG.info("c")
        return x + 1

    LOG.setLevel(logging.INFO)
    agrees(quiet, whole=False)


def test_a_handler_of_the_program_is_called_for_real():
    class Handler(logging.Handler):
        def emit(self, record):
            SEEN.append((record.getMessage(), len(SEEN)))

    logger = logging.Logger("weft_test.own", logging.INFO)
    logger.addHandler(Handler())

    def program(x):
        SEEN.append("before")
        logger.info("message")
        SEEN.append("after")
        return x + 1

    def disabled(x):
        logger.debug("message")
        return x + 1

    breaks(program, "side-effect")
    agrees(disabled)


def warns(x):
    def inner(text):
        warnings.warn(text, DeprecationWarning)
        return 1

    warnings.warn("outer")
    return x + inner("inner")


def about_the_caller(x):
    warnings.warn("about the caller", stacklevel=2)
    return x + 1


def test_warnings_know_their_place():
    expected, _ = agrees(warns)
    assert [place[0] for place in expected[0][2]] == ["outer", "inner"]
    with pytest.raises(Unsupported, match="caller"):
        weft_capture.capture(about_the_caller, eager_backend, fullgraph=True)(X)


def test_one_graph_for_all_seeds():
    def function(x, seed):
        random.seed(seed + 1)
        torch.manual_seed(seed)
        return x + torch.rand(3), random.random()

    optimised = weft_capture.capture(function, eager_backend, fullgraph=True)
    for seed in (5, 6, 7, 10**12, 8):
        found, expected = optimised(X, seed), function(X, seed)
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert len(optimised._weft_capture.graphs) == 2


def test_filters_of_the_call_decide():
    optimised = weft_capture.capture(warns, eager_backend)
    for action, count in (("always", 2), ("ignore", 0), ("always", 2)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter(action)
            optimised(X)
        assert len(seen) == count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="outer"):
            optimised(X)


def softmax(x):
    return torch.nn.functional.softmax(x) + x.std(0, correction=9).nan_to_num()


@pytest.mark.parametrize("action", ["default", "always", "error", "once", "ignore"])
def test_operators_warn_as_in_eager(action):
    def given(function):
        globals().pop("__warningregistry__", None)
        warnings.onceregistry.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter(action)
            for _ in range(3):
                try:
                    function(X)
                except UserWarning as error:
                    seen.append(str(error))
        return [w if isinstance(w, str) else (str(w.message), w.filename, w.lineno) for w in seen]

    optimised = weft_capture.capture(softmax, eager_backend)
    assert given(softmax) == given(optimised) == given(optimised)
    assert [one.code for one in optimised._weft_capture.breaks[:1]] in (["warns"], ["side-effect"])


# ---- random numbers


def draws(x):
    scale, count = random.uniform(1, 2), random.randint(1, 5)
    y = x * scale + count
    rows = random.choices("ab", k=2), random.sample(range(9), 3), random.gauss(0, 1)
    print(scale, f"{scale:.3f}", rows[2])
    return y, scale * 2 - 1, -count, count + 1, rows, scale > 1.5, random.choice([1.5, 2.5]) * y


def draws_integers(x):
    number = random.randrange(3)
    return x.long() + number, (x > 1) + number, x.half() * number, x.double() - number


def shuffles(x):
    items = [1, 2, 3, 4]
    random.shuffle(items)
    SEEN[:] = "abcd"
    random.shuffle(SEEN)
    return x + items[0], items, len(SEEN)


def seeds(x):
    random.seed(3)
    own = random.Random("seed")
    torch.manual_seed(2)
    return x + torch.rand(x.shape), own.random(), own.randint(0, 9), random.random()


@pytest.mark.parametrize("function", [draws, draws_integers, shuffles, seeds])
def test_random_numbers_are_those_of_eager(function):
    expected, _ = agrees(function)
    if function is not seeds:
        assert not same(expected[0][0], expected[1][0])


def branches(x):
    return x + 1 if random.random() < 0.5 else x - 1


def counts(x):
    for i in range(random.randint(1, 3)):
        x = x + i
    return x


def powers(x):
    return x + 1, random.gauss(0, 1) ** 0.5


def rounds(x):
    return x + 1, int(random.random() * 10), round(random.random(), 2)


def chooses_tensors(x):
    return random.choice([x, x + 1])


def narrow(x):
    return x.to(torch.uint8) + random.randint(1, 9)


def test_what_depends_on_a_random_number_breaks():
    breaks(branches, "data-dependent-branch")
    for function in (counts, powers, rounds, narrow):
        breaks(function, "data-dependent-value")
    agrees(chooses_tensors, whole=False)


# ---- clocks, ids, the environment


def test_clocks_stand_around_the_graph():
    def program(x):
        start = time.perf_counter()
        time.sleep(0.002)
        y = x + 1
        time.sleep(0.002)
        return y, time.perf_counter() - start

    optimised = weft_capture.capture(program, eager_backend, fullgraph=True)
    readings = [optimised(X)[1] for _ in range(3)]
    assert min(readings) >= 0.004
    assert len(set(readings)) == 3


def test_a_clock_between_operations_is_read_there():
    def program(x):
        start = time.perf_counter()
        y = x + 1
        middle = time.perf_counter()
        z = y * 2
        return z, start <= middle <= time.perf_counter()

    breaks(program, "side-effect")


def test_ids_differ():
    def program(x):
        one = uuid.uuid4()
        return x + 1, one != uuid.uuid4(), one

    optimised = weft_capture.capture(program, eager_backend, fullgraph=True)
    first, second = optimised(X), optimised(X)
    assert first[1] and second[1] and first[2] != second[2]


def test_environment_variables_are_guarded(monkeypatch):
    def program(x):
        known = os.environ.get("WEFT_TEST_A", "none"), os.getenv("WEFT_TEST_B")
        os.environ["WEFT_TEST_B"] = known[0] + "!"
        return x + 1, known, os.environ["WEFT_TEST_B"], "WEFT_TEST_C" in os.environ

    monkeypatch.setenv("WEFT_TEST_B", "")
    optimised = weft_capture.capture(program, eager_backend, fullgraph=True)
    for value in ("1", "2", "1"):
        monkeypatch.setenv("WEFT_TEST_A", value)
        monkeypatch.delenv("WEFT_TEST_B")
        result = optimised(X)
        assert result[1:] == ((value, None), value + "!", False)
        assert os.environ["WEFT_TEST_B"] == value + "!"
