"""torch's own compiler, seen from outside: the only file that names its modules.

Nothing of it is imported here or elsewhere (0.9 s, and it is what weft is). But programs carry its
marks, and torch imports it on its own for a setting or a marker. So here are the names by which
what belongs to it is recognised, and placeholders that answer until somebody really loads it.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from typing import Any

import torch

from weft_core import static_shapes

COMPILER = "torch._dynamo"
STAGES = (COMPILER, "torch._inductor")
"""Modules whose functions have no place in a graph."""
GRAPH_BREAK = f"{COMPILER}.decorators.graph_break"
SKIP_FRAME = tuple(f"{COMPILER}.decorators.{name}" for name in ("skip_frame", "step_unsupported"))
ERROR_ON_BREAK = f"{COMPILER}.decorators.error_on_graph_break"
NO_EFFECT = tuple(
    f"{COMPILER}.decorators.{name}"
    for name in ("dont_skip_tracing", "disable_nested_graph_breaks", "patch_dynamo_config")
)
"""Context managers of its own compiler's choices."""
MARKS = tuple(f"{COMPILER}.decorators.mark_static{kind}" for kind in ("", "_address"))
"""Functions that say of a tensor only what its own compiler makes use of."""
IS_COMPILING = f"{COMPILER}.external_utils.is_compiling"
TENSOR_INDICES = f"{COMPILER}._trace_wrapped_higher_order_op.TransformGetItemToIndex"
"""The block in which an index that is a tensor of no dimensions is not read."""
MODULE_INIT = f"{COMPILER}.mutation_guard.install_generation_tagging_init.<locals>.patched_init"
"""What it puts in the place of `torch.nn.Module.__init__` when it is loaded."""
COMPILED_MODULE = f"{COMPILER}.eval_frame"
"""The home of the class of `torch.compile(module)`."""
_COMPILER_SETTINGS, _FUNCTORCH_SETTINGS = f"{COMPILER}.config", "torch._functorch.config"


def engine_functions() -> Any:
    """Return the engine's functions by name that torch's compiled autograd was given, or None.

    The engine hands over each only once a process.
    """
    return getattr(sys.modules.get(f"{COMPILER}.compiled_autograd"), "ops", None)


def backend_registry() -> Any:
    """Return torch.compile's registry of backends where the program has loaded it, or None."""
    return sys.modules.get(f"{COMPILER}.backends.registry")


class _SettingsPlaceholder:
    """Settings of a module that `FakeTensorMode` reads, at their defaults.

    Any other name is looked up in the real module, which imports it.
    """

    def __init__(self, module: str, **known: object) -> None:
        self._module = module
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)[name] = value
        if name != "_module":
            setattr(importlib.import_module(self._module), name, value)


class _CompilerPlaceholder:
    """What torch's attribute for its compiler resolves to until somebody really imports that.

    torch resolves it lazily by importing the package; the fake mode's dispatch only wants one
    setting of it. Any other attribute does what torch would have done. A real import replaces the
    placeholder by itself: importing a submodule rebinds the attribute on its parent.
    """

    config = _SettingsPlaceholder(
        _COMPILER_SETTINGS,
        fake_tensor_cache_enabled=True,
        fake_tensor_cache_crosscheck_enabled=False,
        _custom_ops_profile=None,
    )

    def mark_dynamic(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Mark a size, but none of the empty tensors in which jagged ones keep lengths."""
        if tensor.numel():
            self.__getattr__("mark_dynamic")(tensor, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # A half-imported package refers to itself through its parent: serve those look-ups too.
        module = sys.modules.get(COMPILER) or importlib.import_module(COMPILER)
        return getattr(module, name)


def loaded(value: Any) -> Any:
    """Return what an attribute of torch is to a program: its compiler, which is imported if need
    be, in place of the placeholder."""
    return importlib.import_module(COMPILER) if isinstance(value, _CompilerPlaceholder) else value


# What `import` inside a rebound function gives for modules that are, or load, compiler or sympy.
_IMPORTS: dict[str, Any] = {
    "sympy": static_shapes.LazySympy(),
    "torch.utils._sympy.functions": static_shapes.LazySympyFunctions,
    _COMPILER_SETTINGS: torch,
    _FUNCTORCH_SETTINGS: torch,
    "torch.fx.experimental.validator": types.SimpleNamespace(
        translation_validation_enabled=lambda: False
    ),
}


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    return _IMPORTS[name] if name in _IMPORTS else builtins.__import__(name, *args, **kwargs)


def rebind(function: Any) -> Any:
    """`function` with the same code, but placeholders for imports and without torch's trace log."""
    scope = {
        **function.__globals__,
        "__builtins__": {**vars(builtins), "__import__": _import},
        "trace_structured": lambda *args, **kwargs: None,
    }
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _until_loaded(function: Any, name: str, default: Any) -> Any:
    """What `torch._compile` gets when it asks a function for its twin that is left alone."""
    known = getattr(function, name, default)
    loaded = hasattr(sys.modules.get(COMPILER), "disable")
    return known if known is not None or loaded else function


def defer_compiler_import() -> None:
    """Keep the first call of a function that torch hides from its compiler from importing that.

    Hiding matters only where it runs, yet every reference implementation and every dispatch mode
    is marked so. Until it is loaded, such a function is its own hidden twin.
    """
    vars(torch._compile)["getattr"] = _until_loaded


def install_placeholders() -> None:
    """Put the placeholders in place. A real import of either module rebinds the attribute."""
    vars(torch._functorch).setdefault("config", _SettingsPlaceholder(
        _FUNCTORCH_SETTINGS,
        fake_tensor_propagate_real_tensors=False,
        fake_tensor_allow_unsafe_data_ptr_access=True,
        fake_tensor_allow_meta=True,
        fake_tensor_prefer_device_type=None,
        generate_fake_kernels_from_real_mismatches=False,
    ))  # fmt: skip
    vars(torch).setdefault(COMPILER.partition(".")[2], _CompilerPlaceholder())
