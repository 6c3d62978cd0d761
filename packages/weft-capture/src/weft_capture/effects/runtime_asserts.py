"""Graphs that raise: where nothing visible has happened yet, the frame runs again eagerly.

An index out of range then raises in the program's own line, under its handlers, after the side
effects before it. A branch on a tensor where one arm only raises becomes a check in the graph. A
failed check runs the frame again, so a wrong guess about an arm costs time but no correctness.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import checkpoint
from weft_core.errors import WeftError
from weft_core.events import counters, logger

from weft_capture.bytecode import NO_FALL_THROUGH, Decoded, Handler, Instr, decode
from weft_capture.effects.checks import (
    CHECK,
    CheckFailed,
    before_writes,
    check_before_writes,
    has_checks,
    is_repeatable,
)
from weft_capture.model.constant import constant
from weft_capture.model.dicts import LazyValue
from weft_capture.model.protocol import Frame, Tracer, Value
from weft_capture.tensors.tensor import TensorValue

_log = logger("capture", "graph_breaks")


def is_checked(frame: Frame, jump: Instr, condition: Value) -> bool | None:
    """Turn a branch on a tensor into a check of the graph.

    Returns:
        Whether to jump; None when no arm surely raises, or the frame cannot run again.
    """
    if not isinstance(condition, TensorValue) or condition.fake.numel() != 1:
        return None
    assert jump.target is not None
    raising = [_only_raises(frame, at) for at in (frame.ip, jump.target)]
    if raising[0] is raising[1] or _is_caught(frame):
        return None
    jumps = raising[0]
    expected = (jump.opname == "POP_JUMP_IF_TRUE") is jumps
    return jumps if emit_check(frame.tx, condition, expected) else None


def emit_check(tx: Tracer, condition: TensorValue, expected: bool) -> bool:
    """Add a check to the graph; False where the program could notice a second run of the frame."""
    inside = any(not isinstance(context, torch.inference_mode) for context in tx.open_contexts)
    writes = bool(tx.graph.writes())
    if inside or not _may_repeat(tx, before_writes(tx.graph) if writes else tx.graph.graph.nodes):
        return False
    if writes:
        return check_before_writes(tx, condition, expected)
    tx.graph.emit("call_function", CHECK, [condition, constant(expected)], {})
    return True


def recoverable(tx: Tracer) -> type[Exception] | None:
    """Return the exceptions of the graph after which the frame can run again, or None."""
    checks = has_checks(tx.graph)  # checks precede side effects, and restore generators
    modes = any(node.target in _LASTING for node in tx.graph.graph.nodes)
    lasting = modes or tx.graph.writes() or (tx.graph.mode.drawn and not checks)
    if not lasting and _may_repeat(tx, tx.graph.graph.nodes):
        return Exception
    return CheckFailed if checks else None


# Operations whose effect stays when a graph raises: on modes and on inputs.
_LASTING = (
    *(torch.amp.autocast_mode._enter_autocast, "backward", "detach_", "register_hook"),
    *("register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "set_"),
)


def _may_repeat(tx: Tracer, nodes: Iterable[Node]) -> bool:
    """Say whether the frame can run again after these operations without the program noticing."""
    if tx.transforms or tx.overrides.modes or tx.answers:
        return False
    twins = [entry.node_example for entry in tx.graph.inputs]
    inference = any(isinstance(twin, torch.Tensor) and twin.is_inference() for twin in twins)
    if inference and tx.graph.mode.writes:
        return False
    return all(call.result.late for call in tx.calls.calls) and all(map(is_repeatable, nodes))


def _is_caught(frame: Frame) -> bool:
    """Say whether a handler of the graph's frames, other than a `with` block's, may catch here."""
    for around in frame.callers():
        instrs = around.decoded.instrs
        handler: Handler | None = around.instr.handler
        while handler is not None:
            begins = instrs[handler.target].opname == "PUSH_EXC_INFO"
            if begins and instrs[handler.target + 1].opname != "WITH_EXCEPT_START":
                return True
            handler = instrs[handler.target].handler
    return False


# ---- which arms raise


def _only_raises(frame: Frame, start: int) -> bool:
    """Say whether every path from an instruction raises, or calls a function that only raises."""
    return _ends(frame.decoded, start, lambda index: _names_raiser(frame, index))


def _ends(decoded: Decoded, start: int, is_end: Callable[[int], bool]) -> bool:
    seen, todo = set(), [start]
    while todo:
        index = todo.pop()
        instr = decoded.instrs[index]
        if instr.opname in ("RETURN_VALUE", "YIELD_VALUE", "SEND", "RETURN_GENERATOR"):
            return False
        if index in seen or is_end(index):
            continue
        seen.add(index)
        todo += [] if instr.opname in NO_FALL_THROUGH else [index + 1]
        todo += [] if instr.target is None else [instr.target]
    return True


def _names_raiser(frame: Frame, index: int) -> bool:
    """Say whether an instruction loads a function, or a variable's method, that only raises."""
    instr, before = frame.decoded.instrs[index], frame.decoded.instrs[index - 1]
    callee: Any = None
    if instr.opname == "LOAD_GLOBAL":
        callee = frame.function.globals.get(instr.argval)
    elif instr.opname in ("LOAD_METHOD", "LOAD_ATTR") and before.opname == "LOAD_FAST":
        owner = frame.locals.get(before.argval)
        if owner is not None:
            cls = type(owner.obj) if isinstance(owner, LazyValue) else owner.python_type()
            callee = getattr(cls, instr.argval, None)
    is_function = isinstance(callee, types.FunctionType)
    return is_function and _ends(decode(callee.__code__), 0, lambda _: False)


# ---- running a graph with checks


def run_checked(compiled: Callable[..., Any], devices: Sequence[int], *args: Any) -> Any:
    """Run a graph; if it raises, restore torch's generators.

    Args:
        compiled: the graph.
        devices: the CUDA devices that it works on.
    """
    generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)]
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        return compiled(*args)
    except Exception:
        for generator, state in states:
            generator.set_state(state)
        raise


def if_raised(
    error: BaseException, expected: type[Exception], recorded: bool
) -> BaseException | None:
    """Return the error of a graph if the program should see it; None to run the frame eagerly.

    Args:
        error: what the graph raised.
        expected: see `recoverable`.
        recorded: whether gradients were recorded where the frame began.
    """
    # A checkpoint raises the second one to end its recomputation early.
    passed_on = (WeftError, checkpoint._StopRecomputationError)
    if isinstance(error, passed_on) or not isinstance(error, expected):
        return error
    torch._C._set_grad_enabled(recorded)
    counters["capture"]["run_again"] += 1
    _log.info("a graph raised %s, its frame runs eagerly: %s", type(error).__name__, error)
    return None


def devices_of(nodes: Iterable[Node]) -> tuple[int, ...]:
    """Return the indices of the CUDA devices of the tensors that nodes compute."""
    values = [node.meta.get("example_value") for node in nodes]
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    return tuple(sorted(device.index or 0 for device in devices if device.type == "cuda"))
