"""The kernels of `weft_core::flex_attention` on a GPU, which are loaded when it is first called.

Without Triton, or where what is done to the scores has no form in a kernel, the operator computes
the whole matrix of scores, and a notice says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from weft_core import flex_attention as operators
from weft_core.events import notify

from weft_codegen.kernels.triton.triton_expr import NoTritonForm
from weft_codegen.loops.lower.shapes import NoLowering

_library = torch.library.Library("weft_core", "IMPL")


def _on_gpu(name: str, dense: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        try:
            kernels = importlib.import_module("weft_codegen.kernels.triton.flex_attention")
            with torch.cuda.device_of(given[0]):
                return getattr(kernels, name)(*given)
        except (ImportError, NoLowering, NoTritonForm) as reason:
            notify(f"flex_attention computes all scores, without a kernel: {reason}")
            return dense(*given)

    return run


_library.impl("flex_attention", _on_gpu("forward", operators.dense_forward), "CUDA")
_library.impl("flex_attention_backward", _on_gpu("backward", operators.dense_backward), "CUDA")
