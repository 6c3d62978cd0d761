"""print, logging and warnings: deferred calls, in the program's order.

Only with the standard library's own streams, handlers and hooks, which a guard tests: others may
read any state, so the graph breaks. Records and warnings get the program's file and line, which
capture knows.
"""

from __future__ import annotations

import builtins
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch._tensor_str
from weft_guards.sources import CallSource, ConstSource

from weft_capture.breaks import Break, NotConstant
from weft_capture.bytecode import original
from weft_capture.functions.language.text import HOLES, text_of
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.library_traits import LOG_HANDLER_MODULES
from weft_capture.model.constant import FALSE, NONE, Constant, constant
from weft_capture.model.exceptions import ExceptionValue, chain
from weft_capture.model.objects import StreamValue, UserObject, is_plain_stream
from weft_capture.model.protocol import MethodOf, Raised, Tracer, Value, method
from weft_capture.python_compat import FILTERS_MUTATED, WARNINGS_LOCK


def _check_unchanged(tx: Tracer, *objects: object) -> None:
    """Break where the program has changed objects that the call reads."""
    if tx.effects.touches(sys, torch._tensor_str.PRINT_OPTS, *objects):
        raise Break("pending-mutation", "output while print options or sys were changed")


def _check_stream(tx: Tracer, stream: Value) -> None:
    """Break where a stream is the program's own, or its failure may be caught."""
    if not isinstance(stream, StreamValue):
        raise Break("side-effect", f"output to {stream.describe()}")
    _check_unchanged(tx, stream.obj)
    for frame in tx.active_frames():
        code, handler = frame.decoded.instrs, frame.instr.handler
        if handler is not None and code[handler.target].opname == "PUSH_EXC_INFO":
            if code[handler.target + 1].opname != "WITH_EXCEPT_START":
                raise Break("side-effect", "output inside of a try block")


@rule(builtins.print)
def _print(
    tx: Tracer,
    *args: Value,
    sep: Value = NONE,
    end: Value = NONE,
    file: Value = NONE,
    flush: Value = FALSE,
) -> None:
    if not all(isinstance(text.as_constant(), str | None) for text in (sep, end)):
        raise Break("builtin-error", "print with a sep or end that is not a string")
    stream = file if file is not NONE else tx.const_object(sys).tp_getattro(tx, "stdout")
    if stream is not NONE:
        _check_stream(tx, stream)
    try:
        with tx.journal.unchanged("a __str__ with effects"):
            texts = [_snapshot(tx, arg) for arg in args]
    except Raised:
        raise Break("builtin-error", "print of an object whose __str__ raises") from None
    tx.calls.add(_print_now, sep, end, file, constant(flush.nb_bool(tx)), *texts)


def _print_now(sep: Any, end: Any, file: Any, flush: bool, *texts: Any) -> None:
    print(*texts, sep=sep, end=end, file=file, flush=flush)


def _snapshot(tx: Tracer, value: Value) -> Value:
    value = tx.force(value)
    return value if isinstance(value, HOLES) else constant(text_of(tx, value, str))


@method(StreamValue, "write")
def _write(tx: Tracer, self: StreamValue, text: Value) -> Value:
    if not isinstance(text, Constant) or not isinstance(text.value, str):
        raise Break("side-effect", "write of an unknown string")
    _check_stream(tx, self)
    tx.calls.add(_print_now, NONE, constant(""), self, FALSE, text)
    return constant(len(text.value))


# ---- logging

_PLAIN_MODULES = ("logging", "logging.handlers")


