"""Statements of random operator programs, as templates: operators.txt.

In a template `{a}` is any value, `{b}` and `{c}` others, `{f}`, `{g}` and `{h}` floats, `{m}` and
`{n}` bool tensors, `{i}` and `{j}` integer tensors, `{w}` a value that is written, `{d}` and `{e}`
dimensions, `{k}` a small integer, `{s}` a size, `{x}` a number and `{t}` a dtype. A template that
does not fit the values at hand raises when the generator tries it, and another one is chosen.
"""

import re
from pathlib import Path


def _tables() -> dict[str, tuple[int, list[str]]]:
    """Sections `[name weight]`, and the templates below them."""
    found: dict[str, tuple[int, list[str]]] = {}
    name = ""
    for line in Path(__file__).with_name("operators.txt").read_text().splitlines():
        if line.startswith("[") and line.endswith("]") and "{" not in line:
            name, weight = line[1:-1].split()
            found[name] = (int(weight), [])
        elif line:
            found[name][1].append(line)
    return found


TABLES = _tables()

# Of which eager gives one answer in its vector code and another one behind it, in values or
# gradients: for NaN and infinities, for numbers near the largest one, or at the edge of a domain.
# Where the gradient of `max()` is NaN, only a CPU's eager has zeros beside it. Eager's
# variance of the largest numbers is NaN; at an image's border it multiplies an infinity by zero.
# The gradient of a product with two zeros is zero in eager, whatever the other factors; that of
# a norm with an infinite weight is NaN or infinite as the terms are grouped, as that of a running
# product with zeros is. The sign of NaN is nobody's, nor is NaN as an integer.
INCONSISTENT = re.compile(
    r"F\.(gelu|elu|hardtanh|hardswish|selu|celu|softshrink|hardshrink|relu6|smooth_l1_loss)\(|"
    r" % [^)\]]+$|remainder|fmod|\.logit\(|fft\.|"
    r"\.(max|min|median|nanmedian)\(\)|\.(var|std)|(var|std)_mean|F\.interpolate|"
    r"\.prod\(|F\.(layer|group)_norm|laguerre|cumprod|copysign|signbit|"
    r"\.(byte|int|long)\(\)|torch\.u?int\d+|type_as|\.to\([av]\d"
)

# The same whatever the values are: divisors below 1.2e-38 are zero in vector code, and exponents
# beyond 2**24 are even.
UNDECIDED = re.compile(r"(fmod|remainder| %).*1e-40|\*\* \(?-?(1e10|1e39|2\*\*|16777217)")

# Of several writes to one place any may win, says torch; eager goes through memory.
UNORDERED = re.compile(r"\.(index_put|put)_?\((?!.*accumulate)")
