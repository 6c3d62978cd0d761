"""The state of torch that compiled code depends on, beside grad mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weft_guards.abi import state_words

# (name, a function without side effects)
STATE_READERS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("default dtype", torch.get_default_dtype),
    ("any autocast", torch._C._is_any_autocast_enabled),
    ("inference mode", torch.is_inference_mode_enabled),
    ("deterministic algorithms", torch._C._get_deterministic_algorithms),
    ("torch function enabled", torch._C._is_torch_function_enabled),
    ("torch function modes", torch._C._len_torch_function_stack),
    ("dispatch modes", torch._C._len_torch_dispatch_stack),
    ("functorch level", torch._C._functorch.maybe_current_level),
)
_AUTOCAST_DEVICES = ("cpu", "cuda")


def autocast_state() -> tuple[Any, ...]:
    """Return what autocast does on each device; only asked for where any autocast is on."""
    return (
        torch.is_autocast_cache_enabled(),
        *(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        ),
    )


def _present() -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    values = tuple([read() for _, read in STATE_READERS])
    return values, autocast_state() if values[1] else None


@dataclass(frozen=True)
class TorchState:
    """The settings of `STATE_READERS` at one moment, and autocast's where it is on."""

    values: tuple[Any, ...]
    autocast: tuple[Any, ...] | None
    words: bytes | None = field(default=None, compare=False)  # the same, as C reads it

    @staticmethod
    def now() -> TorchState:
        """Take the present state."""
        return TorchState(*_present(), state_words())

    def holds(self, _: object) -> bool:
        """Say whether the present state is the same."""
        return _present() == (self.values, self.autocast)

    def __str__(self) -> str:
        pairs = zip((name for name, _ in STATE_READERS), self.values)
        return ", ".join(f"{name}={value}" for name, value in pairs)

    def difference(self) -> tuple[str, str]:
        """Return what differs from the present state, as old and new text."""
        now = TorchState.now()
        names = [name for name, _ in STATE_READERS]
        pairs = [row for row in zip(names, self.values, now.values) if row[1] != row[2]]
        if self.autocast != now.autocast:
            pairs.append(("autocast", self.autocast, now.autocast))
        old = ", ".join(f"{name} {value}" for name, value, _ in pairs)
        return old, ", ".join(f"{name} {value}" for name, _, value in pairs)
