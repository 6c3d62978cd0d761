"""Settings of weft_guards; `weft.config` chains them with those of the other packages."""

from __future__ import annotations

from dataclasses import dataclass

from weft_core.settings import Settings


@dataclass
class GuardsSettings(Settings):
    """Settings of the code cache and the dynamic-shape policy.

    Args:
        recompile_limit: how many entries one code object may have before it runs eagerly.
        fail_on_recompile_limit_hit: raise RecompileLimit at that limit instead.
        error_on_recompile: raise RecompileLimit where anything would be compiled a second time.
        automatic_dynamic_shapes: make a size or int symbolic when it changes between calls.
        specialize_int: never make int arguments symbolic, only sizes.
        native_checks: run checks in C where the extension was built and validated.
    """

    recompile_limit: int = 8
    fail_on_recompile_limit_hit: bool = False
    error_on_recompile: bool = False
    automatic_dynamic_shapes: bool = True
    specialize_int: bool = False
    native_checks: bool = True


settings = GuardsSettings()
