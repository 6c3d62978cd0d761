"""Settings of weft_codegen, and the options of one compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weft_core.errors import InvalidOption
from weft_core.settings import Settings


@dataclass
class CodegenSettings(Settings):
    """Process-wide settings.

    Args:
        verify_ir: check every loop program against the rules of loops/program.py (for tests).
        interpret: run programs in the reference interpreter instead of compiling them.
    """

    verify_ir: bool = False
    interpret: bool = False


settings = CodegenSettings()


@dataclass(frozen=True)
class Options:
    """What one compilation may be told; names are torch.compile's with `.` as `_`.

    Args:
        epilogue_fusion: share kernels between operators; without it each gets its own.
        max_autotune: try several kernels for an operator and keep the fastest.
        fallback_random: draw random numbers exactly as eager does under a seed.
        shape_padding: pad matrix sizes to multiples that the hardware likes.
        triton_cudagraphs: replay recorded CUDA graphs; no effect on CPU.
        trace_enabled: write each stage's result into a folder.
        trace_graph_diagram: add a diagram of the fused graph to the trace.
    """

    epilogue_fusion: bool = True
    max_autotune: bool = False
    fallback_random: bool = True
    shape_padding: bool = False
    triton_cudagraphs: bool = False
    trace_enabled: bool = False
    trace_graph_diagram: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Options from a dict such as `{"triton.cudagraphs": False}`.

        Raises:
            InvalidOption: for an unknown name; the error suggests the nearest one.
        """
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            plain = name.replace(".", "_")
            if plain not in known:
                raise InvalidOption(name, known)
            values[plain] = value
        return cls(**values)
