"""Loads and stores of locals, globals, cells and attributes; stack shuffling; imports."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import NoReturn

from weft_capture.breaks import Break
from weft_capture.bytecode import Instr, call_pair, original
from weft_capture.functions.super_methods import SuperValue
from weft_capture.model.constant import NONE, NULL
from weft_capture.model.dicts import DictValue
from weft_capture.model.functions import BoundMethod, CellValue
from weft_capture.model.objects import DELETED
from weft_capture.model.protocol import Frame, Value
from weft_capture.model.scope import import_module, load_global, store_global
from weft_capture.model.weakrefs import pop_dying, release
from weft_capture.opcodes.dispatch import HANDLERS, opcode


def _unbound(frame: Frame, name: str) -> NoReturn:
    text = "where it is not associated with a value"
    name = name.lstrip(".")  # of an inlined comprehension
    if name in original(frame.decoded).freevars:
        text = f"cannot access free variable '{name}' {text} in enclosing scope"
        frame.tx.raise_(NameError, text)
    frame.tx.raise_(UnboundLocalError, f"cannot access local variable '{name}' {text}")


@opcode("LOAD_FAST")
def _load_fast(frame: Frame, instr: Instr) -> None:
    name = instr.argval
    value = frame.locals.get(name)
    if value is None:
        _unbound(frame, name)
    frame.stack.append(frame.tx.force(value))


@opcode("LOAD_FAST_AND_CLEAR")
def _load_fast_and_clear(frame: Frame, instr: Instr) -> None:
    name = instr.argval
    old = frame.bind(name, None, cell=name in frame.cells)
    frame.stack.append(NULL if old is None else old)


@opcode("STORE_FAST")
def _store_fast(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    release(frame, frame.locals.get(instr.argval))
    if instr.argval in frame.decoded.cells:  # a cell that is saved during a comprehension
        value = frame.tx.force(value)
    cell = isinstance(value, CellValue) and instr.argval in frame.decoded.cells
    frame.bind(instr.argval, None if value is NULL else value, cell)


@opcode("DELETE_FAST")
def _delete_fast(frame: Frame, instr: Instr) -> None:
    release(frame, frame.tx.force(frame.locals.get(instr.argval, NONE)))
    if frame.bind(instr.argval, None) is None:
        _unbound(frame, instr.argval)


@opcode("LOAD_CLOSURE")
def _load_closure(frame: Frame, instr: Instr) -> None:
    cell = frame.cells.get(instr.argval)
    if cell is None:  # in a comprehension inlined by 3.12+, where the name is a plain variable
        _load_fast(frame, instr)
    else:
        frame.stack.append(cell)


@opcode("LOAD_DEREF")
def _load_deref(frame: Frame, instr: Instr) -> None:
    cell = frame.cells[instr.argval]
    if cell.contents is None:
        _unbound(frame, instr.argval)
    frame.stack.append(frame.tx.force(cell.contents))


@opcode("STORE_DEREF")
def _store_deref(frame: Frame, instr: Instr) -> None:
    value = frame.stack.pop()
    release(frame, frame.cells[instr.argval].contents)
    frame.cells[instr.argval].store(frame.tx, value)


@opcode("DELETE_DEREF")
def _delete_deref(frame: Frame, instr: Instr) -> None:
    cell = frame.cells[instr.argval]
    if cell.contents is None:
        _unbound(frame, instr.argval)
    release(frame, frame.tx.force(cell.contents))
    cell.store(frame.tx, None)


@dataclass(eq=False)
class _Names(Value):
    """The names of a class body, also for the type parameters inside of it."""

    cls = dict

    frame: Frame


def _names_of(value: Value) -> dict[str, Value]:
    """Return the names of a class body, or those of the class that was made of it."""
    if isinstance(value, _Names):
        return value.frame.locals
    names = getattr(value, "namespace", None)
    if names is None:
        raise Break("class-definition", "the names of a class from outside the frame")
    return names  # type: ignore[no-any-return]


@opcode("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
def _load_name(frame: Frame, instr: Instr) -> None:
    """A name in a class body; what the class has not bound is a global or a variable around it."""
    names = frame.locals
    if instr.opname.startswith("LOAD_FROM_DICT"):
        names = _names_of(frame.stack.pop())
    value = names.get(instr.argval)
    if type(getattr(value, "obj", None)) is enum.auto:
        raise Break("class-definition", "the value of an enum.auto in its class body")
    if value is not None:
        frame.stack.append(frame.tx.force(value))
    elif instr.opname.endswith("DEREF"):
        _load_deref(frame, instr)
    else:
        _load_global(frame, instr)


@opcode("DELETE_NAME")
def _delete_name(frame: Frame, instr: Instr) -> None:
    if frame.bind(instr.argval, None) is None:
        frame.tx.raise_(NameError, f"name '{instr.argval}' is not defined")


@opcode("LOAD_GLOBAL")
def _load_global(frame: Frame, instr: Instr) -> None:
    frame.stack.append(load_global(frame.tx, frame.function, instr.argval))


@opcode("DELETE_GLOBAL")
def _delete_global(frame: Frame, instr: Instr) -> None:
    load_global(frame.tx, frame.function, instr.argval)
    store_global(frame.tx, frame.function, instr.argval, DELETED)


def push_method(frame: Frame, attribute: Value) -> None:
    """Push the two slots a CALL expects for an attribute that was read."""
    if isinstance(attribute, BoundMethod):
        frame.stack.extend((attribute.function, attribute.owner))
    else:
        frame.stack.extend(call_pair(attribute, NULL))


@opcode("LOAD_SUPER_ATTR")
def _load_super_attr(frame: Frame, instr: Instr) -> None:
    name, is_method = instr.argval
    owner = frame.stack.pop()
    cls = frame.stack.pop()
    frame.stack.pop()
    attribute = SuperValue(cls.as_constant(), owner).tp_getattro(frame.tx, name)
    if is_method:
        push_method(frame, attribute)
    else:
        frame.stack.append(attribute)


@opcode("SWAP")
def _swap(frame: Frame, instr: Instr) -> None:
    stack = frame.stack
    stack[-1], stack[-instr.arg] = stack[-instr.arg], stack[-1]


@opcode("IMPORT_NAME")
def _import_name(frame: Frame, instr: Instr) -> None:
    from_list = frame.stack.pop().as_constant()
    level = frame.stack.pop().as_constant()
    global_dict = frame.function.globals
    frame.stack.append(import_module(frame.tx, instr.argval, global_dict, None, from_list, level))


@opcode("IMPORT_FROM")
def _import_from(frame: Frame, instr: Instr) -> None:
    module = frame.stack[-1].as_constant()
    name = instr.argval
    if not hasattr(module, name):
        try:
            importlib.import_module(f"{module.__name__}.{name}")
        except ImportError:
            frame.tx.raise_(ImportError, f"cannot import name {name!r} from {module.__name__!r}")
    frame.stack.append(frame.stack[-1].tp_getattro(frame.tx, name))


HANDLERS |= {
    **dict.fromkeys(("NOP", "RESUME", "COPY_FREE_VARS", "END_FOR"), lambda frame, instr: None),
    "MAKE_CELL": lambda frame, instr: frame.bind(
        instr.argval, CellValue(frame.bind(instr.argval, None)), cell=True
    ),
    "LOAD_LOCALS": lambda frame, instr: frame.stack.append(_Names(frame)),
    "STORE_NAME": lambda frame, instr: frame.bind(instr.argval, frame.stack.pop()),
    "POP_TOP": lambda frame, instr: pop_dying(frame, frame.stack.pop()),
    "END_SEND": lambda frame, instr: frame.stack.pop(-2),
    "COPY": lambda frame, instr: frame.stack.append(frame.stack[-instr.arg]),
    "GET_LEN": lambda frame, instr: frame.stack.append(frame.tx.builtin(len, frame.stack[-1])),
    "SETUP_ANNOTATIONS": lambda frame, instr: frame.locals.setdefault(
        "__annotations__", DictValue()
    ),
    "STORE_GLOBAL": lambda frame, instr: store_global(
        frame.tx, frame.function, instr.argval, frame.stack.pop()
    ),
    "LOAD_METHOD": lambda frame, instr: push_method(
        frame, frame.stack.pop().tp_getattro(frame.tx, instr.argval)
    ),
}
