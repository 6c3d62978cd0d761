"""The compiled entries of one code object, and what happens on a miss.

`lookup` runs on every call, so it is a table in C where there is one, and takes no lock; whatever
changes the entries swaps in a new tuple under one. An entry whose guards wait for an object that
died can never match again: a weak reference's callback evicts it, and with it the compiled graph.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from weft_core import recording
from weft_core.errors import RecompileLimit
from weft_core.events import counters, enabled, logger, notify

from weft_guards.check import Check, arg_names_of, compile_check, describe_check
from weft_guards.config import settings
from weft_guards.dynamic import DynamicPolicy
from weft_guards.explain import Miss, explain_miss
from weft_guards.filters import GuardFilter
from weft_guards.guards import Guard
from weft_guards.native import usable_extension
from weft_guards.profile import Profile
from weft_guards.spec import ShapesSpec

_LIMIT = "recompile limit"
_USERS = 32  # how many times the limit what functions share may have at most
_guards_log = logger("guards", "guards")
_recompiles_log = logger("guards", "recompiles")
_verbose_log = logger("guards", "recompiles_verbose")


def _callers() -> str:
    """Return the user's frames on the stack as a traceback prints them."""
    stack = [f for f in traceback.extract_stack() if "weft_" not in f.filename.replace("-", "_")]
    return "".join(traceback.format_list(stack))


def _recompile_record(func: FunctionType, misses: list[Miss], at_limit: bool) -> dict[str, Any]:
    """Return what a recording keeps of a miss: the frame, and why its newest entry did not fit."""
    code, rows = func.__code__, []
    for miss in misses:
        row = {name: getattr(miss, name) for name in ("what", "old", "new", "remedy", "fix")}
        rows.append(row | {"guard": str(miss.guard), "line": miss.user_line})
    frame = (code.co_qualname, code.co_filename, code.co_firstlineno)
    return {"frame": frame, "misses": rows, "limit": at_limit}


Row = tuple[Check, CodeType, "CacheEntry"]


