"""`shapes_spec`: what a call of compile says of its function's arguments, as marks of dimensions.

A spec is a dict of parameters (`"*args"` has a list, `"**kwargs"` a dict). A list stands for sizes
of a tensor or for items, a dict for keys or attributes; at the ends are None (static), an int (only
that one) or `varying()`. torch's own types mean the same. What is not named is static. What a spec
says of several sizes together is not tested: no result depends on it, as sizes are guarded anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from weft_core.errors import InvalidOption

from weft_guards.dimension_marks import Kind, Mark
from weft_guards.explain import program_expr
from weft_guards.sources import Source

_STARRED: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*args",
    inspect.Parameter.VAR_KEYWORD: "**kwargs",
}
# Where the types of torch.fx.experimental.dynamic_spec keep what they are made of.
_CONTENTS = ("_params", "_specs", "_fields", "_entries")


class ShapesSpec:
    """A spec for one function.

    Args:
        spec: the dict, or torch's ShapesSpec or ParamsSpec.
        function: the function, or a bound method of it.

    Raises:
        InvalidOption: for anything else, or a parameter that the function does not have.
    """

    def __init__(self, spec: Any, function: Callable[..., Any]) -> None:
        self.code = getattr(function, "__func__", function).__code__
        self._marks: dict[str, Mark] = {}
        spec = _contents(spec)
        if hasattr(spec, "_named_args"):
            starred = {"*args": spec._varargs, "**kwargs": spec._varkw}
            spec = spec._named_args | {key: part for key, part in starred.items() if part}
        if not isinstance(spec, dict):
            raise _refused(f"is a dict of parameters, not {spec!r}.")
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        names = {_STARRED.get(one.kind, one.name): one.name for one in parameters}
        for key, part in spec.items():
            if key not in names:
                raise _refused(f"names {key!r}; the parameters are {', '.join(names)}.")
            self._enter(names[key], part)

    def _enter(self, place: str, part: Any) -> None:
        """Note what is said of a place in the program and of all that is read from it."""
        part = _contents(part)
        if isinstance(part, dict):
            for key, inner in part.items():
                self._enter(f"{place}[{key!r}]", inner)
                self._enter(f"{place}.{key}", inner)
        elif isinstance(part, list | tuple):
            for index, inner in enumerate(part):
                self._enter(f"{place}[{index}]", inner)
        elif part is None or type(part) is int:
            self._marks[place] = Mark(Kind.STATIC, part, part)
        elif isinstance(part, Mark | torch.SymInt):
            limits = (getattr(part, "min", None), getattr(part, "max", None))
            self._marks[place] = Mark(Kind.DYNAMIC, *limits)
        else:
            raise _refused(f"has {part!r} for {place}; it takes None, an int, or weft.varying().")

    def marks(self, source: Source, value: torch.Tensor | int) -> dict[int, Mark]:
        """Return the marks of a tensor by dimension, or of an int, as that of a dimension 0.

        Raises:
            InvalidOption: when the spec has another number of dimensions or other sizes.
        """
        name = program_expr(source)
        if isinstance(value, int):
            return {0: self._mark(name, value)}
        said = sum(place.rpartition("[")[0] == name for place in self._marks)
        if said not in (0, value.dim()):
            raise _refused(f"has {said} dimensions for {name}, which has {value.dim()}.")
        return {dim: self._mark(f"{name}[{dim}]", size) for dim, size in enumerate(value.shape)}

    def _mark(self, place: str, size: int) -> Mark:
        mark = self._marks.get(place, Mark(Kind.STATIC))
        if not mark.admits(size):
            raise _refused(f"says {mark.min} to {mark.max} for {place}, which is {size}.")
        return mark


def _contents(part: Any) -> Any:
    """Return what one of torch's types is made of; anything else as it is."""
    return next((getattr(part, name) for name in _CONTENTS if hasattr(part, name)), part)


def _refused(detail: str) -> InvalidOption:
    return InvalidOption("shapes_spec", detail=f"shapes_spec {detail}")
