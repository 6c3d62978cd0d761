"""Deduplication of repeated regions of a graph: equal calls are compiled once.

Capture inlines the functions of `torch.compiler.nested_compile_region` and the calls of modules,
and marks their operations. Here equal calls of the former, and with `use_graph_deduplication` also
of the latter, become one compiled piece, called once for each; the operations between them are
compiled in further pieces, as between two graph breaks. Each piece is a program to autograd, and
the tensors between pieces are tensors of the program. Where the split would change the results, and
where no two calls are equal, the graph is compiled as a whole.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from weft_core import events
from weft_core.fake import fresh_fake
from weft_core.tensor_versions import version_of

from weft_capture import config
from weft_capture.model.region_marks import result_state
from weft_capture.passes.graph_split import Subgraph, extract_subgraph

Compiled = Callable[..., Any]
CompileOne = Callable[[fx.GraphModule, list[Any]], Compiled]

_ENTERS = {"_enter_autocast": 1, "_exit_autocast": -1, "enter_attention": 1, "leave_attention": -1}
_WHOLE = frozenset({"requires_grad_", "detach_", "register_hook", "set_"})
_LEAST = 8
"""The number of operations from which a module's call is worth a call at run time."""
_LITERALS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout)


def compile_regions(
    gm: fx.GraphModule, inputs: list[Any], compile_one: CompileOne, modules: bool = False
) -> Compiled:
    """Compile a captured graph, with one piece for equal marked regions.

    Args:
        gm: the graph, which is not changed.
        inputs: its real inputs.
        compile_one: (module, fakes) -> callable; the module itself where it fails.
        modules: include calls of modules without a mark of the program.
    """
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    calls = _Calls(nodes, modules)
    if not any(calls.marks.values()) or not _is_separable(gm, inputs):
        return compile_one(gm, inputs)
    chosen = calls.choose()
    pieces = [(call, list(group)) for call, group in itertools.groupby(nodes, chosen.get)]
    cuts = [extract_subgraph(gm, group) for _, group in pieces]
    if not chosen or not _may_pass([piece.inputs for piece in cuts]):
        return compile_one(gm, inputs)
    graph, compiled = fx.Graph(), dict[Any, Compiled | None]()
    copies = {node: graph.node_copy(node) for node in gm.graph.find_nodes(op="placeholder")}
    for (call, _), piece in zip(pieces, cuts, strict=True):
        key = piece.module if call is None else call[1]
        if key not in compiled:
            compiled[key] = _compile(piece, compile_one)
        run = compiled[key]
        if run is None:
            return compile_one(gm, inputs)
        piece.call(graph, run, copies)
    graph.output(fx.map_arg(gm.graph.output_node().args[0], copies.__getitem__))
    count = sum(call is not None for call, _ in pieces)
    variants = len(compiled) - len(pieces) + count
    events.counters["regions"].update(calls=count, compiled=variants, between=len(pieces) - count)
    return fx.GraphModule(torch.nn.Module(), graph).forward


def _with_history(fake: Any) -> Any:
    """Return a fake with a `grad_fn`, where an argument may be a leaf or not."""
    needs = isinstance(fake, torch.Tensor) and fake.requires_grad and fake.is_leaf
    if not needs or isinstance(fake, torch.nn.Parameter):
        return fake
    with fake.fake_mode, torch.enable_grad():
        return torch.ops.aten.alias.default(fake)


def _may_pass(taken: Sequence[Sequence[fx.Node]]) -> bool:
    """Say whether the inputs of pieces match their fakes at run time.

    Only one piece may use a written input: others might have saved it for a backward.
    """
    uses = Counter(itertools.chain.from_iterable(taken))
    for node, count in uses.items():
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or not isinstance(value, FakeTensor):
                return False
            written = count > 1 and version_of(value) > 0
            changed = node.meta.get("left_as") != result_state(node)
            if written if node.op == "placeholder" else changed:
                return False
        elif not isinstance(value, torch.SymInt):
            return False
    return True


def _compile(piece: Subgraph, compile_one: CompileOne) -> Compiled | None:
    """Compile a piece for the fakes of its inputs, of which some may share memory."""
    module, fakes = (
        piece.module,
        [_with_history(node.meta["example_value"]) for node in piece.inputs],
    )
    for holder, node, fake in zip(module.graph.find_nodes(op="placeholder"), piece.inputs, fakes):
        fresh = node.op != "placeholder" and isinstance(fake, torch.Tensor)
        holder.meta = {**node.meta, "example_value": fresh_fake(fake) if fresh else fake}
    run = compile_one(module, fakes)
    if run is module:
        return None

    def region(*args: Any) -> Any:  # fx wants a function with a name
        return run(*args)

    return region


# ---- whether the graph can be split


