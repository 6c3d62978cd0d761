"""Functions of the program that change aten graphs (`weft.options.PASSES`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import weft_aot
import weft_codegen
from torch import fx

from weft.options import PASSES

Passes = tuple[tuple[str, Any], ...]


def _run(passes: Passes, stage: str, gm: fx.GraphModule) -> None:
    chosen = [function for name, function in passes if PASSES[name] == stage]
    for function in chosen:
        function(gm.graph)
    if chosen:
        weft_codegen.fill_values(gm.graph)
        gm.recompile()


def before(compile_aten: Callable[..., Any], passes: Passes) -> Callable[..., Any]:
    """Return a compiler of aten graphs that first runs the passes of a single graph."""

    def compile_changed(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _run(passes, "post_grad", gm)
        return compile_aten(gm, inputs, **options)

    return compile_changed


def before_cut(passes: Passes, options: weft_codegen.Options) -> Callable[..., Any]:
    """Return a partitioner that first runs the passes of the joint graph, chooses where its values
    lie and pads products."""
    kept = options.keeps_operators

    def cut(joint: Any) -> Any:
        _run(passes, "joint", joint.module)
        if not kept:
            joint.module.graph = weft_codegen.laid_out(joint.module, joint=True).graph
        if options.shape_padding and not kept:
            joint.module.graph = weft_codegen.pad_products(joint.module).graph
        return weft_aot.partition(joint)

    return cut
