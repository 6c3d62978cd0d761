"""Recurrent networks: one node each, up to a number of steps, and packed sequences.

Packing and padding sequences of known lengths are one node each, which has the lengths as ints.
`sizes` is how many sequences reach each step (`PackedSequence.batch_sizes`), as ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import rnn
from weft_core import lstm
from weft_core.adapters import layer_by_layer

from weft_capture.breaks import Break
from weft_capture.config import settings
from weft_capture.functions.table import rule, rule_of_each
from weft_capture.model.constant import NONE
from weft_capture.model.protocol import Tracer, Value
from weft_capture.tensors.scalar_operands import numbers

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def batch_sizes_of(lengths: Sequence[int]) -> list[int]:
    """Return how many sequences reach each step; of step counts, how long each sequence is."""
    return [sum(length > step for length in lengths) for step in range(max(lengths))]


def pack(padded: torch.Tensor, lengths: Sequence[int], batch_first: bool) -> torch.Tensor:
    """Return the items of sequences, step by step, without the padding."""
    rows = padded.transpose(0, 1) if batch_first else padded
    sizes, count = batch_sizes_of(lengths), len(lengths)
    indices = [step * count + i for step, size in enumerate(sizes) for i in range(size)]
    flat = rows.narrow(0, 0, len(sizes)).flatten(0, 1)
    return flat.index_select(0, torch.tensor(indices, device=padded.device))


def pad(
    data: torch.Tensor, sizes: Sequence[int], batch_first: bool, padding: Any, length: int
) -> torch.Tensor:
    """Return packed sequences side by side, padded to a length."""
    rows = torch.cat([data, data.new_full((1, *data.shape[1:]), padding)])
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    indices = [[len(data)] * sizes[0] for _ in range(length)]
    for start, size, row in zip(starts, sizes, indices, strict=False):
        row[:size] = range(start, start + size)
    steps = rows[torch.tensor(indices, device=data.device)]
    return steps.transpose(0, 1) if batch_first else steps


def run_rnn(
    name: str, data: Any, sizes: Sequence[int], hidden: Any, weights: Any, biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool,
) -> Any:  # fmt: skip
    """Run `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` on packed sequences."""
    composite = getattr(torch.ops.aten, name).data.py_kernels[_COMPOSITE]

    def run(data: Any, hidden: Any, *rest: Any) -> Any:
        return composite(data, list(sizes), hidden, *rest[:-1])

    rest = weights, biases, layers, dropout, train, bidirectional, False
    result = layer_by_layer(run, data, hidden, *rest)
    return run(data, hidden, *rest) if result is None else result


def ints(tensor: Value, role: str) -> list[int]:
    """Return the values of a tensor of constant ints.

    Raises:
        Break: for any other.
    """
    values = numbers(tensor, fix=True)
    if not isinstance(values, list) or not all(type(number) is int for number in values):
        raise Break("data-dependent-value", f"{role} of sequences in a tensor")
    return values


def _tensor(tx: Tracer, values: list[int]) -> Value:
    return tx.builtin(torch.tensor, tx.literal(values))


@rule(torch._pack_padded_sequence)
def _pack(tx: Tracer, input: Value, lengths: Value, batch_first: Value) -> Value:
    counts, shape = ints(lengths, "the lengths"), input.example().shape
    time, batch = (1, 0) if batch_first.nb_bool(tx) else (0, 1)
    if sorted(counts, reverse=True) != counts or not counts or counts[-1] < 1 or 0 in shape:
        raise Break("operator-error", "pack_padded_sequence of empty or unsorted sequences")
    if shape[batch] != len(counts) or shape[time] < counts[0]:
        raise Break("operator-error", "pack_padded_sequence with lengths that do not fit")
    arguments = [input, tx.literal(counts), batch_first]
    data = tx.graph.emit("call_function", pack, arguments, {})
    return tx.tuple_of([data, _tensor(tx, batch_sizes_of(counts))])


@rule(torch._pad_packed_sequence)
def _pad(
    tx: Tracer, data: Value, batch_sizes: Value, batch_first: Value,
    padding_value: Value, total_length: Value,
) -> Value:  # fmt: skip
    sizes = ints(batch_sizes, "the sizes")
    if data.example().shape[0] != sum(sizes):
        raise Break("operator-error", "pad_packed_sequence with sizes that do not fit")
    arguments = [data, tx.literal(sizes), batch_first, padding_value, total_length]
    padded = tx.graph.emit("call_function", pad, arguments, {})
    return tx.tuple_of([padded, _tensor(tx, batch_sizes_of(sizes))])


rule(rnn.invert_permutation)(
    lambda tx, permutation: NONE if permutation is NONE else tx.builtin(torch.argsort, permutation)
)


@rule_of_each(torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
def _make(function: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    """Create a tensor whose shape may contain values of a constant tensor."""
    sizes = [tx.literal(n) if type(n := numbers(arg)) is int else arg for arg in args]
    return tx.graph.emit("call_function", function, sizes, kwargs)


@rule_of_each(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _run(function: Any, tx: Tracer, *args: Value, **kwargs: Value) -> Value:
    if len(args) < 9 or not issubclass(args[3].python_type(), list | tuple):  # no packed sequence
        if len(args) == 9:
            _check_steps(tx, function, args)
        return tx.graph.emit("call_function", function, list(args), kwargs)
    leading = [tx.literal(function.__name__), args[0], tx.literal(ints(args[1], "the sizes"))]
    return tx.graph.emit("call_function", run_rnn, [*leading, *args[2:]], {})


def _check_steps(tx: Tracer, function: Any, args: tuple[Value, ...]) -> None:
    """Break where a recurrent network would become a graph of too many steps."""
    x, layers, both, turned = args[0].example(), *(args[at].as_constant() for at in (4, 7, 8))
    if function is torch.lstm:
        examples = ([state.example() for state in args[at].unpack(tx)] for at in (1, 2))
        if lstm.supports(x, *examples):
            return
    length: Any = x.shape[1 if turned and x.dim() == 3 else 0]
    varies = isinstance(length, torch.SymInt) and length.node.maybe_as_int() is None
    if varies and not tx.fullgraph:  # there each number of steps is a graph
        raise Break("unrolled", f"{function.__name__} of a number of steps that varies")
    steps = int(length) * layers * (1 + both)
    if steps > settings.unrolled_steps:
        raise Break("unrolled", f"{function.__name__} of {steps} steps")
