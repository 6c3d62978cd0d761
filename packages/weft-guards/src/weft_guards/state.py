"""The state of torch that compiled code depends on, beside grad mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weft_guards.abi import state_words

# (name, a function without side effects)
_READERS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("default dtype", torch.get_default_dtype),
    ("any autocast", torch._C._is_any_autocast_enabled),
    ("inference mode", torch.is_inference_mode_enabled),
    ("deterministic algorithms", torch._C._get_deterministic_algorithms),
    ("torch function enabled", torch._C._is_torch_function_enabled),
    ("torch function modes", torch._C._len_torch_function_stack),
    ("dispatch modes", torch._C._len_torch_dispatch_stack),
    ("functorch level", torch._C._functorch.maybe_current_level),
)
AUTOCAST = "autocast"  # the name of its settings
_AUTOCAST_DEVICES = ("cpu", "cuda")


def _present() -> tuple[tuple[str, Any], ...]:
    """Return the present settings by name, autocast's on each device only where it is on."""
    values = [(name, read()) for name, read in _READERS]
    if torch._C._is_any_autocast_enabled():
        devices = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        ]
        values.append((AUTOCAST, (torch.is_autocast_cache_enabled(), *devices)))
    return tuple(values)


@dataclass(frozen=True)
class TorchState:
    """The settings of torch at one moment, by name."""

    values: tuple[tuple[str, Any], ...]
    words: bytes | None = field(default=None, compare=False)  # the same, as C reads it

    @staticmethod
    def now() -> TorchState:
        """Take the present state."""
        return TorchState(_present(), state_words())

    def holds(self, _: object) -> bool:
        """Say whether the present state is the same."""
        return _present() == self.values

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values if name != AUTOCAST)

    def difference(self) -> tuple[str, str]:
        """Return what differs from the present state, as old and new text."""
        old, new = dict(self.values), dict(_present())
        names = [name for name in old | new if old.get(name) != new.get(name)]
        texts = [", ".join(f"{name} {side.get(name)}" for name in names) for side in (old, new)]
        return texts[0], texts[1]
