"""CUDA graphs: the second run of a compiled graph is recorded, and the GPU replays it from then on.

Inputs that keep their address, and outputs of other recordings, are read where they are; others are
copied to where the recording reads. The recordings of a device share memory, so a replay may write
what belongs to later ones: where an output of those, or of its own, is in use, the run is recorded
anew, elsewhere, and its owner gives copies away from then on. What is not replayed runs as usual:
`counters["cudagraphs"]` says why.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from weft_core import events
from weft_core.collectives import is_collective

from weft_codegen.config import Options

Run = Callable[..., Any]

_hints = events.logger("codegen", "perf_hints")
_log = events.logger("codegen", "cudagraphs")
_numbers, _uses = itertools.count(), torch._C._storage_Use_Count


def _report(reason: str) -> None:
    events.counters["cudagraphs"][reason] += 1
    for log in (_hints, _log):
        log.info("no replay of a CUDA graph: %s", reason)


def with_cudagraphs(run: Run, gm: fx.GraphModule, options: Options | None = None) -> Run:
    """`run`, which computes the aten graph `gm`, replayed where it can be."""
    nodes = list(gm.graph.nodes)
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    tensors = [value for value in values if isinstance(value, Tensor)]
    devices = {tensor.device for tensor in tensors}
    sizes = (size for value in values for size in getattr(value, "shape", [value]))
    seeded = torch.Tag.nondeterministic_seeded
    seeds = options is not None and not options.fallback_random  # drawn on the CPU
    reasons = {
        "not-on-a-gpu": {device.type for device in devices} != {"cuda"},
        "several-devices": len(devices) > 1,
        "sparse-tensors": any(tensor.layout is not torch.strided for tensor in tensors),
        "dynamic-sizes": any(isinstance(size, torch.SymInt) for size in sizes),
        "collectives": any(is_collective(node.target) for node in nodes),
        "random-numbers": seeds and any(seeded in getattr(n.target, "tags", ()) for n in nodes),
    }
    for reason in [reason for reason, holds in reasons.items() if holds]:
        _report(reason)
        return run
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    written = {inputs.index(n.args[0]) for n in nodes if n.target is torch.ops.aten.copy_.default}
    return CudaGraphRunner(run, written, _memory(devices.pop()))


class CudaGraphPool:
    """What records on a GPU, and the recordings whose outputs have been given away."""

    def __init__(self, device: torch.device) -> None:
        self.lock, self.lent = threading.Lock(), list[_Recording]()
        self.home: int | None = None  # the stream of all replays, for they share memory
        self._device, self._side = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool lives as long as some recording that uses it.
        self._first = self.record(lambda: [torch.zeros((), device=device)], [])

    def stream(self) -> int | None:
        """The current stream; None while somebody records it."""
        recorded = torch.cuda.is_current_stream_capturing()
        return None if recorded else int(torch.cuda.current_stream(self._device).cuda_stream)

    def record(self, run: Run, args: list[Any]) -> tuple[Callable[[], None], list[Any]]:
        """What replays `run(*args)`, and its outputs; nothing has run then."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = list(run(*args))
            finally:
                graph.capture_end()
        return graph.replay, outputs

    def holds(self, value: Any) -> bool:
        """Whether `value` lies in an output of a recording, which stays where it is: what a forward
        saves for its backward."""
        storage = _storage(value)
        return storage != 0 and any(recording.lends(storage) for recording in self.lent)

    def reclaim(self, number: int) -> bool:
        """Whether no output of the recordings from `number` on is in use; such ones are over."""
        late = [recording for recording in self.lent if recording.number >= number]
        used = [recording for recording in late if recording.in_use()]
        for recording in used:
            recording.over = True
            recording.private.update(recording.in_use())
        self.tidy()
        return not used

    def tidy(self) -> None:
        """Let go of what nobody holds, in recordings that nobody replays any more."""
        self.lent = [recording for recording in self.lent if recording.in_use()]
        for recording in self.lent:
            if recording.over or recording.owner() is None:
                recording.keep(recording.in_use())

    def owner_is_gone(self) -> None:
        """The same, when a runner is deleted: by any thread, at any time."""
        if self.lock.acquire(blocking=False):  # else at the next recording
            try:
                self.tidy()
            finally:
                self.lock.release()


_memory = functools.cache(CudaGraphPool)


