from collections.abc import Callable, Mapping
from typing import Any

import torch

class LoadedProgram:
    """A loaded library: `weft_run` as a function of its inputs, or of one list of them."""

    def __init__(
        self,
        library: object,  # stays loaded for as long as it lives
        run: int,  # addresses of weft_run, weft_load and weft_program
        load: int,
        description: int,
        torch_library: str,
        steps: Mapping[int, Callable[[list[Any], list[int]], tuple[Any, ...]]],
        constants: tuple[torch.Tensor, ...],
        kernels: tuple[Callable[[bool], Kernel], ...],
        /,
    ) -> None: ...
    def __call__(self, *args: Any) -> list[Any]: ...

    # Told of each step, while a profiler is on or `always`: (number, state) -> state. -2 is the
    # begin of a call, whose state is None, -1 its end.
    listener: Callable[[int, Any], Any] | None
    always: bool

class Kernel:
    """A kernel of a GPU, which a LoadedProgram launches."""

    def __init__(
        self,
        driver: str,
        function: int,
        threads: int,
        shared: int,
        device: int,
        owner: object,  # keeps `function` loaded
        /,
    ) -> None: ...

def configure(
    wrap: int,  # addresses, as torch_compat.entry_addresses gives them
    new_tensor_handle: int,
    delete_tensor_object: int,
    autocast_is_enabled: int,
    has_callbacks: int,
    handle_offset: int,
    classes: tuple[type, ...],
    is_plain: Callable[[type], bool],
    no_autocast: Callable[[], Any],
    /,
) -> None:
    """Say how tensors are read and made, and how autocast is switched off."""
