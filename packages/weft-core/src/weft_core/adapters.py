"""Replacements for functions whose operators cannot be traced, or trace wrong."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from weft_core import _mutating_ops
from weft_core.eager_error_probe import is_concrete, is_self_overlapping
from weft_core.errors import Unsupported
from weft_core.symnodes import equal_sizes

aten = torch.ops.aten


class AdapterMode(TorchFunctionMode):
    """Route functions whose own ops cannot be traced to ops that can.

    `aten::native_batch_norm` declares no mutation, so functionalisation would lose the update of
    the running statistics. The layer of oneDNN that `lstm` uses on a CPU hides what its backward
    needs (see `weft_core.lstm`). What torch traces of an RNN of several layers misses the dropout
    between them. `one_hot` reads its classes to check them. A pure `bernoulli` draws in plain
    order; traced, it stands for `bernoulli_`, which draws in the order of memory.
    Functionalisation writes zeros beside windows of `unfold`, and sums what is written to elements
    in one place; it adds differences to what an `expand` that repeats nothing shows. `rrelu` draws
    random numbers in training only. The gradient of what `x[mask] = value` sets everywhere would
    ask how many places these are. That of a power asks whether the exponent is zero, which no
    symbolic number answers there. That of a product with several zeros is zero, even times NaN. A
    write in place, or to `out`, makes a tensor of it that is laid out as the operation has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made_of: dict[int, tuple[torch.Tensor, Any]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (operator := _mutating_ops.mutating(func)) is not None:
            return _mutating_ops.call(operator, args, kwargs, self)
        name = func.__name__.partition(".")[0]
        writes = kwargs.get("inplace") or _WRITES(name)
        written = args[0] if writes else kwargs.get("out")
        layouts = []
        for one in _tensors((written,)):
            views = list(self._views(one))
            if any(map(is_self_overlapping, views)):
                raise Unsupported(
                    "overlapping-write",
                    "the program writes through a view whose elements share memory",
                    "clone the view before writing to it",
                )
            if views and _keeps_layout(name):
                layouts.append((views, views[-1].shape, views[-1].stride()))
        if name in ("resize_", "resize_as_") and self._keeps_size(args, kwargs):
            return args[0]
        result = _adapted(func, *args, **kwargs)
        for views, shape, strides in layouts:
            _lay_out(views[-1], shape, strides)
            for view in views[:-1]:
                _update_strides(view)
        given = {id(one) for one in _tensors((*args, *kwargs.values()))}
        for made in _tensors((result,)):
            if args and id(made) not in given:  # it was there before, and not made of another
                self._made_of.setdefault(id(made), (made, args[0]))
        return result

    def _keeps_size(self, args: Any, kwargs: Any) -> bool:
        """Say whether a resize changes nothing.

        Raises:
            Unsupported: another tensor has the memory, of which functionalisation loses sight.
        """
        x, *sizes = args
        to = sizes[0] if sizes else next(iter(kwargs.values()))
        size = to.shape if isinstance(to, torch.Tensor) else to if len(sizes) < 2 else sizes
        if equal_sizes(x.shape, [size] if isinstance(size, int | torch.SymInt) else size):
            return kwargs.get("memory_format") is None
        made = (one for one, _ in self._made_of.values() if one is not x)
        if len(list(self._views(x))) > 1 or any(_shares(x, one) for one in made):
            raise Unsupported(
                "resized-view",
                "the program resizes a tensor of whose memory it has another view",
                "make a tensor of the final size",
            )
        return False

    def _views(self, view: Any) -> Iterator[torch.Tensor]:
        """Yield a tensor, what it is a view of, and so on to the first."""
        while isinstance(view, torch.Tensor) and torch._is_functional_tensor(view):
            yield view
            _, made_of = self._made_of.get(id(view), (view, None))
            view = made_of if made_of is not view and _shares(made_of, view) else None


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, torch.Tensor):
                yield one


def _keeps_layout(name: str) -> bool:
    """Say whether an operation writes contents only, the same wherever they lie in memory."""
    found: Any = getattr(aten, name, None)
    tags = {tag for one in found.overloads() for tag in getattr(found, one).tags} if found else ()
    return torch.Tag.inplace_view not in tags and torch.Tag.nondeterministic_seeded not in tags


