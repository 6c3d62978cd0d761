"""The compiled entries of one code object, and what happens on a miss.

`lookup` runs on every call, so it only walks a tuple: newest hit first, no lock. Whatever changes
the entries swaps in a new tuple under a lock. An entry whose guards wait for an object that died
can never match again; a weak reference's callback evicts it, and with it the compiled graph.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

from weft_core.errors import RecompileLimit
from weft_core.events import counters, enabled, logger

from weft_guards.check import Check, describe_check
from weft_guards.config import settings
from weft_guards.dynamic import DynamicPolicy
from weft_guards.explain import Miss, explain_miss
from weft_guards.guards import Guard

_guards_log = logger("guards", "guards")
_recompiles_log = logger("guards", "recompiles")
_verbose_log = logger("guards", "recompiles_verbose")


class Entry:
    """One piece of compiled code, the check that admits calls to it, and its guards."""

    __slots__ = ("__weakref__", "check", "code", "dead", "guards", "watches")

    def __init__(self, check: Check, code: CodeType, guards: Iterable[Guard]) -> None:
        self.check = check
        self.code = code
        self.guards = tuple(guards)
        self.dead = False
        self.watches: list[weakref.ref[Any]] = []


class CodeCache:
    """Compiled entries of one code object.

    Args:
        code: the original code object; only its name is kept.
        dynamic: the `dynamic` argument of compile, for the cache's `policy`.
    """

    def __init__(self, code: CodeType, dynamic: bool | None = None) -> None:
        self.name = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        self.entries: tuple[Entry, ...] = ()
        self.skip_reason: str | None = None
        self.policy = DynamicPolicy(dynamic)
        # Weak reference callbacks may run anywhere, also inside our own locked sections.
        self._lock = threading.RLock()

    def lookup(self, func: FunctionType, *flat_locals: object) -> CodeType | None:
        """Return code whose guards hold for this call, or None.

        Args:
            func: the function called (gives globals and closure).
            flat_locals: positional and keyword-only arguments, the *args tuple, the **kwargs dict.
        """
        entries = self.entries
        for entry in entries:
            if entry.check(func, *flat_locals):
                if entry is not entries[0]:
                    self._move_to_front(entry)
                return entry.code
        return None

    def _move_to_front(self, entry: Entry) -> None:
        """Let the next call find this entry first; skipped when another thread is at work."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if entry in self.entries:
                rest = tuple(other for other in self.entries if other is not entry)
                self.entries = (entry, *rest)
            self._sweep()
        finally:
            self._lock.release()

    def add(self, check: Check, code: CodeType, guards: Iterable[Guard]) -> Entry:
        """Add an entry in front; it is evicted when an object its guards name dies."""
        entry = Entry(check, code, guards)
        here, there = weakref.ref(self), weakref.ref(entry)

        def died(_: object) -> None:
            cache, gone = here(), there()
            if gone is not None:
                gone.dead = True
            if cache is not None:
                cache._sweep()

        for guard in entry.guards:
            for held in guard.held():
                target = held.get()
                if target is None:
                    entry.dead = True
                else:
                    entry.watches.append(weakref.ref(target, died))
        with self._lock:
            self.entries = (entry, *self.entries)
            self._sweep()
        if enabled("guards"):
            listing = "\n".join(f"  {guard.kind:<12} {guard}" for guard in entry.guards)
            _guards_log.info("%s: %d guards\n%s", self.name, len(entry.guards), listing)
            _guards_log.debug("%s", describe_check(check))
        return entry

    def _sweep(self) -> None:
        """Drop dead entries. Loops, since another may die (on any thread) while one is dropped."""
        while any(entry.dead for entry in self.entries):
            with self._lock:
                before = len(self.entries)
                self.entries = tuple(entry for entry in self.entries if not entry.dead)
                counters["guards"]["evicted"] += before - len(self.entries)

    def mark_skip(self, reason: str) -> None:
        """Run what no entry admits eagerly from now on, for this reason."""
        self.skip_reason = reason

    def clear(self) -> None:
        """Forget all entries, the skip mark and the sizes seen."""
        with self._lock:
            self.entries = ()
            self.skip_reason = None
            self.policy = DynamicPolicy(self.policy.dynamic)

    def may_compile(
        self, func: FunctionType, flat_locals: Sequence[Any], *, strict: bool = False
    ) -> bool:
        """Say, after a miss, whether to compile; log why earlier entries did not fit.

        At the recompile limit the code object is marked to skip, with one warning.

        Args:
            func: the function called.
            flat_locals: its arguments, as for `lookup`.
            strict: raise at the limit instead (fullgraph).

        Raises:
            RecompileLimit: when strict and at the limit.
        """
        if self.skip_reason is not None:
            return False
        entries = self.entries
        if not entries:
            return True
        at_limit = len(entries) >= settings.recompile_limit
        if at_limit or enabled("recompiles") or enabled("recompiles_verbose"):
            reasons = self.reasons(func, flat_locals)
            self._log_reasons(reasons)
        if not at_limit:
            counters["guards"]["recompiles"] += 1
            return True
        counters["guards"]["recompile_limit"] += 1
        text = self._limit_text([miss for _, misses in reasons for miss in misses])
        if strict:
            raise RecompileLimit(text)
        self.mark_skip("recompile limit")
        warnings.warn(text, stacklevel=2)
        return False

    def reasons(
        self, func: FunctionType, flat_locals: Sequence[Any]
    ) -> list[tuple[Entry, list[Miss]]]:
        """Return, for each entry, why it does not admit a call (no misses: it does)."""
        return [(entry, explain_miss(entry.guards, func, flat_locals)) for entry in self.entries]

    def _log_reasons(self, reasons: list[tuple[Entry, list[Miss]]]) -> None:
        """Log why the newest entry does not fit, and verbosely why each does not."""
        for index, (entry, misses) in enumerate(reasons):
            lines = "\n  ".join(map(str, misses))
            if index == 0:
                _recompiles_log.info("recompiling %s\n  %s", self.name, lines)
            _verbose_log.info("%s: entry %#x does not fit:\n  %s", self.name, id(entry), lines)

    def _limit_text(self, misses: list[Miss]) -> str:
        """Say what keeps one function from being compiled once and for all."""
        failed = {
            f"{miss.what}: {miss.old} -> {miss.new}"
            + (f" (used at {miss.user_line})" if miss.user_line else "")
            for miss in misses
        }
        remedies = {miss.remedy for miss in misses} | {"raise weft.config.recompile_limit"}
        return (
            f"[recompile-limit] {self.name} was compiled {len(self.entries)} times and runs "
            "eagerly from now on.\n  Failing guards:\n    "
            + "\n    ".join(sorted(failed))
            + "\n  What to do: "
            + "; or ".join(sorted(remedies))
        )
