"""Cache of captures on disk, so that later processes need not capture again.

Each entry of a code object is a file: guards, replacement code, graph. Another process looks up the
names in it, tests its guards, and passes the graph to its backend. It skips an entry where anything
differs. docs/architecture/capture-cache.md explains why that is correct.
"""

from __future__ import annotations

import functools
import hashlib
import io
import marshal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import weft_core
import weft_guards
from torch.fx import GraphModule
from torch.fx.node import map_aggregate, map_arg
from weft_core import fake
from weft_core.cachedir import cache_dir, package_digest, read_checked, try_write
from weft_core.events import bypasses, logger
from weft_guards import Guard, call_with, serialization
from weft_guards.check import read_sources
from weft_guards.config import settings as guards_settings
from weft_guards.native import usable_extension
from weft_guards.payloads import name_of
from weft_guards.serialization import NotSerializable, Stale
from weft_guards.sources import ConstSource, Source, TensorProperty

from weft_capture import config, frame, torch_compat
from weft_capture.breaks import BreakRecord
from weft_capture.bytecode import decode, make_resume, original
from weft_capture.output.entry import from_the_start, make_entry
from weft_capture.tensors.inputs import GraphInput
from weft_capture.tensors.modes import around
from weft_capture.tensors.runtime_values import origins

if TYPE_CHECKING:
    from weft_capture.execution.tracer import Tracer

_log = logger("capture", "precompiled")
_HOME, _CALLER = ("home",), ("caller",)
_KEPT_META = ("stack_trace", "recompute", "source_name")

Rows = tuple[tuple[Any, ...], ...]
"""(op, name, target, args, kwargs, metadata) of each node of a graph."""
Dims = tuple[int, ...]
Inputs = tuple[tuple[Source, Dims, Dims], ...]
"""Source, symbolic dimensions and free strides of each input of a graph."""


@dataclass(frozen=True)
class Ref:
    """A node of a graph, by name."""

    name: str


@dataclass(frozen=True)
class Saved:
    """One entry of a file."""

    library: tuple[tuple[str, str, str], ...]  # (module, name, repr) of its data that was read
    guards: tuple[Guard, ...]  # as `weft_guards.serialization` writes them
    code: bytes  # the replacement code without its constants, by marshal
    constants: tuple[Any, ...]
    graph: Rows  # none for an empty graph
    inputs: Inputs
    stopped: BreakRecord | None  # the break at its end

    def rebuild(
        self, function: types.FunctionType, values: list[Any], compile_graph: Callable[..., Any]
    ) -> tuple[types.CodeType, GraphModule | None, list[Guard]]:
        """Compile the graph for such inputs; returns the code, the graph, and guards on sizes."""
        caller: Any = None
        module, guards = None, list[Guard]()
        if self.graph:
            module = _graph(self.graph)
            sources = [source for source, *_ in self.inputs]
            symbolic = any(dims or strides for _, dims, strides in self.inputs)
            symbolic |= int in map(type, values)
            env = fake.make_shape_env() if symbolic else None
            fakes = _fakes(self.inputs, values, env) if symbolic else []
            for node, example in zip(module.graph.find_nodes(op="placeholder"), fakes):
                node.meta["example_value"] = example
            caller = functools.partial(frame.run, None, compile_graph(module, values))
            caller = (call_with(caller, sources) or (caller,))[0]
            if env is not None:
                from weft_guards.shapes import shape_guards  # noqa: PLC0415 - imports sympy

                guards = shape_guards(env, list(zip(sources, fakes, strict=True)))
        constants = tuple(caller if value is _CALLER else value for value in self.constants)
        code: types.CodeType = marshal.loads(self.code)
        code = code.replace(co_consts=constants, co_filename=function.__code__.co_filename)
        return code, module, guards


def rows_of(module: GraphModule) -> Rows:
    """Serialize a graph before a backend changes it."""
    refs: dict[torch.fx.Node, Any] = {node: Ref(node.name) for node in module.graph.nodes}
    return tuple(
        (node.op, node.name, node.target)
        + map_arg((node.args, node.kwargs), refs.__getitem__)
        + (tuple((name, node.meta[name]) for name in _KEPT_META if name in node.meta),)
        for node in module.graph.nodes
    )


