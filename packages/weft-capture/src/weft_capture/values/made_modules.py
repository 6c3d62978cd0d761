"""nn.Modules that the captured program makes for its own use: losses, activations, dropout.

Only torch's modules without parameters: making one draws no random numbers and touches nothing, so
it may be made while capturing, and again wherever one is needed after a break. What other modules
do when they are made is captured like any class's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from weft_capture.breaks import Break, NotConstant
from weft_capture.values.base import Kwargs, Value
from weft_capture.values.objects import ModuleValue

if TYPE_CHECKING:
    from weft_capture.output.reconstruct import Output

_PLAIN = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("loss", "dropout", "pooling", "flatten", "padding", "distance", "upsampling")
)
_ACTIVATION = "torch.nn.modules.activation"
_WITH_PARAMETERS = (torch.nn.PReLU, torch.nn.MultiheadAttention)


def is_plain_module(kind: type) -> bool:
    """Say whether making an instance of a class makes no parameters and has no effects."""
    if not issubclass(kind, torch.nn.Module) or kind.__new__ is not object.__new__:
        return False
    activation = kind.__module__ == _ACTIVATION and not issubclass(kind, _WITH_PARAMETERS)
    return activation or kind.__module__ in _PLAIN


class MadeModule(ModuleValue):
    """A module made in the captured frame.

    Raises:
        Break: when an argument is not a constant, such as a tensor of class weights.
    """

    __slots__ = ("arguments", "keywords")

    def __init__(self, kind: type, args: list[Value], kwargs: Kwargs) -> None:
        try:
            real_args = [arg.as_constant() for arg in args]
            real_kwargs = {name: value.as_constant() for name, value in kwargs.items()}
        except NotConstant as error:
            raise Break("unknown-call", f"making a {kind.__qualname__} of {error}") from None
        with unset_fake_temporarily():
            super().__init__(kind, kind(*real_args, **real_kwargs))
        self.arguments = args
        self.keywords = kwargs

    def reconstruct(self, out: Output) -> None:
        if self.attrs:
            raise Break("unsupported-value", f"a {self.cls.__qualname__} made and changed")
        out.call(self.cls, self.arguments, self.keywords)
