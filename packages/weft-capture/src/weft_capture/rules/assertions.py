"""`assert` on a tensor as a node of the graph, which raises what the statement would have raised.

Nothing of the program may see that the graph fails as a whole: there is no handler around the
statement, and nothing was written before it that would be lost.
"""

from __future__ import annotations

import torch
from torch.fx.node import has_side_effect

from weft_capture.bytecode import Instr
from weft_capture.values.base import Frame, Value
from weft_capture.values.constant import constant
from weft_capture.values.tensor import TensorValue

_library = torch.library.Library("weft_capture", "FRAGMENT")
_library.define("assert_true(Tensor condition, bool wanted, str? message) -> ()")


def _check(condition: torch.Tensor, wanted: bool, message: str | None) -> None:
    if bool(condition) is not wanted:
        raise AssertionError(*(() if message is None else (message,)))


def _nothing(condition: torch.Tensor, wanted: bool, message: str | None) -> None:
    pass


_library.impl("assert_true", _check, "CompositeExplicitAutograd")
_library.impl("assert_true", _nothing, "Meta")
assert_true = has_side_effect(torch.ops.weft_capture.assert_true.default)

_STATEMENTS = (
    ("LOAD_ASSERTION_ERROR", "RAISE_VARARGS"),
    ("LOAD_ASSERTION_ERROR", "LOAD_CONST", "CALL", "RAISE_VARARGS"),
)


def is_checked(frame: Frame, jump: Instr, condition: Value) -> bool:
    """Leave an assertion to the graph; False when the jump is no such, or something could tell."""
    following = frame.decoded.instrs[frame.ip : frame.ip + 4]
    names = tuple(instr.opname for instr in following)
    statement = next((s for s in _STATEMENTS if names[: len(s)] == s), None)
    if statement is None or not isinstance(condition, TensorValue) or condition.fake.numel() != 1:
        return False
    message = following[1].argval if len(statement) == 4 else None
    tx = frame.tx
    writes = tx.effects or tx.calls.count or tx.graph.writes()
    if writes or tx.transforms or tx.overrides.modes or not isinstance(message, str | None):
        return False
    around: Frame | None = frame
    while around is not None:
        if around.instr.handler is not None:
            return False
        around = around.parent
    wanted = constant(jump.opname == "POP_JUMP_IF_TRUE")
    tx.graph.emit("call_function", assert_true, [condition, wanted, constant(message)], {})
    return True