class Table:
    """The rows of one code object, the one hit last in front; C has a type that does the same."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.hits = 0
        self.misses = 0

    def __call__(self, func: object, *flat_locals: object) -> CodeType | None:
        """Return the code whose check holds, or None."""
        rows = self.rows
        for row in rows:
            if row[0](func, *flat_locals):
                self.hits += 1
                if row is not rows[0] and self.rows is rows:
                    self.rows = (row, *[other for other in rows if other is not row])
                return row[1]
        self.misses += 1
        return None


@dataclass(frozen=True)
class CacheRules:
    """What one call of compile says of its caches.

    Args:
        dynamic: None for the automatic policy, True for symbolic from the start, False for never.
        recompile_limit: entries that a code object may have; None takes the setting's.
        guard_filter: leaves guards out (unsafe, see `filters`).
        name: stands before the function's name in messages.
        shapes: which sizes and ints of one function vary; decides for it.
    """

    dynamic: bool | None = None
    recompile_limit: int | None = None
    guard_filter: GuardFilter | None = None
    name: str | None = None
    shapes: ShapesSpec | None = None


@dataclass(eq=False)
class CacheEntry:
    """One piece of compiled code, the check that admits calls to it, and its guards."""

    check: Check
    code: CodeType
    guards: tuple[Guard, ...]
    dead: bool = False
    watches: list[weakref.ref[Any]] = field(default_factory=list)


_skips_guards = False
_caches: weakref.WeakSet[CodeCache] = weakref.WeakSet()


def skip_guards(skip: bool) -> bool:
    """Test only the guards by which the entries of a code object differ, or all again.

    This is UNSAFE: what the guards left out say must hold without them. Returns what was set
    before.
    """
    global _skips_guards
    before, _skips_guards = _skips_guards, skip
    for cache in list(_caches) if before != skip else ():
        with cache._lock:
            cache.entries = cache.entries
    return before


class CodeCache:
    """Compiled entries of one code object.

    `lookup(func, *flat_locals)` returns the code whose guards hold for a call of `func`, or None;
    the flat locals are the positional and keyword-only arguments, the *args tuple, the **kwargs
    dict. `lookup.hits` and `lookup.misses` count; `recompiles` tells why each later entry was made.

    Args:
        code: the original code object; only its name is kept.
        rules: what the call of compile said.
        patience: how many times the recompile limit may be compiled.
    """

    def __init__(self, code: CodeType, rules: CacheRules = CacheRules(), patience: int = 1) -> None:
        self.name = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        if rules.name:
            self.name = f"{rules.name}: {self.name}"
        self.rules = rules
        native = usable_extension()
        self.lookup: Table = Table() if native is None else native.Table()
        self.recompiles: list[str] = []
        self.skip_reason: str | None = None  # why what no entry admits runs eagerly
        self.patience = patience
        self.users = 1  # each may have as many entries as the limit
        from_file = not code.co_filename.startswith("<")  # else its name is another each time
        profile = Profile(code) if from_file else None
        spec = rules.shapes if rules.shapes and rules.shapes.code is code else None
        self._fresh_policy = partial(DynamicPolicy, rules.dynamic, profile, spec)
        self.policy = self._fresh_policy()
        # Weak reference callbacks may run anywhere, also inside our own locked sections.
        self._lock = threading.RLock()
        self._names = arg_names_of(code), code.co_freevars
        _caches.add(self)

    @property
    def entries(self) -> tuple[CacheEntry, ...]:
        """The entries, the one hit last in front."""
        return tuple([row[2] for row in self.lookup.rows])

    @entries.setter
    def entries(self, entries: Iterable[CacheEntry]) -> None:
        entries = tuple(entries)
        checks = self._differing(entries) if _skips_guards else [entry.check for entry in entries]
        self.lookup.rows = tuple([(c, e.code, e) for c, e in zip(checks, entries, strict=True)])

    def _differing(self, entries: tuple[CacheEntry, ...]) -> list[Check]:
        """Return checks of the guards that not all entries have."""
        common = set.intersection(*(set(entry.guards) for entry in entries)) if entries else set()
        rests = ([guard for guard in entry.guards if guard not in common] for entry in entries)
        return [compile_check(rest, *self._names) for rest in rests]

    def add(self, check: Check, code: CodeType, guards: Iterable[Guard]) -> CacheEntry:
        """Add an entry in front; it is evicted when an object its guards name dies."""
        self.policy.store_profile()
        entry = CacheEntry(check, code, tuple(guards))
        here, there = weakref.ref(self), weakref.ref(entry)

        def died(_: object) -> None:
            cache, gone = here(), there()
            if gone is not None:
                gone.dead = True
            if cache is not None:
                cache._sweep()

        for guard in entry.guards:
            for identity in guard.identities():
                target = identity.get()
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

    def clear(self) -> None:
        """Forget all entries, the skip mark and the sizes seen."""
        with self._lock:
            self.entries = ()
            self.skip_reason = None
            self.recompiles = []
            self.policy = self._fresh_policy()

    def add_user(self) -> None:
        """Let one more function have entries here; at the recompile limit, compile again."""
        self.users += 1
        if self.skip_reason == _LIMIT:
            self.skip_reason = None

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
            RecompileLimit: at the limit, when strict or so set.
        """
        if self.skip_reason is not None:
            return False
        entries = self.entries
        if not entries:
            return True
        limit = self.rules.recompile_limit or settings.recompile_limit
        limit *= self.patience * min(self.users, _USERS)
        at_limit = settings.error_on_recompile or len(entries) >= limit
        all_of_them = at_limit or enabled("recompiles_verbose")
        reasons = self.reasons(func, flat_locals, entries if all_of_them else entries[:1])
        self._log_reasons(reasons)
        recording.keep("recompile", lambda: _recompile_record(func, reasons[0][1], at_limit))
        if not at_limit:
            self.recompiles += [f"{m.what}: {m.old} -> {m.new}" for m in reasons[0][1][:1]]
            counters["guards"]["recompiles"] += 1
            return True
        counters["guards"]["recompile_limit"] += 1
        fails = strict or settings.fail_on_recompile_limit_hit or settings.error_on_recompile
        text = self._limit_text([miss for _, misses in reasons for miss in misses], fails)
        if fails:
            raise RecompileLimit(text)
        self.skip_reason = _LIMIT
        notify(text)
        return False

    def reasons(
        self,
        func: FunctionType,
        flat_locals: Sequence[Any],
        entries: Iterable[CacheEntry] | None = None,
    ) -> list[tuple[CacheEntry, list[Miss]]]:
        """Return, for each entry (default: all), why it does not admit a call; [] if it does."""
        chosen = self.entries if entries is None else entries
        return [(entry, explain_miss(entry.guards, func, flat_locals)) for entry in chosen]

    def _log_reasons(self, reasons: list[tuple[CacheEntry, list[Miss]]]) -> None:
        """Log why the newest entry does not fit, and verbosely why each does not."""
        for index, (entry, misses) in enumerate(reasons):
            lines = "\n  ".join(map(str, misses))
            if index == 0:
                _recompiles_log.info("recompiling %s\n  %s", self.name, lines)
                if enabled("recompiles_verbose"):
                    _verbose_log.info("%s is called from\n%s", self.name, _callers())
            _verbose_log.info("%s: entry %#x does not fit:\n  %s", self.name, id(entry), lines)

    def _limit_text(self, misses: list[Miss], fails: bool) -> str:
        """Say what keeps one function from being compiled once and for all."""
        failed = {
            f"{miss.what}: {miss.old} -> {miss.new}"
            + (f" (used at {miss.user_line})" if miss.user_line else "")
            for miss in misses
        }
        remedies = {miss.fix or miss.remedy for miss in misses}
        head = f"[recompile-limit] {self.name} was compiled {len(self.entries)} times and "
        head += "may not be once more" if fails else "runs eagerly from now on"
        given = self.rules.recompile_limit
        if settings.error_on_recompile:
            head += ": error_on_recompile is set"
            remedies.add("unset error_on_recompile until every kind of call has been made once")
        else:
            raised = f"weft.config.recompile_limit = {2 * settings.recompile_limit}"
            remedies.add(f"recompile_limit={2 * given}" if given else raised)
        listing, advice = "\n    ".join(sorted(failed)), "; or ".join(sorted(remedies))
        return f"{head}.\n  Failing guards:\n    {listing}\n  What to do: {advice}"
