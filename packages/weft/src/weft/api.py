"""`weft.compile`: check the arguments, and wrap whatever kind of thing is to be compiled.

The work itself is in `weft.pipeline`, which is imported when the first thing is compiled.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, Unpack, overload

from torch import nn
from weft_core.arguments import AtLeast, check, hints_of
from weft_core.collector import collector_paused
from weft_core.errors import InvalidArgument, InvalidOption

from weft import options as option_tables
from weft.backends import Backend, lookup_backend
from weft.modules import original_of, wrap_module

if TYPE_CHECKING:
    from weft.pipeline import Request

Model = TypeVar("Model", bound=Callable[..., Any])


class Arguments(TypedDict, total=False):
    """The keywords of `compile`, and what each may be."""

    fullgraph: bool
    dynamic: bool | None
    backend: str | Backend
    mode: str | None
    options: Mapping[str, Any] | None
    name: str | None
    disable: bool
    recompile_limit: Annotated[int, AtLeast(1)] | None
    isolate_recompiles: bool
    shapes_spec: Any


@overload
def compile(model: Model, **arguments: Unpack[Arguments]) -> Model: ...
@overload
def compile(model: None = None, **arguments: Unpack[Arguments]) -> Callable[[Model], Model]: ...


def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Backend = "codegen",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: Any = None,
) -> Any:
    """Compile a function, a bound method or a module; the arguments are those of torch.compile.

    Args:
        model: what to compile. Without it, a decorator is returned.
        fullgraph: raise `weft.Unsupported` where the program would otherwise be split in graphs.
        dynamic: None makes a size symbolic once it has changed, True from the start, False never.
        backend: a name from `weft.list_backends()`, or `(gm, example_inputs) -> callable`.
        mode: a name from `weft.list_mode_options()`.
        options: options from `weft.list_options()`; not together with `mode`. One more of them is
            `guard_filter_fn`, which leaves guards out and is UNSAFE: see `weft_guards.filters`.
        name: stands before the function's name in messages about recompiles.
        disable: return `model` as it is.
        recompile_limit: instead of `weft.config.recompile_limit`, for this call.
        isolate_recompiles: share nothing with other calls for the same code; else what equal
            calls (backend, options, flags) have compiled serves them all.
        shapes_spec: which sizes and ints of the arguments vary, and within which limits: a dict
            by parameters, as `weft_guards.spec` describes it, or torch's; not with `dynamic`.

    Returns:
        For a module, a twin that shares its parameters, attributes and state_dict; for anything
        else, a function of the same signature. Compiling happens in the first call.

    Raises:
        InvalidBackend: for an unknown backend.
        InvalidOption: for an unknown mode or option; in a call, when a size is not as
            `shapes_spec` says.
        InvalidArgument: for a value of the wrong type, or a `model` that cannot be called.
    """
    arguments = {name: value for name, value in locals().items() if name != "model"}
    request = request_of(arguments)
    if model is None:
        return functools.partial(compile, **arguments)
    if not callable(model) or isinstance(model, type):
        detail = f"weft.compile takes a function or a module, not {model!r}."
        raise InvalidArgument("model", detail=detail)
    if disable:
        return model
    pipeline = importlib.import_module("weft.pipeline")
    compile_function = functools.partial(pipeline.compile_function, request=request)
    if isinstance(model, nn.Module):
        again = functools.partial(compile, **arguments)
        return wrap_module(original_of(model), compile_function, again)
    return compile_function(model)


@functools.cache
def _hints() -> dict[str, Any]:
    return hints_of(Arguments)


def request_of(arguments: Mapping[str, Any]) -> Request:
    """Check the arguments of `compile`; what is not given has its default.

    Raises:
        InvalidBackend: for an unknown backend.
        InvalidOption: for an unknown mode or option.
        InvalidArgument: for a value of the wrong type.
    """
    given = {**(compile.__kwdefaults__ or {}), **arguments}
    lookup_backend(given["backend"])
    check(_hints(), given)
    with collector_paused():
        pipeline = importlib.import_module("weft.pipeline")
    chosen = option_tables.resolve(given["mode"], given["options"])
    if given["dynamic"] is not None and given["shapes_spec"] is not None:
        raise InvalidOption("shapes_spec", detail="give dynamic or shapes_spec, not both.")
    rules = {name: given[name] for name in ("dynamic", "recompile_limit", "name", "shapes_spec")}
    rules["guard_filter"] = chosen.pop("guard_filter_fn", None)
    request: Request = pipeline.Request(
        given["backend"], given["fullgraph"], chosen, rules, given["isolate_recompiles"]
    )
    return request
