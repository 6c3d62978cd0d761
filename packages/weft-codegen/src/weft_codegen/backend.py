"""The backend that other front ends call: `torch.compile(model, backend="weft")`.

Installed as an entry point of the group `torch_dynamo_backends`, so no import of weft is needed.
Graphs that train need an autograd stage: any distribution may offer one under the entry-point
group `weft_autograd` (weft-aot does).  Without one they run eagerly, with one warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import fx
from weft_core.events import notify

from weft_codegen.compile import compile_graph, decompositions
from weft_codegen.config import Options
from weft_codegen.freezing import frozen_inputs


def weft_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a captured torch-level graph.

    Args:
        gm: graph with lifted parameters, as torch.compile's backend protocol defines it.
        example_inputs: one tensor or int a placeholder.
        kwargs: `options`, a dict of codegen options; `mode` is accepted and ignored.

    Returns:
        A callable of the flat inputs that returns the sequence of outputs.
    """
    options = Options.parse(kwargs.get("options"))
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        frozen = frozen_inputs(gm, example_inputs)
        return compile_graph(gm, example_inputs, options=options, inference=True, frozen=frozen)
    stage = next(iter(entry_points(group="weft_autograd")), None)
    if stage is None:
        notify(
            "weft_codegen compiles inference graphs; install weft-aot to compile training too. "
            "This graph runs eagerly.",
            eager=True,
        )
        return gm.forward

    def compile_aten(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(graph, inputs, options=options)

    return stage.load()(
        gm,
        example_inputs,
        fw_compiler=compile_aten,
        decompositions=decompositions(options.keeps_operators),
    )
