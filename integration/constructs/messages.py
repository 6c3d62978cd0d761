"""print, logging, warnings: kept, and in order."""

import functools
import io
import logging
import sys
import warnings

import torch

from constructs import case

log = logging.getLogger("constructs.messages")


@case
def print_constant(x):
    y = x + 1
    print("hello", 3, sep="-")
    return y * 2


@case
def print_in_order_with_effects(x):
    print("one")
    y = x + 1
    print("two", end="!\n")
    z = y * 2
    print(f"three {y.shape[0]}")
    return z


@case
def print_tensor(x):
    y = x + 1
    print(y.sum())
    return y


@case
def print_in_loop(x):
    for i in range(3):
        x = x + i
        print("step", i)
    return x


@case
def print_to_stderr_and_flush(x):
    print("problem", file=sys.stderr, flush=True)
    return x + 1


@case
def print_in_inlined_call(x):
    def note(text):
        print("note:", text)
        return len(text)

    return x + note("abc")


@case
def write_to_stdout(x):
    sys.stdout.write("raw\n")
    return x + 1


@case
def logging_info(x):
    y = x + 1
    log.info("value %d", 3)
    log.debug("not shown")
    return y * 2


@case
def logging_warning_with_arguments(x):
    log.warning("careful: %s", [1, 2])
    return x + 1


@case
def logging_level_test(x):
    if log.isEnabledFor(logging.DEBUG):
        x = x + 1
    return x * 2


@case
def logging_exception(x):
    try:
        raise ValueError("v")
    except ValueError:
        log.error("failed", exc_info=False)
    return x + 1


@case
def warn(x):
    y = x + 1
    warnings.warn("careful")
    return y * 2


@case
def warn_with_category(x):
    warnings.warn("old", DeprecationWarning, stacklevel=2)
    return x + 1


@case
def catch_warnings(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("silent")
        x = x + 1
    return x


@case
def catch_warnings_recorded(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("recorded")
    return x + len(seen), str(seen[0].message)


@case
def warning_as_error(x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            warnings.warn("now an error")
        except UserWarning as error:
            return x + 1, str(error)


@case
def catch_warnings_default(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        warnings.warn("once")
    warnings.warn("after")
    return x + len(seen), seen[0].category, seen[0].lineno > 0


@case
def catch_warnings_filter(x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="skip", category=UserWarning)
        warnings.warn("skip this")
        warnings.warn("not this")
        x = x * 2
    warnings.warn("skip this")
    return x


@case
def catch_warnings_nested(x):
    with warnings.catch_warnings(record=True) as a:
        warnings.simplefilter("always")
        warnings.warn("one")
        with warnings.catch_warnings(record=True) as b:
            warnings.simplefilter("always")
            warnings.warn("two")
        warnings.warn("three")
    return x + 1, [str(w.message) for w in a], [str(w.message) for w in b]


@case
def catch_warnings_with_operations(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y = x.std(0, correction=2)
        warnings.warn("mine")
    return y, len(seen)


@case
def catch_warnings_over_break(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("one")
        n = int(x.sum() > 3)
        warnings.warn("two")
    warnings.warn("three")
    return x + n, [str(w.message) for w in seen]


@case
def warn_levels(x):
    def g():
        warnings.warn("in g", RuntimeWarning, stacklevel=2)
        warnings.warn(UserWarning("made"))

    g()
    return x + 1


@case
def warn_unknown_text(x):
    warnings.warn(f"mean is {x.mean()}", RuntimeWarning)
    return x + 1


@case
def warning_error_uncaught(x):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.warn("bad", RuntimeWarning)
    except RuntimeWarning as error:
        text = str(error)
    warnings.warn("later")
    return x + 1, text


@case
def warn_in_method(x):
    class C:
        def go(self, v):
            warnings.warn("dep", DeprecationWarning, stacklevel=2)
            return v + 1

    return C().go(x)


@case
def warn_three_up(x):
    def a():
        warnings.warn("deep", stacklevel=4)

    def b():
        a()

    def c():
        b()

    c()
    return x + 1


@case
def warn_message_object(x):
    class W(UserWarning):
        pass

    warnings.warn(W("q"))
    warnings.warn(DeprecationWarning("a", "b"))
    return x + 1


@case
def catch_in_loop(x):
    out = []
    for i in range(3):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            warnings.warn(f"n{i}")
        out.append(str(w[0].message))
    return x + 1, out


@case
def catch_exception_through(x):
    before = len(warnings.filters)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raise ValueError("v")
    except ValueError:
        pass
    return x + 1, len(warnings.filters) == before


@case
def catch_decorated(x):
    def quiet(f):
        @functools.wraps(f)
        def g(*a):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return f(*a)

        return g

    @quiet
    def h(v):
        warnings.warn("hidden")
        return v * 2

    return h(x)


@case
def simplefilter_left(x):
    old = warnings.filters[:]
    warnings.simplefilter("ignore", ResourceWarning)
    warnings.warn("r", ResourceWarning)
    n = len(warnings.filters) - len(old)
    warnings.filters[:] = old
    return x + 1, n


@case
def catch_with_linear(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.nn.functional.relu(x - 1)
        warnings.warn("no")
    return y.sum()


@case
def swap_stdout(x):
    old = sys.stdout
    sys.stdout = buf = io.StringIO()
    print("in")
    sys.stdout = old
    print("out")
    return x + 1, buf.getvalue()
