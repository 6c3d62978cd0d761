"""`backward()` of a result of the graph: gradients in the graph, `.grad` set after it.

AccumulateGrad is done on values: a first gradient is set, in the parameter's layout and in its own
memory; a further gradient is added in place. There may be no hooks, no distributed training and no
anomaly detection, which is guarded. A tensor that leaves the graph with a freed history refuses
another `backward()`, as in eager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from weft_guards.sources import CallSource

from weft_capture import config
from weft_capture.breaks import Break
from weft_capture.effects.rehearsals import check_backward
from weft_capture.functions.table import rule
from weft_capture.model.constant import FALSE, NONE, constant
from weft_capture.model.protocol import Kwargs, Tracer, Value, method
from weft_capture.tensors.tensor import TensorValue
from weft_capture.torch_compat import grad_dtype


@method(TensorValue, "backward")
def _backward_of(
    tx: Tracer, self: TensorValue, gradient: Value = NONE, retain_graph: Value = NONE,
    create_graph: Value = FALSE, inputs: Value = NONE,
) -> None:  # fmt: skip
    _backward(tx, self, gradient, retain_graph, create_graph, NONE, inputs)


@rule(torch.autograd.backward)
def _backward(
    tx: Tracer, tensors: Value, grad_tensors: Value = NONE, retain_graph: Value = NONE,
    create_graph: Value = FALSE, grad_variables: Value = NONE, inputs: Value = NONE,
) -> None:  # fmt: skip
    check_backward(tx, "backward()")
    if not config.settings.capture_backward:
        raise _refused("while config.capture_backward is off")
    if not {retain_graph, create_graph, grad_variables, inputs} <= {NONE, FALSE}:
        raise _refused("with arguments that keep the graph or choose inputs")
    roots = _tensors(tx, tensors)
    seeds = [None] * len(roots) if grad_tensors is NONE else _tensors(tx, grad_tensors)
    nodes, variables = _history([root.fake for root in roots])
    for reason, met in _in_the_way(tx, nodes):
        if met:
            raise _refused(reason)
    leaves = [_leaf(tx, variable) for variable in variables]
    before = [leaf.tp_getattro(tx, "grad") for leaf in leaves]
    leaf_tensors = {
        leaf.source: leaf.real for leaf in leaves if leaf.source and leaf.real is not None
    }
    if not is_unobserved(*leaf_tensors.values()):
        raise _refused("that somebody listens to")
    tx.guard(CallSource(is_unobserved, tuple(leaf_tensors)), "CONST", True)
    grads = _gradients(tx, roots, seeds, leaves)
    for leaf, old, grad in zip(leaves, before, grads, strict=True):
        if isinstance(grad, TensorValue):
            _accumulate(tx, leaf, old, grad, grads.count(grad) > 1 or _is_shared(tx, grad))
    passed = tx.graph.passed
    tx.journal.on_rollback(lambda: setattr(tx.graph, "passed", passed))
    tx.graph.passed = passed | nodes


def _refused(why: str) -> Break:
    return Break("inner-backward", f"a backward pass inside the captured program {why}")


def _tensors(tx: Tracer, tensors: Value) -> list[Any]:
    values = [tensors] if isinstance(tensors, TensorValue) else tensors.unpack(tx)
    forced = [tx.force(value) for value in values]
    if not all(isinstance(value, TensorValue) for value in forced):
        raise _refused("of what is no tensor")
    return forced


# ---- what a backward pass meets


def _history(roots: Sequence[torch.Tensor]) -> tuple[set[Any], list[torch.Tensor]]:
    """Return the nodes of an autograd graph and its leaves."""
    nodes: dict[Any, None] = {None: None}
    todo: list[Any] = [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes[node] = None
            todo += [following for following, _ in reversed(node.next_functions)]
    ends = [node for node in nodes if hasattr(node, "variable")]
    return nodes.keys() - {None, *ends}, [node.variable for node in ends]


def _in_the_way(tx: Tracer, nodes: set[Any]) -> Iterator[tuple[str, object]]:
    """Yield the reasons against capturing a backward pass, each with whether it applies."""
    graph, modes = tx.graph, tx.overrides
    blocks = [block for block in tx.open_contexts if not isinstance(block, torch.autocast)]
    under = tx.transforms, modes.modes, modes.outer, blocks
    yield "under a mode or transform", any(under)
    yield "with tensors of wrapper classes", graph.has_wrappers
    yield "under autocast", any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    yield "with hooks", any(tensor.hooked_at >= 0 for tensor in graph.tensors())
    checkpointed = any("recompute" in node.meta for node in graph.graph.nodes)
    yield "through a checkpoint, whose memory is saved only between graphs", checkpointed
    yield "of what has no history", not nodes
    yield "over a history that another one has used up", graph.passed & nodes


def _leaf(tx: Tracer, variable: torch.Tensor) -> TensorValue:
    leaf = tx.graph.value_of(variable)
    supported = leaf is not None and (leaf.real is not None or leaf.is_new_leaf())
    if leaf is None or not supported or leaf.owner is not None or leaf.fake is not variable:
        raise _refused("past the inputs of the graph")
    return leaf


def is_unobserved(*leaves: torch.Tensor) -> bool:
    """Say whether a gradient of a leaf is visible only in its `.grad`.

    Hooks on the AccumulateGrad node of a leaf keep that node alive, as the history of a tensor
    does: without either, each access creates a new node. Only distributed training has hooks in
    C++, which cannot be seen.
    """
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if torch.is_anomaly_enabled() or hooked or distributed:
        return False
    for leaf in leaves:
        hooks: Any = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
        if hooks != (None, None) or not leaf.is_leaf or grad_dtype(leaf) != leaf.dtype:
            return False
    closed = [leaf for leaf in leaves if not leaf.requires_grad]
    try:
        for leaf in closed:  # the program will do so before the graph
            leaf.requires_grad_(True)
        for node in _accumulators(leaves):
            node.metadata[_SEEN] = True
            del node
        alive = [node for node in _accumulators(leaves) if node.metadata.pop(_SEEN, False)]
        return not any(map(_has_hooks, alive))
    finally:
        for leaf in closed:
            leaf.requires_grad_(False)


_SEEN = "weft: asked for before"


def _has_hooks(node: Any) -> bool:
    """Say whether Python registered hooks on a node: a further one is put beside them."""
    handles = node.register_hook(_no_hook), node.register_prehook(_no_hook)
    hooks = sum(len(handle.hooks_dict_ref()) for handle in handles)
    for handle in handles:
        handle.remove()
    return hooks > len(handles)


def _no_hook(*gradients: Any) -> None:
    """Do nothing."""


class _Ends(torch.autograd.Function):
    """An autograd.Function with an edge to the AccumulateGrad node of each leaf."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def _accumulators(leaves: Sequence[torch.Tensor]) -> Iterator[Any]:
    if not leaves:
        return iter(())
    with torch.enable_grad():
        end: Any = _Ends.apply(*leaves)  # type: ignore[no-untyped-call]
    return iter([node for node, _ in end.grad_fn.next_functions])


