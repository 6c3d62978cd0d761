"""weft: a compiler for PyTorch programs.

    model = weft.compile(model)          # or @weft.compile on any function

This package joins the stages (weft_capture, weft_guards, weft_aot, weft_codegen,
weft_compiled_autograd) behind one interface. To see how a program becomes code, read
`weft/pipeline.py`. Names below are loaded when first used, so that `import weft` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft_core.errors import (
    BackendCompilerError,
    CompilerNotFound,
    CompilerUnavailable,
    InvalidBackend,
    InvalidOption,
    RecompileLimit,
    Unsupported,
    WeftError,
)
from weft_core.events import counters, set_logs, watch_stages

from weft.api import compile
from weft.backends import (
    get_default_backend,
    list_backends,
    lookup_backend,
    register_backend,
    set_default_backend,
)
from weft.options import InvalidMode, list_mode_options, list_options
from weft.settings import config

if TYPE_CHECKING:
    from weft_capture import allow_in_graph as allow_in_graph
    from weft_capture import assume_constant_result as assume_constant_result
    from weft_capture import disable as disable
    from weft_capture import disallow_in_graph as disallow_in_graph
    from weft_capture import error_on_graph_break as error_on_graph_break
    from weft_capture import explain as explain
    from weft_capture import graph_break as graph_break
    from weft_capture import is_compiling as is_compiling
    from weft_capture import nonstrict_trace as nonstrict_trace
    from weft_capture import show_code as show_code
    from weft_capture import skip_frame as skip_frame
    from weft_capture import substitute_in_graph as substitute_in_graph
    from weft_guards import mark_dynamic as mark_dynamic
    from weft_guards import mark_static as mark_static
    from weft_guards import mark_unbacked as mark_unbacked
    from weft_guards import maybe_mark_dynamic as maybe_mark_dynamic
    from weft_guards import varying as varying

    from weft import compiled_autograd, compiler
    from weft.background import wait_for_compilation as wait_for_compilation
    from weft.bisection import bisect as bisect
    from weft.compiler import mark_static_address as mark_static_address
    from weft.compiler import run as run
    from weft.mega_cache import load_cache_artifacts as load_cache_artifacts
    from weft.mega_cache import save_cache_artifacts as save_cache_artifacts
    from weft.pipeline import aot_autograd as aot_autograd
    from weft.pipeline import cudagraph_mark_step_begin as cudagraph_mark_step_begin
    from weft.regional import compile_repeated_blocks as compile_repeated_blocks
    from weft.reports import report as report
    from weft.reports import report_by_rank as report_by_rank
    from weft.state import reset as reset
    from weft.state import set_stance as set_stance

__version__ = "0.1.0"

# module -> the names that it has
_LAZY = {
    "weft_capture": "allow_in_graph assume_constant_result disable disallow_in_graph "
    "error_on_graph_break explain graph_break is_compiling nonstrict_trace show_code skip_frame "
    "substitute_in_graph",
    "weft.background": "wait_for_compilation",
    "weft.bisection": "bisect",
    "weft.compiler": "mark_static_address run",
    "weft_guards": "mark_dynamic mark_static mark_unbacked maybe_mark_dynamic varying",
    "weft.mega_cache": "load_cache_artifacts save_cache_artifacts",
    "weft.pipeline": "aot_autograd cudagraph_mark_step_begin",
    "weft.regional": "compile_repeated_blocks",
    "weft.reports": "report report_by_rank",
    "weft.state": "reset set_stance",
}

__all__ = [
    "BackendCompilerError",
    "CompilerNotFound",
    "CompilerUnavailable",
    "InvalidBackend",
    "InvalidMode",
    "InvalidOption",
    "RecompileLimit",
    "Unsupported",
    "WeftError",
    "compile",
    "compiled_autograd",
    "compiler",
    "config",
    "counters",
    "get_default_backend",
    "list_backends",
    "list_mode_options",
    "list_options",
    "lookup_backend",
    "register_backend",
    "set_default_backend",
    "set_logs",
    "watch_stages",
    *" ".join(_LAZY.values()).split(),
]


def __getattr__(name: str) -> Any:
    if name in ("compiled_autograd", "compiler"):
        return importlib.import_module(f"weft.{name}")
    for module, names in _LAZY.items():
        if name in names.split():
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
