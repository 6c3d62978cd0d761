"""Everything in capture that differs between the supported versions of torch."""

from __future__ import annotations

from typing import Any

import torch

_APPLY: Any = vars(torch.autograd.Function)["apply"]
#: What `apply` of every autograd.Function is bound from: a class method of Python up to torch
#: 2.13, one of C from 2.14 on.
FUNCTION_APPLY: Any = getattr(_APPLY, "__func__", _APPLY)
