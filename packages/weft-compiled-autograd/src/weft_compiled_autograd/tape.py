"""The tape: one backward as the engine describes it, one fx node per engine callback.

The engine calls the methods of a `TapeRecorder` in the order in which it would run its nodes.
Tensors are stand-ins without data: only their identity matters. A tape is exact for every call that
hits the same engine cache entry, whatever the sizes: no C++ backward function has run yet.
`lower.py` turns a tape into an aten graph; `interpret.py` runs one node by node.

    tape  ::= placeholder{inputs, sizes, scalars, hooks, packed_data}  call*  output
    call  ::= EngineOp(grads, *args)                 a built-in node, or validate_outputs
            | accumulate(old, new)                   two gradients of one value meet
            | accumulate_grad(variable, old, new)    AccumulateGrad; then its post hooks
            | call_hook(hook, value...)              hook_type says which kind
            | call_backward(ctx, saved, metas, symints, grads)   a Python autograd.Function
            | call_cpp_hook(id, grad)  | copy_slices_prologue/epilogue | getitem | aten factory
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from weft_core import torch_compiler_shim

from weft_compiled_autograd import accumulation, hooks, views
from weft_compiled_autograd.errors import NotCapturable
from weft_compiled_autograd.saved_tensor_hooks import Layouts

PLACEHOLDERS = ("inputs", "sizes", "scalars", "hooks", "packed_data")
"""What the engine passes at every run, in order; each is a list or tuple."""

ORIGIN = "autograd_node"
"""Key in `node.meta`: the autograd node that a tape or graph node came from."""


BLOCK = "node_call"
"""Key in the `meta` of a tape's nodes: the position of the autograd node, as the engine counts."""


class EngineOp:
    """A backward function of the engine: `op(grads, *args) -> list of gradients or None`."""

    def __init__(self, name: str, function: Callable[..., Any], traceable: bool) -> None:
        self.__name__ = name
        self.__module__ = "weft_compiled_autograd.ops"
        self.function = function
        self.traceable = traceable

    def __call__(self, grads: list[torch.Tensor | None], *args: Any) -> list[torch.Tensor | None]:
        return self.function(grads, *args)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.__name__


@dataclass
class Tape:
    """A recorded backward.

    `contexts` holds, until the first lowering, the autograd.Function contexts by hook index;
    `effects` says that Python code of the user runs in the middle of it; `unpacks` that it holds
    unpack hooks, and `unpacked` is then what a first run has noted of their results.
    """

    graph: Graph
    names: list[str] = field(default_factory=list)
    effects: bool = False
    unpacks: bool = False
    unpacked: Layouts = field(default_factory=dict)
    contexts: dict[int, Any] = field(default_factory=dict)

    def signature(self) -> tuple[str, ...]:
        """Names of the autograd nodes in order: tells which tapes are the same program."""
        return tuple(self.names)


