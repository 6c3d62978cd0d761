"""Graphs that raise: where nothing visible has happened yet, the frame runs again eagerly.

An index out of range then raises in the program's own line, under its handlers, after the side
effects before it. A branch on a tensor where one arm only raises becomes a check in the graph. A
failed check runs the frame again, so a wrong guess about an arm costs time but no correctness.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import has_side_effect
from torch.utils import checkpoint
from weft_core.collectives import is_collective
from weft_core.errors import WeftError
from weft_core.events import counters, logger
from weft_core.node_effects import is_effect
from weft_core.tensor_subclass import is_distributed

from weft_capture.bytecode import NO_FALL_THROUGH, Decoded, Handler, Instr, decode
from weft_capture.model.constant import constant
from weft_capture.model.dicts import LazyValue
from weft_capture.model.protocol import Frame, Tracer, Value
from weft_capture.tensors.graph import GraphBuilder
from weft_capture.tensors.tensor import TensorValue

_log = logger("capture", "graph_breaks")
_library = torch.library.Library("weft_capture", "FRAGMENT")
_library.define("check(Tensor condition, bool wanted) -> ()")


class CheckFailed(Exception):
    """A check of the program failed in its graph: the program itself knows what to raise."""


def _check(condition: torch.Tensor, expected: bool) -> None:
    if bool(condition) is not expected:
        raise CheckFailed(f"a tensor is {not expected} where the captured program would raise")


def _nothing(condition: torch.Tensor, expected: bool) -> None:
    pass


_library.impl("check", _check, "CompositeExplicitAutograd")
_library.impl("check", _nothing, "Meta")
CHECK: Any = has_side_effect(torch.ops.weft_capture.check.default)


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
    if inside or not _may_repeat(tx):
        return False
    tx.graph.emit("call_function", CHECK, [condition, constant(expected)], {})
    return True


def has_checks(graph: GraphBuilder) -> bool:
    """Say whether there are checks in a graph."""
    return any(node.target is CHECK for node in graph.graph.nodes)


def recoverable(tx: Tracer) -> type[Exception] | None:
    """Return the exceptions of the graph after which the frame can run again, or None."""
    checks = has_checks(tx.graph)  # checks precede side effects, and restore generators
    modes = any(node.target in _LASTING for node in tx.graph.graph.nodes)
    if (checks or not tx.graph.mode.drawn) and not modes and _may_repeat(tx):
        return Exception
    return CheckFailed if checks else None


# Operations whose effect stays when a graph raises: on modes and on inputs.
_LASTING = (
    *(torch.amp.autocast_mode._enter_autocast, "backward", "detach_", "register_hook"),
    *("register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "set_"),
)


def _may_repeat(tx: Tracer) -> bool:
    """Say whether the frame can run again from its start without the program noticing."""
    if tx.transforms or tx.overrides.modes or tx.answers:
        return False
    return all(call.result.late for call in tx.calls.calls) and all(_is_repeatable(tx.graph))


def _is_repeatable(graph: GraphBuilder) -> Iterator[bool]:
    """Yield, for each part of the graph so far, whether it can run twice."""
    yield graph.writes() == 0
    twins = [e.node_example for e in graph.inputs if isinstance(e.node_example, torch.Tensor)]
    yield not (graph.mode.writes and any(fake.is_inference() for fake in twins))
    for node in graph.graph.nodes:
        target = node.target
        of_program = isinstance(target, types.FunctionType) and target.__module__.split(".")[0]
        yield of_program in (False, "torch", "weft_capture", "weft_core")
        yield not is_collective(target)
        yield not is_distributed(type(node.meta.get("example_value")))
        yield target is CHECK or not (is_effect(target) and not target._schema.returns)


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