def _parts(logger: logging.Logger) -> Iterator[Any]:
    """Yield the objects that process a record: loggers, filters, handlers, formatters, streams."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from (current, *current.filters)
        for handler in current.handlers:
            yield from (handler, *handler.filters)
            if handler.formatter is not None:
                yield handler.formatter
            yield getattr(handler, "stream", None)
        current = current.parent if current.propagate else None
    yield from (logging.lastResort, sys.stderr)


def _is_plain(component: object) -> bool:
    module = type(component).__module__
    of_library = module in _PLAIN_MODULES or module in LOG_HANDLER_MODULES
    return component is None or of_library or is_plain_stream(component)


def _log_state(logger: logging.Logger, level: int) -> str:
    """Return "off" for a disabled message, "plain" where only known objects process it."""
    if not logger.isEnabledFor(level):
        return "off"
    plain = all(map(_is_plain, _parts(logger)))
    return "plain" if plain and logging.getLogRecordFactory() is logging.LogRecord else "other"


def _state(tx: Tracer, logger: Value, level: int) -> str:
    source = logger.source
    if not isinstance(logger, UserObject) or source is None or type(level) is not int:
        raise Break("side-effect", "logging with a logger created in the frame")
    looked_at = [*_parts(logger.obj), logging, logger.obj.manager]
    lists = [getattr(obj, name, None) for obj in looked_at for name in ("handlers", "filters")]
    _check_unchanged(tx, *looked_at, *lists)
    answer = _log_state(logger.obj, level)
    tx.guard(CallSource(_log_state, (source, ConstSource(level))), "CONST", answer)
    return answer


rule(logging.Logger.isEnabledFor)(
    lambda tx, logger, level: constant(_state(tx, logger, level.as_constant()) != "off")
)


@rule(logging.Logger.log)
def _log(tx: Tracer, logger: Value, level: Value, text: Value, *args: Value, **k: Value) -> Value:
    state = _state(tx, logger, level.as_constant())
    if state == "off":
        return NONE
    options = k.keys() - {"exc_info", "stack_info", "extra"}
    if state == "other" or options or any(k[n] not in (NONE, FALSE) for n in k):
        raise Break("side-effect", "logging with custom handlers or options")
    assert tx.frame is not None
    at = tx.frame.location()[0]
    where = constant((at.filename, at.lineno, at.name))
    tx.calls.add(_log_now, logger, level, where, *(_copied(tx, arg) for arg in (text, *args)))
    return NONE


def _copied(tx: Tracer, value: Value) -> Value:
    """Return a snapshot of an argument, which may change before the message is formatted."""
    value = tx.force(value)
    try:
        return value if isinstance(value, HOLES) else tx.literal(value.data(tx))
    except NotConstant:
        raise Break("side-effect", f"logging of {value.describe()}") from None


def _log_now(logger: logging.Logger, level: int, where: Any, text: Any, *args: Any) -> None:
    file, line, name = where
    logger.handle(logger.makeRecord(logger.name, level, file, line, text, args, None, name))


_LEVELS = ("debug", "info", "warning", "error", "critical")


@rule_of_each(*(getattr(logging.Logger, name) for name in _LEVELS))
def _log_at(
    function: Any, tx: Tracer, logger: Value, text: Value, *args: Value, **kwargs: Value
) -> Value:
    level = constant(getattr(logging, function.__name__.upper()))
    return _log(tx, logger, level, text, *args, **kwargs)


# ---- warnings

_WARNINGS: Any = warnings


def _action(
    filters: Any, text: str | None, warning_class: type[Warning], module: str | None, line: int
) -> str:
    """Return the action for a warning; "error" where an unknown value (None) may decide it."""
    for action, message, category, where, at in filters:
        if not issubclass(warning_class, category):
            continue
        if module is not None and at not in (0, line):
            continue
        unsure = (message is not None and text is None) or ((where or at) and module is None)
        fits = message is None or text is None or message.match(text)
        fits = fits and (where is None or module is None or where.match(module))
        if fits and (action == "error" or not unsure):
            return str(action)
    return str(_WARNINGS.defaultaction)


def _is_only_shown(
    text: str | None, category: type[Warning], module: str | None, line: int
) -> bool:
    """Say whether a warning is shown or recorded: it is no error, and no hook gets it."""
    show = _WARNINGS._showwarnmsg_impl
    recorded = isinstance(show, types.BuiltinMethodType) and isinstance(show.__self__, list)
    if not recorded and not (show.__module__ == "warnings" and is_plain_stream(sys.stderr)):
        return False
    for name in ("showwarning", "formatwarning"):
        if getattr(_WARNINGS, name) is not getattr(_WARNINGS, f"_{name}_orig"):
            return False
    return _action(_WARNINGS.filters, text, category, module, line) != "error"


@rule(warnings.warn)
def _warn(
    tx: Tracer,
    message: Value,
    category: Value = NONE,
    stacklevel: Value = Constant(1),  # noqa: B008
    source: Value = NONE,
) -> Value:
    warning_class = UserWarning if category is NONE else category.as_constant()
    if isinstance(message, ExceptionValue):
        warning_class = message.python_type()
    if (
        not isinstance(warning_class, type)
        or not issubclass(warning_class, Warning)
        or source is not NONE
    ):
        raise Break("side-effect", "a warning with a source, or whose category is no warning class")
    text = None if isinstance(message, HOLES) else text_of(tx, message, str)
    frame, above = tx.frame, stacklevel.as_constant() - 1
    while frame is not None and above > 0:
        above -= frame.function.globals.get("__name__") != "weft_capture.polyfills"
        frame = frame.parent
    above += frame is None
    if above < 0 or (above and original(tx.frames[0].decoded) is not tx.frames[0].decoded):
        raise Break("side-effect", "a warning with a stacklevel above a resume function")
    position: Any = (above,)
    about: Any = (text, warning_class, None, 0)
    if frame is not None:
        at, module = frame.location()[0], frame.function.globals
        about = (text, warning_class, module.get("__name__") or "<string>", at.lineno)
        position = (at.filename, at.lineno, about[2], module)
    recorder = id(getattr(_WARNINGS._showwarnmsg_impl, "__self__", None))
    if tx.effects.touches(warnings, warnings.filters) or recorder in tx.values_by_id:
        return _warn_changed(tx, message, about, position)
    _check_unchanged(tx)
    shown = _is_only_shown(*about)
    tx.guard(CallSource(_is_only_shown, tuple(map(ConstSource, about))), "CONST", shown)
    if not shown:
        raise Break("side-effect", "a warning that raises or calls a hook")
    tx.calls.written.add(recorder)
    tx.calls.add(_warn_now, message, *map(constant, (warning_class, *position)))
    return NONE


def _warn_now(message: Any, warning_class: Any, *position: Any) -> None:
    """Warn with a position in the captured frame, or in one of its callers."""
    if len(position) == 1:
        frame, above = sys._getframe(1), position[0]
        while above and frame.f_back is not None:
            frame = frame.f_back
            above -= not str(frame.f_globals.get("__name__")).startswith("weft")
        namespace = frame.f_globals
        position = (frame.f_code.co_filename, frame.f_lineno, namespace.get("__name__"), namespace)
    file, line, name, namespace = position
    registry = namespace.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, warning_class, file, line, name, registry)


# Inside `catch_warnings`: its Python is traced, and what it changes in the module is known.


def _warn_changed(tx: Tracer, message: Value, about: Any, position: Any) -> Value:
    """Warn under filters or a recorder that the captured code has set."""
    text, warning_class, _, line = about
    library = tx.const_object(warnings)
    recorder = library.tp_getattro(tx, "_showwarnmsg_impl")
    plain = recorder.source is not None or isinstance(recorder, MethodOf)
    plain = plain and not tx.effects.touches(sys, _WARNINGS.onceregistry)
    if text is None or len(position) == 1 or not plain or not is_plain_stream(sys.stderr):
        raise Break("side-effect", "a warning with an unknown message or stream")
    filters = [entry.as_constant() for entry in library.tp_getattro(tx, "filters").unpack(tx)]
    action = _action(filters, *about)
    instance = message
    if not isinstance(message, ExceptionValue):
        instance = tx.const_object(warning_class).tp_call(tx, [message], {})
    if action == "error":
        raise Raised(chain(tx, instance))
    if action == "ignore":
        return NONE
    if action != "always":
        raise Break("side-effect", "a warning that may have been shown before")
    arguments = [instance, *map(tx.const_object, (warning_class, position[0], line))]
    record = tx.const_object(warnings.WarningMessage).tp_call(tx, arguments, {})
    if isinstance(recorder, MethodOf):
        return recorder.tp_call(tx, [record], {})
    tx.calls.add(_WARNINGS._showwarnmsg, record)
    return NONE


@rule(FILTERS_MUTATED)
def _mutated(tx: Tracer) -> None:
    """Forget the warnings that were shown."""
    tx.calls.add(_WARNINGS._filters_mutated)


@rule_of_each(*WARNINGS_LOCK)
def _lock(function: Any, tx: Tracer) -> None:
    """Do nothing: generated code runs the program's part later."""