class _RecordFactories(TorchDispatchMode):
    """Records what the engine allocates during a capture (zeros for undefined gradients)."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recorder.allocating:
            return func(*args, **kwargs)
        returns = func._schema.returns
        if len(returns) != 1 or str(returns[0].type) != "Tensor":
            raise NotCapturable(f"{func} runs while the backward is being captured")
        return self.recorder.emit_tensor(func, args, kwargs)


torch_compiler_shim.defer_compiler_import()  # which the first call of a dispatch mode would import


class SizeRef:
    """Stands for one dynamic size while a tape is recorded: a SymInt holds what answers these few.

    It has no value, so nothing can specialise on it by accident, and no symbolic-shape machinery
    (sympy, 0.35 s to import) is loaded. Products and sums are references that nothing may name.
    """

    def is_int(self) -> bool:
        """Yes: a SymInt; without a value, so symbolic too."""
        return True

    def is_float(self) -> bool:
        """No; nor any of the other kinds."""
        return False

    is_symbolic = is_int
    is_bool = is_nested_int = is_constant = is_float

    def maybe_as_int(self) -> int | None:
        """No value is known."""
        return None

    def clone(self) -> SizeRef:
        """References have no state."""
        return self

    def wrap_int(self, value: int) -> SizeRef:
        """A constant beside a reference: its value is of no interest."""
        return SizeRef()

    def mul(self, other: Any) -> SizeRef:
        """A product; the engine computes element counts that nothing reads."""
        return SizeRef()

    add = sub = sym_max = sym_min = mul

    def guard_int(self, *where: Any) -> int:
        """Refuse to be a number.

        Raises:
            NotCapturable: always.
        """
        raise NotCapturable("the value of a dynamic size is needed during the capture")

    int_ = guard_int

    def __str__(self) -> str:
        return "size"


class TapeRecorder:
    """Receives the engine's callbacks and writes a `Tape`. One instance captures one backward.

    Method names and argument orders are the engine's; `engine.py` adapts what torch versions
    disagree about.
    """

    def __init__(self, ops: dict[str, EngineOp]) -> None:
        self.ops = ops
        self.tape = Tape(Graph())
        self.allocating = False
        self._nodes: dict[int, Node] = {}
        self._keep: list[object] = []
        self._origin = ""
        self._block: int | None = None
        self._placeholders: dict[str, Node] = {}
        self._mode: _RecordFactories | None = None

    # -- the frame of a capture ---------------------------------------------------------------

    def begin(
        self, inputs: Sequence[torch.Tensor], sizes: Sequence[int], scalars: Sequence[object]
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Start a tape; return a stand-in for each input and a symbol for each dynamic size.

        Raises:
            NotCapturable: for inputs that have no graph form.
        """
        if scalars:
            raise NotCapturable("a C++ autograd function keeps numbers in its context")
        for name in PLACEHOLDERS:
            self._placeholders[name] = self.tape.graph.placeholder(name)
        stand_ins = []
        for index, tensor in enumerate(inputs):
            _check_plain(tensor)
            layout = (tensor.shape, (0,) * tensor.dim() if tensor.is_sparse else tensor.stride())
            install_placeholders = torch.empty_strided(*layout, dtype=tensor.dtype, device="meta")
            self._bind(install_placeholders, self._item("inputs", index))
            stand_ins.append(install_placeholders)
        symbols: list[Any] = [torch.SymInt(SizeRef()) for _ in sizes]
        for index, symbol in enumerate(symbols):
            self._bind(symbol.node, self._item("sizes", index))
        self._mode = _RecordFactories(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return stand_ins, symbols

    def end(self, outputs: Sequence[torch.Tensor | None]) -> Tape:
        """Close the tape with the gradients that the engine returns to its caller."""
        self.close()
        self.tape.graph.output(self._ref(list(outputs)))
        return self.tape

    def close(self) -> None:
        """Leave the dispatch mode; safe to call twice, and after a failed capture."""
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # -- emitting ------------------------------------------------------------------------------

    def emit(self, target: Callable[..., Any], args: tuple[Any, ...], **kwargs: Any) -> Node:
        """Append one call; stand-ins and symbols among `args` become references."""
        node = self.tape.graph.call_function(target, self._ref(args), kwargs)
        self._mark(node)
        return node

    def _mark(self, node: Node) -> None:
        if self._block is not None:
            node.meta[BLOCK] = self._block
            node.meta[ORIGIN] = self._origin

    def emit_tensor(self, target: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
        """Append one call that returns one tensor; return its stand-in."""
        return self._stand_in(self.emit(target, tuple(args), **self._ref(kwargs)))

    def _emit_list(self, target: Callable[..., Any], args: tuple[Any, ...], count: int) -> Any:
        return self._items(self.emit(target, args), range(count))

    def _getitem(self, node: Node, index: int) -> Node:
        item = self.tape.graph.call_function(operator.getitem, (node, index))
        self._mark(item)
        return item

    def _item(self, placeholder: str, index: int) -> Node:
        return self._getitem(self._placeholders[placeholder], index)

    def _stand_in(self, node: Node, like: torch.Tensor | None = None) -> torch.Tensor:
        self.allocating = True
        try:
            size = () if like is None else like.shape
            dtype = None if like is None else like.dtype
            tensor = torch.empty(size, dtype=dtype, device="meta")
        finally:
            self.allocating = False
        self._bind(tensor, node)
        return tensor

    def _bind(self, value: object, node: Node) -> None:
        self._keep.append(value)  # ids stay unique while the objects live
        self._nodes[id(value)] = node

    def _ref(self, value: Any) -> Any:
        """Replace stand-ins and symbols by the tape nodes that made them."""
        return map_aggregate(value, self._node_of)

    def _node_of(self, value: Any) -> Any:
        symbolic = isinstance(value, torch.SymInt)
        if not symbolic and not isinstance(value, torch.Tensor):
            return value
        node = self._nodes.get(id(value.node if symbolic else value))
        if node is None:
            what = "a computed size" if symbolic else "a tensor that is no input of the backward"
            raise NotCapturable(f"{self._origin} uses {what}")
        return node

    # -- the engine's callbacks ------------------------------------------------------------------

    def set_node_origin(self, name: str, index: int, pyobj: Any) -> None:
        """Name the autograd node that the following calls belong to."""
        aot_id = getattr(getattr(pyobj, "_forward_cls", None), "weft_aot_id", "")
        self._origin = f"{name}{aot_id} (NodeCall {index})"
        self._block = index
        self.tape.names.append(name)

    def apply_functional(self, name: str, grads: Any, args: Any, metadata: Sequence[Any]) -> Any:
        """Record a built-in node."""
        return self._emit_list(self.ops[name], (list(grads), *args), len(metadata))

    def validate_outputs(self, name: str, outputs: Any, args: Any, metadata: Any) -> Any:
        """Record the engine's check of a node's results (which also reduces and casts them)."""
        if not outputs:
            return outputs
        return self._emit_list(self.ops[name], (list(outputs), *args), len(outputs))

    def accumulate(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Record the sum of two gradients of one value."""
        return self.emit_tensor(accumulation.accumulate, (old, new), {})

    def record_gradient(
        self,
        variable: torch.Tensor,
        old: torch.Tensor | None,
        new: torch.Tensor,
        has_post_hooks: bool,
    ) -> torch.Tensor:
        """Record an AccumulateGrad node; `old` is the gradient that the variable has now."""
        node = self.emit(accumulation.accumulate_grad, (variable, old, new, has_post_hooks))
        return self._stand_in(node, like=variable)

    def call_backward(
        self, inputs: Any, metadata: Any, saved: Any, index: int, context: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """Record a Python autograd.Function; `metadata` describes what its inputs were."""
        self.tape.effects |= not exposes_graph(context)
        self.tape.contexts[index] = context
        symints = list(context._get_compiled_autograd_symints())
        target = self._item("hooks", index)
        node = self.emit(
            hooks.call_backward, (target, list(saved), list(metadata), symints, list(inputs))
        )
        node.meta["hook_index"] = index
        return tuple(self._items(node, metadata))

    def _hook(self, hook_type: str, hook: Node, *args: Any) -> Node:
        self.tape.effects = True
        return self.emit(hooks.call_hook, (hook, *args), hook_type=hook_type)

    def tensor_pre_hook(self, grads: list[Any], hook: int, position: int) -> list[Any]:
        """Record a hook on one gradient (`Tensor.register_hook`)."""
        node = self._hook("tensor_pre_hook", self._item("hooks", hook), grads[position])
        grads[position] = self._stand_in(node)
        return grads

    def cpp_tensor_pre_hook(self, grads: list[Any], hook: int, position: int) -> list[Any]:
        """Record a hook that lives in C++ (`retain_grad`)."""
        self.tape.effects = True
        grads[position] = self.emit_tensor(hooks.call_cpp_hook, (hook, grads[position]), {})
        return grads

    def pre_hook(self, grads: Any, hook: int) -> list[Any]:
        """Record a hook on a node's incoming gradients (`Node.register_prehook`)."""
        node = self._hook("pre_hook", self._item("hooks", hook), tuple(grads))
        return self._items(node, grads)

    def post_hook(self, outputs: Any, inputs: Any, hook: int) -> list[Any]:
        """Record a hook on a node's results (`Node.register_hook`)."""
        node = self._hook("post_hook", self._item("hooks", hook), tuple(outputs), tuple(inputs))
        return self._items(node, outputs)

    def _items(self, node: Node, like: Sequence[Any]) -> list[Any]:
        return [
            None if value is None else self._stand_in(self._getitem(node, position))
            for position, value in enumerate(like)
        ]

    def post_acc_grad_hook(self, variable: torch.Tensor, hook: int) -> list[Any]:
        """Record a hook that runs after a variable's gradient is accumulated."""
        self._hook("post_acc_grad_hook", self._item("hooks", hook), variable)
        return [variable]

    def unpack_hook(self, hook: int, data: int) -> torch.Tensor:
        """Record the unpacking of a saved tensor (`saved_tensors_hooks`)."""
        self.tape.unpacks = True
        node = self._hook("unpack_hook", self._item("hooks", hook), self._item("packed_data", data))
        return self._stand_in(node)

    def call_copy_slices_prologue(self, *args: Any) -> Any:
        """Record the first half of a write through a view."""
        return self._emit_list(views.copy_slices_prologue, args, 3)

    def call_copy_slices_epilogue(self, needs: Sequence[bool], *args: Any) -> Any:
        """Record the second half of a write through a view."""
        return self._emit_list(views.copy_slices_epilogue, (list(needs), *args), len(needs))


def exposes_graph(context: Any) -> bool:
    """Whether an autograd.Function's backward is a graph (see `aot.py`), so no user code runs."""
    cls: Any = getattr(context, "_forward_cls", None)
    return hasattr(cls, "weft_backward_graph") and not cls.weft_watched(context)


def _check_plain(tensor: torch.Tensor) -> None:
    """Raise NotCapturable for a tensor that is no ordinary dense tensor, nor a sparse gradient."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NotCapturable(f"a tensor of type {type(tensor).__name__}")
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        raise NotCapturable(f"a tensor with layout {tensor.layout}")
    if tensor.is_quantized:
        raise NotCapturable("a quantized tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise NotCapturable("a lazily conjugated or negated tensor")
