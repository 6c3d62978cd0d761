"""Settings of compiled autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from weft_core.arguments import AtLeast
from weft_core.settings import Settings


@dataclass
class CompiledAutogradSettings(Settings):
    """Settings of this package; `weft.config` shows them too."""

    graph_limit: Annotated[int, AtLeast(0)] = 8
    """Graphs compiled for one autograd structure; beyond that it runs node by node."""


settings = CompiledAutogradSettings()
