"""`weft.bisect`: which stage, which graph and which operator make a result differ from eager's.

    run f eagerly, in float64, and with one stage more at a time      -> stage
    capture: fewer frames, then fewer instructions of the last one    -> instruction
    others: each graph beside the graph run as the stage before does  -> graph and its inputs
    make that graph smaller (minimise.py)                             -> operator, script

Every run begins with copies of the arguments and of the modules that the function reaches.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import weft_aot
import weft_capture
import weft_codegen
from torch import fx, nn
from torch.utils import _pytree as pytree
from weft_codegen import Options
from weft_core.errors import user_frame
from weft_guards import CacheRules

from weft import api
from weft.bisect_script import expression_script, source_of, write_script
from weft.judge import Outcome, difference, observe, widened
from weft.minimise import Candidate, copy_of, first, minimise, script, target_name
from weft.modules import original_of
from weft.pipeline import CompileRequest, aot_autograd, aot_eager, codegen, eager
from weft.settings import config

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_OWN = Options(measure=False)


def _decomposed(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """As `aot_eager`, with the decompositions that the code generator wants."""
    compiler = weft_aot.run_op_by_op
    table = weft_codegen.decompositions()
    return aot_autograd(fw_compiler=compiler, decompositions=table)(gm, inputs)


_STAGES: dict[str, Backend] = {
    "capture": eager,
    "aot": aot_eager,
    "decompositions": _decomposed,
    "codegen": functools.partial(codegen, options=_OWN),
}
"""The stages in order; each backend does what those before it do, and one thing more."""

_CODEGEN: dict[str, tuple[bool, bool]] = {
    "lowering": (True, False),
    "fusion": (True, True),
    "kernel": (False, True),
}
"""The parts of code generation: whether the program is interpreted, and whether it is fused."""


@dataclass(frozen=True)
class Finding:
    """What differs, and where it comes from; print it.

    Args:
        stage: `capture`, `aot`, `decompositions`, `lowering`, `fusion`, `kernel` or `compiled
            autograd`; empty when nothing differs.
        difference: what is not as in eager.
        graph: the number of the captured graph, and which graph of it; empty for none.
        kernels: the kernels of the smallest graph.
        operators: the operators of the smallest graph; for capture, the expression.
        where: `file:line` of the user's code.
        script: a program that shows the difference, or an empty text.
        path: where it was written.
    """

    stage: str
    difference: str = ""
    graph: str = ""
    kernels: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    where: str = ""
    script: str = ""
    path: str = ""

    def __bool__(self) -> bool:
        return bool(self.stage)

    def __str__(self) -> str:
        if not self:
            return "no stage of weft makes a result that differs from eager's"
        rows = {
            "difference": self.difference,
            "graph": self.graph,
            "kernel": ", ".join(self.kernels),
            "operator": ", ".join(self.operators),
            "user code": self.where,
            "script": self.path,
        }
        known = [f"  {name + ':':<12}{text}" for name, text in rows.items() if text]
        return "\n".join([f"{self.stage} makes a result that differs from eager's", *known])


def bisect(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool | None = None,
) -> Finding:
    """Find what makes a compiled function differ from eager, or fail.

    Results, gradients of what requires one (the sum of results with fixed weights is
    differentiated), and arguments after the call are compared; float64 runs tell rounding from
    errors. The function runs some tens of times, on copies.

    Args:
        function: a function or module, compiled or not.
        args, kwargs: what to call it with.
        dynamic: as for `weft.compile`.

    Returns:
        What was found; false when nothing differs.
    """
    own_args, own_kwargs = pytree.tree_map(_as_leaf, (tuple(args), dict(kwargs or {})))
    with _bare():
        return _Search(_Program(function, own_args, own_kwargs, dynamic)).finding()


class Found(BaseException):
    """A call in a watched program differs from eager; the argument is the finding."""


@contextmanager
def watched(calls: int = 4) -> Iterator[None]:
    """Bisect what `weft.compile` is given, at its first calls; the program itself runs eagerly.

    Args:
        calls: how many calls of each function are looked at.

    Raises:
        Found: at the first call that differs.
    """
    apply_request = api.apply_request

    def apply(request: CompileRequest | None, model: Any) -> Any:
        compiled = apply_request(request, model)
        if request is None:
            return compiled
        called = model.forward if isinstance(model, nn.Module) else model
        left = itertools.count(calls, -1)

        @functools.wraps(called)
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left) > 0:
                found = bisect(model, args, kwargs, dynamic=request.rules.dynamic)
                if found:
                    raise Found(found)
            return called(*args, **kwargs)

        if not isinstance(model, nn.Module):
            return call
        object.__setattr__(compiled, "_weft_call", call)
        return compiled

    api.apply_request = apply
    try:
        yield
    finally:
        api.apply_request = apply_request


@contextmanager
def _bare() -> Iterator[None]:
    """No cache on disk, no measuring, errors as they are: each run builds what it runs."""
    with config.patch(
        verify_ir=True, measure=False, compiled_autograd=False, on_compile_error="raise",
        raise_internal_errors=True, caching_precompile=False, overrides="",
    ), torch.random.fork_rng(range(torch.cuda.device_count())):  # fmt: skip
        yield


@dataclass(frozen=True)
class _Program:
    """A call to run again and again; each time on copies of what it may change."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic: bool | None
    differentiate: bool = True

    def run(
        self, backend: Backend | None, limit: weft_capture.CaptureLimit | None = None,
        wide: bool = False,
    ) -> Outcome:  # fmt: skip
        """Run eagerly (None), or captured for a backend; `wide` in float64."""

        function, state, args, kwargs = self._copies(wide)

        def call() -> tuple[Any, Any]:
            if backend is None:
                return function(*args, **kwargs), (state, args, kwargs)
            called = function.forward if isinstance(function, nn.Module) else function
            split = functools.partial(_split, backend)
            compiled = weft_capture.capture(called, split, rules=CacheRules(self.dynamic))
            capture: Any = compiled._weft_capture  # type: ignore[attr-defined]
            capture.request = replace(capture.request, limit=limit)
            try:
                return compiled(*args, **kwargs), (state, args, kwargs)
            finally:
                capture.forget()

        return observe(call, self.differentiate)

    def _copies(self, wide: bool) -> tuple[Any, Any, Any, Any]:
        """Copies of the function, the modules and lists that it reaches, and its arguments."""
        function = original_of(self.function)
        if hasattr(function, "_weft_capture"):
            function = function.__wrapped__
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        plain = getattr(function, "__func__", function)
        state = {"self": owner} if owner is not None else {}
        cells: list[tuple[str, types.CellType]] = []
        if isinstance(plain, types.FunctionType):
            names = [n for n in plain.__code__.co_names if n in plain.__globals__]
            state |= {f"global {n}": plain.__globals__[n] for n in names}
            cells = [*zip(plain.__code__.co_freevars, plain.__closure__ or ())]
            state |= {f"cell {n}": _contents(cell) for n, cell in cells}
        state = {name: value for name, value in state.items() if _is_copied(value)}
        parts = (state, self.args, self.kwargs)
        state, args, kwargs = (widened if wide else copy.deepcopy)(parts)
        if isinstance(plain, types.FunctionType):
            closure = (
                types.CellType(state[f"cell {n}"]) if f"cell {n}" in state else cell
                for n, cell in cells
            )
            own = {n[7:]: value for n, value in state.items() if n.startswith("global ")}
            twin = types.FunctionType(
                plain.__code__, plain.__globals__ | own, plain.__name__, plain.__defaults__,
                tuple(closure),
            )  # fmt: skip
            twin.__kwdefaults__ = plain.__kwdefaults__
            function = twin if owner is None else types.MethodType(twin, state.get("self", owner))
        elif "self" in state:
            function = state["self"]
        return function, state, args, kwargs


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_copied(value: Any) -> bool:
    """Whether a run may change this object, and each run gets a copy."""
    if isinstance(value, nn.Module | torch.Tensor | torch.optim.Optimizer | list | dict):
        with suppress(Exception):
            copy.deepcopy(value)
            return True
    return False


