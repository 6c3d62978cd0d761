"""Find a linear layer whose logits only a cross entropy reads; see `chunked_loss` for the rewrite.

::

    linear | matmul | mm | addmm | einsum ─► slices of rows
        ─► views, casts, scalars, tanh, log_softmax ─► cross_entropy | nll_loss
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from weft_core.symnodes import hint
from weft_core.tracing import IN_FORWARD

from weft_aot.config import settings
from weft_aot.rewrites.chunked_loss import ChunkedLoss
from weft_aot.rewrites.match import (
    argument,
    call_name,
    erase,
    example,
    has_transforms,
    is_private,
    is_quiet,
    writes,
)

ANCHORS = frozenset({"cross_entropy", "nll_loss"})
_LIMIT = 64 << 20
"""Bytes of logits in float32 from which chunks pay by themselves."""
_CHUNK = 32 << 20
_MOST = 16
"""Chunks: each has kernels of its own."""
_FEWEST_ROWS = {"cpu": 64, "cuda": 1024}
"""Rows of a chunk: each chunk reads and writes the gradient of the weights."""
_VIEWS = frozenset("view reshape flatten unflatten squeeze unsqueeze contiguous clone".split())  # noqa: SIM905
_SWAPS = frozenset({"transpose", "permute", "movedim", "mT"})
_CASTS = frozenset({"float", "half", "bfloat16", "double", "to", "type"})
_ROWWISE = _CASTS | {"mul", "div", "tanh", "neg"}


def chunk_losses(graph: fx.Graph) -> int:
    """Rewrite each loss of `graph` whose logits are large; returns how many."""
    if settings.chunk_cross_entropy is False or has_transforms(graph):
        return 0
    grads = graph.find_nodes(op="call_function", target=torch.autograd.grad)
    if any(node.kwargs.get("create_graph") for node in grads):
        return 0
    losses = [node for node in graph.nodes if call_name(node) in ANCHORS]
    return sum(_rewrite(node) for node in losses)


def _rewrite(loss: fx.Node) -> bool:
    chain = _chain(loss)
    if chain is None:
        return False
    linear = chain[0]
    operands = _operands(linear)
    options = _loss_options(loss)
    steps = _steps(chain, loss) if operands and options else None
    if operands is None or options is None or steps is None:
        return False
    logits, target, hidden = example(linear), example(options["target"]), example(operands[0])
    assert logits is not None
    if target is None or hidden is None or not _pays(target.numel(), logits, hidden.shape[-1]):
        return False
    indices, function, functions = steps
    reduction, class_weight = options.pop("reduction"), options.pop("weight")
    labels = options.pop("target")
    recomputed = "recompute" in loss.meta
    spec = ChunkedLoss(
        indices, tuple(functions), function, options, reduction,
        _chunks(hint(target.numel()), logits),
        one_pass=not recomputed,
    )  # fmt: skip
    hidden_node, matrix, bias, turned = operands
    with loss.graph.inserting_before(loss):
        if turned:
            matrix = loss.graph.call_method("t", (matrix,))
        args = (hidden_node, matrix, bias, labels, class_weight)
        chunked = loss.graph.call_function(spec, args)
    chunked.meta = dict(loss.meta)
    mark = IN_FORWARD if spec.one_pass and reduction != "none" else "recompute"
    chunked.meta.setdefault(mark, f"{loss.name} in chunks")
    loss.replace_all_uses_with(chunked)
    erase([loss, *reversed(chain)])
    return True


def _pays(rows: Any, logits: torch.Tensor, features: Any) -> bool:
    """Whether the logits are large, and larger than what a chunked loss keeps of each row.

    Not by itself on a GPU, where chunks took longer on an H100, and of a wide layer more memory.
    """
    count, classes = hint(rows), logits.shape[-1]
    if not isinstance(classes, int) or count < 2:
        return False
    if settings.chunk_cross_entropy is True:
        return True
    large = count * classes * 4 >= _LIMIT and classes >= 2 * hint(features)
    return large and logits.device.type == "cpu"


def _chunks(rows: int, logits: torch.Tensor) -> int:
    size = rows * int(logits.shape[-1]) * 4
    wanted = min(_MOST, -(-size // _CHUNK), rows // _FEWEST_ROWS.get(logits.device.type, 256))
    return max(wanted, min(rows, 4))


def _chain(loss: fx.Node) -> list[fx.Node] | None:
    """The nodes from a linear layer to the input of `loss`, which nothing else reads."""
    chain: list[fx.Node] = []
    user, node = loss, argument(loss, 0, "input")
    while isinstance(node, fx.Node) and is_private(node, user) and example(node) is not None:
        chain.append(node)
        if node.meta.get("recompute") != loss.meta.get("recompute"):
            return None
        if call_name(node) in _LINEAR:
            return chain[::-1] if is_quiet(node, loss, chain) else None
        name = call_name(node)
        if name in ("mul", "add") and isinstance(node.args[1], fx.Node):
            user, node = node, node.args[1]
        else:
            user, node = node, argument(node, 0, "input")
    return None


def _loss_options(loss: fx.Node) -> dict[str, Any] | None:
    """The arguments of the loss by name; None for a form that is not handled."""
    names = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"]
    names += ["label_smoothing"] if call_name(loss) == "cross_entropy" else []
    given = dict(zip(names, loss.args, strict=False)) | loss.kwargs
    options = {
        "target": given["target"],
        "weight": given.get("weight"),
        "ignore_index": given.get("ignore_index", -100),
        "reduction": given.get("reduction", "mean"),
    }
    if "label_smoothing" in names:
        options["label_smoothing"] = given.get("label_smoothing", 0.0)
    numbers = options["ignore_index"], options.get("label_smoothing", 0.0)
    target = example(options["target"])
    plain = target is not None and target.dtype is torch.int64 and target.dim() > 0
    weight: Any = options["weight"]
    plain &= weight is None or (example(weight) is not None and not _trains(weight))
    plain &= all(isinstance(number, int | float) for number in numbers)
    plain &= given.get("size_average") is None and given.get("reduce") is None
    return options if plain and options["reduction"] in ("mean", "sum", "none") else None


def _trains(node: fx.Node) -> bool:
    return bool(node.meta["example_value"].requires_grad)


def _steps(chain: list[fx.Node], loss: fx.Node) -> tuple[tuple[Any, ...], Any, list[Any]] | None:
    """Indices that cut out rows, the loss, and functions of rows of logits before it.

    None where other things are done to the logits.

    Throughout, the rows are in the order of the hidden states. Classes are last, or second.
    """
    shape: tuple[Any, ...] = tuple(example(chain[0]).shape)  # type: ignore[union-attr]
    classes, place = shape[-1], len(shape) - 1
    indices: list[Any] = []
    steps: list[tuple[str, Any]] = []
    viewed = False
    for before, node in itertools.pairwise(chain):
        name, after = call_name(node), tuple(example(node).shape)  # type: ignore[union-attr]
        last = place == len(shape) - 1
        if name == "getitem" and not viewed and (index := _row_index(node, len(shape))):
            indices.append(index)
        elif name in _VIEWS and ((last and after[-1:] == (classes,)) or after == shape):
            viewed |= after != shape
        elif name in _SWAPS and last and len(shape) > 2 and _moves_classes(node, len(shape)):
            place, shape = 1, after
            continue
        elif name == "log_softmax" and _softmax_dim(node) in (place, place - len(shape)):
            dtype: Any = node.kwargs.get("dtype")
            steps.append((name, functools.partial(F.log_softmax, dim=-1, dtype=dtype)))
        elif name in _ROWWISE and not writes(node) and (step := _rowwise(node, before)):
            steps.append((str(name), step))
        else:
            return None
        shape = after
        place = len(shape) - 1 if last else place
    target = tuple(example(argument(loss, 1, "target")).shape)  # type: ignore[union-attr]
    if place != 1 or target != shape[:place] + shape[place + 1 :]:
        return None
    return tuple(indices), *_cross_entropy_of(steps, loss)


def _cross_entropy_of(steps: list[tuple[str, Any]], loss: fx.Node) -> tuple[Any, list[Any]]:
    """The loss, and the functions before it: `nll_loss` of `log_softmax` is a cross entropy."""
    functions, names = [function for _, function in steps], [name for name, _ in steps]
    if call_name(loss) == "cross_entropy":
        return F.cross_entropy, functions
    start = names.index("log_softmax") if "log_softmax" in names else len(names)
    if start == len(names) or not _CASTS.issuperset(names[start + 1 :]):
        return F.nll_loss, functions
    dtype = functions[start].keywords["dtype"]
    functions[start] = functools.partial(_to, dtype=dtype)
    return F.cross_entropy, functions


def _to(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _softmax_dim(node: fx.Node) -> Any:
    return argument(node, 1, "dim") if len(node.args) <= 2 else None


def _row_index(node: fx.Node, count: int) -> tuple[Any, ...] | None:
    """The index of a `getitem` of rows: slices and integers, and all of the last dimension."""
    given = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    index = [*given]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (count + 1 - len(index))
    index += [slice(None)] * (count - len(index))
    ends = [end for s in index if isinstance(s, slice) for end in (s.start, s.stop, s.step)]
    plain = all(isinstance(s, slice | int) for s in index) and index[-1] == slice(None)
    return tuple(index) if plain and all(end is None or type(end) is int for end in ends) else None


def _moves_classes(node: fx.Node, count: int) -> bool:
    """Whether a node moves the last dimension to the second one, and nothing else."""
    wanted = [0, count - 1, *range(1, count - 1)]
    probe = torch.empty(tuple(range(2, 2 + count)), device="meta")
    args = list(node.args[1:])
    try:
        if node.op == "call_method":
            turned = getattr(probe, str(node.target))(*args, **node.kwargs)
        else:
            turned = node.target(probe, *args, **node.kwargs)  # type: ignore[operator]
    except (TypeError, RuntimeError, IndexError):
        return False
    return [size - 2 for size in turned.shape] == wanted


def _rowwise(node: fx.Node, before: fx.Node) -> Any:
    """A function of some logits that does what `node` does to all."""
    inputs = [*node.args, *node.kwargs.values()]
    if node.all_input_nodes != [before] or sum(value is before for value in inputs) != 1:
        return None
    numbers = [v for v in inputs if v is not before]
    if not all(isinstance(v, int | float | bool | torch.dtype | None) for v in numbers):
        return None
    return functools.partial(_apply, node.op, node.target, node.args, node.kwargs, before)


def _apply(op: str, target: Any, args: Any, kwargs: Any, node: fx.Node, value: Any) -> Any:
    args, kwargs = fx.map_arg((args, kwargs), lambda arg: value)
    if op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _operands(node: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """Hidden states, matrix, bias, and whether the matrix is (features, classes)."""
    found = _LINEAR[str(call_name(node))](node)
    if found is None or found[1] is None:
        return None
    values = [example(value) for value in found[:3] if value is not None]
    if any(value is None or not value.is_floating_point() for value in values):
        return None
    shapes = [value.shape for value in values]  # type: ignore[union-attr]
    fits = len(shapes[0]) >= 2 and len(shapes[1]) == 2
    return found if fits and (found[2] is None or len(shapes[2]) == 1) else None


def _linear(node: fx.Node) -> Any:
    return argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias"), False


def _matmul(node: fx.Node) -> Any:
    return node.args[0], argument(node, 1, "other"), None, True


def _addmm(node: fx.Node) -> Any:
    if node.kwargs or len(node.args) != 3:
        return None
    return node.args[1], node.args[2], node.args[0], True


def _einsum(node: fx.Node) -> Any:
    if len(node.args) != 3 or not isinstance(node.args[0], str):
        return None
    left, arrow, right = node.args[0].replace(" ", "").partition("->")
    a, comma, b = left.partition(",")
    if not (arrow and comma and len(b) == 2) or "," in b or "." in left or len(set(a)) != len(a):
        return None
    lead = a[:-1]
    if b[0] == a[-1] and b[1] not in a and right == lead + b[1]:
        return node.args[1], node.args[2], None, True
    if b[1] == a[-1] and b[0] not in a and right == lead + b[0]:
        return node.args[1], node.args[2], None, False
    return None


_LINEAR = {
    "linear": _linear, "matmul": _matmul, "mm": _matmul, "addmm": _addmm, "einsum": _einsum,
}  # fmt: skip
