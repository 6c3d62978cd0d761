"""`weft.set_stance`: weft_capture's, with backends by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import weft_capture

from weft.pipeline import Request, graph_compiler


class set_stance(weft_capture.set_stance):
    """Set the stance of all compiled functions; see `weft_capture.set_stance`.

    Args:
        stance: `default`, `force_eager`, `eager_on_recompile`, `fail_on_recompile`,
            `eager_then_compile` or `aot_eager_then_compile`.
        skip_guard_eval_unsafe: taken for compatibility; guards are always tested.
        force_backend: a backend or its name, for all functions in the default stance.

    Raises:
        InvalidOption: for an unknown stance.
        InvalidBackend: for an unknown backend.
    """

    def __init__(
        self,
        stance: str = "default",
        *,
        skip_guard_eval_unsafe: bool = False,
        force_backend: str | Callable[..., Any] | None = None,
    ) -> None:
        backend = None if force_backend is None else graph_compiler(Request(force_backend))
        super().__init__(
            stance, skip_guard_eval_unsafe=skip_guard_eval_unsafe, force_backend=backend
        )
