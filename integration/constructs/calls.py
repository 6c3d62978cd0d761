"""Arguments: positional, keyword, star, defaults, errors."""

from constructs import case, one_tensor


def everything(a, /, b, c=3, *args, d, e=5, **kwargs):
    return a * b + c + sum(args) + d + e + sum(kwargs.values())


@case
def all_kinds(x):
    return everything(x, 2, d=4), everything(x, 2, 3, 4, 5, d=6, e=7, f=8, g=9)


@case
def star_arguments(x):
    args, kwargs = [x, 2], {"d": 1, "z": 3}
    return everything(*args, **kwargs), everything(*args, 9, *[1, 2], d=0, **{"q": 1})


@case
def keyword_order(x):
    def f(**kwargs):
        return list(kwargs)

    return x + 1, f(b=1, a=2, **{"z": 3})


@case
def args_tuple_and_kwargs_dict(x):
    def f(*args, **kwargs):
        kwargs["added"] = 1
        return args, kwargs

    d = {"k": 2}
    return x + 1, f(1, *(2, 3), **d), d


@case
def missing_argument(x):
    try:
        everything(x)
    except TypeError as error:
        return x + 1, str(error)


@case
def missing_keyword_only(x):
    try:
        everything(x, 1)
    except TypeError as error:
        return x + 1, str(error)


@case
def too_many_arguments(x):
    def f(a, b=1):
        return a

    try:
        f(x, 2, 3)
    except TypeError as error:
        return x + 1, type(error).__name__


@case
def unexpected_keyword(x):
    def f(a):
        return a

    try:
        f(x, zz=2)
    except TypeError as error:
        return x + 1, type(error).__name__


@case
def multiple_values(x):
    def f(a, b):
        return a

    try:
        f(x, a=2)
    except TypeError as error:
        return x + 1, type(error).__name__


@case
def duplicate_keyword_in_star(x):
    def f(**k):
        return k

    try:
        f(a=1, **{"a": 2})
    except TypeError as error:
        return x + 1, type(error).__name__


@case
def positional_only_name_in_kwargs(x):
    def f(a, /, **kwargs):
        return a + kwargs["a"]

    return f(x, a=3)


@case
def call_not_callable(x):
    three = 3
    try:
        three(x)
    except TypeError as error:
        return x + 1, str(error)


@case
def argument_evaluation_order(x):
    log = []

    def note(v):
        log.append(v)
        return v

    def f(*args, **kwargs):
        return len(args) + len(kwargs)

    return x + f(note(1), *[note(2)], k=note(3), **{"m": note(4)}), log


@case
def default_is_tensor(x):
    y = x + 1

    def f(a, b=y):
        return a * b

    return f(x), f(x, 2)


@case(inputs=lambda: (*one_tensor(), 2, 3.5, "s", None, True, [1, 2], {"k": (1, 2)}))
def many_input_types(x, i, f, s, none, flag, items, table):
    items.append(i)
    table["new"] = s
    return x * i + f + len(s) + (1 if flag and none is None else 0) + table["k"][1]


@case(inputs=lambda: ([*one_tensor(), [*one_tensor(), {"a": one_tensor()[0]}]],))
def nested_tensor_inputs(tree):
    tree[1][1]["b"] = tree[0] * 2
    return tree[0] + tree[1][0] + tree[1][1]["a"]


@case(inputs=lambda: (lambda t: (t, t))(one_tensor()[0]))
def aliased_inputs(a, b):
    a.add_(1)
    return a + b, a is b


@case
def recursion_with_accumulator(x):
    def go(n, acc):
        return acc if n == 0 else go(n - 1, acc + x * n)

    return go(5, x)


@case
def callbacks_and_higher_order(x):
    def apply(f, *args, times=1):
        for _ in range(times):
            args = (f(*args),)
        return args[0]

    return apply(lambda y: y + 1, x, times=3)


@case
def method_call_with_star(x):
    class C:
        def m(self, *a, **k):
            return sum(a) + sum(k.values())

    return C().m(*[x, x], **{"q": x})


@case
def bound_and_unbound(x):
    items = [3, 1, 2]
    append = items.append
    append(0)
    return x + list.index(items, 1), str.upper("a"), sorted(items, key=(-1).__mul__)


@case
def keyword_only_from_dict_merge(x):
    def f(*, a, b, c=0):
        return a * 100 + b * 10 + c

    return x + f(**({"a": 1} | {"b": 2}))


@case
def returns_multiple_values(x):
    def f():
        return x, x + 1, {"k": x}

    a, b, c = f()
    return a + b + c["k"]
