"""The pipeline of this package: aten graph -> loop nodes -> program -> machine code.

    1. trace      a torch-level graph is first traced to aten operators (inference only)
    2. lower      loops/lower: operators to loop nodes, the rest to extern calls
    3. schedule   loops/schedule: loop nodes to kernels
    4. verify     loops/verify.py, when settings.verify_ir is set
    5. build      kernels/: C source, compiler, loaded callable
    6. measure    measure.py: eager runs instead where it is faster
    7. record     cudagraphs.py: CUDA graphs, where the options ask for them

A graph whose program is on disk goes from 1 to 5's loading at once (graph_cache.py).
Each step takes a value and returns the next one; nothing here knows how a step works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from weft_core import events, recording
from weft_core.dumps import graph_script
from weft_core.errors import BackendCompilerError, CompilerUnavailable, WeftError
from weft_core.fake import fake_inputs
from weft_core.tracing import trace_aten

from weft_codegen import graph_cache
from weft_codegen.collective_buckets import join_collectives
from weft_codegen.config import Options, settings
from weft_codegen.cudagraphs import with_cudagraphs
from weft_codegen.freezing import frozen as with_frozen
from weft_codegen.kernels import CompiledGraph, Loadable, compile_program
from weft_codegen.kernels.step_events import step_origins, timed
from weft_codegen.kernels.triton.triton_expr import NoTritonForm
from weft_codegen.layout import laid_out
from weft_codegen.loops.interpret import run_program
from weft_codegen.loops.lower.decompose import decompositions
from weft_codegen.loops.lower.graph import NoLowering, lower_graph
from weft_codegen.loops.printer import program_text
from weft_codegen.loops.program import CPU, Program
from weft_codegen.loops.schedule import schedule
from weft_codegen.loops.verify import verify_program
from weft_codegen.measure import Eager, measured
from weft_codegen.nan_asserts import with_nan_asserts
from weft_codegen.padded_products import pad_products
from weft_codegen.program_record import program_record
from weft_codegen.trace import dump_of, write_program
from weft_codegen.tune import attention_wins, convolution_wins, linear_wins, loop_wins

__all__ = ["compile_graph", "decompositions", "make_program"]

Compiled = Callable[..., Any]

_schedule_log = events.logger("codegen", "schedule")
_hints = events.logger("codegen", "perf_hints")


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Options = Options(),
    inference: bool = False,
    frozen: Mapping[int, torch.Tensor] | None = None,
) -> Compiled:
    """Compile a graph to one native function.

    Args:
        gm: an aten graph whose nodes carry `meta["val"]`, functional apart from trailing
            `aten.copy_(placeholder, value)` nodes; or a torch-level graph of the backend protocol,
            which is traced first and compiled for inference.
        inputs: real or fake tensors and ints, one a placeholder.
        options: what else is asked for.
        inference: nothing is saved for a backward, so the graph's own layouts may change.
        frozen: with the option `freezing`, inputs by position that hold still (freezing.py).

    Returns:
        A callable of the flat inputs that returns the list of outputs.

    Raises:
        BackendCompilerError: a stage of the compilation failed, or `freezing` and no inference.
    """
    if options.freezing and not inference:
        text = "options={'freezing': True} is for inference, and this graph needs gradients"
        raise BackendCompilerError("codegen", text, remedy="call it under torch.no_grad()")
    if options.freezing and frozen:
        build = functools.partial(compile_graph, inputs=(), options=options, inference=True)
        return with_frozen(_aten(gm, inputs, options), frozen, build)
    with events.span("codegen"):
        try:
            gm = _aten(gm, inputs, options)
            with torch._C.DisableTorchFunction():  # `with torch.device(...)` of the caller
                compiled = _compile(gm, inputs, options, inference)
            if options.nan_asserts:
                return compiled
            if settings.measure and options.measure and isinstance(compiled, CompiledGraph):
                compiled = measured(compiled, gm)
            return with_cudagraphs(compiled, gm, options) if options.triton_cudagraphs else compiled
        except (NoLowering, NoTritonForm) as reason:
            _hints.info("graph runs without generated code: %s", reason)
            events.notify(f"no code for a graph: {reason}", eager=True, quiet=True)
        except CompilerUnavailable as missing:
            events.notify(f"{missing}\nGraphs run eagerly until then.", eager=True)
        except WeftError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            first = next(iter(n for n in gm.graph.nodes if n.op == "call_function"), None)
            op = None if first is None else str(first.target)
            raise BackendCompilerError("codegen", text, op=op) from error
    return Eager(gm)


def make_program(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options = Options()
) -> Program:
    """The scheduled loop program of a graph (steps 1 to 4).

    Raises:
        NoLowering: the graph cannot be a program (sizes only known while running, for example).
    """
    gm = _aten(gm, inputs, options)
    gm = join_collectives(gm, settings.collective_bucket, options.bucket_collectives)
    dump = dump_of(options)
    if dump:
        dump.write("codegen.graph.py", graph_script(gm))
    with events.span("codegen.lower"):
        rounding = {"rounds": options.emulate_precision_casts, "strict": options.strict_numerics}
        called = options.fallback_by_default
        lowered = lower_graph(gm, options.fallback_random, **rounding, called=called)
    if dump:
        dump.write("codegen.loops.txt", program_text(lowered) + "\n")
    with events.span("codegen.schedule"):
        prefer = loop_wins if options.max_autotune else None
        fuse, strict = options.epilogue_fusion, options.keeps_operators
        program = schedule(
            lowered, fuse=fuse, prefer=prefer, linear=linear_wins, attention=attention_wins,
            convolution=convolution_wins, strict=strict,
        )  # fmt: skip
    if settings.verify_ir:
        verify_program(program)
    recording.keep("program", lambda: program_record(lowered, program, gm))
    if dump:
        write_program(dump, program, diagram=options.trace_graph_diagram)
    if events.enabled("schedule"):
        _schedule_log.info("%s", program_text(program))
    return program


def _compile(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, inference: bool
) -> Compiled:
    """Steps 2 to 5, or what they led to before."""
    if recording.current() is not None and recording.here() is None:  # no other stage is around
        rows = recording.graph_rows(gm.graph)
        with recording.inside("aten", lambda: {"title": "aten graph", "rows": rows}):
            return _compile(gm, inputs, options, inference)
    with events.span("codegen.key"):
        threads = torch.get_num_threads()  # which the blocks of columns are cut for
        shown = dump_of(options) or options.nan_asserts
        key = None if shown else graph_cache.graph_key(gm, options, inference, threads)
    with graph_cache.known_or_made(key) as known:
        if known is None:
            return _make(gm, inputs, options, inference, key)
    events.counters["codegen"]["known_graphs"] += 1
    _count(known)
    compiled = CompiledGraph(known, graph_cache.constants(gm))
    compiled.listen(known.origins, gm)
    return compiled


def _make(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, inference: bool, key: str | None
) -> Compiled:
    """Steps 2 to 5."""
    before = gm
    if inference and not options.keeps_operators:
        with events.span("codegen.layout"):
            gm = laid_out(gm)
            gm = pad_products(gm) if options.shape_padding else gm
    program = make_program(gm, inputs, options)
    if options.nan_asserts:
        return with_nan_asserts(program, lambda program: _build(program, gm, before, None, options))
    if settings.interpret:
        return lambda *args: run_program(program, args)
    return _build(program, gm, before, key, options)


def _build(
    program: Program, gm: fx.GraphModule, before: fx.GraphModule, key: str | None, options: Options
) -> Compiled:
    """Step 5; `before` is the graph whose nodes the steps are named after."""
    if program.device != CPU:
        try:
            return _compile_elsewhere(program, gm)
        except NoTritonForm as reason:  # of a kernel that several operators share
            _hints.info("graph runs without fusion: %s", reason)
            alone = make_program(gm, (), replace(options, epilogue_fusion=False))
            return _compile_elsewhere(alone, gm)
    compiled = compile_program(program)
    compiled.listen(step_origins(program, before), before, timed(program))
    _count(compiled.loadable)
    if key is not None:
        graph_cache.store(key, compiled.loadable)
    return compiled


def _compile_elsewhere(program: Program, gm: fx.GraphModule) -> Compiled:
    """`program`, some of whose tensors are on a GPU, with Triton; or operator by operator."""
    if not program.kernels:
        return Eager(gm)
    try:
        from weft_codegen.kernels.triton import launch  # noqa: PLC0415  it may be missing
    except ImportError:
        text = "Graphs on a GPU run eagerly until Triton is there: pip install triton"
        events.notify(text, eager=True)
        return Eager(gm)
    compiled = launch.compile_program(program)
    compiled.listen(step_origins(program, gm), gm)
    _count(compiled.loadable)
    return compiled


def _count(loadable: Loadable) -> None:
    events.counters["codegen"].update(
        graphs=1,
        externs=len(loadable.externs),
        kernels=loadable.kernels,
        launches=loadable.launches,
    )
    events.counters["extern"].update(loadable.externs)


# Modules whose functions do arithmetic on sizes.
_ARITHMETIC = ("_operator", "builtins", "math", "torch")


def _is_aten(node: fx.Node) -> bool:
    """Whether a node is one that an aten graph may have."""
    if node.op == "call_function":
        known = isinstance(node.target, torch._ops.OpOverload)
        return known or getattr(node.target, "__module__", "") in _ARITHMETIC
    return node.op != "call_method" and (node.op != "placeholder" or "val" in node.meta)


def _aten(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options = Options()
) -> fx.GraphModule:
    """An aten graph as it is; one made of a torch-level graph, for inference."""
    if all(map(_is_aten, gm.graph.nodes)):
        return gm
    fakes = fake_inputs(gm, inputs)
    with events.span("codegen.trace"), torch.no_grad():
        table = decompositions(options.keeps_operators)
        return trace_aten(gm, fakes, decompositions=table)