# ---- the gradients


def _gradients(
    tx: Tracer, roots: list[Any], seeds: list[Any], leaves: list[TensorValue]
) -> list[Value]:
    """Add the node that computes the gradients, which frees the history of the fakes, too."""
    fakes = [leaf.fake for leaf in leaves]
    if tx.graph.passed:
        tx.journal.forget()  # the fakes' histories cannot be given back, and `leaving` asks them
    try:
        with torch.autograd.set_multithreading_enabled(False):
            grads = torch.autograd.grad(
                [root.fake for root in roots], fakes, [seed and seed.fake for seed in seeds],
                allow_unused=True,
            )  # fmt: skip
    except RuntimeError as error:
        raise Break("operator-error", f"backward: {str(error)[:300]}") from error
    for grad in grads:
        if grad is not None and grad.layout is not torch.strided:
            raise _refused("with sparse gradients")
    args = (
        [root.graph_arg() for root in roots],
        [leaf.graph_arg() for leaf in leaves],
        [seed and seed.graph_arg() for seed in seeds],
    )
    node = tx.graph.node("call_function", torch.autograd.grad, args, {"allow_unused": True}, grads)
    return tx.graph.result(node, grads).unpack(tx)


def _accumulate(tx: Tracer, leaf: TensorValue, old: Value, grad: TensorValue, shared: bool) -> None:
    """Accumulate a gradient as the engine does; one with `shared` memory is copied."""
    target, incoming = leaf.fake, grad.fake
    if old is not NONE:
        assert isinstance(old, TensorValue)
        alike = (old.fake.shape, old.fake.dtype) == (incoming.shape, incoming.dtype)
        if not alike or old.fake.requires_grad or old.owner is not None:
            raise _refused("where .grad is not what the engine would have put there")
        old.call_method(tx, "add_", [grad], {})
        return
    is_dense = torch.empty_like(target).stride() == target.stride()
    strides = tuple((target if is_dense else incoming.new_empty(incoming.shape)).stride())
    pairs = zip(incoming.shape, incoming.stride(), strides, strict=True)
    if any(n != 1 and a != b for n, a, b in pairs) or shared:
        options: Kwargs = {"dtype": constant(incoming.dtype), "device": constant(incoming.device)}
        if not is_dense:
            options["memory_format"] = constant(torch.contiguous_format)
        template = leaf if is_dense else grad
        laid_out = tx.graph.emit("call_function", torch.empty_like, [template], options)
        leaf.store(tx, "grad", laid_out.call_method(tx, "copy_", [grad], {}))
    else:
        leaf.store(tx, "grad", grad)