def _is_separable(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Say whether pieces with tensors between them compute the same as the whole graph.

    Gradients and hooks inside the graph depend on all of it. A tensor whose shape or history
    changes in place differs from its fake, and two inputs may share memory that is written.
    """
    for holder, example in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        fake = holder.meta.get("example_value")
        if isinstance(example, torch.Tensor) and fake.requires_grad != example.requires_grad:
            return False
    distinct = {id(t): t for t in inputs if isinstance(t, torch.Tensor)}.values()
    storages = {t.untyped_storage()._cdata for t in distinct}
    return (
        len(storages) == len(distinct)
        and not config.settings.capture_scalar_outputs
        and not any(map(_concerns_all, gm.graph.nodes))
    )


def _concerns_all(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    data = node.target is getattr and node.args[1] == "data"
    return node.op == "get_attr" or node.target is torch.autograd.grad or data or _rebinds(name)


@functools.cache
def _rebinds(name: str) -> bool:
    """Say whether a function of this name may change a tensor's shape, history or memory."""
    packet = getattr(torch.ops.aten, name, None) if name.endswith("_") else None
    overloads = packet.overloads() if packet is not None else ()
    views = any(torch.Tag.inplace_view in getattr(packet, overload).tags for overload in overloads)
    return views or name in _WHOLE


# ---- which calls are equal


class _Calls:
    """The marked calls in the operations of a graph."""

    def __init__(self, nodes: Sequence[fx.Node], modules: bool) -> None:
        self.nodes = nodes
        marks = ((node, node.meta.get("regions", ())) for node in nodes)
        self.marks = {
            node: [region for region in regions if modules or region[2] is not None]
            for node, regions in marks
        }
        self.position = {node: index for index, node in enumerate(nodes)}
        self.checkpointed = Counter(node.meta.get("recompute") for node in nodes)
        self.changed = self._under_changed_modes()

    def _under_changed_modes(self) -> set[fx.Node]:
        """Return the operations that run in other modes than those at the start of the graph."""
        changed = set()
        depth, recorded = 0, torch.is_grad_enabled()
        for node in self.nodes:
            if depth or recorded != torch.is_grad_enabled():
                changed.add(node)
            depth += _ENTERS.get(getattr(node.target, "__name__", ""), 0)
            if node.target is torch._C._set_grad_enabled:
                recorded = bool(node.args[0])
        return changed

    def choose(self) -> dict[fx.Node, tuple[int, str]]:
        """Return, for each operation of a repeated call, the call and its text."""
        chosen: dict[fx.Node, tuple[int, str]] = {}
        for depth in range(max(map(len, self.marks.values()))):
            calls: dict[Any, list[fx.Node]] = defaultdict(list)
            for node in self.nodes:
                if len(self.marks[node]) > depth and node not in chosen:
                    calls[self.marks[node][depth]].append(node)
            alike: dict[tuple[str, int | None, str], list[Any]] = defaultdict(list)
            for call, inside in calls.items():
                worth_it = call[2] is not None or len(inside) >= _LEAST
                if worth_it and self._stands_alone(inside):
                    alike[*call[1:], _signature_text(inside)].append(call)
            variants: Counter[str] = Counter()
            for (function, limit, text), calls_of_text in alike.items():
                if len(calls_of_text) > 1 and (limit is None or variants[function] < limit):
                    variants[function] += 1
                    chosen |= {
                        node: (call[0], text) for call in calls_of_text for node in calls[call]
                    }
        return chosen

    def _stands_alone(self, inside: Sequence[fx.Node]) -> bool:
        """Say whether a call is contiguous, in the graph's modes, and contains its checkpoints."""
        inner = Counter(node.meta.get("recompute") for node in inside)
        shared = any(
            self.checkpointed[checkpoint] != n
            for checkpoint, n in inner.items()
            if checkpoint is not None
        )
        together = self.position[inside[-1]] - self.position[inside[0]] == len(inside) - 1
        return together and not shared and inside[0] not in self.changed


def _signature_text(inside: Sequence[fx.Node]) -> str:
    """Return a text of the operations, equal for calls that may share code."""
    names: dict[fx.Node, str] = {}
    memory: dict[int, int] = {}
    members, rows = set(inside), []

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value not in names:
                names[value] = f"%{len(names)}"
                rows.append(_kind(value, memory))
            return names[value]
        return value if isinstance(value, _LITERALS) else (type(value).__name__, id(value))

    for node in inside:
        args = fx.node.map_aggregate((node.args, node.kwargs), leaf)
        names[node] = f"%{len(names)}"
        example = node.meta.get("example_value")
        follows = isinstance(example, torch.Tensor) and example.requires_grad
        leaves = not members.issuperset(node.users)
        how = follows, leaves, "recompute" in node.meta
        rows.append((node.op, _identity(node.target), args, how))
    return repr(rows)


def _kind(node: fx.Node, memory: dict[int, int]) -> object:
    """Return the properties of an input on which code depends."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return str(value)
    shared = memory.setdefault(value.untyped_storage()._cdata, len(memory))
    layout = tuple(value.shape), value.stride(), value.dtype, value.device
    return *layout, isinstance(value, torch.nn.Parameter), value.requires_grad, shared


def _identity(target: Any) -> object:
    """Return a key of a function, equal for functions of equal code and variables."""
    cells = getattr(target, "__closure__", None)
    if not cells or types.CellType() in cells or target.__defaults__ or target.__kwdefaults__:
        return target if isinstance(target, str) else id(target)
    return id(target.__code__), *(id(cell.cell_contents) for cell in cells)
