"""compile, eval and exec of text and code."""

from constructs import case


@case
def eval_of_variables(x):
    y = x + 1
    return eval("(x * y, [n for n in range(2)])")


@case
def eval_in_dict(x):
    names = {"y": x + 1}
    return eval("y * 2 + len(str(3))", names), sorted(names)


@case
def eval_of_code(x):
    code = compile("x + n", "<made>", "eval")
    return eval(code, {"x": x, "n": 2}), code.co_filename


@case
def exec_in_dict(x):
    names = {"x": x}
    exec("y = x + 1\nz = [y, y * 2]\nfor i in range(3):\n    y = y + i\ndel x", names)
    names.pop("__builtins__")
    return names, list(names)


@case
def exec_that_raises(x):
    names = {}
    try:
        exec("a = 1\nb = a / 0\nc = 2", names)
    except ZeroDivisionError as error:
        return x + names["a"], "b" in names, str(error)


@case
def exec_of_unknown_name(x):
    try:
        exec("missing", {})
    except NameError as error:
        return x + 1, str(error)


@case
def exec_calls_that_see_the_dict(x):
    def put(value):
        names["seen"] = names["y"] + value

    names = {"put": put, "x": x}
    exec("y = x + 1\nput(3)\nz = seen * 2", names)
    return names["z"], names["seen"]


@case
def exec_of_variables(x):
    out = []
    exec("out.append(x * 2)\nassert out")
    return out


@case
def exec_of_functions(x):
    names = {"x": x}
    exec("def make():\n    y = x + 1\n    return lambda: (y, own)\nown = []\nget = make()", names)
    return names["get"]()[0], names["get"]()[1] is names["own"]


@case
def exec_that_makes_variables(x):
    exec("y = x + 1\nassert y.shape == x.shape")
    return x * 2


@case
def compile_bad_text(x):
    try:
        compile("a = = 1", "<bad>", "exec")
    except SyntaxError as error:
        return x + 1, error.msg, error.lineno, error.filename, error.args


@case
def compile_text_that_warns(x):
    return x + eval(compile("1 if 3 is 3 else 2", "<made>", "eval"))
