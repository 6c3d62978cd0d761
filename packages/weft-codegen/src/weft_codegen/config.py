"""Settings of weft_codegen, and the options of one compilation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weft_core.errors import InvalidOption
from weft_core.settings import Settings


@dataclass
class CodegenSettings(Settings):
    """Process-wide settings.

    Args:
        verify_ir: check every loop program against the rules of loops/program.py (for tests).
        interpret: run programs in the reference interpreter instead of compiling them.
        keep_freed_memory: bytes of freed memory that the C library may keep for the next step
            (see kernels/malloc.py); 0 leaves the C library as it is. Read at the first compile.
        measure: let graphs prove themselves against eager (see measure.py); the environment
            variable WEFT_MEASURE=0 turns it off for a process and what it starts.
    """

    verify_ir: bool = False
    interpret: bool = False
    keep_freed_memory: int = 128 << 20
    measure: bool = field(default_factory=lambda: os.environ.get("WEFT_MEASURE") != "0")


settings = CodegenSettings()


# Accepted, so that a program keeps its dictionary of options when it switches to weft.
_NO_EFFECT = ("shape_padding", "triton.cudagraphs")


@dataclass(frozen=True)
class Options:
    """What one compilation may be told; names are torch.compile's with `.` as `_`.

    Args:
        epilogue_fusion: share kernels between operators; without it each gets its own.
        max_autotune: measure whether matrix products are faster as loops (see tune.py).
        fallback_random: draw random numbers exactly as eager does under a seed.
        freezing: compute what depends on parameters alone once; for inference (see freezing.py).
        shape_padding: pad matrix sizes to multiples that the hardware likes.
        triton_cudagraphs: replay recorded CUDA graphs; no effect on CPU.
        measure: run eager's operators instead of a graph that its first calls show to be slower.
        trace_enabled: write each stage's result into a folder.
        trace_graph_diagram: add a diagram of the fused graph to the trace.
    """

    epilogue_fusion: bool = True
    max_autotune: bool = False
    fallback_random: bool = True
    freezing: bool = False
    shape_padding: bool = False
    triton_cudagraphs: bool = False
    measure: bool = True
    trace_enabled: bool = False
    trace_graph_diagram: bool = False

    def without_effect(self) -> tuple[str, ...]:
        """The options that are set and that nothing here listens to, in torch.compile's names."""
        return tuple(name for name in _NO_EFFECT if getattr(self, name.replace(".", "_")))

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Options from a dict such as `{"triton.cudagraphs": False}`.

        Raises:
            InvalidOption: for an unknown name; the error suggests the nearest one.
        """
        known = {item.name for item in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            plain = name.replace(".", "_")
            if plain not in known:
                raise InvalidOption(name, known)
            values[plain] = value
        return cls(**values)
