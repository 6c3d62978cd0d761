"""`weft.compile`: check the arguments, and wrap whatever kind of thing is to be compiled.

The work itself is in `weft.pipeline`, which is imported when the first thing is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, Unpack, overload

from torch import nn
from weft_core.arguments import AtLeast, checked
from weft_core.collector import collector_paused
from weft_core.errors import InvalidArgument, InvalidOption

from weft.backends import Backend, get_default_backend, is_own, lookup_backend
from weft.modules import original_of, wrap_module
from weft.options import parse_options

if TYPE_CHECKING:
    from weft.pipeline import CompileRequest

Model = TypeVar("Model", bound=Callable[..., Any])


class Arguments(TypedDict, total=False):
    """The keywords of `compile`, and what each may be."""

    fullgraph: bool
    dynamic: bool | None
    backend: str | Backend | None
    mode: str | None
    options: Mapping[str, Any] | None
    name: str | None
    disable: bool
    recompile_limit: int | None
    isolate_recompiles: bool
    shapes_spec: Any


@overload
def compile(model: Model, **arguments: Unpack[Arguments]) -> Model: ...
@overload
def compile(model: None = None, **arguments: Unpack[Arguments]) -> Callable[[Model], Model]: ...


@checked
def compile(
    model: Any = None,  # checked below, with a better message
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Backend | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: Annotated[int, AtLeast(1)] | None = None,
    isolate_recompiles: bool = False,
    shapes_spec: Any = None,
) -> Any:
    """Compile a function, a bound method or a module; the arguments are those of torch.compile.

    Args:
        model: what to compile. Without it, a decorator is returned.
        fullgraph: raise `weft.Unsupported` where the program would otherwise be split in graphs.
        dynamic: None makes a size symbolic once it has changed, True from the start, False never.
        backend: a name from `weft.list_backends()`, or `(gm, example_inputs) -> callable`; None is
            `codegen`, or what `weft.set_default_backend` says.
        mode: a name from `weft.list_mode_options()`; a backend that is not weft's gets it as it is.
        options: options from `weft.list_options()`; not together with `mode`. Of torch.compile's
            others, weft says that they have no effect, and a backend that is not weft's gets all
            as they are. `guard_filter_fn` leaves guards out and is UNSAFE: see
            `weft_guards.filters`.
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
    if dynamic is not None and shapes_spec is not None:
        raise InvalidOption("shapes_spec", detail="give dynamic or shapes_spec, not both.")
    backend = get_default_backend() if backend is None else backend
    lookup_backend(backend)
    with collector_paused():  # the stages are loaded on demand
        from weft_guards import CacheRules  # noqa: PLC0415

        from weft.pipeline import CompileRequest  # noqa: PLC0415
    parsed = parse_options(mode, options, own=is_own(backend))
    rules = CacheRules(dynamic, recompile_limit, parsed.guard_filter, name)
    how = (shapes_spec, isolate_recompiles, parsed.keywords, parsed.passes)
    request = CompileRequest(backend, fullgraph, parsed.options, rules, *how)
    apply = functools.partial(apply_request, None if disable else request)
    return apply if model is None else apply(model)


def apply_request(request: CompileRequest | None, model: Callable[..., Any]) -> Any:
    """Compile a function, a bound method or a module as a request says; None disables it.

    Raises:
        InvalidArgument: for a `model` that cannot be called.
    """
    if not callable(model) or isinstance(model, type):
        detail = f"weft.compile takes a function or a module, not {model!r}."
        raise InvalidArgument("model", detail=detail)
    if request is None:
        return model
    from weft.pipeline import compile_function  # noqa: PLC0415  a pickled request may come first

    if isinstance(model, nn.Module):
        compile_forward = functools.partial(compile_function, request=request)
        again = functools.partial(apply_request, request)
        return wrap_module(original_of(model), compile_forward, again)
    return compile_function(model, request)