class CudaGraphRunner:
    """A compiled graph that is replayed; it is called as the graph is."""

    def __init__(self, run: Run, written: set[int], memory: CudaGraphPool) -> None:
        self.run, self.written, self._memory = run, written, memory
        self._seen: list[Any] | None = None
        self._recording: _Recording | None = None
        self._left = 16  # recordings
        self.copied: set[int] = set()
        self.private: set[int] = set()
        weakref.finalize(self, memory.owner_is_gone).atexit = False

    def __call__(self, *args: Any) -> Any:
        """The outputs of the graph."""
        return self.call_owning(list(args))

    def call_owning(self, args: list[Any]) -> Any:
        """The outputs of the graph; `args` may be emptied."""
        reason = "threads"
        if self._memory.lock.acquire(blocking=False):
            try:
                with torch.inference_mode(False), torch.no_grad():
                    found = self._find(args)
                    if isinstance(found, _Recording):
                        self._memory.lent.append(found)
                        return found.replay(args)
                    reason = found
            finally:
                self._memory.lock.release()
        _report(reason)
        owning = getattr(self.run, "call_owning", None)
        return self.run(*args) if owning is None else owning(args)

    def _find(self, args: list[Any]) -> _Recording | str:
        """A recording that fits `args`, or why there is none."""
        stream, addresses = self._memory.stream(), [_address(x) for x in args]
        if self._seen is None:
            self._seen = addresses
            return "first-call"
        self._memory.home = stream if self._memory.home is None else self._memory.home
        if stream is None or stream != self._memory.home:
            return "another-stream"
        known = self._recording
        if known is None or not known.fits(addresses) or not self._memory.reclaim(known.number):
            if not self._left:
                return "recorded-too-often"
            self._left, self._recording = self._left - 1, None
            if known is not None:
                known.over = True
            self._memory.tidy()
            pairs = enumerate(zip(addresses, self._seen, strict=True))
            moved = {k for k, (now, before) in pairs if now != before} - self.written
            self.copied |= {k for k in moved if not self._memory.holds(args[k])}
            self._seen = addresses
            try:
                known = self._recording = _Recording(self, self._memory, args, addresses)
                _log.info("recorded CUDA graph %d, %d more may be", known.number, self._left)
            except Exception as error:  # what cannot be recorded may still run
                _hints.info("%s", error)
                self._left = 0
                return "recording-failed"
        return known


def _address(x: Any) -> tuple[Any, ...]:
    return (x.data_ptr(), x.shape, x.stride()) if isinstance(x, Tensor) else (x,)


def _storage(value: Any) -> int:
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else 0


class _Recording:
    """One recorded run; it keeps copies of inputs, and the outputs, but no input itself."""

    def __init__(
        self, owner: CudaGraphRunner, memory: CudaGraphPool, args: list[Any], addresses: list[Any]
    ) -> None:
        self.owner, self._addresses = weakref.ref(owner), addresses
        self.private, self._written = owner.private, owner.written
        self.number, self.over = next(_numbers), False
        self._copies = {k: torch.empty_like(args[k]) for k in sorted(owner.copied)}
        inputs = [self._copies.get(k, value) for k, value in enumerate(args)]
        self._replay: Callable[[], None] | None
        self._replay, outputs = memory.record(owner.run, inputs)
        sources = {_storage(x): k for k, x in enumerate(inputs) if isinstance(x, Tensor)}
        self._lent: list[tuple[int, int, int]] = []
        self._makers: list[tuple[Callable[[Any], Any], Any, int | None]] = []  # one per output
        for k, output in enumerate(outputs):
            source = sources.get(_storage(output))
            if source is not None and (output is inputs[source] or source not in self._copies):
                self._makers.append((_as_view(output, inputs[source]), None, source))
            elif not isinstance(output, Tensor) or k in owner.private:
                make = Tensor.clone if isinstance(output, Tensor) else copy.copy
                self._makers.append((make, output, None))
            else:
                self._makers.append((Tensor.detach, output, None))
                self._lent.append((k, _storage(output), _uses(_storage(output))))

    def fits(self, addresses: list[Any]) -> bool:
        """Whether inputs at `addresses` are where this run reads them, or can be copied there."""
        pairs = enumerate(zip(addresses, self._addresses, strict=True))
        return not self.over and all(
            now == known or (k in self._copies and now[1] == known[1]) for k, (now, known) in pairs
        )

    def lends(self, storage: int) -> bool:
        """Whether an output that was given away lies in `storage`."""
        return any(storage == own for _, own, _ in self._lent)

    def in_use(self) -> list[int]:
        """The outputs whose memory somebody holds."""
        return [k for k, storage, idle in self._lent if _uses(storage) != idle]

    def keep(self, outputs: list[int]) -> None:
        """Let go of all but these outputs; there is no replay after it."""
        self.over, self._replay = True, None
        self._copies.clear()
        self._lent = [row for row in self._lent if row[0] in outputs]
        nothing = (copy.copy, None, None)
        pairs = enumerate(self._makers)
        self._makers = [maker if k in outputs else nothing for k, maker in pairs]

    def replay(self, args: list[Any]) -> list[Any]:
        """The outputs for `args`."""
        for k, own in self._copies.items():
            own.copy_(args[k])
        assert self._replay is not None
        self._replay()
        torch.autograd.graph.increment_version([args[k] for k in self._written])
        return [make(x if k is None else args[k]) for make, x, k in self._makers]


def _as_view(output: Tensor, given: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes `output`, which is `given` or a view of it, of the tensor that comes instead."""
    if output is given:
        return lambda now: now
    if (output.dtype, output.is_conj(), output.is_neg()) != (given.dtype, False, False):
        raise ValueError("an output is an input's memory in other numbers")
    shape, strides = output.shape, output.stride()
    start = output.storage_offset() - given.storage_offset()
    return lambda now: now.as_strided(shape, strides, now.storage_offset() + start)
