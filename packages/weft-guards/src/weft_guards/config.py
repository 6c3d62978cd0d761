"""Settings of weft_guards; `weft.config` chains them with those of the other packages."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated

from weft_core.arguments import AtLeast
from weft_core.settings import Settings, environment_flag


@dataclass
class GuardsSettings(Settings):
    """Settings of the code cache and the dynamic-shape policy.

    Args:
        recompile_limit: how many entries one code object may have before it runs eagerly.
        fail_on_recompile_limit_hit: raise RecompileLimit at that limit instead.
        error_on_recompile: raise RecompileLimit where anything would be compiled a second time.
        automatic_dynamic_shapes: make a size or int symbolic when it changes between calls.
        automatic_dynamic_local_pgo: keep in the cache folder which of them did, so that the next
            process compiles them symbolic at once; the environment variable WEFT_PGO=0 turns it
            off for a process and what it starts.
        dynamic_sources: sources that are symbolic from the start, whatever else is said: a comma
            list of names as guards print them (`L['x']`) or regular expressions for their
            beginning; `:N` behind one means only dimension N.
        unbacked_sources: in the same way, sizes on which nothing may depend, as with mark_unbacked.
        job_id: programs with one id share the record of what varied, which each program has alone
            otherwise; WEFT_JOB_ID sets it.
        specialize_int: never make int arguments symbolic, only sizes.
        specialize_float: never make floats inputs of a graph, learning rates included.
        native_checks: run checks in C where the extension was built and validated.
    """

    recompile_limit: Annotated[int, AtLeast(1)] = 8
    fail_on_recompile_limit_hit: bool = False
    error_on_recompile: bool = False
    automatic_dynamic_shapes: bool = True
    automatic_dynamic_local_pgo: bool = field(default_factory=lambda: environment_flag("WEFT_PGO"))
    dynamic_sources: str = ""
    unbacked_sources: str = ""
    job_id: str = field(default_factory=lambda: os.environ.get("WEFT_JOB_ID", ""))
    specialize_int: bool = False
    specialize_float: bool = False
    native_checks: bool = True


settings = GuardsSettings()
