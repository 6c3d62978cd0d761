"""with: user classes, contextlib, ExitStack, several at once."""

import contextlib
import io

import torch

from constructs import case


class Manager:
    def __init__(self, log, name="m", swallow=()):
        self.log, self.name, self.swallow = log, name, swallow

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        return self

    def __exit__(self, kind, error, traceback):
        self.log.append(f"exit {self.name} {kind.__name__ if kind else None}")
        return kind is not None and issubclass(kind, self.swallow)


@contextlib.contextmanager
def scaled(log, factor):
    log.append("in")
    try:
        yield factor
    except ValueError:
        log.append("handled")
    finally:
        log.append("out")


@case
def user_class(x):
    log = []
    with Manager(log) as m:
        y = x + len(m.name)
    return y, log


@case
def swallows_exception(x):
    log = []
    with Manager(log, swallow=(KeyError,)):
        {}["k"]
        x = x * 0
    return x + 1, log


@case
def lets_exception_through(x):
    log = []
    try:
        with Manager(log, swallow=(KeyError,)):
            raise ValueError("v")
    except ValueError:
        log.append("outside")
    return x + 1, log


@case
def several_managers(x):
    log = []
    with Manager(log, "a") as a, Manager(log, "b") as b:
        x = x + len(a.name + b.name)
    return x, log


@case
def parenthesised_managers(x):
    log = []
    with (
        Manager(log, "a"),
        scaled(log, 3) as factor,
    ):
        x = x * factor
    return x, log


@case
def contextmanager_decorator(x):
    log = []
    with scaled(log, 2) as factor:
        x = x * factor
    return x, log


@case
def contextmanager_handles_exception(x):
    log = []
    with scaled(log, 2):
        raise ValueError("inside")
    return x + 1, log


@case
def contextmanager_lets_through(x):
    log = []
    try:
        with scaled(log, 2):
            raise KeyError("inside")
    except KeyError as error:
        log.append(error.args)
    return x + 1, log


@case
def contextmanager_as_function_decorator(x):
    log = []

    @scaled(log, 2)
    def f(y):
        log.append("body")
        return y + 1

    return f(x) + f(x), log


@case
def return_inside_with(x):
    log = []

    def f():
        with Manager(log):
            return x + 1

    return f(), log


@case
def loop_control_inside_with(x):
    log = []
    for i in range(3):
        with Manager(log, str(i)):
            if i == 0:
                continue
            if i == 1:
                break
    return x + i, log


@case
def exit_stack(x):
    log = []
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(Manager(log, "a"))
        factor = stack.enter_context(scaled(log, 4))
        stack.callback(log.append, "callback")
        x = x * factor + len(a.name)
    return x, log


@case
def exit_stack_in_loop(x):
    log = []
    with contextlib.ExitStack() as stack:
        for name in "abc":
            stack.enter_context(Manager(log, name))
        x = x + 1
    return x, log


@case
def exit_stack_with_exception(x):
    log = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log, "a", swallow=(ValueError,)))
        stack.push(Manager(log, "b").__exit__)
        raise ValueError("v")
    return x + 1, log


@case
def exit_stack_pop_all(x):
    log = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(Manager(log, "a"))
        kept = stack.pop_all()
    log.append("after")
    kept.close()
    return x + 1, log


@case
def nullcontext(x):
    with contextlib.nullcontext(x + 1) as y:
        return y * 2


@case
def closing(x):
    class Resource:
        closed = False

        def close(self):
            self.closed = True

    with contextlib.closing(Resource()) as resource:
        x = x + 1
    return x, resource.closed


@case
def suppress_nested(x):
    with contextlib.suppress(ValueError):
        with contextlib.suppress(KeyError):
            {}["a"]
        x = x + 1
        raise ValueError
    return x


@case
def context_decorator_class(x):
    class Doubler(contextlib.ContextDecorator):
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

    @Doubler()
    def f(y):
        return y * 2

    return f(x)


@case
def redirect_stdout(x):
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        print("captured")
    return x + 1, buffer.getvalue()


@case
def grad_modes(x):
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = torch.is_grad_enabled()
    return a, b, torch.is_grad_enabled()


@case
def manager_from_outside(x):
    with OUTER:
        y = x + 1
    return y, OUTER.log.pop(), OUTER.log.pop()


OUTER = Manager([], "outer")


@case
def enter_raises(x):
    class Bad:
        def __enter__(self):
            raise ValueError("enter")

        def __exit__(self, *error):
            return True

    try:
        with Bad():
            x = x * 0
    except ValueError as error:
        return x + 1, str(error)


@case
def exit_replaces_exception(x):
    class Replace:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            raise KeyError("new")

    try:
        with Replace():
            raise ValueError("old")
    except KeyError as error:
        return x + 1, type(error.__context__).__name__


@case
def yield_inside_with(x):
    log = []

    def gen():
        with Manager(log):
            yield 1
            yield 2

    return x + sum(gen()), log


@case
def not_a_manager(x):
    try:
        with 3:
            pass
    except TypeError as error:
        return x + 1, str(error)


@contextlib.contextmanager
def doubled(x, log):
    log.append("in")
    try:
        with torch.no_grad():
            yield x * 2
    except ValueError as error:
        log.append(error.args[0])
    finally:
        log.append(("out", torch.is_grad_enabled()))


@case
def contextmanager_over_break(x):
    log = []
    with doubled(x, log) as y:
        y = y + int(x.sum())
        log.append(torch.is_grad_enabled())
        x = x + 1
        raise ValueError("raised")
    return x + y, log, torch.is_grad_enabled()


@case
def exit_stack_over_break(x):
    log = []
    with contextlib.ExitStack() as stack:
        y = stack.enter_context(doubled(x, log)) + stack.enter_context(doubled(x + 1, log))
        n = int(x.sum())
        log.append(n)
    return x + y + n, log


@case
def exit_stack_of_a_real_error(x):
    log = []
    with contextlib.ExitStack() as stack:
        stack.push(lambda kind, error, trace: log.append((kind, str(error), trace is None)))
        stack.enter_context(Manager(log, "a", (RuntimeError,)))
        stack.push(lambda kind, error, trace: log.append(trace is error.__traceback__ is not None))
        x = x + 1
        torch.ones(2) @ torch.ones(3)
    return x, log
