"""Functions whose own ops trace wrong or not at all, and what is traced in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class AdapterMode(TorchFunctionMode):
    """Route functions whose own ops cannot be traced to ops that can.

    `aten::native_batch_norm` declares no mutation, so functionalisation would lose the update of
    the running statistics. The layer of oneDNN that `lstm` uses on a CPU hides a workspace tensor
    between its forward and its backward, and leaves it undefined without one. A pure `bernoulli`
    draws in plain order; traced, it stands for `bernoulli_`, which draws in the order of memory.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        adapter = _ADAPTERS.get(func)
        if adapter is not None:
            result = adapter(*args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


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


def _lstm(
    x: Any, hidden: Any, weights: Any, biases: Any, layers: Any = None, dropout: Any = None,
    train: Any = None, bidirectional: Any = None, batch_first: Any = None,
) -> Any:  # fmt: skip
    if batch_first is None:
        return None  # packed sequences are not computed by oneDNN
    from torch._decomp import decompositions as known  # noqa: PLC0415 - rarely needed

    projected = hidden[0].size(2) != hidden[1].size(2)
    weights = known.gather_params(weights, biases, projected)
    states = list(zip(hidden[0], hidden[1], strict=True))
    out, finals = known._rnn_helper(
        x, states, weights, biases, layers, dropout, train, bidirectional, batch_first,
        known.one_layer_lstm,
    )  # fmt: skip
    return out, *(torch.stack(parts, 0) for parts in zip(*finals, strict=True))


def _bernoulli(x: Any, p: Any = None, **rest: Any) -> Any:
    if not isinstance(p, float | int) or rest:
        return None
    return torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(p)


_ADAPTERS: dict[Any, Callable[..., Any]] = {
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.lstm: _lstm,
    torch.nn.functional.batch_norm: _functional_batch_norm,
    torch.batch_norm: _torch_batch_norm,
}
