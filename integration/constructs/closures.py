"""Closures, nonlocal, global, lambdas, decorators, nested functions."""

import functools

import torch

from constructs import case

COUNTER = 0
TABLE = {"n": 1}


@case
def closure_reads(x):
    k = 3

    def f(y):
        return y * k

    k = 5
    return f(x)


@case
def nonlocal_counter(x):
    count = 0

    def bump():
        nonlocal count
        count += 1
        return count

    return x + bump() + bump(), count


@case
def counter_factory(x):
    def make():
        n = 0

        def step(by=1):
            nonlocal n
            n += by
            return n

        return step

    a, b = make(), make()
    a(), a(2), b()
    return x + a() * 10 + b()


@case
def late_binding_loop(x):
    fs = [lambda y: y + i for i in range(3)]
    gs = [lambda y, i=i: y + i for i in range(3)]
    return [f(x) for f in fs], [g(x) for g in gs]


@case
def global_write(x):
    global COUNTER
    COUNTER = 1
    COUNTER += 4
    return x + COUNTER


@case
def global_write_in_call(x):
    def bump():
        global COUNTER
        COUNTER = COUNTER + 1

    global COUNTER
    COUNTER = 0
    bump()
    bump()
    return x * COUNTER


@case
def global_container_mutated(x):
    TABLE.clear()
    TABLE["n"] = 2
    TABLE.update(m=3)
    return x + TABLE["n"] + TABLE["m"], dict(TABLE)


@case
def global_deleted(x):
    global TEMPORARY
    TEMPORARY = 3
    y = x + TEMPORARY
    del TEMPORARY
    try:
        TEMPORARY
    except NameError as error:
        return y, str(error)


@case
def global_read_through_globals(x):
    return x + globals()["TABLE"].get("none", 7)


@case
def lambda_in_containers(x):
    ops = {"add": lambda a, b: a + b, "neg": lambda a: -a}
    return ops["add"](x, 1), ops["neg"](x), (lambda *a: len(a))(1, 2, 3)


@case
def immediately_called(x):
    return (lambda y: (lambda z: z * 2)(y + 1))(x)


@case
def decorator_plain(x):
    def twice(f):
        def wrapped(*args):
            return f(f(*args))

        return wrapped

    @twice
    def add(y):
        return y + 1

    return add(x), add.__name__


@case
def decorator_with_wraps_and_arguments(x):
    def scale(k):
        def decorate(f):
            @functools.wraps(f)
            def wrapped(*args, **kwargs):
                return f(*args, **kwargs) * k

            return wrapped

        return decorate

    @scale(3)
    @scale(k=2)
    def add(y, n=1):
        """Docs."""
        return y + n

    return add(x, n=2), add.__name__, add.__doc__, add.__wrapped__ is not None


@case
def class_as_decorator(x):
    class Counted:
        def __init__(self, f):
            self.f, self.calls = f, 0

        def __call__(self, *args):
            self.calls += 1
            return self.f(*args)

    @Counted
    def add(y):
        return y + 1

    return add(add(x)), add.calls


@case
def function_attributes(x):
    def f(y):
        f.calls += 1
        return y + f.calls

    f.calls = 0
    return f(x), f(x), f.calls


@case
def defaults_evaluated_once(x):
    def f(item, seen=[]):
        seen.append(item)
        return len(seen)

    return x + f(1) + f(2), f.__defaults__


@case
def keyword_defaults_and_annotations(x):
    def f(a: int, *, b: "str" = "q", c: float = 2.0) -> float:
        return a * c

    return x + f(2), f.__kwdefaults__, sorted(f.__annotations__)


@case
def compose(x):
    def compose(*fs):
        return functools.reduce(lambda f, g: lambda y: g(f(y)), fs)

    return compose(lambda y: y + 1, lambda y: y * 2, lambda y: -y)(x)


@case
def cell_shared_between_functions(x):
    value = 0

    def get():
        return value

    def put(v):
        nonlocal value
        value = v

    put(x * 2)
    return get(), value


@case
def free_variable_unassigned(x):
    def f():
        return later

    try:
        f()
    except NameError as error:
        message = str(error)
    later = 1
    return x + f(), message


@case
def returned_closure(x):
    y = x + 1

    def inner(z):
        return y * z

    return inner(2), callable(inner)


@case
def closure_over_argument_mutated(x):
    items = []

    def push(v):
        items.append(v)

    for i in range(3):
        push(x * i)
    return items


@case
def nested_three_deep(x):
    def a(n):
        def b(m):
            def c(k):
                return n + m * k

            return c

        return b

    return x + a(1)(2)(3)


@case
def locals_function(x):
    n = 3
    y = x + n
    names = sorted(locals())
    return y, names


@case
def function_equality(x):
    def f():
        pass

    g = f
    return x + 1, f is g, f == g, {f: 1}[g]


@case
def exec_and_eval(x):
    return x + eval("1 + 2")


@case(inputs=lambda: (torch.ones(2), 1))
def deleted_argument_in_a_cell(x, n):
    def made(n):
        def f():
            return n

        del n
        return f

    def f():
        return n

    del n
    size = int(x.sum())
    try:
        f()
    except NameError:
        return x + size, made(x).__closure__[0] == made(x).__closure__[0]
