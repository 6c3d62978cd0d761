"""The data path of weft: every step from a Python function to compiled code, in order.

    1. capture        weft_capture   bytecode of a frame -> fx graph of torch calls, guards, breaks
    2. joint trace    weft_aot       fx graph -> one aten graph of forward and backward
    3. partition      weft_aot       joint graph -> forward, backward, and the tensors saved between
    4. code           weft_codegen   aten graph -> loop program -> schedule -> C -> loaded callable
    5. autograd       weft_aot       forward and backward callables -> one autograd function
    6. cache          weft_guards    guards -> compiled check; replacement code under that check

Steps 2 to 5 are a backend: they take a graph and example inputs and return a callable. Other
backends stop earlier (`eager` after step 1, `aot_eager` runs step 4's graphs as they are). In a
later call only step 6 runs: the frame hook asks the cache for code whose check holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import weft_aot
import weft_capture
import weft_codegen
from torch import fx
from weft_codegen import Options
from weft_core.arguments import checked
from weft_core.dumps import dump_graph
from weft_core.events import counters
from weft_guards import CacheRules, ShapesSpec

from weft import background, custom_passes, failures, progress
from weft.backends import Backend, Compiled, lookup_backend
from weft.overrides import override
from weft.settings import config


@dataclass(frozen=True)
class CompileRequest:
    """What the user asked `weft.compile` for, checked and parsed.

    Args:
        backend: a name or a callable.
        fullgraph: a graph break is an error.
        options: what the code generator is told.
        rules: what the caches are to do, `dynamic` included.
        shapes_spec: which sizes of a function's arguments vary (see `weft_guards.ShapesSpec`).
        isolated: share nothing with other calls.
        keywords: what a backend that is not weft's is called with (`mode`, `options`).
        passes: functions that change aten graphs, by `weft.options.PASSES`.
    """

    backend: str | Backend = "codegen"
    fullgraph: bool = False
    options: Options = Options()
    rules: CacheRules = CacheRules()
    shapes_spec: Any = None
    isolated: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[tuple[str, Any], ...] = ()

    @property
    def is_tied(self) -> bool:
        """Whether options fold parameters into graphs, or record these, which ties them to one
        module."""
        return self.options.freezing or self.options.triton_cudagraphs

    def shared_by(self) -> object:
        """Return what is equal in calls that share what they compile; None to share nothing."""
        own = self.isolated or self.shapes_spec is not None
        if own or self.is_tied or self.backend == "cudagraphs":
            return None
        return lookup_backend(self.backend), self, config.as_dict()


requests: WeakKeyDictionary[weft_capture.Capture, CompileRequest] = WeakKeyDictionary()
"""What was asked for each compiled function: a backward that it reaches is compiled alike."""


def compile_function(function: Callable[..., Any], request: CompileRequest) -> Callable[..., Any]:
    """Return `function` with steps 1 and 6 around it; steps 2 to 5 run when it is called.

    Raises:
        InvalidBackend: for an unknown backend.
    """
    rules = request.rules
    if request.shapes_spec is not None:
        rules = replace(rules, shapes=ShapesSpec(request.shapes_spec, function))
    compiled: Any = weft_capture.capture(
        function,
        graph_compiler(request),
        fullgraph=request.fullgraph,
        rules=rules,
        first_backend=aot_eager,
        marks_modules=request.options.use_graph_deduplication,
        share=request.shared_by(),
    )
    requests[compiled._weft_capture] = request
    return compiled  # type: ignore[no-any-return]


def graph_compiler(request: CompileRequest) -> Backend:
    """Return the backend of a request with timing, progress and error reports around it.

    weft's own backends get the parsed options, others the dict that torch.compile would pass.
    """
    usual = lookup_backend(request.backend)

    def compile_captured(gm: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
        dump_graph("capture.graph", gm)
        instead = override(counters["capture"]["graphs"] - 1)
        backend = usual if instead is None else lookup_backend(instead)
        keywords = request.keywords if instead is None else {}
        if backend in (codegen, aot_eager):
            keywords = {"options": request.options}
        if backend is codegen:
            keywords = {**keywords, "passes": request.passes}

        def compile_one(gm: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
            def compile_now() -> Compiled:
                with progress.stage("backend", failures.describe(gm)):
                    return failures.compile_or_fallback(
                        lambda: backend(gm, example_inputs, **keywords), gm
                    )

            waits = config.background_compile and backend is codegen and not request.is_tied
            if waits and background.can_wait(gm, example_inputs):
                return background.Background(gm, compile_now)
            return compile_now()

        pieces = capture_piece if backend is codegen else None
        return weft_capture.compile_split(gm, example_inputs, compile_one, pieces)

    return compile_captured


def capture_piece(function: Compiled, compile_one: Backend) -> Compiled:
    """Capture a piece of a captured graph, between numbers out of tensors, as a function."""
    captured: Compiled = weft_capture.capture(function, compile_one)
    return captured


def codegen(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Options = Options(),
    passes: tuple[tuple[str, Any], ...] = (),
) -> Compiled:
    """Backend `codegen`: steps 2 to 5, with generated code for both directions."""
    compile_aten: Backend = partial(weft_codegen.compile_graph, options=options)
    if passes:
        compile_aten = custom_passes.before(compile_aten, passes)
    frozen = weft_codegen.frozen_inputs(gm, example_inputs)
    backend = aot_autograd(
        fw_compiler=compile_aten,
        inference_compiler=partial(compile_aten, inference=True, frozen=frozen),
        decompositions=weft_codegen.decompositions(options.keeps_operators),
        partition_fn=custom_passes.before_cut(passes, options),
        rewrites=not (options.keeps_operators or options.emulate_precision_casts),
    )
    if options.freezing or options.triton_cudagraphs:
        return backend(gm, example_inputs)
    modules = options.use_graph_deduplication
    return weft_capture.compile_regions(gm, example_inputs, backend, modules)


def aot_eager(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: Options = Options()
) -> Compiled:
    """Backend `aot_eager`: steps 2, 3 and 5; the aten graphs run op by op."""
    backend = aot_autograd(fw_compiler=weft_aot.run_op_by_op)
    modules = options.use_graph_deduplication
    return weft_capture.compile_regions(gm, example_inputs, backend, modules)


def eager(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Compiled:
    """Backend `eager`: step 1 alone; the captured graph runs op by op."""
    return gm.forward


def cudagraphs(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Compiled:
    """Backend `cudagraphs`: as `aot_eager`, recorded and replayed where that can be."""
    replayed = weft_codegen.with_cudagraphs
    return aot_autograd(fw_compiler=lambda aten, _: replayed(weft_codegen.Eager(aten), aten))(
        gm, example_inputs
    )


def cudagraph_mark_step_begin() -> None:
    """Mark the start of a step: nothing to do, for no replay overwrites outputs in use."""


@checked
def aot_autograd(
    *,
    fw_compiler: Backend,
    bw_compiler: Backend | None = None,
    inference_compiler: Backend | None = None,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
    partition_fn: Callable[..., Any] | None = None,
    rewrites: bool = True,
) -> Backend:
    """Make a backend from compilers of plain aten graphs: steps 2, 3 and 5 are done for them.

    Args:
        fw_compiler: compiles the forward graph, `(gm, fake_inputs) -> callable`.
        bw_compiler: compiles the backward graph; defaults to `fw_compiler`.
        inference_compiler: compiles graphs that need no gradient; defaults to `fw_compiler`.
        decompositions: op overload -> function, applied while the joint graph is traced.
        partition_fn: splits the joint graph; defaults to weft's min-cut.
        rewrites: compute attention and losses in other forms, which round otherwise.
    """

    def backend(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Compiled:
        return weft_aot.aot_compile(
            gm,
            example_inputs,
            fw_compiler=fw_compiler,
            bw_compiler=bw_compiler,
            inference_compiler=inference_compiler,
            decompositions=decompositions,
            partition_fn=partition_fn or weft_aot.partition,
            rewrites=rewrites,
        )

    return backend


if _trace := os.environ.get("WEFT_TRACE"):  # the first compilation has begun
    from weft import program_trace

    program_trace.start(_trace)
