"""The code object that replaces a captured frame.

    early calls -> run the graph -> late calls (see `effects`) -> load all live values
    -> write side effects -> return, or run the breaking instruction eagerly and continue in a
    resume function

Everything is loaded before anything is written, so that no write changes what a source reads.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.fx import GraphModule, Node
from weft_core.transform_levels import preserve_transform_levels
from weft_guards import call_with
from weft_guards.sources import ClosureSource, LocalSource

from weft_capture import config
from weft_capture import frame as hook
from weft_capture.breaks import REASONS, Break
from weft_capture.bytecode import Writer, live_at, shows_frame
from weft_capture.effects.checks import has_checks
from weft_capture.effects.runtime_asserts import (
    devices_of,
    if_raised,
    recoverable,
    run_checked,
)
from weft_capture.execution.stepping import OuterFrame, Stop
from weft_capture.functions.torch.backward import leaving
from weft_capture.functions.torch.transforms import LEVELS
from weft_capture.model.constant import NULL, constant
from weft_capture.model.contexts import AutocastContext
from weft_capture.model.protocol import Frame, MethodOf, Tracer, Value
from weft_capture.output.eager_instruction import RealStep
from weft_capture.output.entry import InnerFrames, from_the_start
from weft_capture.output.reconstruct import GRAPH_RESULT, Output
from weft_capture.tensors.inputs import GraphInput
from weft_capture.tensors.modes import handlers_off

_ASKS_LATER = (
    {"register_hook"},
    {"register_multi_grad_hook"},
    {"retain_grad"},
    {"autograd", "grad"},
)


def _check_histories(tx: Tracer, frames: Sequence[Frame], outputs: Collection[Node]) -> None:
    """Break where one result of the graph is computed from another whose gradient may be read.

    To autograd a compiled graph is one function, and has no edges between its results.

    Raises:
        Break: at the operation that first consumes such a result.
    """
    names = [frame.function.code.co_names for frame in frames]
    if not any(n.issubset(used) for n in _ASKS_LATER for used in names):
        return
    leading = set(outputs)
    written = {e.node: e.recorded_at for e in tx.graph.inputs if e.recorded_at >= 0}
    for node in reversed(tx.graph.graph.nodes):
        visible = node in written or (node in outputs and node.op != "placeholder")
        steps = (tx.graph.step_of_node[user] for user in node.users if user in leading)
        first = [step for step in steps if step > written.get(node, -1)]
        fake = node.meta.get("example_value") if visible else None
        if first and getattr(fake, "requires_grad", False):
            detail = "a tensor whose gradient may be read is used before the graph ends"
            raise Break("autograd-state", detail, min(first))
        if first:
            leading.add(node)


def _run_in(inference: bool, function: Callable[..., Any], *args: Any) -> Any:
    with torch.inference_mode(inference):
        return function(*args)


def _in_handler(error: Break) -> Break:
    """Return the break for a break inside the handler of an exception that eager code raised.

    Capture cannot go back to the instruction that raised, and no other frame can handle the
    exception. An uncaught exception may end the handler.
    """
    if error.code == "uncaught-exception":
        return error
    result = Break("handler", " ".join(filter(None, (error.code, error.detail))))
    result.user_stack = error.user_stack
    return result


def _close_contexts(tx: Tracer, frames: Sequence[Frame]) -> bool:
    """Restore the modes at the start of the graph; returns the grad mode to set after it.

    The context managers on the stack enter the open blocks again.
    """
    tx.journal.begin()
    tx.calls.forget_clock()
    inference = [real for real in tx.open_contexts if isinstance(real, torch.inference_mode)]
    for real in reversed(inference):
        real.__exit__(None, None, None)
    end_mode = torch.is_grad_enabled()
    for real in inference:
        real.__enter__()
    open_autocasts = []
    for value in reversed([value for frame in frames for value in frame.stack]):
        if not isinstance(value, MethodOf) or value.name != "__exit__":
            continue
        owner = value.owner
        if owner.source is not None:
            continue  # entered before this capture
        if isinstance(owner, AutocastContext) and owner.real is not None:
            open_autocasts.append(owner)
    for context in (*open_autocasts, *reversed(tx.left_blocks)):
        context.leave_node(tx)
    if end_mode is not tx.entry_grad_mode and tx.graph.op_count:
        tx.graph.node("call_function", torch._C._set_grad_enabled, (tx.entry_grad_mode,), {}, None)
    return end_mode


@dataclass(eq=False)
class Assembly:
    """One pass over the code; the first, `draft`, collects the outputs that the graph needs.

    Args:
        frame: the captured frame, which returned (`stopped` None) or broke.
        end_mode: the grad mode to set after the graph.
        rebuilt: the values that the code rebuilds, known in the second pass.
    """

    tx: Tracer
    frame: OuterFrame
    stopped: Stop | None
    end_mode: bool
    rebuilt: Set[Value]

    def __post_init__(self) -> None:
        self.writer = Writer(self.frame.decoded, tail_call=hook.tail_call)
        # The cells of inlined comprehensions are rebuilt.
        self.replaced = {
            name: cell
            for name, cell in self.frame.cells.items()
            if name not in self.frame.decoded.cellvars and cell.source != ClosureSource(name)
        }
        own_cells = self.frame.cells.keys() - self.replaced
        cells = {self.frame.cells[name]: name for name in own_cells}
        ended = functools.partial(leaving, self.tx)
        self.out = Output(self.writer, cells, self.tx, ended, self.rebuilt)
        self.handlers, self.begins_at = "", 0

    @classmethod
    def draft(cls, frame: OuterFrame, stopped: Stop | None) -> Self:
        """Make the first pass, while the modes are those at the end of the capture.

        Raises:
            Break: when a live value cannot be rebuilt, such as the interpreter's state inside an
                exception handler.
        """
        tx = frame.tx
        if stopped is not None and any(outer.exception is not None for outer in stopped.frames):
            raise _in_handler(stopped.error)
        end_mode = _close_contexts(tx, stopped.frames if stopped else (frame,))
        assembly = cls(tx, frame, stopped, end_mode, frozenset())
        assembly.body({})
        with torch.set_grad_enabled(end_mode):  # the end of a generator may change it
            for watcher in tx.watched:
                watcher.check(tx, assembly.out)
        if stopped is not None:
            _check_histories(tx, stopped.frames, assembly.out.graph_outputs)
        return assembly

    def finish(
        self, compile_graph: Callable[[GraphModule, list[GraphInput]], Any]
    ) -> tuple[types.CodeType, GraphModule | None]:
        """Make the second pass; returns the code and its graph, None for an empty one.

        Args:
            compile_graph: (module, inputs) -> callable on the inputs' values.
        """
        tx, outputs = self.tx, self.out.graph_outputs
        graph: GraphModule | None = None
        inputs: list[GraphInput] = []
        compiled = None
        if tx.graph.op_count or outputs:
            graph, inputs = tx.graph.finish(list(outputs))
            mode = tx.graph.inference
            if mode is torch.is_inference_mode_enabled():
                compiled = compile_graph(graph, inputs)
            else:
                compiled_graph = _run_in(mode, compile_graph, graph, inputs)
                compiled = functools.partial(_run_in, mode, compiled_graph)
        final = replace(self, rebuilt=self.out.rebuilt())
        tx.calls.emit(final.out, late=False)
        final.begin()
        if compiled is not None:
            final.call_graph(compiled, inputs)
        final.body(dict(outputs))
        return final.writer.finish(), graph

    def begin(self) -> None:
        """Disable the program's handlers around code that is not the program's."""
        if self.tx.overrides.outer:
            self.out.call(handlers_off, [])
            self.handlers = self.out.store_temp()
            self.begins_at = self.writer.position()

    def _end(self) -> None:
        if self.handlers:
            self._handlers_on()
            self.writer.cover(self.begins_at, self._handlers_on)

    def _handlers_on(self) -> None:
        self.writer.begin_call()
        self.writer.load_local(self.handlers)
        self.writer.call(0)
        self.writer.pop()

    def call_graph(self, compiled: Any, inputs: list[GraphInput]) -> None:
        """Run the graph and keep its results.

        A compiled graph with an attribute `call_boxed` gets its arguments in a list that it owns,
        unless code after a break may read them again.
        """
        writer = self.writer
        sources = [entry.source for entry in inputs]
        plain = self.stopped or config.settings.caching_precompile  # another backend may call it
        boxed = None if plain else getattr(compiled, "call_boxed", None)
        # The frame hook is off while the backend's code runs.
        target = functools.partial(hook.run, None, boxed or compiled)
        if any(node.target in LEVELS for node in self.tx.graph.graph.nodes):
            target = functools.partial(
                preserve_transform_levels()(hook.run), None, boxed or compiled
            )
        if has_checks(self.tx.graph):
            devices = devices_of(self.tx.graph.graph.nodes)
            target = functools.partial(run_checked, target, devices)
        caller = call_with(target, sources) if boxed is None else None
        start = writer.position()
        writer.begin_call()
        if caller is None:
            writer.load_const(target)
        else:
            function, sources = caller
            writer.load_const(function)
            writer.load_const(None)
        for source in sources:
            source.emit(writer)
        if boxed is not None:
            writer.build_list(len(sources))
        writer.call(1 if boxed else len(sources) + (caller is not None))
        error_type = recoverable(self.tx)
        if error_type is not None:
            writer.catch(start, functools.partial(self._run_again, error_type))
        writer.store_local(GRAPH_RESULT)

    def _run_again(self, error_type: type[Exception]) -> None:
        """Run the frame eagerly after its graph raised; no side effect has happened yet."""
        writer = self.writer
        writer.store_local(GRAPH_RESULT)
        writer.begin_call()
        writer.load_const(if_raised)
        writer.load_local(GRAPH_RESULT)
        writer.load_const(error_type)
        writer.load_const(self.tx.entry_grad_mode)
        writer.call(3)
        if self.handlers:
            self._handlers_on()
        raises = writer.label()
        writer.pop_jump_if_not_none(raises)
        writer.clear_temps(GRAPH_RESULT)
        writer.call_resume(from_the_start(self.frame.decoded))
        writer.mark(raises)
        writer.load_local(GRAPH_RESULT)
        writer.clear_temps(GRAPH_RESULT)
        writer.reraise()

    def body(self, outputs: dict[Node, int]) -> None:
        """Write the code after the graph."""
        self.out.graph_outputs.update(outputs)
        if self.end_mode is not self.tx.entry_grad_mode:
            self.out.do(torch._C._set_grad_enabled, constant(self.end_mode))
        self.tx.calls.emit(self.out, late=True)
        self.tx.effects.prepare(self.out)
        if self.stopped is None:
            self._return()
        else:
            self._break(self.stopped.frames[1:])

    def _return(self) -> None:
        value = self.frame.result
        assert value is not None
        writer = self.writer
        self.out.load(value)
        cells = self._load_cells()
        result = self.out.store_temp() if self.out.writes or cells or self.handlers else None
        self.out.write()
        self._store_cells(cells)
        self._end()
        if result is not None:
            writer.load_local(result)
        writer.return_()

    def _load_cells(self) -> dict[str, str]:
        """Load the contents of the frame's own cells into temporaries, where a cell escapes."""
        temps: dict[str, str] = {}
        for name, cell in self.frame.cells.items():
            if name in self.frame.decoded.cellvars and cell.contents is not None:
                temps[name] = self.out.load_temp(cell.contents)
        return temps

    def _store_cells(self, temps: dict[str, str]) -> None:
        for name, temp in temps.items():
            self.writer.load_local(temp)
            self.writer.store_local(name)
        self._empty_cells()

    def _empty_cells(self) -> None:
        """Unbind the arguments in cells that the program has deleted."""
        for name in self.frame.decoded.flat_args:
            cell = self.frame.cells.get(name)
            if cell is not None and cell.contents is None:
                self.writer.delete_local(name)

    def _break(self, inlined: Sequence[Frame]) -> None:
        frame, out, writer = self.frame, self.out, self.writer
        index = frame.ip - 1 if inlined else frame.ip
        instr = frame.decoded.instrs[index]
        writer.at(instr)
        # An inlined function may look at the frames of its callers.
        shown = bool(inlined) and shows_frame(inlined[-1].decoded, inlined[-1].ip)
        fails = (self.stopped is not None and REASONS[self.stopped.error.code].raises) or shown
        keep = frozenset(frame.locals) if shown else out.kept(frame.locals)
        live = frame.locals if fails else live_at(frame.decoded, index) | keep
        locals_ = {name: value for name, value in frame.locals.items() if name in live}
        temps = {name: out.load_temp(value) for name, value in locals_.items()}
        stack = [None if value is NULL else out.load_temp(value) for value in frame.stack]
        inner = InnerFrames(out, inlined, keep_all=fails) if inlined else None
        temps.update(self._load_cells())
        replaced = {name: out.load_temp(cell) for name, cell in self.replaced.items()}
        out.write()
        self._end()
        for name, temp in replaced.items():
            writer.load_local(temp)
            writer.store_cell(name)
        for name, temp in temps.items():
            writer.load_local(temp)
            writer.store_local(name)
        for name in frame.decoded.flat_args:
            if name not in temps and name not in frame.cells and self._is_rebound(name):
                writer.delete_local(name)
        self._empty_cells()
        writer.load_stack(stack)
        below = [value is not NULL for value in frame.stack]
        step = RealStep(writer, frame.decoded, below, tuple(locals_), keep)
        if inner is None:
            # This frame must not keep objects alive that the instruction releases.
            writer.clear_temps(GRAPH_RESULT)
            step.run(index)
            return
        inner.call()
        step.returned(index)

    def _is_rebound(self, name: str) -> bool:
        """Say whether an argument's variable was rebound, so that the argument must be released."""
        source = getattr(self.frame.locals.get(name), "source", None)
        return source != LocalSource(name)
