"""List, dict, set comprehensions and generator expressions."""

from constructs import case


@case
def list_of_tensors(x):
    return [x * i for i in range(3)]


@case
def with_condition(x):
    return [i for i in range(10) if i % 2 if i > 3], x + 1


@case
def nested_loops(x):
    return x + len([(i, j) for i in range(3) for j in range(i)])


@case
def nested_comprehension(x):
    return [[i * j for j in range(2)] for i in range(3)], x + 1


@case
def dict_comprehension(x):
    return {str(i): x + i for i in range(3)}


@case
def dict_inverted(x):
    d = {"a": 1, "b": 2}
    return x + 1, {v: k for k, v in d.items() if v > 1}


@case
def set_comprehension(x):
    return x + 1, sorted({i % 3 for i in range(10)})


@case
def variable_does_not_leak(x):
    i = 7
    squares = [i * i for i in range(3)]
    return x + i, squares


@case
def closure_in_comprehension(x):
    k = 2
    return [(lambda y: y * k + i)(x) for i in range(2)]


@case
def comprehension_over_tensor(x):
    return [row.sum() for row in x]


@case
def unpacking_in_comprehension(x):
    return x + sum([a * b for a, b in zip([1, 2], [3, 4])]), [h for h, *_ in ["ab", "cd"]]


@case
def conditional_expression_inside(x):
    return [x + i if i % 2 else x - i for i in range(4)]


@case
def comprehension_calls_method(x):
    class M:
        def f(self, y):
            return y + 1

    m = M()
    return [m.f(x) for _ in range(2)]


@case
def comprehension_in_class_body(x):
    class C:
        sizes = [n * 2 for n in range(3)]
        table = {n: n for n in (1, 2)}

    return x + sum(C.sizes), C.table


@case
def exception_in_comprehension(x):
    try:
        [1 // (2 - i) for i in range(5)]
    except ZeroDivisionError as error:
        return x + 1, str(error)


@case
def comprehension_of_generators(x):
    return x + sum(sum(i for i in range(n)) for n in range(4))


@case
def star_in_list_display(x):
    a = [1, 2]
    return [*a, *range(2), *(i for i in a)], {**{"a": 1}, "b": 2, **{"a": 3}}, {*a, 3}, x + 1


@case
def variables_called_as_cells(x):
    n = 2

    def free():
        return [lambda: n for n in (n, [1])[1]]

    a = [n + 1 for n in (1, 2) if x.sum() > n]
    b = [[lambda: n for n in (int(x[0, n]), 4)] for n in (1, int(x[0, 2]))]
    c = [[(n, free()) for n in (int(x[0, n]), 4)] for n in (1, 2)]
    try:
        [1 // int(x[0, n]) for n in (1, 0)]
    except ZeroDivisionError:
        n += 1
    return x * n, a, [f() for row in b for f in row], len(c), free()[0]()
