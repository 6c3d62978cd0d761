"""Calls of optimised coroutine and generator functions.

The frame hook replaces the frame of such a function when it begins, and the frame of each piece
after an `await` or `yield`. A piece is a coroutine or generator itself, which waits and yields
eagerly and returns the tail call of the next piece. The object that the program holds runs the
pieces in turn. Asynchronous generators, which cannot return a value, run eagerly.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any, cast

from torch.compiler import is_dynamo_compiling

from weft_capture import frame
from weft_capture.policy.selection import has_tensor_work

_TailCall = type(frame.tail_call(cast(types.FunctionType, inspect.isawaitable)))
_KINDS = inspect.CO_GENERATOR | inspect.CO_ITERABLE_COROUTINE
SUSPENDING = _KINDS | inspect.CO_COROUTINE
_SHOWN = ("co_name", "co_qualname", "co_filename", "co_firstlineno")


def _of_kind(code: types.CodeType, flags: int) -> types.CodeType:
    return code.replace(co_flags=code.co_flags & ~_KINDS | flags)


def driven(function: Any, begin: Callable[..., Any], miss: Any) -> Callable[..., Any]:
    """Wrap a function: `begin` creates the first piece, and the hook calls `miss`."""
    original_code = function.__code__
    flags = original_code.co_flags & _KINDS
    code = _of_kind((_generator if flags else _coroutine).__code__, flags)
    names = {
        name: getattr(original_code, name) for name in _SHOWN
    }  # shown by an error before the first step
    made_by: Any = types.FunctionType(code.replace(**names), globals())

    def optimised(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # torch.compile inlines the function; see `decorators` for weft
            return function(*args, **kwargs)
        function(*args, **kwargs).close()  # raises for arguments that do not fit
        result: Any = made_by(_pieces(begin, miss, args, kwargs))
        result.__name__, result.__qualname__ = function.__name__, function.__qualname__
        return result

    return optimised


def call_in_hook(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the current run of the frame hook."""
    miss = frame.current()
    plain = getattr(function, "__func__", function)
    if miss is None or not has_tensor_work(plain, (*args, *kwargs.values())):
        return function(*args, **kwargs)
    begin = functools.partial(frame.run, miss, function)
    return driven(function, begin, miss)(*args, **kwargs)


async def _coroutine(pieces: Any) -> Any:
    try:
        return await pieces
    except BaseException as error:
        error.__traceback__ = _own_frames(error.__traceback__)
        raise


def _generator(pieces: Any) -> Any:
    try:
        return (yield from pieces)
    except BaseException as error:
        error.__traceback__ = _own_frames(error.__traceback__)
        raise


@types.coroutine
def _pieces(
    begin: Callable[..., Any], miss: Any, args: Any, kwargs: dict[str, Any]
) -> Generator[Any, Any, Any]:
    """Run the pieces in turn, each step with the hook on."""
    piece = begin(*args, **kwargs)
    del args, kwargs
    step, inbox = piece.send, list[Any]([None])  # no traceback refers to items of a list
    while True:
        try:
            item = frame.run(miss, step, inbox.pop())
        except StopIteration as stop:
            if type(stop.value) is not _TailCall:
                return stop.value
            following = list[Any](cast(Any, stop.value))
        else:
            try:
                inbox.append((yield item))
                step = piece.send
            except BaseException as error:
                error.__traceback__ = _own_frames(error.__traceback__)
                inbox.append(error)
                step = piece.throw
            continue
        piece = frame.run(miss, *following)
        following.clear()
        step, inbox = piece.send, [None]


def _own_frames(shown: types.TracebackType | None) -> types.TracebackType | None:
    """Remove the frames of this module from a traceback."""
    while shown is not None and shown.tb_frame.f_globals is globals():
        shown = shown.tb_next
    return shown
