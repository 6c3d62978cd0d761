"""One call of a function, and all that can be seen of it afterwards.

Stands alone: files of failing programs hold a copy of it.
"""

import collections
import contextlib
import random
import re
import types

import torch


def observe(function, arguments, order=0, state=None):
    """Call, differentiate `order` times, and return a dict from labels to what was seen.

    Tensors are copies; other values are described by plain data. An exception is the label `error`.
    `state` is a function of the program that returns what its calls may have changed.
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
        seen = {"error": type(error).__name__, "error text": str(error)[:2000]}
    if state is not None:
        found = state()
        seen["state"] = plain(found)
        for label, tensor in tensors_of("state", found):
            seen[label] = tensor.detach().clone()
    return seen


def parts(value):
    """What a container or an object of the program holds, with labels; asks none of its methods."""
    if isinstance(value, dict):
        for place, (key, item) in enumerate(dict.items(value)):
            yield f"[{key!r}]" if type(key) in (str, int) else f"[key {place}]", item
    elif isinstance(value, list | tuple):
        base = list if isinstance(value, list) else tuple
        for place, item in enumerate(base.__iter__(value)):
            yield f"[{place}]", item
    if type(value).__module__ == "program":
        for kind in type(value).__mro__:
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):
                        yield f".{name}", member.__get__(value)
        with contextlib.suppress(AttributeError):
            for name, item in object.__getattribute__(value, "__dict__").items():
                yield f".{name}", item


def tensors_of(label, value, seen=None):
    """Every tensor in nested containers and objects, with a label that says where."""
    if isinstance(value, torch.Tensor):
        yield label, value
        return
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = value
        for name, item in parts(value):
            yield from tensors_of(label + name, item, seen)


def plain(value, seen=None):
    """The value as plain data, with tensors as the word, and what came before by its number."""
    kind, seen = type(value).__name__, {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        return kind
    if value is None or isinstance(value, type | torch.dtype | torch.Size):
        return (kind, repr(value))
    if type(value) in (bool, int, bytes):
        return (kind, value)
    if type(value) is complex:  # NaN does not equal itself
        return (kind, repr(value))
    if type(value) is float:
        return (kind, "nan" if value != value else value)
    if type(value) is str:
        return (kind, _UNLIKE.sub("", value))
    if id(value) in seen and not isinstance(value, tuple | frozenset):
        return ("again", seen[id(value)][0])
    seen[id(value)] = len(seen), value
    return (kind, [(name, plain(item, seen)) for name, item in parts(value)] + _more(value, seen))


def _more(value, seen):
    """What else an object holds: its number or text, its keys, what has no order."""
    rows = []
    for base in (int, float, str, bytes):
        if isinstance(value, base):
            rows.append((base.__name__, base.__repr__(value)))
    if isinstance(value, dict):
        rows.append([plain(key, seen) for key in dict.keys(value)])
    elif isinstance(value, set | frozenset):
        base = set if isinstance(value, set) else frozenset
        rows += sorted(str(plain(item)) for item in base.__iter__(value))
    elif isinstance(value, collections.deque):
        rows += [plain(item, seen) for item in value]
    elif isinstance(value, BaseException):
        rows += [plain(item, seen) for item in value.args]
    return rows


# Addresses, and the names of gradient functions: a graph has one for all of its operators.
_UNLIKE = re.compile(r"(?<=0x)[0-9a-f]{6,}|(?<=grad_fn=<)\w+")


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
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
    return (values / max(tensor.numel(), 1) ** 0.5).to(tensor)


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
