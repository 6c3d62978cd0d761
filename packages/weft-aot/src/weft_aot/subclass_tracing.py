"""Traces of programs with tensors of wrapper classes, below their `__torch_dispatch__`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from weft_core import jagged
from weft_core.tensor_subclass import is_wrapper_subclass
from weft_core.tracing import AtenTracer


class FunctionalTensor(torch.Tensor):
    """Functionalisation of C++ around a fake tensor, as a class that other classes' dispatch sees.

    C++'s own wrapper is unwrapped before a `__torch_dispatch__` is asked, this one after that.
    """

    elem: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> FunctionalTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, device=elem.device,
        )  # fmt: skip
        made.elem = elem
        jagged.set_ragged_size(made)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **words: Any) -> Any:
        return NotImplemented  # the mode below does it, unless another class comes first


def storage_of(tensor: Any) -> int:
    """Identity of the memory of a program's tensor in a trace."""
    inner = tensor.elem if isinstance(tensor, FunctionalTensor) else tensor
    return int(inner.untyped_storage()._cdata)


class _FunctionalMode(TorchDispatchMode):
    """Runs operations on what is inside of a `FunctionalTensor`; leaves others to their classes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler on the first dispatch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_wrapper_subclass(kind) for kind in types):
            product = jagged.product(func, args)
            with self:
                return product() if product else NotImplemented
        kwargs = kwargs or {}
        given, words = pytree.tree_map_only(FunctionalTensor, lambda t: t.elem, (args, kwargs))
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        include = torch._C._dispatch_tls_local_include_set() | key
        exclude = torch._C._dispatch_tls_local_exclude_set() - key
        before = torch._functionalize_enable_reapply_views(True)  # type: ignore[attr-defined]
        try:
            with torch._C._ForceDispatchKeyGuard(include, exclude):
                out = func(*given, **words)
        finally:
            torch._functionalize_enable_reapply_views(before)  # type: ignore[attr-defined]
        known = {id(t.elem): t for t in pytree.tree_leaves(args) if isinstance(t, FunctionalTensor)}

        def wrapped(made: torch.Tensor) -> torch.Tensor:
            same = known.get(id(made))  # as of `to` where nothing is to do
            functional = same is None and torch._is_functional_tensor(made)
            return FunctionalTensor(made) if functional else made if same is None else same

        out = pytree.tree_map_only(torch.Tensor, wrapped, out)
        aten = getattr(func, "namespace", "") == "aten"
        return return_and_correct_aliasing(func, args, kwargs, out) if aten else out


class SubclassTracer(AtenTracer):
    """A trace in which plain tensors are `FunctionalTensor`, so that classes can wrap them."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Record everything torch runs inside, below every `__torch_dispatch__` of a class."""
        with super().active():
            torch._disable_functionalization()
            try:
                with _FunctionalMode():  # type: ignore[no-untyped-call]
                    yield
            finally:
                torch._enable_functionalization(reapply_views=True)

    def functional(self, value: torch.Tensor) -> torch.Tensor:
        """A functional tensor over a fake one, without its history."""
        return FunctionalTensor(super().functional(value))

    def wrap(self, value: Any) -> Any:
        """The program's view of a value; the caller puts those of wrapper classes together."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FunctionalTensor):
            return value
        return value if is_wrapper_subclass(type(value)) else super().wrap(value)

    def value(self, result: Any) -> Any:
        """The pure fake tensor behind a plain result."""
        return super().value(result.elem if isinstance(result, FunctionalTensor) else result)
