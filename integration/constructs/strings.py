"""Strings, bytes, f-strings, formatting."""

import string
import textwrap
import typing

from constructs import case


@case
def f_string_numbers(x):
    n, f = 5, 2.34567
    return x + 1, f"{n} {n:03d} {f:.2f} {f:>10.3e} {n!r} {n:x} {n:+} {1000000:,}"


@case
def f_string_expressions(x):
    width, items = 8, [1, "a"]
    return x + 1, f"{'ab':>{width}}|{items!r}|{x.shape[0] * 2=}|{ {'k': 1}['k'] }"


@case
def f_string_of_shape(x):
    return x + 1, f"shape {x.shape} {tuple(x.shape)} dtype {x.dtype} dim {x.dim()}"


@case
def percent_formatting(x):
    return x + 1, "%d-%s-%.1f-%r" % (3, "a", 2.55, [1]), "%(k)s" % {"k": 4}


@case
def str_format(x):
    return x + 1, "{} {1}".replace("{1}", "q").format(3), "{a:>4}{b[0]}".format(a=1, b=[2])


@case
def str_methods(x):
    s = "Hello, World"
    return (
        x + s.count("o"), s.lower(), s.upper(), s.split(", "), s.find("W"), s.replace("l", "L"),
        s.startswith("He"), s.endswith(("d", "x")), s.partition(","), s.strip("Hd"), s.center(16),
        s.swapcase(), s.title(), s.isalpha(), "7".zfill(3), s.index("o"), "a-b-c".rsplit("-", 1),
    )  # fmt: skip


@case
def str_join_and_iteration(x):
    return x + 1, "-".join(["a", "b"]), "".join(c for c in "abc" if c != "b"), list("xy")


@case
def str_operators(x):
    s = "ab"
    s += "c"
    return x + len(s), s * 2, "b" in s, "z" not in s, s < "b", s[1], s[::-1], s == "abc"


@case
def str_join_error(x):
    try:
        ",".join(["a", 1])
    except TypeError as error:
        return x + 1, str(error)


@case
def bytes_methods(x):
    b = b"ab,c"
    return x + b[0], b.split(b","), b.decode(), "é".encode(), b + b"!", b.hex(), bytes([1, 2])


@case
def bytearray_operations(x):
    b = bytearray(b"abc")
    b[0] = 120
    b.append(100)
    return x + len(b), bytes(b)


@case
def translate_and_maketrans(x):
    return x + 1, "abc".translate(str.maketrans("ab", "xy")), "a\tb".expandtabs(4)


@case
def string_module(x):
    return x + 1, string.ascii_lowercase[:3], string.capwords("ab cd"), string.digits


@case
def template(x):
    return x + 1, string.Template("$a-${b}").substitute(a=1, b="c")


@case
def text_wrapping(x):
    return x + 1, textwrap.dedent("  a\n  b"), textwrap.shorten("hello world foo", 11)


@case
def int_str_conversions(x):
    return x + int("12"), int("ff", 16), str(3.5), float("1e3"), hex(255), bin(5), oct(8), chr(97)


@case
def ord_and_sorting_text(x):
    return x + ord("a"), sorted("hello"), min("hello"), max(["a", "bb"], key=len)


@case
def repr_of_containers(x):
    return x + 1, repr([1, "a", (2,), {"k": None}]), str({1: [2]}), repr({3}), str((1,))


@case
def string_comparison_chain(x):
    return x + ("a" < "b" <= "b"), "abc"[-2:], "ab", r"\n", "x".isidentifier()


@case
def multiline_and_unicode(x):
    text = """line
    two"""
    return x + len(text.splitlines()), "\u00e9" == "é", "ß".casefold(), "ǅ".lower()


@case
def f_string_of_tensor(x):
    y = x.sum()
    return y, f"{y}"


@case
def string_as_dict_key_built(x):
    table = {f"layer_{i}": x * i for i in range(3)}
    return table["layer_" + str(2)], list(table)


class Named(typing.NamedTuple):
    number: int

    def __str__(self):
        return "its own text"


@case
def text_of_a_named_tuple(x):
    one = Named(3)
    return x + 1, str(one), f"{one}", repr(one), "%s" % (one,), str([one])


class Kept(frozenset):
    def __repr__(self):
        return frozenset.__repr__(self)


@case
def text_of_a_set_of_a_class(x):
    return x + 1, repr(Kept([1]))


@case
def text_in_a_type_hint(x):
    hint = typing.Annotated[int, Words("a")]
    return x + 1, type(hint.__metadata__[0]) is Words


class Words(str):
    pass
