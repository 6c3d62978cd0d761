"""What stands behind one entry of the engine's cache: a tape and the graphs compiled from it.

The engine finds the entry by the autograd structure. The entry finds a graph by compiler, input
layouts and the global state that changes what a backward traces to. When none fits, the tape is
lowered once more, with the sizes that changed made symbolic.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from weft_core.events import counters, span

from weft_compiled_autograd import guards, report
from weft_compiled_autograd.aot import symbolic_dims
from weft_compiled_autograd.config import settings
from weft_compiled_autograd.errors import NotCapturable
from weft_compiled_autograd.hooks import OmittedGradient, call_backward
from weft_compiled_autograd.interpret import run_tape
from weft_compiled_autograd.lower import Lowered, lower
from weft_compiled_autograd.ownership import release_inputs
from weft_compiled_autograd.saved_tensor_hooks import Layouts, packed_data_key
from weft_compiled_autograd.tape import Tape

Compiler = Callable[[Any], Callable[..., Any]]


def compiler_key(compiler: Compiler) -> Hashable:
    """What makes two compilers the same: a function without closure or defaults is its code.

    So `enable(lambda gm: gm)` in a loop finds the graphs of its earlier rounds.
    """
    plain = isinstance(compiler, types.FunctionType)
    if plain and not compiler.__closure__ and not compiler.__defaults__:
        return compiler.__code__
    return id(compiler)


def dynamic_of(compiler: Compiler) -> bool | None:
    """Which sizes a compiler wants symbolic: None for those that change, True, False for none."""
    return getattr(compiler, "dynamic", None)


def _global_state() -> Hashable:
    """Process state that a trace depends on."""
    cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    dtypes = (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) if cast else ()
    enabled = (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")) if cast else ()
    return (dtypes, enabled, torch.are_deterministic_algorithms_enabled())


@dataclass(frozen=True)
class CompiledBackward:
    """One compiled graph of an entry."""

    key: Hashable
    compiler: Compiler  # kept alive: `key` may be its id
    check: guards.Check
    function: Callable[..., Any]
    lowered: Lowered

    def run(self, inputs: Any, *rest: Any) -> list[torch.Tensor | None]:
        """Run the graph; assign the first gradients that it returns."""
        variables = [inputs[index] for index in self.lowered.assigned]
        results = self.function(inputs, *rest)
        for variable, grad in zip(variables, results[self.lowered.results :], strict=True):
            variable.grad = grad
        return list(results[: self.lowered.results])


_seen_shapes: dict[tuple[tuple[str, ...], tuple[int, ...]], guards.SeenShapes] = {}
"""Shapes by program (tape signature and ranks of the inputs): an entry that replaces another after
a size changed knows which dimensions did."""


_EMPTY = Tape(torch.fx.Graph())


def forget() -> None:
    """Forget which sizes changed."""
    _seen_shapes.clear()


@dataclass
class BackwardEntry:
    """One autograd structure. Called by `engine.py` with what the engine passes at run time.

    Args:
        tape: the recorded backward.
        origins: the autograd nodes of the sizes where the engine passes all of them, not only
            those that changed: which of them are symbolic is then decided here.
    """

    tape: Tape
    origins: Sequence[tuple[int, str]] | None = None
    last_sizes: Sequence[int] = ()
    noted: dict[Hashable, Layouts] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    graphs: list[CompiledBackward] = field(default_factory=list)
    gave_up: bool = False
    watches: list[weakref.ref[type]] = field(default_factory=list)

    def prepare(
        self, compiler: Compiler, inputs: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> None:
        """Compile the first graph, while the autograd graph is still whole.

        Raises:
            NotCapturable: when only the eager engine can run this backward.
            Exception: whatever the compiler raises.
        """
        contexts, self.tape.contexts = self.tape.contexts, {}
        self._end_with(context._forward_cls for context in contexts.values())
        self.last_sizes = tuple(sizes)
        if self.tape.unpacks:
            return  # what the hooks unpack is seen in the first run
        self._try(compiler, contexts, inputs, sizes, first=True)

    def _end_with(self, functions: Iterable[type]) -> None:
        """Free everything when an autograd.Function in it is gone: the engine keeps the entry."""
        here = weakref.ref(self)

        def gone(_: object) -> None:
            if (entry := here()) is not None:
                signature = entry.tape.signature()
                for program in [known for known in _seen_shapes if known[0] == signature]:
                    del _seen_shapes[program]
                entry.graphs, entry.tape = [], _EMPTY

        self.watches = [weakref.ref(function, gone) for function in functions]

    def _give_up(self, reason: str) -> None:
        self.gave_up = True
        counters["compiled_autograd"]["node_by_node"] += 1
        report.report_once(reason, report.TAPE)

    def _compile(
        self,
        compiler: Compiler,
        contexts: dict[int, Any],
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[int],
    ) -> CompiledBackward:
        program = (self.tape.signature(), tuple(tensor.dim() for tensor in inputs))
        seen = _seen_shapes.setdefault(program, guards.SeenShapes())
        dynamic = seen.update([tensor.shape for tensor in inputs])
        symbolic = set(range(len(sizes)))
        if dynamic_of(compiler) is False:
            dynamic, symbolic = [[] for _ in inputs], set()
        elif dynamic_of(compiler):
            dynamic = [_varying(tensor) for tensor in inputs]
        elif self.origins is not None:
            dynamic, values = with_aot_sizes(self.tape, contexts, inputs, dynamic)
            symbolic = {k for k, size in enumerate(sizes) if size in values} | self.changed
        with span("compiled_autograd", f"{len(self.tape.names)} autograd nodes"):
            lowered = lower(self.tape, contexts, inputs, sizes, dynamic, symbolic)
            check = guards.build_check(lowered, inputs, sizes)
        counters["compiled_autograd"]["graphs"] += 1
        report.show_graph(lowered.module)
        function = compiler(lowered.module)
        if function is lowered.module:
            release_inputs(lowered.module.graph)
            lowered.module.recompile()
        key = self._key(compiler)
        made = CompiledBackward(key, compiler, check, function, lowered)
        self.graphs.insert(0, made)
        return made

    def __call__(
        self, compiler: Compiler, inputs: Any, sizes: Any, scalars: Any, hooks: Any, packed: Any
    ) -> list[torch.Tensor | None]:
        """Run this backward; return the gradients that the engine asked for."""
        after: OmittedGradient | None = None
        if self.tape.unpacks and not self.gave_up and not self._knows(packed):
            return self._first_run(inputs, sizes, scalars, hooks, packed)
        if not self.gave_up:
            graph = self._find(compiler, inputs, sizes) or self._another(
                compiler, inputs, sizes, hooks
            )
            if graph is not None:
                try:
                    return graph.run(inputs, sizes, scalars, hooks, packed)
                except OmittedGradient as stop:
                    self._give_up(str(stop))
                    after = stop.with_traceback(None)
        return run_tape(self.tape, inputs, sizes, scalars, hooks, packed, after=after)

    def _knows(self, packed: Any) -> bool:
        """Whether the layouts of what the hooks will unpack are known; the tape has them then."""
        key = packed_data_key(packed)
        if key is None or len(self.noted) > settings.graph_limit:
            self._give_up("saved-tensor hooks: what they unpack is known only when they run")
            return True
        self.tape.unpacked = self.noted.setdefault(key, {})
        return bool(self.tape.unpacked)

    def _first_run(self, *arguments: Any) -> list[torch.Tensor | None]:
        unpacked: Layouts = {}
        outputs = run_tape(self.tape, *arguments, unpacked=unpacked)
        if None in unpacked.values():
            self._give_up("a saved-tensor hook that unpacks no dense tensor")
        self.tape.unpacked.update(unpacked)
        return outputs

    def _find(self, compiler: Compiler, inputs: Any, sizes: Any) -> CompiledBackward | None:
        key = self._key(compiler)
        shapes, strides = guards.layout(inputs)
        for position, graph in enumerate(self.graphs):
            if graph.key == key and graph.check(shapes, strides, sizes):
                if position:
                    self.graphs.insert(0, self.graphs.pop(position))
                return graph
        return None

    def _key(self, compiler: Compiler) -> Hashable:
        """What the graphs of this entry are told apart by, apart from the layouts of inputs."""
        unpacked = tuple(self.tape.unpacked.values())
        return (compiler_key(compiler), _global_state(), unpacked)

    def _note_sizes(self, sizes: Sequence[int]) -> None:
        """Where the engine passes all sizes: find those that changed, as the engine would."""
        if self.origins is None:
            return
        pairs = enumerate(zip(sizes, self.last_sizes, strict=False))
        new = [k for k, (now, before) in pairs if now != before and k not in self.changed]
        self.last_sizes = tuple(sizes)
        if new:
            self.changed.update(new)
            counters["compiled_autograd"]["captures"] += 1
            report.report_sizes(new, self.origins)

    def _another(
        self, compiler: Compiler, inputs: Any, sizes: Any, hooks: Any
    ) -> CompiledBackward | None:
        """Compile a graph for a layout or compiler that none of this entry's graphs fits."""
        self._note_sizes(sizes)
        if len(self.graphs) >= settings.graph_limit:
            self._give_up(f"{settings.graph_limit} graphs were compiled for one structure")
            return None
        return self._try(compiler, dict(enumerate(hooks)), inputs, sizes, first=False)

    def _try(self, *arguments: Any, first: bool) -> CompiledBackward | None:
        try:
            return self._compile(*arguments)
        except NotCapturable as problem:
            if first and not problem.replayable:
                raise
            self._give_up(str(problem))
            return None


def _varying(tensor: torch.Tensor) -> list[int]:
    """The dimensions that may vary from the start: none of a parameter; 0 and 1 broadcast."""
    of: Any = tensor if tensor._base is None else tensor._base
    fixed = isinstance(of, torch.nn.Parameter)
    return [] if fixed else [dim for dim, size in enumerate(tensor.shape) if size > 1]


def with_aot_sizes(
    tape: Tape,
    contexts: dict[int, Any],
    inputs: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[int]],
) -> tuple[list[list[int]], set[int]]:
    """Add the dimensions that compiled forwards call symbolic; also the sizes that these have."""
    dims = [set(known) for known in dynamic]
    values: set[int] = set()
    for node in tape.graph.nodes:
        if node.target is not call_backward:
            continue
        saved: Any = node.args[1]
        context = contexts[node.meta["hook_index"]]
        for tensor, found in zip(saved, symbolic_dims(context, len(saved)), strict=False):
            if found and tensor.args[0].target == "inputs":
                index = tensor.args[1]
                dims[index].update(found)
                values.update(inputs[index].shape[dim] for dim in found)
        values.update(getattr(context, "symbols", ()))
    return [sorted(found) for found in dims], values
