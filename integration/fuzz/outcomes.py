"""One call of a function, and all that can be seen of it afterwards.

Stands alone: files of failing programs hold a copy of it.
"""

import random

import torch


def observe(function, arguments, order=0):
    """Call, differentiate `order` times, and return a dict from labels to what was seen.

    Tensors are copies; other values are described by plain data. An exception is the label `error`.
    """
    torch.manual_seed(0)
    random.seed(0)
    leaves = [t for _, t in tensors_of("", arguments) if t.requires_grad and t.is_leaf]
    seen = {}
    try:
        result = function(*arguments)
        _see_result(seen, result, arguments)
        _see_gradients(seen, result, leaves, order)
    except Exception as error:
        return {"error": type(error).__name__, "error text": str(error)[:2000]}
    return seen


def tensors_of(label, value):
    """Every tensor in nested containers, with a label that says where."""
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(f"{label}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from tensors_of(f"{label}[{place}]", item)


def plain(value):
    """The value with tensors as the word, and what has no good `==` by the name of its type."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__
    if isinstance(value, dict):
        return (type(value).__name__, [(plain(k), plain(v)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value).__name__, sorted(map(repr, value)))
    if isinstance(value, float):
        return ("float", "nan" if value != value else value)
    if value is None or isinstance(value, str | bytes | int | complex | torch.dtype | torch.Size):
        return (type(value).__name__, value)
    return type(value).__name__


def _see_result(seen, result, arguments):
    seen["result"] = plain(result)
    results = list(tensors_of("result", result))
    given = list(tensors_of("argument", arguments))
    for label, tensor in results + given:
        seen[label] = tensor.detach().clone()
        seen[f"{label} type"] = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
        seen[f"{label} strides"] = _strides(tensor)
    seen["aliases"] = _aliases(results + given)


def _strides(tensor):
    """Strides where they matter: not of one element, nor where there are no elements."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    return tuple(st if size > 1 else None for size, st in zip(tensor.shape, tensor.stride()))


def _aliases(labelled):
    """Pairs that are one object or share memory, with the distance of their first elements."""
    found = []
    places = [
        (label, t, t.untyped_storage().data_ptr() if t.layout == torch.strided else 0)
        for label, t in labelled
        if t.numel()
    ]
    for number, (label, tensor, storage) in enumerate(places):
        for other_label, other, other_storage in places[:number]:
            if tensor is other:
                found.append((other_label, "is", label))
            elif storage and storage == other_storage:
                found.append((other_label, tensor.data_ptr() - other.data_ptr(), label))
    return found


def _weights(tensor, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (values / max(tensor.numel(), 1) ** 0.5).to(tensor.dtype)


def _see_gradients(seen, result, leaves, order):
    outputs = [t for _, t in tensors_of("", result) if t.requires_grad]
    for depth in range(1, order + 1):
        if not outputs or not leaves:
            return
        weights = [_weights(t, depth * 100 + place) for place, t in enumerate(outputs)]
        outputs = torch.autograd.grad(
            outputs, leaves, weights, allow_unused=True, create_graph=depth < order
        )
        for place, gradient in enumerate(outputs):
            label = f"gradient {depth}[{place}]"
            seen[label] = None if gradient is None else gradient.detach().clone()
        outputs = [g for g in outputs if g is not None and g.requires_grad]
