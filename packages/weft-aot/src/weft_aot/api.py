"""`aot_compile`: from a captured graph module to a callable with compiled forward and backward."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from weft_core import events, recording
from weft_core.dumps import dump_graph
from weft_core.errors import Unsupported
from weft_core.fake import fake_inputs
from weft_core.memory import are_disjoint
from weft_core.tracing import Decompositions

from weft_aot.config import settings
from weft_aot.joint import first_occurrences, trace_joint
from weft_aot.partition import partition
from weft_aot.records import JointGraph, Partition
from weft_aot.rewrites import rewrite
from weft_aot.runtime import build_inference, build_training
from weft_aot.subclass_flatten import FlatProgram, has_subclasses

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def aot_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    inference_compiler: Compiler | None = None,
    decompositions: Decompositions | None = None,
    partition_fn: Callable[[JointGraph], Partition] = partition,
    rewrites: bool = True,
) -> Callable[..., Any]:
    """Compile `gm`, and its backward if anything needs gradients under the current grad mode.

    Args:
        gm: torch-level graph module; parameters and buffers are placeholders, in the order of
            `inputs`. ``meta["example_value"]`` of a placeholder, if there, is its fake;
            ``meta["gradient_bucket_bytes"]`` of the module asks for gradients in buckets.
        inputs: real (or fake) tensors and ints.
        fw_compiler: called with the forward aten graph and its fake inputs.
        bw_compiler: the same for the backward; default `fw_compiler`.
        inference_compiler: the same where nothing needs gradients; default `fw_compiler`.
        decompositions: op overload -> Python function.
        partition_fn: cuts the joint graph.
        rewrites: put better forms in place of patterns, whose results round otherwise.

    Returns:
        A callable of flat positional arguments that returns a tuple or list of the graph's results.
        Programs that cannot be made functional run as they are (with a log line).
    """
    fakes, same_as = fake_inputs(gm, inputs), first_occurrences(inputs)
    flat = FlatProgram(gm, fakes, same_as) if has_subclasses(gm, fakes) else None
    try:
        with events.span("aot.joint"):
            if flat is None:
                program = rewrite(gm, fakes) if rewrites else gm
                joint = trace_joint(program, fakes, decompositions, same_as=same_as)
            else:
                _, inputs = flat.flatten(inputs)
                joint = flat.trace(lambda given: _trace_flat(flat, given, decompositions, inputs))
        _refuse_written_overlap(joint, inputs)
    except Unsupported as reason:
        events.notify(f"a graph runs without being compiled: {reason}", eager=True)
        return gm
    _show("aot_joint_graph", "joint graph", joint.module, keep=bool(joint.gradients))
    if not joint.gradients:
        compile_one = inference_compiler or fw_compiler
        built = build_inference(joint, _compile(compile_one, joint.module, "inference graph"))
        return flat.wrap(built, joint) if flat else built
    with events.span("aot.partition"):
        parts = partition_fn(joint)
    _show("aot_graphs", "forward graph", parts.forward)
    _show("aot_graphs", "backward graph", parts.backward)
    how = _compile_later if settings.lazy_backward else _compile
    compile_backward = functools.partial(how, bw_compiler or fw_compiler)
    forward = _compile(fw_compiler, parts.forward, "forward graph")
    buckets = 0 if flat else gm.meta.get("gradient_bucket_bytes", 0)
    built = build_training(joint, parts, forward, compile_backward, flat or gm, buckets)
    return flat.wrap(built, joint) if flat else built


def _trace_flat(
    program: FlatProgram, given: list[Any], decompositions: Any, inputs: Sequence[Any]
) -> JointGraph:
    """Trace a flat program, whose carriers come after `inputs`.

    Raises:
        Unsupported: one object takes part in autograd as one input, and not as another.
    """
    same_as = [*first_occurrences(inputs), *range(len(inputs), len(given))]
    if any(
        given[i].requires_grad != given[j].requires_grad for i, j in enumerate(same_as) if i != j
    ):
        what = "a tensor that requires grad is an input, and inside of another input"
        raise Unsupported("overlapping-inputs", what, "pass separate tensors")
    return trace_joint(program, given, decompositions, same_as=same_as)


def _compile(
    compiler: Compiler,
    module: fx.GraphModule,
    title: str = "backward graph",
    parent: int | None = None,
) -> Callable[..., Any]:
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with recording.inside("aten", lambda: _record(title, module), parent):
        return compiler(module, examples)


def _compile_later(compiler: Compiler, module: fx.GraphModule) -> Callable[..., Any]:
    """A callable that compiles `module` at its first call; threads wait for the one that does."""
    lock = threading.RLock()
    compile_now = functools.partial(_compile, compiler, module, parent=recording.here())
    compiled = functools.cache(compile_now)

    def known() -> Callable[..., Any]:
        with lock:
            return compiled()

    def call_owning(args: list[Any]) -> Any:
        owning = getattr(known(), "call_owning", None)
        if owning is not None:
            return owning(args)
        with torch._C._DisableAutocast():
            return known()(*args)

    def run(*args: Any) -> Any:
        return known()(*args)

    run.call_owning = call_owning  # type: ignore[attr-defined]
    return run


def _record(title: str, module: fx.GraphModule) -> dict[str, Any]:
    return {"title": title, "rows": recording.graph_rows(module.graph)}


def _show(artifact: str, title: str, module: fx.GraphModule, keep: bool = False) -> None:
    if keep:
        recording.keep("aten", lambda: _record(title, module))
    dump_graph(f"aot.{title.replace(' ', '_')}", module)
    if events.enabled(artifact):
        text = module.print_readable(print_output=False)
        events.logger("aot", artifact).info("%s\n%s", title, text)


def _refuse_written_overlap(joint: JointGraph, inputs: Sequence[Any]) -> None:
    if _written_overlap(joint, inputs):
        what = "the program writes an input that shares memory with another input"
        raise Unsupported("overlapping-inputs", what, "pass separate tensors")


def _written_overlap(joint: JointGraph, inputs: Sequence[Any]) -> bool:
    """Whether an input that the program writes has elements of another input tensor.

    Views of one tensor that autograd records writes to are histories of each other.
    """
    tensors = {id(t): t for t in inputs if isinstance(t, torch.Tensor)}
    strided = [t for t in tensors.values() if t.layout is torch.strided]
    count = collections.Counter(t.untyped_storage()._cdata for t in strided)
    for mutation in joint.mutations:
        given = inputs[mutation.index]
        if not mutation.written or given.layout is not torch.strided:
            continue
        if count[given.untyped_storage()._cdata] > 1 and (
            mutation.value is not None
            or not all(t is given or are_disjoint(given, t) for t in strided)
        ):
            return True
    return False


def run_op_by_op(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiler of aten graphs that compiles nothing: each operator runs eagerly."""
    # Some operators lay their result out otherwise than their fake kernel: `view` would refuse it.
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return gm.forward
