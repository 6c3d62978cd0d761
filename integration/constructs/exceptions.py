"""try, except, else, finally, raise, chaining, groups."""

import contextlib
import traceback

import torch

from constructs import case


class Problem(Exception):
    def __init__(self, code, detail="none"):
        super().__init__(f"problem {code}")
        self.code = code
        self.detail = detail


class Worse(Problem):
    pass


def fail(n):
    if n > 1:
        raise Problem(n)
    raise ValueError("small", n)


@case
def try_except_else_finally(x):
    log = []
    try:
        y = x + 1
    except ValueError:
        log.append("except")
    else:
        log.append("else")
    finally:
        log.append("finally")
    return y, log


@case
def caught_from_a_call(x):
    try:
        fail(3)
    except Problem as error:
        return x * error.code, error.detail, str(error), error.args


@case
def caught_by_tuple(x):
    for n in (1, 2):
        try:
            fail(n)
        except (KeyError, ValueError) as error:
            x = x + error.args[1]
        except (TypeError, Problem):
            x = x * 5
    return x


@case
def caught_by_base_class(x):
    try:
        raise Worse(4, detail="bad")
    except Problem as error:
        return x + 1, type(error).__name__, error.detail, isinstance(error, Exception)


@case
def bare_except(x):
    try:
        [][1]
    except:  # noqa: E722
        return x + 1
    return x


@case
def bare_raise(x):
    try:
        try:
            fail(2)
        except Problem:
            x = x + 1
            raise
    except Problem as error:
        return x, error.code


@case
def raise_from(x):
    try:
        try:
            fail(1)
        except ValueError as error:
            raise Problem(7) from error
    except Problem as error:
        cause = error.__cause__
        return x + 1, type(cause).__name__, cause.args, error.__suppress_context__


@case
def raise_from_none(x):
    try:
        try:
            fail(1)
        except ValueError:
            raise Problem(7) from None
    except Problem as error:
        return x + 1, error.__cause__, error.__suppress_context__, type(error.__context__).__name__


@case
def implicit_context(x):
    try:
        try:
            fail(1)
        except ValueError:
            {}["missing"]
    except KeyError as error:
        context = error.__context__
        return x + 1, type(context).__name__, context.args, error.__cause__


@case
def context_of_inlined_call(x):
    def handler():
        raise Problem(1)

    try:
        try:
            fail(1)
        except ValueError:
            handler()
    except Problem as error:
        return x + 1, type(error.__context__).__name__


@case
def no_context_after_handler(x):
    try:
        fail(1)
    except ValueError:
        x = x + 1
    try:
        raise Problem(2)
    except Problem as error:
        return x, error.__context__


@case
def name_unbound_after_except(x):
    try:
        fail(1)
    except ValueError as error:
        x = x + len(error.args)
    try:
        error
    except UnboundLocalError:
        return x


@case
def finally_runs_on_exception(x):
    log = []

    def inner():
        try:
            fail(2)
        finally:
            log.append("cleaned")

    try:
        inner()
    except Problem:
        log.append("caught")
    return x + 1, log


@case
def return_overridden_by_finally(x):
    def inner():
        try:
            return 1
        finally:
            return 2  # noqa: B012

    return x + inner()


@case
def finally_swallows(x):
    def inner():
        try:
            raise ValueError("lost")
        finally:
            return x * 2  # noqa: B012

    return inner()


@case
def nested_handlers(x):
    try:
        try:
            try:
                fail(2)
            except ValueError:
                x = x * 0
            finally:
                x = x + 1
        except KeyError:
            x = x * 0
    except Problem:
        x = x + 10
    return x


@case
def exception_in_handler_and_finally(x):
    order = []
    try:
        try:
            raise ValueError(1)
        except ValueError:
            order.append("first")
            raise TypeError(2)
        finally:
            order.append("finally")
    except TypeError as error:
        order.append(type(error.__context__).__name__)
    return x + 1, order


@case
def loop_with_try(x):
    results = []
    for value in ("1", "x", "3"):
        try:
            results.append(int(value))
        except ValueError as error:
            results.append(str(error))
            continue
        x = x + results[-1]
    return x, results


@case
def uncaught_builtin_error(x):
    y = x + 1
    return {"a": y}["b"]


@case
def uncaught_user_error(x):
    y = x + 1
    fail(5)
    return y


@case
def uncaught_chained(x):
    try:
        fail(1)
    except ValueError as error:
        raise Problem(x.shape[0]) from error


@case
def index_and_key_errors(x):
    seen = []
    for action in (lambda: [1][5], lambda: {}[2], lambda: None.a, lambda: 1 + "a", lambda: 1 / 0):
        try:
            action()
        except Exception as error:
            seen.append((type(error).__name__, str(error)))
    return x + 1, seen


@case
def stop_iteration_value(x):
    def gen():
        yield 1
        return 5

    g = gen()
    next(g)
    try:
        next(g)
    except StopIteration as stop:
        return x + stop.value