def _lay_out(x: Any, shape: Any, strides: Any) -> None:
    """Give a written tensor the strides back that it had, unless it was resized.

    What functionalisation puts in its place has strides of its own.
    """
    functional: Any = torch
    functional._sync(x)
    if x.layout is not torch.strided or not equal_sizes(x.shape, shape):
        return
    if equal_sizes(x.stride(), strides):
        return
    with torch.no_grad():
        dense = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
        dense.copy_(x.detach())
        functional._sync(dense)
        functional._functionalize_replace(x, functional._from_functional_tensor(dense))
        functional._functionalize_commit_update(x)
        functional._sync(x)


def _update_strides(view: Any) -> None:
    """Let a written view say how it lies in its base, not how the result of the operation did."""
    functional: Any = torch
    functional._sync(view)
    value = functional._from_functional_tensor(view)
    if view.layout is torch.strided and not equal_sizes(view.stride(), value.stride()):
        functional._functionalize_replace(view, value)


def _shares(one: Any, view: torch.Tensor) -> bool:
    known = isinstance(one, torch.Tensor) and torch._is_functional_tensor(one)
    return known and one.untyped_storage()._cdata == view.untyped_storage()._cdata


def _functional_batch_norm(
    x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if training:
        torch.nn.functional._verify_batch_size(x.size())  # type: ignore[attr-defined]
    return _torch_batch_norm(x, weight, bias, mean, var, training, momentum, eps)


def _torch_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
    eps: float, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    if not training or mean is None:
        return None
    return aten._native_batch_norm_legit.default(
        x, weight, bias, mean, var, training, momentum, eps
    )[0]


def run_lstm(
    x: Any, hidden: Any, weights: Any, biases: Any, layers: Any = None, dropout: Any = None,
    train: Any = None, bidirectional: Any = None, batch_first: Any = None,
) -> Any:  # fmt: skip
    """Do what `torch.lstm` does, by one operator a layer where eager has one; None if packed."""
    if isinstance(hidden, torch.Tensor):
        return None  # packed sequences are not computed by oneDNN
    if dropout and train and layers > 1:
        return layer_by_layer(
            run_lstm, x, hidden, weights, biases, layers, dropout, train, bidirectional, batch_first
        )
    from torch._decomp import decompositions as known  # noqa: PLC0415 - rarely needed

    from weft_core import lstm  # noqa: PLC0415 - rarely needed

    layer = lstm.layer if lstm.supports(x, hidden, weights) else known.one_layer_lstm
    projected = hidden[0].size(2) != hidden[1].size(2)
    weights = known.gather_params(weights, biases, projected)
    states = list(zip(hidden[0], hidden[1], strict=True))
    out, finals = known._rnn_helper(
        x, states, weights, biases, layers, dropout, train, bidirectional, batch_first, layer
    )  # fmt: skip
    last = zip(hidden, zip(*finals, strict=True), strict=True)  # torch 2.11 adds a dimension
    return out, *(torch.stack(parts, 0).view(state.shape) for state, parts in last)


def layer_by_layer(
    function: Any, x: Any, hidden: Any, weights: Any, biases: Any, layers: Any, dropout: Any,
    train: Any, bidirectional: Any, batch_first: Any,
) -> Any:  # fmt: skip
    """The layers of an RNN one by one; torch's decomposition leaves out the dropout between."""
    if not isinstance(weights, list | tuple) or not (dropout and train and layers > 1):
        return None
    single = isinstance(hidden, torch.Tensor)
    states = [hidden] if single else hidden
    count, share = 1 + bidirectional, len(weights) // layers
    out, finals = x.transpose(0, 1) if batch_first else x, []
    for layer in range(layers):
        out = torch.dropout(out, dropout, True) if layer else out
        own = [state.narrow(0, layer * count, count) for state in states]
        own_weights = weights[layer * share : (layer + 1) * share]
        start = own[0] if single else own
        out, *last = function(out, start, own_weights, biases, 1, 0.0, train, bidirectional, False)
        finals.append(last)
    joined = (torch.cat(parts, 0) for parts in zip(*finals, strict=True))
    return (out.transpose(0, 1) if batch_first else out), *joined


def _below_python(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose decomposition, which torch's Python dispatcher prefers, is wrong."""
    with torch._C._DisablePythonDispatcher():
        return function(*args, **kwargs)


def _bernoulli(x: Any, p: Any = None, **rest: Any) -> Any:
    if not isinstance(p, float | int) or rest:
        return None
    return torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(p)


def _rrelu(x: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, **k: Any) -> Any:
    """`rrelu` draws random numbers in training only; else it can be differentiated again."""
    if training:
        return None
    result = F.leaky_relu(x, (lower + upper) / 2, **k)
    return result if k.get("inplace") or x.device.type != "cpu" else result.contiguous()


def _unfold(x: Any, dimension: Any, size: Any, step: Any) -> Any:
    if not torch._is_functional_tensor(x) or not x.dim() or not 0 < size <= step:
        return None
    length, dimension = x.shape[dimension], dimension % x.dim()
    count = (length - size) // step + 1
    if size < step and not (type(length) is int and 0 < count * step <= length):
        return None
    cut = x.narrow(dimension, 0, count * step).unflatten(dimension, (count, step))
    return cut.narrow(dimension + 1, 0, size).movedim(dimension + 1, -1)


def _expand(x: Any, *sizes: Any, implicit: bool = False, size: Any = None) -> Any:
    """`expand` that repeats nothing as other views.

    Functionalisation adds the difference to what was there when such a view is written.
    """
    wanted = sizes[0] if sizes and not isinstance(sizes[0], int | torch.SymInt) else size or sizes
    wanted = wanted.shape if isinstance(wanted, torch.Tensor) else wanted
    new = len(wanted) - x.dim()
    kept = [n if is_concrete(m) and m == -1 else m for n, m in zip(x.shape, wanted[new:])]
    if new < 0 or not equal_sizes((*[1] * new, *x.shape), (*wanted[:new], *kept)):
        return None
    view = aten.alias.default(x)
    for _ in range(new):
        view = view.unsqueeze(0)
    return view


def _expanded(x: Any, shape: Any) -> Any:
    """What `expand` gives in a graph, adapted or not."""
    adapted = _expand(x, shape)
    return x.expand(shape) if adapted is None else adapted


def _broadcast_tensors(*tensors: Any) -> Any:
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(_expanded(x, shape) for x in tensors)


def _meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    """Grids whose `expand`s are adapted, too, where one of them may repeat nothing."""
    given = tensors[0] if tensors and isinstance(tensors[0], list | tuple) else tensors
    plain = all(isinstance(x, torch.Tensor) and x.dim() <= 1 for x in given)
    if indexing != "ij" or not given or not plain:
        return None
    shape = [x.numel() for x in given]
    ranks = range(len(shape))
    rows = [x.reshape([-1 if k == d else 1 for k in ranks]) for d, x in enumerate(given)]
    return tuple(_expanded(x, shape) for x in rows)


def _one_hot(x: Any, num_classes: Any = -1) -> Any:
    if not is_concrete(num_classes) or num_classes < 1 or x.dtype is not torch.int64:
        return None
    check = aten._assert_async.msg
    check((x >= 0).all(), "Class values must be non-negative.")
    check((x < num_classes).all(), "Class values must be smaller than num_classes.")
    classes = torch.arange(num_classes, device=x.device)
    return (x.unsqueeze(-1) == classes).to(torch.int64, memory_format=torch.contiguous_format)


def _power(x: Any, exponent: Any, **rest: Any) -> Any:
    symbolic = isinstance(exponent, torch.SymInt | torch.SymFloat)
    if not symbolic or rest or not isinstance(x, torch.Tensor) or not x.requires_grad:
        return None
    return torch.pow(x, torch.scalar_tensor(exponent, dtype=torch.float64))


def _product(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dim is not None or not isinstance(x, torch.Tensor) or not x.requires_grad:
        return None
    x = x.to(x.dtype if dtype is None else dtype)
    return torch.where((x == 0).sum() > 1, x.detach(), x).prod()


def _max_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Without gradients a CPU's kernel makes rows; that which fakes take finds places, too."""
    differentiated = input.requires_grad and torch.is_grad_enabled()
    if return_indices or differentiated or input.device.type != "cpu":
        return None
    sizes = kernel_size, () if stride is None else stride, padding, dilation, ceil_mode
    return aten.max_pool1d.default(input, *sizes).contiguous()


def for_fakes(function: Any) -> Any:
    """Return what to call with fake tensors in place of a function."""
    if function not in (torch.max_pool1d, F.max_pool1d):
        return function
    return functools.partial(_adapted, function)


def _adapted(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, or its adapter where that takes these arguments."""
    adapter = _ADAPTERS.get(function)
    result = None if adapter is None else adapter(*args, **kwargs)
    return function(*args, **kwargs) if result is None else result


def _set_where(x: Any, key: Any, value: Any) -> Any:
    masked = isinstance(key, torch.Tensor) and key.dtype is torch.bool and key.dim() > 0
    if not (masked and isinstance(value, torch.Tensor) and value.requires_grad):
        return None
    rest, count = x.dim() - key.dim(), value.shape[0] if value.dim() else 1
    if rest < 0 or key.shape != x.shape[: key.dim()] or key.device != x.device:
        return None
    sizes = zip(reversed(value.shape[-rest:] if rest else ()), reversed(x.shape))
    fits = value.dim() <= rest + 1 and all(one == 1 or one == wide for one, wide in sizes)
    if not fits or (value.dtype != x.dtype and value.numel() != 1):
        return None
    if value.dim() == rest + 1:
        value = value[0] if is_concrete(count) and count == 1 else _rows_where(key, value)
    return x.copy_(torch.where(key[(..., *[None] * rest)], value.to(x.dtype), x))


def _rows_where(key: Any, rows: Any) -> Any:
    """Rows laid out where a mask is true, which must be as many places; any of them elsewhere."""
    count, flat = rows.shape[0], key.flatten()
    text = f"shape mismatch: {count} rows cannot be written where a mask is true elsewhere"
    aten._assert_async.msg(flat.sum() == count, text)
    if is_concrete(count) and count == 0:
        return rows.sum(0)  # whose gradient has no rows either
    places = (flat.cumsum(0) - 1).clamp(0, count - 1)
    return rows.index_select(0, places).unflatten(0, key.shape)


_WRITES = re.compile(
    r"(?!requires_grad_|detach_)[^_].*_|__setitem__"
    r"|__i(add|sub|mul|(true|floor)?div|mod|pow|and|or|xor|[lr]shift)__"
).fullmatch
_MULTILABEL = torch._C._nn.multilabel_margin_loss

_ADAPTERS: dict[Any, Callable[..., Any]] = {
    _MULTILABEL: functools.partial(_below_python, _MULTILABEL),
    F.multilabel_margin_loss: functools.partial(_below_python, F.multilabel_margin_loss),
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    F.one_hot: _one_hot,
    torch.meshgrid: _meshgrid,
    torch.pow: _power,
    torch.Tensor.pow: _power,
    torch.Tensor.__pow__: _power,
    torch.prod: _product,
    torch.Tensor.prod: _product,
    torch.max_pool1d: _max_pool1d,
    F.max_pool1d: _max_pool1d,
    torch.rrelu: _rrelu,
    F.rrelu: _rrelu,
    torch.Tensor.expand: _expand,
    torch.Tensor.expand_as: _expand,
    torch.Tensor.broadcast_to: _expand,
    torch.broadcast_to: _expand,
    torch.broadcast_tensors: _broadcast_tensors,
    aten.expand.default: _expand,
    torch.Tensor.unfold: _unfold,
    torch.Tensor.__setitem__: _set_where,
    aten.unfold.default: _unfold,
    torch.lstm: run_lstm,
    **{
        function: functools.partial(layer_by_layer, function)
        for function in (torch.gru, torch.rnn_tanh, torch.rnn_relu)
    },
    torch.nn.functional.batch_norm: _functional_batch_norm,
    torch.batch_norm: _torch_batch_norm,
}
