"""Settings of compiled autograd."""

from __future__ import annotations

from dataclasses import dataclass

from weft_core.settings import Settings


@dataclass
class CompiledAutogradSettings(Settings):
    """Settings of this package; `weft.config` shows them too."""

    graph_limit: int = 8
    """Graphs compiled for one autograd structure; beyond that it runs node by node."""


settings = CompiledAutogradSettings()