@case
def exception_attributes_and_notes(x):
    try:
        error = Problem(3)
        error.extra = [1]
        error.add_note("a note")
        raise error
    except Problem as caught:
        return x + 1, caught.extra, caught.__notes__, caught is error


@case(inputs=lambda: (torch.ones(2), ValueError(3)))
def outside_exception_gets_attributes(x, error):
    before = hasattr(error, "extra")
    error.extra = [1]
    return x + 1, before, error.extra, error.args


@case
def exception_equality_and_identity(x):
    a, b = ValueError(1), ValueError(1)
    return x + 1, a == b, a is a, a != b, repr(a), str(a), bool(a)


@case
def raise_class_and_instance(x):
    kinds = []
    for thing in (ValueError, ValueError("a"), KeyError):
        try:
            raise thing
        except (ValueError, KeyError) as error:
            kinds.append(error.args)
    return x * 2, kinds


@case
def raise_non_exception(x):
    try:
        raise 3
    except TypeError as error:
        return x + 1, str(error)


@case
def except_group(x):
    log = []
    try:
        raise ExceptionGroup("many", [ValueError(1), TypeError(2), ValueError(3)])
    except* ValueError as group:
        log.append([error.args for error in group.exceptions])
    except* TypeError as group:
        log.append(len(group.exceptions))
    return x + 1, log


@case
def except_group_single(x):
    try:
        raise ValueError("plain")
    except* ValueError as group:
        x = x + len(group.exceptions)
    return x


@case
def except_group_rest_raised(x):
    try:
        try:
            raise ExceptionGroup("g", [ValueError(1), KeyError("k")])
        except* ValueError:
            x = x * 2
    except ExceptionGroup as rest:
        return x, rest.message, [type(e).__name__ for e in rest.exceptions]


@case
def groups_that_may_be_refused(x):
    errors = [ValueError(1)]
    for given in ((3, errors), ("m", []), ("m", [KeyboardInterrupt()])):
        with contextlib.suppress(TypeError, ValueError):
            x = x + len(ExceptionGroup(*given).exceptions)
    group = BaseExceptionGroup("m", errors)
    group.add_note("n")
    return x, type(group), group.split(ValueError)[0].add_note("o"), group.__notes__


@case
def suppress(x):
    with contextlib.suppress(KeyError, ValueError):
        fail(1)
        x = x * 0
    return x + 1


@case
def error_from_property_and_getattr(x):
    class Thing:
        @property
        def broken(self):
            raise ValueError("broken")

    found = getattr(Thing(), "missing", "default")
    try:
        Thing().broken
    except ValueError as error:
        return x + 1, found, str(error)


@case
def traceback_object(x):
    try:
        fail(2)
    except Problem as error:
        return x + 1, error.__traceback__ is not None


@case
def exception_as_value(x):
    errors = []
    for n in range(3):
        try:
            fail(n)
        except Exception as error:
            errors.append(error)
    return x + len(errors), [type(e).__name__ for e in errors]


@case
def generator_raises_through_loop(x):
    def gen():
        yield 1
        raise Problem(9)

    total = 0
    try:
        for value in gen():
            total += value
    except Problem as error:
        total += error.code
    return x + total


@case
def frames_of_a_traceback_cleared(x):
    try:
        raise Problem(2)
    except Problem as error:
        traceback.clear_frames(error.__traceback__)
        return x + error.code


@case
def notes_that_cannot_be_added(x):
    texts = []
    for notes in ([], 42):
        error = ValueError(1)
        error.__notes__ = notes
        for note in ("a", 3):
            try:
                error.add_note(note)
            except TypeError as refused:
                texts.append(str(refused))
        texts.append(error.__notes__)
    return x + 1, texts


@case
def kept_over_a_break(x):
    kept = []
    for n in range(4):
        try:
            fail(n)
        except (Problem, ValueError) as error:
            kept.append(error)
    if x.sum() > 1e9:
        x = x + 1
    return x + 1, kept, [len(traceback.extract_tb(error.__traceback__)) for error in kept]


@case
def traceback_handed_on_over_a_break(x):
    try:
        fail(2)
    except Problem as error:
        trace = error.__traceback__
    if x.sum() > 1e9:
        x = x + 1
    try:
        raise IndexError(3).with_traceback(trace)
    except IndexError as error:
        return x + 1, error.__traceback__.tb_next is trace


@case
def class_of_an_oserror(x):
    try:
        raise OSError(17, "there is one")
    except FileExistsError as error:
        return x + 1, type(error).__name__, error.errno, error.args


class Trimmed(ValueError):
    def __new__(cls, text, more):
        made = super().__new__(cls, text)
        made.more = more
        return made


@case
def exception_made_by_its_own_new(x):
    error = Trimmed("a", 3)
    return x + error.more, error.args
