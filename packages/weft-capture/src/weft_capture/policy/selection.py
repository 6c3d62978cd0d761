"""Selection of the frames that are captured.

Inside an optimised call the frame hook sees every Python frame: not the inlined ones, but after a
break the functions that run eagerly, down into libraries.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import lr_scheduler, optimizer
from torch.utils.weak import WeakIdKeyDictionary
from weft_core import torch_compiler_shim

from weft_capture import frame
from weft_capture.breaks import Break
from weft_capture.library_traits import ARRAY_CLASSES, EAGER_PACKAGES, LAUNCHER_MODULES
from weft_capture.model import attributes

LAUNCHER_MODULES.update(("weft_compiled_autograd.cache", "weft_aot.double_backward"))
_MODULE_CALLS = frozenset(
    (torch.nn.Module._wrapped_call_impl.__code__, torch.nn.Module._call_impl.__code__)
)
# `optimizer.step` is such a wrapper around the function of the class.
_STEP_FILES = frozenset((optimizer.__file__, lr_scheduler.__file__))


def is_skipped_code(code: types.CodeType, module: str | None) -> bool:
    """Say whether frames of a function are never captured on their own: library internals."""
    if code in _MODULE_CALLS or ".<shown at " in code.co_qualname:  # see `bytecode.shows_frame`
        return True
    if code.co_name == "wrapper" and code.co_filename in _STEP_FILES:
        return False
    if not module:
        return code.co_filename.startswith(("<frozen", "<weft"))
    if module.startswith("weft_") or module == "weft" or module.startswith("weft."):
        return True
    if module.startswith("torch."):
        of_layer = module.startswith("torch.nn.modules.") and not module.endswith("._functions")
        return not (of_layer and code.co_name == "forward")
    if module.partition(".")[0] in EAGER_PACKAGES:
        return True
    return module != "__main__" and attributes.is_immutable_module(module)


def is_launcher(module: str | None) -> bool:
    """Say whether a module launches kernels, or programs that were captured before."""
    return (module or "").startswith(tuple(LAUNCHER_MODULES))


def framed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Python function or method whose frame the hook sees when it is called.

    Callables without such a frame (functions of C and of libraries, `partial`, scripted modules)
    get a wrapper.
    """
    if isinstance(function, staticmethod):
        function = function.__func__
    if isinstance(function, types.FunctionType) and is_compiled_by_torch(function):
        return framed(function.__dict__["_torchdynamo_orig_callable"])
    method = function
    if not isinstance(function, types.FunctionType | types.MethodType):
        method = function.__call__  # type: ignore[operator]
    plain = getattr(method, "__func__", method)
    if isinstance(plain, types.FunctionType) and (
        plain.__name__ == "forward" or not is_skipped_code(plain.__code__, plain.__module__)
    ):
        return method

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    functools.update_wrapper(call, function, updated=())
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = call.__code__.replace(co_name=name, co_qualname=name)
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = getattr(inner, "__func__", inner)
    if isinstance(inner, types.FunctionType):  # one wrapper for each function
        code = _wrapping.setdefault(inner.__code__, {}).setdefault(name, code)
    call.__code__ = code
    call.__module__ = ""  # not a library's module
    return call


_wrapping: MutableMapping[types.CodeType, dict[str, types.CodeType]] = WeakIdKeyDictionary()


def has_tensor_work(function: types.FunctionType, flat_args: tuple[Any, ...]) -> bool:
    """Say whether a frame may work on tensors: as arguments, or because its names lead to torch.

    Other frames (a logger, a tokenizer) run eagerly; a capture of them would only guard on the
    numbers and strings that they get.
    """
    if any(_holds_tensor(value, 2) for value in flat_args):
        return True
    cells = function.__closure__ or ()
    if any(_holds_tensor(_contents(cell), 1) for cell in cells):
        return True
    global_dict = function.__globals__
    return any(_is_torch(global_dict.get(name)) for name in function.__code__.co_names)


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


_WORKING = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