def _graph(rows: Rows) -> GraphModule:
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    for op, name, target, *operands, meta in rows:
        args, kwargs = map_aggregate(
            tuple(operands), lambda arg: nodes[arg.name] if isinstance(arg, Ref) else arg
        )
        nodes[name] = graph.create_node(op, target, args, kwargs, name=name)
        nodes[name].meta.update(meta)
    return GraphModule(torch.nn.Module(), graph)


def _fakes(inputs: Inputs, values: list[Any], env: Any) -> list[Any]:
    """Return fakes of a graph's inputs, with new symbols for the old ones."""
    mode = fake.fake_mode(env)
    fakes: dict[Source, Any] = {}
    for (source, dims, free), value in zip(inputs, values):
        if isinstance(value, torch.Tensor):
            name = source.expr()
            fakes[source] = fake.to_fake(mode, value, dims, name, free_strides=free)
    for (source, *_), value in zip(inputs, values):
        if isinstance(source, TensorProperty):
            fakes[source] = getattr(fakes[source.base], source.prop)(source.dim)
        elif source not in fakes:
            fakes[source] = fake.new_symint(env, value, source.expr(), duck=False)
    return [fakes[source] for source, *_ in inputs]


# ---- from a capture to bytes


class _Saver(serialization.GuardPickler):
    """Pickles entries; a code object is written as a reference to its function.

    `owners` are the functions whose code the entry may hold.
    """

    def __init__(self, file: Any, references: Mapping[int, Any], owners: list[Any]) -> None:
        super().__init__(file, references)
        self.owners = {id(owner.__code__): owner for owner in owners}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        derived = decode(obj).derived
        if "origin" in derived:
            return _resume, (original(decode(obj)).code, *derived["origin"].made_with)
        if "entry of" in derived:
            decoded, how = derived["entry of"]
            return _entry, (decoded().code, *how)
        if "start of" in derived:
            return _start, (derived["start of"]().code,)
        if id(obj) not in self.owners:
            raise NotSerializable("unnamed-object", name_of(obj))
        return getattr, (self.owners[id(obj)], "__code__")


def _resume(code: types.CodeType, index: int, stack: Any, bound: frozenset[str]) -> types.CodeType:
    return make_resume(decode(code), index, stack, tuple(bound), bound).code


def _entry(code: types.CodeType, *how: Any) -> types.CodeType:
    return make_entry(decode(code), *how)[0]


def _start(code: types.CodeType) -> types.CodeType:
    return from_the_start(decode(code)).code


def to_bytes(
    tx: Tracer, code: types.CodeType, guards: list[Guard], rows: Rows, inputs: list[GraphInput],
    stopped: BreakRecord | None,
) -> bytes | str:  # fmt: skip
    """Serialize a capture for other processes, or return the reason why they cannot use it."""
    own_code = original(decode(tx.function.__code__)).code
    data = {key: obj for key, obj in tx.library.items() if not callable(obj)}
    references: dict[int, Any] = {id(obj): ("place", *key) for key, obj in data.items()
                             if isinstance(obj, list | dict | set)}  # fmt: skip
    references[id(own_code)] = _HOME
    for value in code.co_consts:
        if (
            isinstance(value, getattr(usable_extension(), "Check", ()))
            or getattr(value, "func", None) is frame.run
        ):
            references[id(value)] = _CALLER
    library = tuple((*key, repr(value)) for key, value in data.items())
    file = io.BytesIO()
    try:
        other = tx.graph.inference is not torch.is_inference_mode_enabled()
        if around.modes or tx.process_bound or tx.graph.root._modules or (inputs and other):
            raise NotSerializable("process-bound", tx.process_bound or "a mode, or control flow")
        blank, where = marshal.dumps(code.replace(co_consts=())), tuple(_readable(inputs))
        entry = Saved(library, tuple(guards), blank, code.co_consts, rows, where, stopped)
        owners = [outer.function.obj for outer in tx.frames if outer.function.obj is not None]
        _Saver(file, references, owners).dump(entry)
    except Exception as reason:
        if config.settings.raise_internal_errors and not isinstance(reason, NotSerializable):
            raise
        return str(reason) if isinstance(reason, NotSerializable) else f"[internal] {reason!r}"
    return file.getvalue()


