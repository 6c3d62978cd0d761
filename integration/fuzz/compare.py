"""What differs between two outcomes of a call, and whether that is a defect.

Stands alone: files of failing programs hold a copy of it.
"""

import torch

FACTOR = 4  # weft's error may be as many times the largest one seen of eager


def differences(eager, weft, reference=None, nudged=()):
    """Yield (kind, text) for each difference; without a reference, every rounding counts.

    `reference` is eager's outcome in float64. `nudged` are pairs of eager's outcome and that in
    float64 for slightly different inputs, or of one with other roundings and `reference`: they tell
    how large a rounding error can be.
    """
    labels = {**eager, **weft}
    if "error" in labels:
        yield from _errors(eager, weft)
        labels = [label for label in labels if label.startswith("state")]
    for label in labels:
        a, b = eager.get(label), weft.get(label)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            runs = [(eager, reference), *nudged]
            known = [tuple(_tensor(run, label) for run in pair) for pair in runs]
            known = [pair for pair in known if all(t is not None for t in pair)]
            yield from _values(label, a, b, known if reference else None)
        elif isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or not _same(a, b):
            a, b = _innermost(a, b)
            yield _kind(label), f"{label}: eager {_short(a)}, weft {_short(b)}"


def _innermost(a, b):
    """Return what differs inside of nested data, with what is around it if that is short."""
    around = a, b
    while isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        if max(len(repr(a)), len(repr(b))) < 200:
            break
        around = a, b
        pairs = [pair for pair in zip(a, b) if not _same(*pair)]
        if len(pairs) != 1 and len(pairs) == len(a):
            break
        a, b = pairs[0]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        common = next((n for n, pair in enumerate(zip(a, b)) if not _same(*pair)), len(a))
        return a[max(common - 1, 0) :], b[max(common - 1, 0) :]
    return around


def _errors(eager, weft):
    a, b = eager.get("error"), weft.get("error")
    if a != b:
        text = f"eager: {eager.get('error text')}\nweft: {weft.get('error text')}"
        yield f"exception {a} -> {b}", text


def _kind(label):
    for kind in ("strides", "type", "aliases", "gradient"):
        if kind in label:
            return kind
    return "result"


def _same(a, b):
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= 1e-4 * abs(a)
    return a == b


def _short(value):
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {str(value)[:300]}"
    return repr(value)[:300]


def _tensor(run, label):
    found = (run or {}).get(label)
    return found if isinstance(found, torch.Tensor) else None


def _values(label, eager, weft, known):
    if eager.dtype != weft.dtype or eager.shape != weft.shape:
        return  # the label `type` tells
    kind = label.split(" ")[0].split("[")[0]
    kind = {"result": "values", "argument": "mutation"}.get(kind, kind)
    if any(t.layout != torch.strided for t in (eager, weft)):
        return
    bad = ~_close(eager, weft)
    if not bad.any():
        return
    usable = [p for p in known or [] if all(t.shape == eager.shape for t in p)]
    if len(usable) < 2:
        yield kind if known is None else "doubtful", _report(label, eager, weft, None, bad)
        return
    exact, (_, moved) = usable[0][1], usable[1]
    bad &= ~_allowed(weft, exact, usable)
    if bad.any():
        # Where a rounding of the inputs makes another number altogether, nobody is right.
        sure = _close(eager, exact.to(eager.dtype), 64) & _close(eager, moved.to(eager.dtype), 64)
        if eager.dtype.is_floating_point and not _jumps(exact, moved):
            # Nor where eager itself is far off, as where a square overflows.
            sure |= _close(eager, exact.to(eager.dtype), 0.05 / torch.finfo(eager.dtype).eps)
        sure &= torch.stack([_kinds(eager) == _kinds(run) for run, _ in usable]).all(0)
        yield kind if (bad & sure).any() else "doubtful", _report(label, eager, weft, exact, bad)


def _kinds(tensor):
    """Numbers that tell NaN, both infinities and finite elements apart."""
    if tensor.dtype.is_complex:
        real, imaginary = torch.view_as_real(tensor.resolve_conj()).unbind(-1)
        return _kinds(real) + 4 * _kinds(imaginary)
    return tensor.isnan() + 2 * tensor.isposinf() + 3 * tensor.isneginf()


def _jumps(exact, moved):
    """Whether a slightly different input makes a very different number somewhere."""
    scale = exact.abs().nan_to_num(0, 0, 0).max() if exact.numel() else 0
    both = exact.isfinite() & moved.isfinite()
    far = torch.where(both, (exact - moved).abs(), 0) > 1e-2 * scale
    return bool(far.any() or (exact.isfinite() != moved.isfinite()).any())


def _close(a, b, factor=8):
    """Where two tensors agree but for a rounding."""
    if a.dtype.is_complex:
        return _close(torch.view_as_real(a), torch.view_as_real(b), factor).all(-1)
    if not a.dtype.is_floating_point:
        return a == b
    a, b, eps = a.double(), b.double(), torch.finfo(a.dtype).eps * factor
    same = (a == b) | (a.isnan() & b.isnan())
    return same | ((a - b).abs() <= eps * a.abs().clamp(max=1e300))


def _allowed(weft, exact, known):
    """Where weft's error against float64 is that of rounding."""
    if weft.dtype.is_complex:
        parts = torch.view_as_real(weft), torch.view_as_real(exact.resolve_conj())
        known = [tuple(torch.view_as_real(t.resolve_conj()) for t in pair) for pair in known]
        return _allowed(*parts, known).all(-1)
    if not weft.dtype.is_floating_point:
        # Another number of eager's own, where a rounding decides it, is as good.
        seen = [exact.to(weft.dtype), *(rounded for rounded, _ in known)]
        return torch.stack([weft == one for one in seen]).any(0)
    limits = torch.finfo(weft.dtype)
    # So is one of its own infinities.
    runs = [_kinds(rounded) == _kinds(weft) for rounded, _ in known]
    allowed = torch.stack(runs).any(0) & ~weft.isfinite()
    weft, exact = weft.double(), exact.double()
    errors = [_error(rounded.double(), right.double()) for rounded, right in known]
    errors += [_error(right.double(), exact) for _, right in known[1:]]
    scale = torch.where(exact.isfinite(), exact.abs(), 0.0).clamp(max=limits.max)
    # Nothing has more digits than float64: eager's errors in it are not known, and what cancels to
    # nothing leaves a rounding of the inputs.
    digits, least = (4096, 1e-13) if limits.eps < 1e-15 else (16, limits.tiny)
    worst = torch.stack(errors).max() * FACTOR + digits * limits.eps * scale.max() + least
    beyond = exact.abs() > limits.max * 0.99
    exact = torch.where(beyond, exact.sign() * torch.inf, exact)
    same = (weft == exact) | (weft.isnan() & exact.isnan()) | allowed
    return same | ((weft - exact).abs() <= worst)


def _error(one, other):
    """The largest distance of finite elements."""
    return torch.where(one.isfinite() & other.isfinite(), (one - other).abs(), 0.0).max()


def _report(label, eager, weft, exact, bad):
    place = tuple(bad.nonzero()[0].tolist()) if bad.dim() else ()
    text = f"{label}: {int(bad.sum())} of {bad.numel()} differ, first at {place}: "
    text += f"eager {eager[place].item()!r}, weft {weft[place].item()!r}"
    return text if exact is None else f"{text}, float64 {exact[place].item()!r}"