def _holds_tensor(value: Any, depth: int) -> bool:
    cls = type(value)  # `isinstance` would ask the value for its class
    if issubclass(cls, _WORKING):
        return True
    if ARRAY_CLASSES.get(cls.__module__) == cls.__name__:
        return True
    if depth == 0:
        return False
    inner: Iterable[object] = ()
    if issubclass(cls, tuple):  # with methods of builtin types, which run no code of a subclass
        inner = tuple.__getitem__(value, slice(16))
    elif issubclass(cls, list):
        inner = list.__getitem__(value, slice(16))
    elif issubclass(cls, dict):
        inner = list(dict.values(value))[:64]
    elif cls is functools.partial:  # reading its dict would prevent merging
        inner = (value.func, *value.args, *value.keywords.values())
    elif cls.__module__ != "builtins":
        inner = _attributes(value, cls)
    return any(_holds_tensor(item, depth - 1) for item in inner)


def _attributes(value: object, value_type: type) -> list[object]:
    """Return an object's attributes, of its dict and slots, without running code of its class."""
    values: list[object] = []
    if value_type.__dictoffset__:
        values += list(attributes.dict_of(value).values())[:64]
    for slot in (attribute for cls in value_type.__mro__ for attribute in vars(cls).values()):
        if isinstance(slot, types.MemberDescriptorType):
            with suppress(AttributeError):
                values.append(slot.__get__(value, value_type))
    return values


def _is_torch(value: object) -> bool:
    cls = type(value)
    if issubclass(cls, torch.Tensor | torch.nn.Module):
        return True
    if not isinstance(cls.__getattribute__, types.WrapperDescriptorType):
        return False  # `isinstance` would run it
    if issubclass(cls, types.ModuleType):
        return str(vars(value).get("__name__")).partition(".")[0] == "torch"
    return (getattr(value, "__module__", None) or "").startswith("torch.")


def is_compiled_by_torch(function: types.FunctionType) -> bool:
    """Say whether `torch.compile` returned this function.

    The marker holds the function's id, because `functools.wraps` copies attributes to wrappers.
    """
    marks = function.__dict__
    return marks.get("_torchdynamo_wrapper_id") == id(function) and not marks.get(
        "_torchdynamo_disable"
    )


_OF_PROGRAMS = ("print", "input", "open", "breakpoint", "exit", "quit", "help", "__import__")
_BUILTINS = {
    name: obj
    for name, obj in vars(builtins).items()
    if callable(obj) and name not in _OF_PROGRAMS and not name.startswith("_")
}


def replaced_builtins() -> list[str]:
    """Return the names of replaced builtins on which capture itself relies."""
    now = builtins.__dict__
    return [name for name, obj in _BUILTINS.items() if now.get(name) is not obj]


def with_own_builtins(function: Callable[..., object], *args: object) -> None:
    """Call a function with the original builtins."""
    now = builtins.__dict__
    replaced = {name: now.get(name, _BUILTINS) for name in replaced_builtins()}
    now.update(_BUILTINS)
    try:
        function(*args)
    finally:
        for name, obj in replaced.items():
            if obj is _BUILTINS:
                del now[name]  # it was deleted by the program
            else:
                now[name] = obj


def skip_disabled(function: types.FunctionType) -> bool:
    """Skip what torch.compiler.disable wraps; False when `function` is no such wrapper."""
    marks, code = function.__dict__, function.__code__
    module = function.__globals__.get("__name__", "")
    if "_torchdynamo_disable" not in marks or not module.startswith(torch_compiler_shim.COMPILER):
        return False
    if code.co_name == "_fn":
        frame.skip(code, True)
    else:  # disabled with recursive=False
        frame.skip(marks["_torchdynamo_orig_callable"].__code__)
    return True


_NEVER = ("weft_", *torch_compiler_shim.STAGES, "torch.fx", "logging")
_CALLS_OF_GRAPHS = ("torch.fx.graph_module", "torch.fx._pytree")


def check_inlinable(function: types.FunctionType) -> None:
    """Break for functions that the user disabled, or that capture never inlines.

    Raises:
        Break: with code disabled or skipped-function.
    """
    namespace = function.__dict__
    if marked := namespace.get("_weft_disable") or namespace.get("_torchdynamo_disable"):
        why = marked if isinstance(marked, str) else namespace.get("_torchdynamo_disable_msg")
        raise Break("disabled", function.__qualname__ + (f": {why}" if why else ""))
    if function.__code__.co_filename == torch._compile.__file__:
        # torch's own marker: its wrapper would import torch's compiler.
        raise Break("disabled", function.__qualname__)
    module = function.__module__ or ""
    never = module.startswith(_NEVER) and module not in _CALLS_OF_GRAPHS
    if never and not namespace.get("_weft_inline"):
        raise Break("skipped-function", f"{module}.{function.__qualname__}")