def _is_shared(tx: Tracer, grad: TensorValue) -> bool:
    """Say whether a gradient shares memory with another tensor of the graph."""
    memory = grad.fake.untyped_storage()._cdata
    return any(
        other is not grad and other.fake.untyped_storage()._cdata == memory
        for other in tx.graph.tensors()
        if torch._C._has_storage(other.fake)
    )


# ---- what leaves the graph afterwards


def leaving(tx: Tracer, tensor: TensorValue) -> tuple[object, list[Value]] | None:
    """Return the call that recreates a tensor of the finished graph whose history was freed."""
    if not tx.graph.passed or tensor.fake.grad_fn is None:
        return None
    if tensor not in tx.graph.ended:
        error = _error_of_backward(tx, tensor)
        args = [tensor.call_method(tx, "detach", [], {}), constant(error)] if error else []
        tx.graph.ended[tensor] = (_with_ended_history, args) if error else None
        tx.journal.on_rollback(lambda: tx.graph.ended.pop(tensor))
    return tx.graph.ended[tensor]  # type: ignore[no-any-return]


def _error_of_backward(tx: Tracer, tensor: TensorValue) -> str:
    """Return the error of another `backward()` of a tensor; empty where it may run."""
    with torch.autograd.set_multithreading_enabled(False), tx.graph.mode:
        _, leaves = _history([tensor.fake])
        seed = torch.ones_like(tensor.fake)
        try:
            torch.autograd.grad(tensor.fake, leaves, seed, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            return str(error)
    return ""


class _Ended(torch.autograd.Function):
    """The autograd node of a tensor whose history `backward()` has freed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, start: torch.Tensor, text: str) -> torch.Tensor:
        ctx.text = text
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(ctx.text)


def _with_ended_history(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """Return a tensor that requires grad, and whose backward raises `text`."""
    with torch.enable_grad():
        start = torch.empty(0, requires_grad=True)
        result: torch.Tensor = _Ended.apply(tensor, start, text)  # type: ignore[no-untyped-call]
    return result
