"""Graphs compiled before: from the text of an aten graph to what loads its program.

lowered/<key> holds (key, Loadable); the key is made of the graph, its tensors' layouts, options,
this package, torch, compiler and CPU. The user's lines only make comments and are no part of it.
Graphs with symbolic sizes are not kept: lowering them may ask (and so guard) what the sizes are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from weft_core import cachedir, events, recording
from weft_core.cachedir import cache_dir, package_digest, read_checked

from weft_codegen.config import settings
from weft_codegen.kernels.build import program_path
from weft_codegen.kernels.load import Loadable
from weft_codegen.kernels.toolchain import find as find_toolchain
from weft_codegen.layout import has_onednn
from weft_codegen.loops.lower.fxnodes import attribute
from weft_codegen.torch_compat import VERSION

_PLAIN = frozenset(
    (type(None), type(...), bool, int, float, complex, str, torch.dtype, torch.device)
    + (torch.layout, torch.memory_format)
)
_log = logging.getLogger("weft.codegen.graph_cache")


class _NotCacheable(Exception):
    """The graph holds something whose text does not say what it is."""


def graph_key(gm: fx.GraphModule, *choices: Any) -> str | None:
    """What names the program of an aten graph on disk; None for graphs that are not kept.

    Args:
        choices: whatever else decides what is made of the graph, with a stable repr.

    Raises:
        CompilerUnavailable: no C compiler that works.
    """
    if settings.interpret or settings.verify_ir or not _on_cpu(gm):
        return None
    if events.bypasses("graphs") or recording.current() is not None:
        return None  # each stage shows what it makes
    try:
        lines = _lines(gm)
    except _NotCacheable as reason:
        _log.debug("not kept: %s", reason)
        return None
    # No program depends on how long a compiler may take.
    deciding = {k: v for k, v in settings.as_dict().items() if k != "compiler_timeout"}
    chosen = repr(
        (choices, deciding, VERSION, torch.get_default_dtype())
        + (has_onednn(), torch.are_deterministic_algorithms_enabled())
    )
    # Another version of this package may lower the same graph otherwise.
    parts = (package_digest(__file__), find_toolchain().fingerprint, chosen, *lines)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _on_cpu(gm: fx.GraphModule) -> bool:
    """Whether a graph's inputs are on a CPU: other programs are kept by Triton."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return all(v.device.type == "cpu" for v in values if isinstance(v, torch.Tensor))


def store(key: str, loadable: Loadable) -> None:
    """Remember what loads the program of the graph `key`."""
    cachedir.try_write(_path(key), pickle.dumps((key, loadable)))


def load(key: str) -> Loadable | None:
    """What `store` was given, if that and the shared object are there and undamaged."""
    payload = read_checked(_path(key))
    if payload is None:
        return None
    try:
        kept, loadable = pickle.loads(payload)
        assert kept == key and isinstance(loadable, Loadable)
    except Exception:  # whatever it holds, it is not ours
        _log.warning("unreadable cache file %s: it will be made again", _path(key), exc_info=True)
        return None
    return None if read_checked(program_path(loadable.stem)) is None else loadable


@contextlib.contextmanager
def known_or_made(key: str | None) -> Iterator[Loadable | None]:
    """What is known of a graph; where that is nothing, others wait until the block has made it.

    The block is to `store` it: those who wait for what is not kept wait in vain.
    """
    known = None if key is None else load(key)
    if key is None or known is not None:
        yield known
        return
    with cachedir.made_once(_path(key)):
        yield load(key)


def constants(gm: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """The tensors that a graph's `get_attr` nodes name, in the order of a program's constants."""
    return tuple(map(attribute, gm.graph.find_nodes(op="get_attr")))


def _path(key: str) -> Path:
    return cache_dir("lowered") / key[:40]


def _lines(gm: fx.GraphModule) -> list[str]:
    """One text a node: operator, arguments, and the layout of its value."""
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            target, value = "constant", attribute(node)
        else:
            target = _target(node.target) if node.op == "call_function" else node.op
            value = node.meta.get("val")
        arguments = "" if node.op == "placeholder" else _text((node.args, node.kwargs), numbers)
        lines.append(f"{target}{arguments}:{_text(value, numbers)}")
        numbers[node] = len(numbers)
    return lines


@functools.cache
def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema} {target.tags}"
    return f"{target.__module__}.{target.__name__}"


def _text(value: Any, numbers: dict[fx.Node, int]) -> str:
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, torch.Tensor):
        if value.is_mkldnn:
            return f"packed {value.dtype}{tuple(value.shape)}"
        if value.layout is not torch.strided:
            raise _NotCacheable(f"a tensor of layout {value.layout}")
        layout = (tuple(value.shape), value.stride(), value.storage_offset())
        if not all(type(size) is int for size in (*layout[0], *layout[1], layout[2])):
            raise _NotCacheable("symbolic sizes")
        return f"{value.dtype}{value.device}{layout}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, numbers) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}={_text(item, numbers)}' for name, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), numbers)}"
    raise _NotCacheable(f"a {type(value).__name__}")
