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

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import weft_aot
import weft_capture
import weft_codegen
from torch import fx
from weft_core.arguments import checked
from weft_core.dumps import dump_graph

from weft import control_flow, failures, progress
from weft.backends import Backend, Compiled, lookup_backend
from weft.region_dedup import deduplicate_regions
from weft.settings import config

DEDUPLICATE = "use_graph_deduplication"


@dataclass(frozen=True)
class Request:
    """What the user asked `weft.compile` for, checked.

    Args:
        backend: a name or a callable.
        fullgraph: a graph break is an error.
        options: the codegen options that differ from their defaults.
        rules: what its caches are to do (`weft_guards.CacheRules`), by name.
        isolated: share nothing with other calls.
    """

    backend: str | Backend = "codegen"
    fullgraph: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    isolated: bool = False

    def shared_by(self) -> object:
        """Return what is equal in calls that share what they compile; None to share nothing.

        Options that fold parameters into a graph or record it tie that graph to one module.
        """
        tied = ("freezing", "triton.cudagraphs")
        own = self.isolated or self.rules.get("shapes_spec") is not None
        if own or self.backend == "cudagraphs" or any(map(self.options.get, tied)):
            return None
        return lookup_backend(self.backend), self, config.as_dict()


requests: WeakKeyDictionary[weft_capture.Capture, Request] = WeakKeyDictionary()
"""What was asked for each compiled function: a backward that it reaches is compiled alike."""


def compile_function(function: Callable[..., Any], request: Request) -> Callable[..., Any]:
    """Return `function` with steps 1 and 6 around it; steps 2 to 5 run when it is called.

    Raises:
        InvalidBackend: for an unknown backend.
    """
    compiled: Any = weft_capture.capture(
        function,
        graph_compiler(request),
        fullgraph=request.fullgraph,
        first_backend=aot_eager,
        marks_modules=bool(request.options.get(DEDUPLICATE)),
        share=request.shared_by(),
        **request.rules,
    )
    requests[compiled._weft_capture] = request
    return compiled  # type: ignore[no-any-return]


def graph_compiler(request: Request) -> Backend:
    """Return the backend of a request with timing, progress and error reports around it."""
    backend = lookup_backend(request.backend)
    keywords = {"options": request.options} if request.options else {}

    def compile_graph(gm: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
        dump_graph("capture.graph", gm)
        with progress.stage("backend", failures.describe(gm)):
            if control_flow.is_used(gm):
                return control_flow.split(gm, compile_one)
            return compile_one(gm, example_inputs)

    def compile_one(gm: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
        return failures.compile_or_fallback(lambda: backend(gm, example_inputs, **keywords), gm)

    return compile_graph


def codegen(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Compiled:
    """Backend `codegen`: steps 2 to 5, with generated code for both directions."""

    options = dict(options or {})
    modules = options.pop(DEDUPLICATE, False)
    compile_aten = partial(weft_codegen.compile_graph, options=options)
    frozen = weft_codegen.frozen_inputs(gm, example_inputs)
    backend = aot_autograd(
        fw_compiler=compile_aten,
        inference_compiler=partial(compile_aten, inference=True, frozen=frozen),
        decompositions=weft_codegen.decompositions(),
    )
    whole = any(options.get(name) for name in ("freezing", "triton.cudagraphs"))
    pieces = None if whole else deduplicate_regions(gm, example_inputs, backend, modules)
    return pieces or backend(gm, example_inputs)


def aot_eager(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None
) -> Compiled:
    """Backend `aot_eager`: steps 2, 3 and 5; the aten graphs run op by op."""
    backend, modules = aot_autograd(fw_compiler=_op_by_op), (options or {}).get(DEDUPLICATE, False)
    pieces = deduplicate_regions(gm, example_inputs, backend, modules)
    return pieces or backend(gm, example_inputs)


def _op_by_op(gm: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    # Some operators lay their result out otherwise than their fake kernel: `view` would refuse it.
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return gm.forward


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
) -> Backend:
    """Make a backend from compilers of plain aten graphs: steps 2, 3 and 5 are done for them.

    Args:
        fw_compiler: compiles the forward graph, `(gm, fake_inputs) -> callable`.
        bw_compiler: compiles the backward graph; defaults to `fw_compiler`.
        inference_compiler: compiles graphs that need no gradient; defaults to `fw_compiler`.
        decompositions: op overload -> function, applied while the joint graph is traced.
        partition_fn: splits the joint graph; defaults to weft's min-cut.
    """
    arguments = {**locals(), "partition_fn": partition_fn or weft_aot.partition}

    def backend(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Compiled:
        return weft_aot.aot_compile(gm, example_inputs, **arguments)

    return backend
