"""Random programs, each run in eager and under weft and compared.

    python -m integration.fuzz --generator operators --seeds 0:1000 --minutes 5
    python -m integration.fuzz --generator all --seeds 0:20 --backend aot_eager
    python -m integration.fuzz --generator views --device cuda --jobs 16
    python -m integration.fuzz --generator operators --show 17     # the program of a seed
    python -m integration.fuzz --generator operators --sanitizer address --jobs 2

A generator is a function `(seed: int) -> Program` in a module of this package, named in `REGISTRY`
below. It must give the same program for the same seed. A program is text:

    Program(
        source="def f(x, n):\\n    y = x * n\\n    y.add_(1)\\n    return y\\n",
        calls=(
            "(tensor((3, 4), 'float32', seed=1, grad=True), 2)",
            "x = tensor((6, 4), 'float32', seed=2)\\n(x[1:], 3)",
        ),
        order=1,
    )

- `source` is a module that defines `f`. It may define classes, globals and helpers too.
- Each call is text as well, run in the namespace of `source`: its last line is the tuple of
  arguments, the lines before it may change state (`model.flag = True`). Of the namespace are
  `torch`, `F`, and the makers of inputs.py (`tensor`, `indices`).
- `order` is how often the results are differentiated (0, 1 or 2), `dynamic` is given to
  `weft.compile`, `parts` is how many independent programs the text holds (for the counts).

`runner.run` executes the source twice (eager and weft have a state each) and compares, after each
call: results and their types, dtypes, strides, requires_grad; which of them share memory; the
arguments, which may have been written; gradients; the type of an exception. A graph that raises
where eager does not fails, too: its frame then runs in eager, which hides a wrong graph. What weft
says of graphs that it does not compile, and of operators that it leaves to eager, is counted; what
hunt.py does not expect is shown. Where floats differ by more than a rounding, runs in float64 and
with slightly different inputs decide: weft's error may be a few times eager's largest. Where
integers differ that a slightly different input changes too, the verdict is `doubtful`.

A failing function is split into the programs that it holds; those that fail are reduced
(minimise.py) and written as files that run alone. Most seeds compile without optimisation.

| module | what it holds |
|---|---|
| `program.py` | `Program`, `Verdict` |
| `inputs.py` | the makers of arguments |
| `outcomes.py` | one call, and all that can be seen of it |
| `compare.py` | what differs between two outcomes |
| `runner.py` | a program in eager, under weft and in float64 |
| `worker.py`, `pool.py` | programs in a process of their own, which may crash or hang |
| `minimise.py`, `alone.py` | the smallest program that fails, and its file |
| `hunt.py` | seeds, minutes, counts |
"""

from importlib import import_module

from .program import Call, Generator, Program, Verdict

__all__ = ["REGISTRY", "Call", "Generator", "Program", "Verdict", "generator"]

# Name of a generator: the module, and the function in it.
REGISTRY: dict[str, str] = {
    "operators": "operators:generate",  # chains of operators, static sizes, several in a function
    "dynamic-operators": "operators:generate_dynamic",  # few operators, calls of changing sizes
    "python-programs": "python_programs:generate",  # classes, iterators, contexts, changes of state
    "expressions": "expressions:generate",  # operators and builtins on values of every kind
    "special-methods": "special_methods:generate",  # what CPython asks of classes over builtin ones
    "views": "views:generate",  # views, writes in place, layouts changed, results that alias
    "views-differentiated": "views:generate_differentiated",
    "gradients": "gradients:generate",  # higher orders, hooks, transforms, in and out of regions
    "modules": "modules:generate",  # random modules, several training steps
}


def generator(name: str) -> Generator:
    """The generator of this name; importing it is left until it is used."""
    module, function = REGISTRY[name].split(":")
    return getattr(import_module(f"{__name__}.{module}"), function)