def _readable(inputs: list[GraphInput]) -> Iterator[tuple[Source, Dims, Dims]]:
    """Yield the row of `Inputs` of each input, if another process can read its source."""
    sources = {entry.source for entry in inputs}
    for entry in inputs:
        source, example = entry.source, entry.node_example
        sizes: Any = getattr(example, "shape", (example,))
        dims = tuple(dim for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt))
        alone = isinstance(source, TensorProperty) and source.base not in sources
        unknown = not all(sizes[dim].node.has_hint() for dim in dims)
        if alone or unknown or isinstance(source, ConstSource) or any(origins(source)):
            raise NotSerializable("process-bound", f"input {source} of the graph")
        free = {entry.source.dim for entry in inputs if isinstance(entry.source, TensorProperty)
                and (entry.source.base, entry.source.prop) == (source, "stride")}  # fmt: skip
        yield source, dims, tuple(sorted(free))


# ---- from bytes to code


class CaptureCache:
    """The entries on disk for one code object.

    `rules` are further options that the capture depends on, with a stable repr.
    """

    def __init__(self, function: types.FunctionType, *rules: Any) -> None:
        code = function.__code__
        settings = (config.settings.as_dict(), guards_settings.as_dict(), *rules)
        digest_of = (_environment(), settings, function.__module__, serialization.digest(code))
        self.folder = cache_dir("precompiled")
        self.key = hashlib.sha256(repr(digest_of).encode()).hexdigest()[:40]
        self.entries: list[Saved] = []
        for path in sorted(self.folder.glob(f"{self.key}-*")):
            data = None if bypasses("captures") else read_checked(path)
            if data is None:
                continue
            loader = serialization.GuardUnpickler(io.BytesIO(data))
            loader.known = {_HOME: original(decode(code)).code, _CALLER: _CALLER}
            try:
                entry = loader.load()
                same = [repr(serialization.find(*key)) == text for *key, text in entry.library]
                self.entries += [entry] if all(same) else []
            except Stale as reason:
                _log.info("%s: kept code is passed over: %s", code.co_qualname, reason)
            except Exception:  # the file has another format
                _log.warning("unreadable cache file %s: not used", path, exc_info=True)

    def add(self, data: bytes) -> None:
        """Store one more entry."""
        if len(list(self.folder.glob(f"{self.key}-*"))) < 16:
            try_write(self.folder / f"{self.key}-{hashlib.sha256(data).hexdigest()[:16]}", data)

    def take(
        self, function: types.FunctionType, flat_args: tuple[Any, ...], backend: Callable[..., Any]
    ) -> tuple[types.CodeType, list[Guard], GraphModule | None, BreakRecord | None] | None:
        """Compile and drop an entry whose guards hold; returns code, guards, graph and break."""
        for entry in self.entries:
            try:
                guards = serialization.bind(entry.guards, function, flat_args)
            except Stale as reason:
                _log.info("%s: %s", function.__qualname__, reason)
                continue
            self.entries.remove(entry)
            values = read_sources([source for source, *_ in entry.inputs], function, flat_args)
            code, graph, more = entry.rebuild(function, values, backend)
            return code, guards + more, graph, entry.stopped
        return None


@functools.cache
def _environment() -> str:
    """Return the state of the process that capture depends on."""
    files = (str(weft_core.__file__), str(weft_guards.__file__), __file__)
    versions = (sys.version, sys.flags, torch_compat.BUILD)
    machine = (torch.cuda.is_available(), torch.get_num_threads(), usable_extension() is not None)
    return repr((*map(package_digest, files), versions, machine))
