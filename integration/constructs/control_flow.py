"""if, for, while, break, else, del, walrus, assert, unpacking."""

import torch

from constructs import case, one_tensor


@case
def if_on_shape(x):
    if x.shape[0] > 1 and x.dim() == 2:
        return x + 1
    return x - 1


@case
def elif_chain(x):
    n = x.size(1)
    if n == 1:
        return x
    elif n == 2:
        return x * 2
    elif n == 3:
        return x * 3
    else:
        return x * 4


@case
def conditional_expression(x):
    return (x if x.requires_grad else x + 1) * (2 if x.is_floating_point() else 3)


@case
def for_range(x):
    for i in range(1, 10, 3):
        x = x + i
    return x


@case
def for_over_tensor(x):
    total = 0
    for row in x:
        total = total + row * row
    return total


@case
def for_else_without_break(x):
    for i in range(3):
        if i == 7:
            break
    else:
        x = x * 10
    return x, i


@case
def for_else_with_break(x):
    for i in range(9):
        if i == 4:
            break
    else:
        x = x * 10
    return x + i


@case
def continue_in_loop(x):
    for i in range(6):
        if i % 2:
            continue
        x = x + i
    return x


@case
def while_counter(x):
    n = 0
    while n < 4:
        n += 1
        if n == 2:
            continue
        x = x * n
    return x, n


@case
def while_true_break(x):
    n = 0
    while True:
        x = x + 1
        n += 1
        if n >= 3:
            break
    else:
        x = x * 0
    return x


@case
def nested_loops_with_flags(x):
    found = None
    for i in range(4):
        for j in range(4):
            if i * j == 6:
                found = (i, j)
                break
        if found:
            break
        x = x + i
    return x, found


@case
def loop_variable_after_loop(x):
    for i, (a, b) in enumerate([(1, 2), (3, 4)]):
        x = x * a + b
    return x, i, a, b


@case
def delete_local(x):
    y = x + 1
    z = y * 2
    del y
    try:
        y
    except UnboundLocalError as error:
        return z, type(error).__name__


@case
def walrus_in_condition(x):
    if (n := x.shape[1]) > 2 and (m := n * 2) > 4:
        return x + n + m
    return x


@case
def walrus_in_while(x):
    data = [1, 2, 3]
    while (item := data.pop() if data else None) is not None:
        x = x + item
    return x, data


@case
def walrus_in_comprehension(x):
    return [x + last for i in range(4) if (last := i * 2) > 2], last


@case
def star_unpacking(x):
    first, *middle, last = [x, x + 1, x + 2, x + 3]
    (a, *b), c = [(1, 2, 3), 4]
    return first + last, middle, a, b, c


@case
def unpack_nested(x):
    (a, (b, c)), [d, e] = (x, (1, 2)), [3, x * 2]
    return a * b + c + d + e


@case
def swap_and_rotate(x):
    a, b, c = x, x + 1, x + 2
    a, b, c = b, c, a
    a, b = b, a
    return a - b * c


@case
def unpack_too_few(x):
    try:
        a, b, c = (x, 1)
    except ValueError as error:
        return x + 1, str(error)


@case
def unpack_too_many(x):
    try:
        a, b = [x, 1, 2]
    except ValueError as error:
        return x + 1, str(error)


@case
def unpack_tensor_rows(x):
    a, b = x
    return a + b


@case
def chained_comparison(x):
    n = x.shape[0]
    return x + (1 if 0 < n < 5 <= 5 != 6 else 2)


@case
def boolean_operators_return_operands(x):
    a = None or 0 or "" or x
    b = [] and x
    c = 1 and x + 1
    return a, b, c, not [], not "a"


@case
def assert_passes(x):
    assert x.shape[0] == 2, "two rows"
    assert isinstance(x, torch.Tensor)
    return x + 1


@case
def assert_fails_and_is_caught(x):
    try:
        assert x.shape[0] == 3, f"rows: {x.shape[0]}"
    except AssertionError as error:
        return x * 2, error.args


@case
def augmented_assignments(x):
    n = 5
    n += 2
    n *= 3
    n -= 1
    n //= 3
    n **= 2
    n %= 7
    n <<= 2
    n |= 3
    n &= 13
    n ^= 6
    n >>= 1
    x = x + n
    x += 1
    x *= 2
    return x, n


@case
def augmented_item_and_attribute(x):
    class Box:
        pass

    box = Box()
    box.n = 1
    box.n += 4
    items = [1, 2, x]
    items[0] += 5
    items[2] *= 2
    table = {"a": 1}
    table["a"] -= 3
    return box.n, items, table


@case
def early_return_in_loop(x):
    for i in range(10):
        if i == 3:
            return x * i
    return x


@case
def return_in_finally_loop(x):
    for i in range(3):
        try:
            if i == 1:
                return x + i
        finally:
            x = x * 2
    return x


@case
def break_in_finally(x):
    for i in range(3):
        try:
            x = x + i
        finally:
            if i == 1:
                break
    return x


@case
def recursion(x):
    def power(n):
        return torch.ones_like(x) if n == 0 else x * power(n - 1)

    return power(4)


@case
def mutual_recursion(x):
    def even(n):
        return x if n == 0 else odd(n - 1) + 1

    def odd(n):
        return x * 0 if n == 0 else even(n - 1) + 2

    return even(5), odd(5)


@case
def iterate_while_appending(x):
    items = [1]
    for item in items:
        if len(items) < 5:
            items.append(item + 1)
        x = x + item
    return x, items


@case
def multiple_assignment_targets(x):
    a = b = [x]
    a.append(1)
    c = d = e = x + 1
    return a is b, b, c is e, d


@case
def if_on_tensor(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


@case
def while_on_tensor(x):
    while x.sum() < 100:
        x = x * 2
    return x


@case(inputs=lambda: (*one_tensor(), 3, [1, 2]))
def arguments_decide(x, n, items):
    while n:
        x = x + items[n % 2]
        n -= 1
    return x


@case
def ellipsis_and_none_index(x):
    return x[..., None][:, 0], x[None, ..., 1:]


@case(inputs=lambda: (torch.ones(2), {"a": 1, "b": 2}))
def break_in_loop_over_a_dict_that_changed(x, table):
    del table["a"]
    table["c"] = table["d"] = 3
    for name, number in table.items():
        if x.sum() > 0:
            x = x * number
        table[name] = number + 1
    return x