def _as_leaf(value: Any) -> Any:
    """A tensor that can be copied: without the history that it came with."""
    return copy_of(value) if isinstance(value, torch.Tensor) and not value.is_leaf else value


def _split(backend: Backend, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile as `weft.compile` does: control flow on tensors has graphs of its own."""
    return weft_capture.compile_split(gm, inputs, backend)


@dataclass
class _Shadow:
    """A backend that runs each graph as a plainer one does, and looks where a stage differs.

    Args:
        plain: what runs.
        stage: what is compared with it.
        gradients: whether the graphs are differentiated: aten graphs are not.
        found: the first graph that differs: which, what differs, and its inputs.
    """

    plain: Backend
    stage: Backend
    gradients: bool = True
    found: tuple[str, str, Candidate] | None = None
    graphs: int = 0

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], title: str = "") -> Any:
        """Compile a graph both ways; real inputs come with the first call."""
        title = title or f"{self.graphs}"
        self.graphs += 1
        original, plain = _copied(gm), self.plain(gm, inputs)

        def run(*args: Any) -> Any:
            if self.found is None:
                keep = copy_of if self.gradients else _detached
                candidate = Candidate(original, tuple(map(keep, args)))
                text = self.differs(candidate)
                if text:
                    self.found = title, text, candidate
            return plain(*args)

        return run

    def smallest(self) -> tuple[str, str, Candidate]:
        """Return what was found, made small: it still raises, or differs, as it did."""
        assert self.found is not None
        title, text, candidate = self.found
        kind = _kind(text)

        def fails(smaller: Candidate) -> str:
            found = self.differs(smaller)
            return found if _kind(found) == kind else ""

        return title, text, minimise(candidate, fails)

    def differs(self, candidate: Candidate) -> str:
        """Say what a stage makes of a graph that the plainer backend does not, or nothing."""
        eager_run = _run_graph(self.plain, candidate)
        if eager_run.error is not None:
            return ""
        wide = Candidate(candidate.graph, tuple(widened(list(candidate.inputs))))
        exact = _run_graph(eager, wide)
        return difference(_run_graph(self.stage, candidate), eager_run, exact)


def _detached(value: Any) -> Any:
    return copy_of(value.detach()) if isinstance(value, torch.Tensor) else value


def _kind(text: str) -> str:
    """What a difference is: an error by its type, or other values."""
    return text.partition("(")[0] if text.startswith("raises ") else "differs" if text else ""


def _run_graph(backend: Backend, candidate: Candidate) -> Outcome:
    inputs = candidate.fresh_inputs()
    return observe(lambda: (backend(_copied(candidate.graph), inputs)(*inputs), inputs))


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return fx.GraphModule(gm, graph)


class _Search:
    """The search for one program."""

    def __init__(self, program: _Program) -> None:
        self.eager = program.run(None)
        self.program = program = replace(program, differentiate=not self.eager.spent)
        try:
            self.exact: Outcome | None = program.run(None, wide=True)
        except Exception:
            self.exact = None

    def differs(self, backend: Backend, limit: weft_capture.CaptureLimit | None = None) -> str:
        return difference(self.program.run(backend, limit), self.eager, self.exact)

    def finding(self) -> Finding:
        if not self.differs(_STAGES["codegen"]):
            with config.patch(compiled_autograd=True):
                text = self.differs(eager)
            return Finding("compiled autograd", text) if text else Finding("")
        before: Backend = eager
        for stage, backend in _STAGES.items():
            text = self.differs(backend)
            if text and stage == "capture":
                return self._captured(text)
            if text and stage == "codegen":
                return self._in_codegen(text)
            if text:
                return self._in_graph(stage, text, _Shadow(before, backend))
            before = backend
        return Finding("")  # it differs only now and then

    # ---- capture

    def _captured(self, text: str) -> Finding:
        """Find the first frame, then the first instruction, whose capture makes the difference."""
        everything = weft_capture.CaptureLimit(1 << 30)
        self.differs(eager, everything)
        frames = first(everything.seen, lambda n: self._fails(weft_capture.CaptureLimit(n)))
        steps = self._steps(frames)
        limit = weft_capture.CaptureLimit(frames, max(0, steps - 1))
        self._fails(limit)
        file, positions = limit.stopped
        where = f"{file}:{positions[0]}" if file and positions and positions[0] else ""
        expression = source_of(file, positions) if where else ""
        found = Finding("capture", text, operators=(expression,) if expression else (), where=where)
        about = f"capture: {expression}\n{text}"
        written = expression_script(lambda: self.program.run(None), where, expression, about)
        return replace(found, script=written, path=write_script(written)) if written else found

    def _fails(self, limit: weft_capture.CaptureLimit) -> bool:
        return bool(self.differs(eager, limit))

    def _steps(self, frames: int) -> int:
        """The least number of steps of the last frame with which the result is wrong."""
        most = 1
        while not self._fails(weft_capture.CaptureLimit(frames, most)) and most < 1 << 20:
            most *= 2
        return first(most, lambda n: self._fails(weft_capture.CaptureLimit(frames, n)))

    # ---- graphs

    def _in_graph(self, stage: str, text: str, shadow: _Shadow) -> Finding:
        self.program.run(shadow)
        if shadow.found is None:
            return Finding(stage, text)
        number, text, smallest = shadow.smallest()
        backend = "aot_eager" if stage == "aot" else "codegen"
        return _told(Finding(stage, text, f"captured graph {number}"), smallest, backend)

    def _in_codegen(self, text: str) -> Finding:
        training, inference = (
            _Shadow(_op_by_op, _generates(flag), gradients=False) for flag in (False, True)
        )
        numbers = itertools.count()

        def compile_captured(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            number = next(numbers)

            def direction(name: str) -> Backend:
                shadow = inference if name == "inference" else training
                return lambda aten, fakes: shadow(aten, fakes, f"{number}, {name}")

            return aot_autograd(
                fw_compiler=direction("forward"),
                bw_compiler=direction("backward"),
                inference_compiler=direction("inference"),
                decompositions=weft_codegen.decompositions(),
            )(gm, inputs)

        self.program.run(compile_captured)
        shadow = training if training.found is not None else inference
        if shadow.found is None:
            return Finding("codegen", text)
        number, text, smallest = shadow.smallest()
        infers = shadow is inference
        stages = (name for name in _CODEGEN if self._stage_fails(name, infers, smallest))
        stage = next(stages, "codegen")
        return _told(Finding(stage, text, f"captured graph {number}"), smallest)

    def _stage_fails(self, name: str, inference: bool, smallest: Candidate) -> bool:
        interpret, fuse = _CODEGEN[name]
        with config.patch(interpret=interpret):
            stage = _generates(inference, fuse)
            return bool(_Shadow(_op_by_op, stage).differs(smallest))


def _op_by_op(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return weft_aot.run_op_by_op(gm, inputs)


def _generates(inference: bool, fuse: bool = True) -> Backend:
    """The backend of aten graphs that generates code for them."""
    options = replace(_OWN, epilogue_fusion=fuse)
    return functools.partial(weft_codegen.compile_graph, options=options, inference=inference)


def _told(finding: Finding, smallest: Candidate, backend: str = "codegen") -> Finding:
    """Add what the smallest graph tells, and write its script."""
    operators = tuple(dict.fromkeys(map(target_name, smallest.calls)))
    lines = (":".join(user_frame(n.meta.get("stack_trace"))[:2]) for n in smallest.calls)
    kernels: tuple[str, ...] = ()
    if finding.stage in _CODEGEN:
        with suppress(Exception):  # where lowering itself fails, there are none
            program = weft_codegen.make_program(_copied(smallest.graph), smallest.inputs, _OWN)
            kernels = tuple(program.kernels)
    about = f"{finding.stage}: {', '.join(operators)}\n{finding.difference}"
    text = script(smallest, about, f"weft.compile(f, backend={backend!r})")
    where = next(filter(None, lines), "")
    path = write_script(text)
    return replace(
        finding, kernels=kernels, operators=operators, where=where, script=text, path=path
    )
