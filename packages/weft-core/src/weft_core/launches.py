"""Launches of Triton kernels as operators, so that a graph can hold them.

`weft::launch_` runs a kernel. Functionalisation makes of it `weft::launch`, which returns what the
kernel may have written; as in eager execution, no version counts that and no gradient goes through.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from weft_core.errors import Unsupported

KERNELS = "jit.JITFunction autotuner.Autotuner autotuner.Heuristics interpreter.InterpretedFunction"
_HOOKS = "pre_run_hooks early_config_prune user_defined_pre_hook user_defined_post_hook"
_launches: dict[str, tuple[Any, ...]] = {}


def bind(kernel: Any, grid: Any, args: Any, kwargs: Any, call: Any = None) -> Any:
    """Return a launch as arguments of `weft::launch_`, or raise Unsupported; `call` runs rules."""
    layers = [kernel]
    for layer in layers:
        layers.extend(() if isinstance(layer, FunctionType) else (layer.fn,))
    tuned = [config for one in layers for config in getattr(one, "configs", ())]
    hooks = [getattr(one, name, None) for one in layers for name in _HOOKS.split()]
    if any(hooks) or any(config.pre_hook for config in tuned):
        raise Unsupported("triton-launch", "functions of the program run before or after it")
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    grids = []
    for choice in ([config.kwargs for config in tuned] or [{}]) if callable(grid) else ():
        meta = {**named, **choice}
        for name, rule in (row for one in layers for row in getattr(one, "values", {}).items()):
            meta[name] = call(rule, meta) if call else rule(meta)
        grids.append((choice, grid(meta)))
    leaves, spec = pytree.tree_flatten((list(args), kwargs, grids or [({}, grid)]))
    tensors: list[Any] = list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
    numbers: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    slots = {id(x): (k, at) for k, xs in enumerate((tensors, numbers)) for at, x in enumerate(xs)}
    template = [slots.get(id(leaf), leaf) for leaf in leaves]
    wrote = _stored(layers[-1]).union(*(getattr(one, "reset_to_zero", ()) for one in layers))
    found = pytree.tree_leaves([named[name] for name in wrote if name in named])
    written = sorted({slots[id(one)][1] for one in found if isinstance(one, torch.Tensor)})
    memory = [tensor.untyped_storage()._cdata for tensor in tensors]
    if any(memory.count(memory[at]) > 1 or 0 in tensors[at].stride() for at in written):
        raise Unsupported("triton-launch", "what it writes shares memory")
    row = kernel, spec, template, repr(template)  # 1 equals True
    name = next((one for one in _launches if _launches[one] == row), f"launch_{len(_launches)}")
    _launches[name] = row
    return name, tensors, numbers, written


@functools.cache
def _stored(kernel: FunctionType) -> set[str]:
    """What addresses may be made of that other calls than loads get: nothing else is written."""
    source = inspect.cleandoc(inspect.getsource(kernel))
    if "print(" in source or "pointer_type" in source:
        raise Unsupported("triton-launch", "it prints, or makes pointers out of numbers")
    found, assigned = set[str](), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.iter if isinstance(node, ast.For) else node.value or node
            assigned.append((_names_in(*targets), _names_in(value)))
        elif isinstance(node, ast.Call):
            found |= _names_in(node)
    while any(names & found and not origin <= found for names, origin in assigned):
        found |= {one for names, origin in assigned if names & found for one in origin}
    return found


def _names_in(*nodes: ast.AST) -> set[str]:
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".load")):
            found |= _names_in(*ast.iter_child_nodes(node))
    return found


def _run(name: str, tensors: Any, numbers: Any, written: Any) -> None:
    kernel, spec, template, _ = _launches[name]
    leaves = [(tensors, numbers)[x[0]][x[1]] if isinstance(x, tuple) else x for x in template]
    args, kwargs, grids = pytree.tree_unflatten(leaves, spec)
    kernel.run(
        *args, **kwargs, warmup=False,
        grid=lambda meta: next(grid for choice, grid in grids if choice.items() <= meta.items()),
    )  # fmt: skip


def _fresh(name: str, tensors: Any, numbers: Any, written: Any) -> list[torch.Tensor]:
    return [t.new_empty_strided(t.shape, t.stride()) for t in map(tensors.__getitem__, written)]


def _run_on_copies(name: str, tensors: Any, numbers: Any, written: Any) -> list[torch.Tensor]:
    made, given = _fresh(name, tensors, numbers, written), list(tensors)
    for at, new in zip(written, made, strict=True):
        given[at] = new.copy_(given[at])
    _run(name, given, numbers, written)
    return made


def _count(name: str, tensors: Any, numbers: Any, written: Any) -> None:
    counted = [tensors[at] for at in written if not tensors[at].is_inference()]
    torch.autograd.graph.increment_version(counted)  # so that a capture sees what is written


def _functionalise(name: str, tensors: Any, numbers: Any, written: Any) -> None:
    for at, new in zip(written, LAUNCH(name, tensors, numbers, written), strict=True):
        torch._functionalize_replace(tensors[at], torch._from_functional_tensor(new))
        torch._functionalize_commit_update(tensors[at])
        torch._functionalize_sync(tensors[at])


_library = torch.library.Library("weft", "FRAGMENT")
for _name, _type, _made in (("launch_", "Tensor(a!)[]", "()"), ("launch", *["Tensor[]"] * 2)):
    _library.define(f"{_name}(str name, {_type} tensors, SymInt[] ints, int[] written) -> {_made}")
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
_library.impl("launch_", _run, "CompositeExplicitAutograd")
_library.impl("launch_", _functionalise, "Functionalize")
_library.impl("launch", _run_on_copies, "CompositeExplicitAutograd")
torch.library.register_fake("weft::launch_", _count, lib=_library)
torch.library.register_fake("weft::launch", _fresh, lib=_library)
LAUNCH_, LAUNCH = torch.ops.weft.launch_.default, torch.ops.weft.launch.default


@contextlib.contextmanager
def launches_recorded() -> Iterator[None]:
    """Make launches on fake or functional tensors calls of `weft::launch_` inside."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_wrap_triton_enabled(False))  # that leads to torch's compiler
        for kind in KERNELS.split():
            module, _, name = f"triton.runtime.{kind}".rpartition(".")
            if owner := getattr(sys.modules.get(module), name, None):
                stack.callback(setattr, owner, "run", owner.run)
                owner.run = _recorded(owner.run)
        yield


def _recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        for one in filter(torch.is_tensor, (*args, *kwargs.values())):
            if isinstance(one, FakeTensor) or torch._is_functional_tensor(one):
                return LAUNCH_(*bind(kernel, grid, args, kwargs))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    return launch
