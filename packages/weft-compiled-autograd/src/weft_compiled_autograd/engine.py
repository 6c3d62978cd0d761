"""The seam to torch's autograd engine: the only file that knows its Python interface.

`Variable._execution_engine`, through which every `backward()` and `autograd.grad()` of Python goes,
becomes an `EngineGate`: it decides which backward is captured and runs the others on the eager
engine. For one captured backward at a time the engine's own extension point is set; the engine then
looks its autograd graph up in its cache and either calls the methods of a `BackwardCapture`, or at
once what an earlier capture returned. `accumulate_grad` is where torch 2.13 and 2.11 differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from weft_core import torch_compiler_shim
from weft_core.events import counters

from weft_compiled_autograd import ddp, report
from weft_compiled_autograd.aot import reaches_dynamic
from weft_compiled_autograd.cache import BackwardEntry, Compiler, dynamic_of
from weft_compiled_autograd.engine_lock import engine_lock
from weft_compiled_autograd.errors import NotCapturable
from weft_compiled_autograd.node_order import eager_order
from weft_compiled_autograd.tape import EngineOp, TapeRecorder

_seam = torch._C._dynamo.compiled_autograd
_BUSY = "another backward runs at the same time"


class _OpTable(dict[str, EngineOp]):
    """The engine's functions by name. It hands over each only once a process.

    When torch's own compiled autograd ran first, the function is in that module's table.
    """

    def __missing__(self, name: str) -> EngineOp:
        found = getattr(torch_compiler_shim.engine_functions(), name, None)
        if found is None:
            raise NotCapturable(f"the engine gave no function for {name}")
        self[name] = EngineOp(name, found, traceable=True)
        return self[name]


_ops = _OpTable()


class Session:
    """One backward that is being captured or run from the cache, in one thread."""

    def __init__(
        self, compiler: Compiler, roots: Sequence[Any] = (), inputs: Sequence[Any] = ()
    ) -> None:
        self.compiler = compiler
        self.roots = roots
        self.inputs = inputs
        self.dynamic = dynamic_of(compiler) or reaches_dynamic(roots)
        self.capture: BackwardCapture | None = None
        self.started = False
        self.compiler_failed = False
        self.callbacks: list[Callable[[], None]] = []


class _ThreadState(threading.local):
    """Per thread: the compilers of nested `enable` blocks (None: disabled), the open session."""

    def __init__(self) -> None:
        self.compilers: list[Compiler | None] = []
        self.session: Session | None = None


thread = _ThreadState()


class ProcessSession:
    """Gives the compiler of threads that are in no `enable` or `disable` block."""

    choose: Callable[[], Compiler | None] = staticmethod(lambda: None)


_one_at_a_time = threading.Lock()


class BackwardCapture(TapeRecorder):
    """The object whose methods the engine calls, in the forms that torch's versions have."""

    def __init__(self, session: Session) -> None:
        super().__init__(_ops)
        self.session = session
        self.inputs: list[torch.Tensor] = []
        self.sizes: Sequence[int] = ()
        self.size_origins: Sequence[tuple[int, str]] = ()
        self.session.capture = self

    def begin_capture(
        self,
        inputs: list[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        origins: Sequence[Any],
        accumulate_grad: bool = True,
        check_nans: bool = False,
    ) -> tuple[str, list[torch.Tensor], list[Any], list[Any]]:
        """Start: the engine's cache missed."""
        self.size_origins = origins[1] if len(origins) > 1 else ()
        if not self.session.dynamic:
            report.miss_log.name_sizes(self.size_origins)
        number = counters["compiled_autograd"]["captures"]
        counters["compiled_autograd"]["captures"] += 1
        self.inputs, self.sizes = list(inputs), list(sizes)
        stand_ins, symbols = self.begin(inputs, sizes, scalars)
        return f"weft{number}", stand_ins, symbols, []

    def log_compile_reasons(self, reasons: list[str]) -> None:
        """Take the engine's summary; the same lines have been logged one by one."""

    def bind_function(
        self, name: str, function: Callable[..., Any], custom: bool, traceable: bool
    ) -> str:
        """Keep a backward function under the name that later calls use."""
        if custom:
            name = f"CppNode{name}{len(_ops)}"
        _ops[name] = EngineOp(name, function, traceable)
        return name

    def accumulate_grad(self, variable: torch.Tensor, *args: Any) -> torch.Tensor | None:
        """Record AccumulateGrad in either version's form."""
        *old, new, post_hooks = args
        before = old[0] if old else variable.grad
        result = self.record_gradient(variable, before, new, bool(post_hooks))
        return result if old else None

    def proxy_call_backward(
        self,
        inputs: Sequence[Any],
        output_metadatas: Sequence[Any],
        saved_tensors: Sequence[Any],
        backward_idx: int,
        ctx: Any,
        backward_state_idx: int | None,
        opaque_indices: Sequence[int] = (),
    ) -> tuple[torch.Tensor | None, ...]:
        """Record a Python autograd.Function."""
        if backward_state_idx is not None or opaque_indices:
            raise NotCapturable("a compiled forward that keeps Python objects for its backward")
        ours = hasattr(ctx._forward_cls, "weft_backward_graph")  # takes gradients in either way
        if getattr(ctx._forward_cls, "boxed_grads_call", False) and not ours:
            raise NotCapturable("an autograd.Function with boxed_grads_call")
        return self.call_backward(inputs, output_metadatas, saved_tensors, backward_idx, ctx)

    def end_capture(self, outputs: Sequence[Any]) -> tuple[Callable[..., Any], BackwardEntry]:
        """Finish: compile, and return what the engine calls now and on every later hit."""
        tape = self.end(outputs)
        tape = eager_order(tape, self.session.roots, self.session.inputs)
        entry = BackwardEntry(tape, self.size_origins if self.session.dynamic else None)
        try:
            entry.prepare(self.session.compiler, self.inputs, self.sizes)
        except NotCapturable:
            raise
        except Exception:
            self.session.compiler_failed = True
            raise
        finally:
            self.inputs = []
        return _run_entry, entry


def _run_entry(entry: BackwardEntry, *arguments: Any) -> list[torch.Tensor | None]:
    """Run one backward, called by the engine; from here on no fallback is possible."""
    engine_lock.close()
    session = thread.session
    assert session is not None
    session.started = True

    def run() -> list[torch.Tensor | None]:
        outputs = entry(session.compiler, *arguments)
        while session.callbacks:
            session.callbacks.pop(0)()
        return outputs

    if ddp.RedirectedReducers.any and entry.tape.effects:
        gate: Any = Variable._execution_engine
        return ddp.in_backward(gate.engine, run)
    return run()


class EngineGate:
    """Stands before the engine: `run_backward` for `backward()`, and what hooks ask of it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Run `callback` at the end of the backward that runs now."""
        if thread.session is not None and thread.session.started:
            thread.session.callbacks.append(callback)
        else:
            self.engine.queue_callback(callback)

    def run_backward(
        self, tensors: Any, grads: Any, keep_graph: bool, create_graph: bool, *rest: Any, **kw: Any
    ) -> Any:
        """Run a backward, captured where that is enabled and possible."""
        compiler = thread.compilers[-1] if thread.compilers else ProcessSession.choose()
        call = (tensors, grads, keep_graph, create_graph, *rest)
        if compiler is None or _in_a_trace():
            return self._eager(call, kw)
        refusal = _refusal(grads, create_graph)
        if refusal is None:
            inputs = call[4] if len(call) > 4 else kw.get("inputs", ())
            outputs, refusal = self._captured(Session(compiler, tensors, inputs), call, kw)
            if refusal is not None and ddp.REFUSAL in refusal and ddp.redirect_reducer_hooks():
                outputs, refusal = self._captured(Session(compiler, tensors, inputs), call, kw)
            if refusal is None:
                return outputs
        report.report_once(refusal)
        counters["compiled_autograd"]["eager"] += 1
        return self._eager(call, kw)

    def _captured(self, session: Session, call: Any, kw: Any) -> tuple[Any, str | None]:
        """Run one backward through the extension point.

        Returns:
            Its result and None, or None and why it has to run on the eager engine; nothing has
            happened then.
        """
        if not _one_at_a_time.acquire(blocking=False):
            return None, _BUSY
        try:
            log = report.miss_log if report.is_verbose() else None
            if not engine_lock.open(_new_capture, log, session.dynamic):
                return None, _BUSY
            thread.session = session
            return self.engine.run_backward(*call, **kw), None
        except Exception as problem:
            if session.started or session.compiler_failed:
                raise
            return None, str(problem).strip().split("\n", 1)[0]
        finally:
            thread.session = None
            if session.capture is not None:
                session.capture.close()  # leaves what a failed capture left open
                session.capture = None  # the two refer to each other, and to the autograd graph
            engine_lock.close()
            _one_at_a_time.release()

    def _eager(self, call: Any, kw: Any) -> Any:
        with engine_lock.eager():
            return self.engine.run_backward(*call, **kw)


def _in_a_trace() -> bool:
    """Whether a tracer differentiates what it traces: no backward of the program's own."""
    modes = _get_current_dispatch_mode_stack()
    return bool(modes) and all(type(mode).is_infra_mode() for mode in modes)


def _refusal(grads: Any, create_graph: bool) -> str | None:
    """Why this backward is left to the eager engine, before anything is tried."""
    if not all(grad is None or torch._C._has_storage(grad) for grad in grads):
        return "is_grads_batched=True: gradients under vmap have no memory of their own"
    if create_graph:
        return "create_graph=True: gradients of gradients need the eager engine's graph"
    if thread.session is not None:
        return "a backward inside a compiled backward"
    if torch.is_anomaly_enabled():
        return "anomaly mode checks every node"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode is active"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    return None


def _new_capture() -> BackwardCapture:
    """Called by the engine on a cache miss."""
    engine_lock.close()
    assert thread.session is not None
    return BackwardCapture(thread.session)


def install() -> None:
    """Put the gate before the engine; later calls change nothing."""
    if not isinstance(Variable._execution_engine, EngineGate):
        gate: Any = EngineGate(Variable._execution_engine)
        Variable._execution_engine = gate


def clear_cache() -> None:
    """Forget every captured backward."""
    _seam.clear_cache()
