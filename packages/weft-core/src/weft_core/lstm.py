"""A layer of an LSTM as oneDNN computes it on a CPU, as one operator with a backward.

torch's own operator (`aten::mkldnn_rnn_layer`, ATen/native/mkldnn/RNN.cpp) hides what its forward
keeps for its backward, and leaves it out where gradients are off, as they are while compiled code
runs. `weft_core::lstm_layer` has it as a result. How many bytes these are only oneDNN knows, so the
result is the first of them, and its storage holds all.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
_LSTM = 2  # ideep::rnn_kind
_library = torch.library.Library("weft_core", "FRAGMENT")
_library.define(
    "lstm_layer(Tensor x, Tensor w, Tensor u, Tensor b, Tensor d, Tensor h, Tensor c,"
    " bool reverse, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "lstm_layer_backward(Tensor x, Tensor w, Tensor u, Tensor b, Tensor d, Tensor h, Tensor c,"
    " Tensor y, Tensor hy, Tensor cy, Tensor kept, Tensor gy, Tensor gh, Tensor gc, bool reverse)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(*values: Any) -> Any:
    *tensors, reverse, keeps = values
    given = [one.contiguous() for one in tensors]
    hidden = given[-1].shape[-1]
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(keeps):
        y, hy, cy, kept = aten.mkldnn_rnn_layer.default(
            *given, reverse, [], _LSTM, hidden, 1, True, False, False, keeps
        )
    return y, hy, cy, kept[:1] if keeps else y.new_empty(0, dtype=torch.uint8)


def _backward(*tensors: Any) -> Any:
    *before, kept, gy, gh, gc, reverse = tensors
    given = [one.contiguous() for one in (*before, gy, gh, gc)]
    storage = kept.untyped_storage()
    if storage.nbytes() == 1:  # somebody copied the byte
        storage = _forward(*given[:7], reverse, True)[3].untyped_storage()
    whole = kept.new_empty(0).set_(storage, 0, (storage.nbytes(),))
    return aten.mkldnn_rnn_layer_backward.default(
        *given, reverse, _LSTM, gh.shape[-1], 1, True, True, False, [], False, whole
    )


def _fake_forward(x: Any, *rest: Any) -> Any:
    *_, h, c, _, keeps = rest
    kept = x.new_empty(int(keeps), dtype=torch.uint8)
    return x.new_empty(*x.shape[:-1], h.shape[-1]), h.new_empty(h.shape), c.new_empty(c.shape), kept


_library.impl("lstm_layer", _forward, "CPU")
_library.impl("lstm_layer", _fake_forward, "Meta")
_library.impl("lstm_layer_backward", _backward, "CPU")
_library.impl(
    "lstm_layer_backward", lambda *given: tuple(x.new_empty(x.shape) for x in given[:7]), "Meta"
)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *made, kept = torch.ops.weft_core.lstm_layer(*given, True)
        ctx.save_for_backward(*given[:-1], *made, kept)
        ctx.reverse = given[-1]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward = torch.ops.weft_core.lstm_layer_backward
        return *backward(*ctx.saved_tensors, *grads, ctx.reverse), None


def supports(x: torch.Tensor, hidden: Any, weights: Any) -> bool:
    """Say whether eager computes an LSTM of these by oneDNN, and it can be traced so."""
    tensors = [x, *hidden, *weights]
    return (
        torch._C._get_mkldnn_enabled()
        and all(one.device.type == "cpu" and one.dtype is torch.float32 for one in tensors)
        and all(type(size) is not int or size for size in x.shape)
        and hidden[0].shape == hidden[1].shape
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def layer(x: Any, hidden: Any, weights: Any, has_biases: bool, reverse: bool = False) -> Any:
    """Run one direction of one layer.

    Args:
        x: (time, batch, features), float32.
        hidden: the states `h` and `c`, each (batch, hidden).
        weights: of input and state, and the two biases if there are some.
        has_biases: whether there are.
        reverse: whether time runs backwards.

    Returns:
        the outputs (time, batch, hidden), and the last `h` and `c`.
    """
    biases = weights[2:] if has_biases else [x.new_zeros(weights[0].shape[0])] * 2
    given = x, *weights[:2], *biases, *hidden, reverse
    if torch.is_grad_enabled() and any(one.requires_grad for one in given[:-1]):
        y, *states = _Layer.apply(*given)  # type: ignore[no-untyped-call]
    else:
        y, *states = torch.ops.weft_core.lstm_layer(*given, False)[:3]
    return y, tuple(states)
