"""`weft.config`: the settings of every stage under one roof.

Each package keeps its own settings group in its `config.py`; this chains them, so that
`weft.config.recompile_limit = 4` reaches the guards package. A stage is imported when one of its
settings is first asked for.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from weft_core.errors import UnknownSetting
from weft_core.settings import Settings

_GROUPS = (
    "weft_guards.config",
    "weft_capture.config",
    "weft_aot.config",
    "weft_compiled_autograd.config",
    "weft_codegen.config",
)


@dataclass
class UmbrellaSettings(Settings):
    """The settings that concern all stages.

    Args:
        on_compile_error: `"raise"` a BackendCompilerError, or run the graph in `"eager"` with a
            warning.
        compiled_autograd: capture and compile what the autograd engine runs in `backward()`.
        record: keep graphs, generated code and times for `weft.report()`, which costs compile time
            and memory.
        overrides: another backend for some graphs, such as `"0-3:aot_eager,5:eager"`, as
            overrides.py describes; the environment variable WEFT_OVERRIDES sets it.
        background_compile: compile graphs in a thread; until that is done they run eagerly.
        progress: show on stderr what is being compiled; None means on a terminal only.
    """

    on_compile_error: Literal["raise", "eager"] = "raise"
    compiled_autograd: bool = False
    background_compile: bool = False
    progress: bool | None = None
    record: bool = False
    overrides: str = field(default_factory=lambda: os.environ.get("WEFT_OVERRIDES", ""))

    def __setattr__(self, name: str, value: object) -> None:
        before = self.__dict__.get(name, False)
        super().__setattr__(name, value)
        if name == "compiled_autograd" and value != before:
            importlib.import_module("weft.compiled_autograd").switch(value)
        elif name == "record" and value != before:
            importlib.import_module("weft_core.recording").switch(bool(value))


umbrella = UmbrellaSettings()


class Config(Settings):
    """All settings by name; `patch(...)` changes some for a while."""

    def _groups(self) -> Iterator[Settings]:
        yield umbrella
        for module in _GROUPS:
            yield importlib.import_module(module).settings

    def _owner(self, name: str) -> Settings:
        for group in self._groups():
            if name in group.as_dict():
                return group
        raise UnknownSetting(name, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return every setting of every stage by name."""
        return {name: value for group in self._groups() for name, value in group.as_dict().items()}

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.as_dict()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._owner(name), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._owner(name), name, value)

    def save_config(self) -> bytes:
        """Return all settings as bytes for `load_config`."""
        return pickle.dumps(self.as_dict())

    def load_config(self, saved: bytes | dict[str, Any]) -> None:
        """Set what `save_config`, or `as_dict`, returned; bytes must come from a trusted place.

        Raises:
            UnknownSetting: for the name of a setting that this version does not have.
        """
        for name, value in (pickle.loads(saved) if isinstance(saved, bytes) else saved).items():
            setattr(self, name, value)

    def codegen_config(self) -> str:
        """Return the lines of Python that set what differs from the defaults."""
        rows = (
            (name, value, getattr(type(group)(), name))
            for group in self._groups()
            for name, value in group.as_dict().items()
        )
        return "\n".join(f"weft.config.{n} = {value!r}" for n, value, old in rows if value != old)

    def reset(self) -> None:
        """Put every setting back to its default."""
        for group in self._groups():
            group.reset()


config = Config()
