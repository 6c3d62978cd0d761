"""How often tensors were written, which inference mode does not count."""

import torch


def version_of(value: object) -> int:
    """How often a tensor was written; 0 for those that do not count, and what is no tensor."""
    counts = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if counts else 0  # type: ignore[attr-defined]
