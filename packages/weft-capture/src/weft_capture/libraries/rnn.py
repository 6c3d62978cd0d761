"""Recurrent networks: one node each, over packed sequences too, up to a number of steps."""

from __future__ import annotations

from typing import Any

import torch
from weft_core import lstm

from weft_capture.breaks import Break
from weft_capture.config import settings
from weft_capture.functions.table import rule_of_each
from weft_capture.libraries.packed_sequence import ints, run_rnn
from weft_capture.model.protocol import Tracer, Value


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
