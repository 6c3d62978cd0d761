"""What `weft.compile(module)` returns: the same module with a compiled `forward`.

The compiled module is an instance of a subclass of the module's own class and shares the
`__dict__` of the original. So parameters, buffers, hooks, the training flag and every attribute
are one and the same, state_dict keys have no prefix, `isinstance` keeps working, and an assignment
to either is seen by both. Hooks run around the compiled forward, as nn.Module runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class _Forward:
    """The compiled forward; a descriptor with a setter, to win over one in the instance.

    Of the class it is the eager one, of which libraries ask the signature. A forward that was
    replaced since, in the instance or in its class, is compiled anew.
    """

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return cast(Any, super)(_Compiled, owner).forward
        if _plain_forward(module._weft_original) is not module._weft_forward:
            fresh: Any = module._weft_compile(module._weft_original)
            object.__setattr__(module, "_weft_call", fresh._weft_call)
            object.__setattr__(module, "_weft_forward", fresh._weft_forward)
        return module._weft_call

    def __set__(self, module: Any, function: Callable[..., Any]) -> None:
        module.__dict__["forward"] = function


class _Compiled:
    """What a compiled module's class adds to the class of the original."""

    __slots__ = ()

    _weft_call: Callable[..., Any]
    _weft_forward: Any
    _weft_original: nn.Module
    _weft_compile: Callable[[nn.Module], nn.Module]

    forward = _Forward()

    def __repr__(self) -> str:
        return f"weft.compile({self._weft_original!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the original; the copy compiles itself anew on its first call."""
        return self._weft_compile, (self._weft_original,)


def _plain_forward(module: nn.Module) -> Any:
    """Return the function that calling the original would run, as it stands now."""
    return module.__dict__.get("forward") or getattr(type(module), "forward", None)


def original_of(module: Any) -> Any:
    """Return the module under a compiled one; anything else is returned as it is."""
    return module._weft_original if isinstance(module, _Compiled) else module


def wrap_module(
    module: Module,
    compile_forward: Callable[[Callable[..., Any]], Callable[..., Any]],
    compile_again: Callable[[nn.Module], nn.Module],
) -> Module:
    """Return a twin of `module` whose forward is compiled.

    Args:
        module: the original; it keeps its eager forward.
        compile_forward: compiles the bound `forward`.
        compile_again: makes a compiled module of a copy of the original, for copy and pickle.
    """
    original = original_of(module)
    base = type(original)
    slots = ("_weft_call", "_weft_forward", "_weft_original", "_weft_compile")
    names = {"__slots__": slots, "__module__": base.__module__, "__doc__": base.__doc__}
    twin_class: Any = type(base.__name__, (_Compiled, base), names)
    if "forward" in vars(twin_class):  # of a metaclass that decorates it in each class
        del twin_class.forward
    # Not twin_class.__new__: fx.GraphModule's makes one more class of its own.
    twin: Any = object.__new__(twin_class)
    object.__setattr__(twin, "__dict__", original.__dict__)
    object.__setattr__(twin, "_weft_call", compile_forward(original.forward))
    object.__setattr__(twin, "_weft_forward", _plain_forward(original))
    object.__setattr__(twin, "_weft_original", original)
    object.__setattr__(twin, "_weft_compile", compile_again)
    return cast(Module, twin)
