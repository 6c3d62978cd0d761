"""Calls of optimised coroutine and generator functions.

The frame hook replaces the frame of such a function when it begins, and that of each piece of it
behind an `await` or `yield`. A piece is a coroutine or generator itself, which waits and yields for
real and returns the tail call of the next one. What the program holds runs one after the other.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any, cast

from weft_capture import frame

_TailCall = type(frame.tail_call(cast(types.FunctionType, inspect.isawaitable)))
SUSPENDING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_driven(code: types.CodeType) -> bool:
    """Say whether calls of a function are to go through `driven`."""
    kind = code.co_flags & (SUSPENDING | inspect.CO_ITERABLE_COROUTINE)
    return kind in (inspect.CO_GENERATOR, inspect.CO_COROUTINE)


def driven(function: Any, begin: Callable[..., Any], miss: Any) -> Callable[..., Any]:
    """Return a version of a function: `begin` makes the first piece, the hook asks `miss`."""
    made_by = _coroutine if function.__code__.co_flags & inspect.CO_COROUTINE else _generator

    def optimised(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs).close()  # refuses arguments that do not fit
        made: Any = made_by(_pieces(begin, miss, args, kwargs))
        made.__name__, made.__qualname__ = function.__name__, function.__qualname__
        return made

    return optimised


def driven_here(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function as if the run of the frame hook that this lies in were for it."""
    miss = frame.current()
    if miss is None:
        return function(*args, **kwargs)
    return driven(function, functools.partial(frame.run, miss, function), miss)(*args, **kwargs)


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
    """Run the pieces one after the other, each step of one with the hook on."""
    piece = begin(*args, **kwargs)
    del args, kwargs
    step, given = piece.send, list[Any]([None])  # in a list: no traceback holds an error by it
    while True:
        try:
            item = frame.run(miss, step, given.pop())
        except StopIteration as stop:
            if type(stop.value) is not _TailCall:
                return stop.value
            following = list[Any](cast(Any, stop.value))
        else:
            try:
                given.append((yield item))
                step = piece.send
            except BaseException as error:
                error.__traceback__ = _own_frames(error.__traceback__)
                given.append(error)
                step = piece.throw
            continue
        piece = frame.run(miss, *following)
        following.clear()
        step, given = piece.send, [None]


def _own_frames(shown: types.TracebackType | None) -> types.TracebackType | None:
    """Leave the frames of this module out of a traceback."""
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    return shown
