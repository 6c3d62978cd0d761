"""Python programs: values and tensors, classes of the program, state changed between calls."""

from __future__ import annotations

import random

from .program import Program

_PRELUDE = """\
import collections, contextlib, functools, itertools, math, operator
from torch import nn

SCALE, NAMES, TABLE, SEEN = 2.0, ["a", "b"], {"a": 1.0, "b": 2.0}, []


class Box:
    rate = 0.5
    __slots__ = ("value", "__dict__")

    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        SEEN.append("add")
        return Box(self.value + getattr(other, "value", other))

    def __radd__(self, other):
        SEEN.append("radd")
        return Box(other + self.value)

    def __mul__(self, other):
        return NotImplemented if isinstance(other, str) else Box(self.value * other)

    def __eq__(self, other):
        SEEN.append("eq")
        return isinstance(other, Box) and self.value is other.value

    def __hash__(self):
        return 7

    def __len__(self):
        return 3

    def __bool__(self):
        SEEN.append("bool")
        return self.rate > 0.2

    def __getitem__(self, key):
        if key == 3:
            raise IndexError(key)
        return self.value * key

    def __contains__(self, item):
        return item == 1

    def __call__(self, x, by=1.5):
        return x * self.rate + by

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return len(name)

    @property
    def twice(self):
        return self.value * 2

    def scaled(self, x):
        return x * self.rate


class Steps:
    def __init__(self, end):
        self.end, self.at = end, 0

    def __iter__(self):
        SEEN.append("iter")
        self.at = 0
        return self

    def __next__(self):
        self.at += 1
        if self.at > self.end:
            raise StopIteration
        return self.at


class Block:
    def __init__(self, swallow=False):
        self.swallow = swallow

    def __enter__(self):
        SEEN.append("enter")
        return self

    def __exit__(self, kind, error, trace):
        SEEN.append(("exit", kind and kind.__name__))
        return self.swallow


@contextlib.contextmanager
def block(name):
    SEEN.append(("begin", name))
    try:
        yield name
    finally:
        SEEN.append(("end", name))


def helper(x, by=1.5, *more, shift=0.25, **named):
    return x * by + shift + len(more) + len(named)


def counting(start):
    def count(x):
        nonlocal start
        start += 1
        return x + start

    return count


def numbers(end):
    for number in range(end):
        got = yield number
        if got:
            SEEN.append(got)
    return end


class Net(nn.Module):
    width = 2.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.parts = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.named = nn.ModuleDict({"a": nn.Identity()})
        self.register_buffer("total", torch.zeros(3))
        self.calls, self.flag = 0, True

    def forward(self, x):
        self.calls += 1
        self.total = self.total + x.detach().sum()
        x = self.first(x) if self.flag else self.second(x)
        for part in self.parts:
            x = part(x)
        return self.named["a"](x) * self.width


count, box, net = counting(1), Box(3.0), Net()
base_helper, base_scaled, base_sqrt = helper, Box.scaled, math.sqrt

"""

_ITERABLES = (
    "Steps(4)", "range(n)", "[1, 2, n]", "numbers(4)", "TABLE.values()", "'abc'", "x", "(x, 2)",
    "iter([3, 4, 5])", "{1: 2, 3: 4}", "collections.deque([1, 2], 2)",
)  # fmt: skip
_LAZY = (
    "enumerate({})", "zip({}, {})", "map(lambda a: (a, 1), {})", "filter(None, [1, 0, n])",
    "itertools.chain({}, {})", "itertools.islice({}, 3)", "itertools.zip_longest({}, {})",
    "itertools.takewhile(lambda a: True, {})", "itertools.dropwhile(lambda a: False, {})",
    "itertools.pairwise({})", "itertools.compress({}, [1, 0, 1])", "itertools.product([1], {})",
    "itertools.accumulate([1, n, 2])", "reversed([1, n])",
    "itertools.islice(itertools.cycle({}), 5)",
    "itertools.starmap(lambda *a: a, zip({}, {}))", "iter(lambda: n, n)", "{}", "{}",
)  # fmt: skip
_EXPRESSIONS = (
    "x * SCALE", "helper(x)", "helper(x, n, 3, shift=1, k=2)", "count(x)", "net(x)", "box(x)",
    "box.scaled(x)", "x * len(NAMES)", "x * TABLE.get('a', 5)", "x + math.sqrt(n + 4)",
    "(box + 1).value", "(1 + box).value", "box == box", "box != 3", "len(box), 1 in box, list(box)",
    "box.missing", "box.twice", "getattr(box, 'extra', None)", "hasattr(box, '_none')",
    "{box: 1}.get(Box(2))", "1 if box else 0", "sorted(NAMES, key=len)", "dict(TABLE)",
    "functools.partial(helper, by=n)(x)", "functools.reduce(operator.add, [x, n, x])",
    "sum(TABLE.values())", "[x * k for k in range(n)]", "{k: x for k in NAMES}", "x.shape[0] * n",
    "(lambda *a, **k: (len(a), k))(*NAMES, **TABLE)", "'%s-%d' % ('a', n), f'{n:>4}'",
    "torch.where(x > 0, x, n)", "max(n, 2), min([n, 1]), divmod(7, n or 1)", "x[n % 2]",
    "x.sum() > 1e9 or n", "[*NAMES, *range(n)]", "NAMES * 2 == NAMES + NAMES", "vars(box)",
    "next(numbers(2)), next(iter([]), n)", "isinstance(box, (int, Box))", "type(box).__name__",
    "net.total + net.calls", "net.training, net.flag", "sum(p.sum() for p in net.parameters())",
    "operator.attrgetter('rate')(box)", "operator.itemgetter(0)(NAMES)", "SCALE if n > 2 else x",
)  # fmt: skip
_STATEMENTS = (
    "global SCALE; SCALE = SCALE + 1", "NAMES.append(n)", "TABLE['c'] = n", "TABLE.pop('c', None)",
    "box.value = n", "box.extra = x", "Box.rate = Box.rate + 0.25", "net.flag = not net.flag",
    "x = x + 1", "n += 1", "NAMES[0:1] = ['z']", "SEEN.append(n)", "x = x.clone(); x.add_(1)",
    "del box.extra", "weft_break()", "helper.note = n", "net.train(not net.training)",
    "NAMES += [n]", "NAMES.sort(key=str)", "TABLE |= {{'d': n}}", "[x0, *rest] = NAMES",
    "assert n < 3, n", "TABLE['missing'] += 1", "raise ValueError(n)", "box.no()",
)  # fmt: skip
_STATE = (
    "SCALE = 5.0", "SCALE = torch.tensor(3.0)", "NAMES.append('q')", "NAMES.clear()",
    "NAMES = ('t',)",
    "TABLE['a'] = 7.5", "TABLE.clear()", "box.rate = 0.1", "Box.rate = 2.0", "box.value = 1",
    "helper = lambda x, *a, **k: x - 1", "helper = base_helper", "helper.__defaults__ = (9.0,)",
    "helper.__kwdefaults__ = {'shift': 4.0}",
    "helper.__code__ = (lambda x, *a, **k: x - 2).__code__",
    "Box.scaled = lambda self, x: x - 7", "Box.scaled = base_scaled", "net.flag = False",
    "Box.__len__ = lambda self: 1", "Box.__eq__ = lambda self, other: True", "del Box.__add__",
    "Box.__getattr__ = lambda self, name: name", "Box.twice = 3", "box.__dict__['twice'] = 1",
    "math.sqrt = lambda v: 3.5", "math.sqrt = base_sqrt", "count = counting(9)", "net.eval()",
    "net.parts.append(nn.Sigmoid())", "net.named['a'] = nn.Softplus()", "net.width = torch.ones(3)",
    "net.first.bias = None", "net.second = nn.Linear(3, 3)", "Net.first = lambda self, x: x * 2",
    "net.total = torch.ones(3)", "net.first.weight.requires_grad_(False)",
    "net.register_forward_hook(lambda m, a, out: out + 1)", "net.first.forward = lambda x: x + 3",
    "net.first.register_forward_pre_hook(lambda m, a: SEEN.append(len(a)))",
    "Steps.__next__ = numbers", "Steps.__iter__ = lambda self: iter([self.end])",
    "Block.__exit__ = lambda *a: True", "count.__closure__[0].cell_contents = 40",
    "box = Box(torch.ones(3))",
    "box.__class__ = type('Other', (Box,), {'rate': 4.0, '__slots__': ()})",
)  # fmt: skip


class _Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def lazy(self) -> str:
        text = self.random.choice(_LAZY)
        while "{}" in text:
            text = text.replace("{}", self.random.choice(_ITERABLES), 1)
        return text

    def block(self, depth: int, count: int) -> None:
        for _ in range(count):
            self.statement(depth)

    def statement(self, depth: int) -> None:
        choose = self.random.random()
        if choose < 0.45 or depth > 3:
            self.line(depth, f"out.append(({self.random.choice(_EXPRESSIONS)}))")
        elif choose < 0.6:
            text = self.random.choice(_STATEMENTS).replace("{{", "{").replace("}}", "}")
            self.line(depth, text.removeprefix("global SCALE; "))
        elif choose < 0.75:
            self.line(depth, f"for item in itertools.islice({self.lazy()}, 6):")
            self.line(depth + 1, "out.append(item)")
            self.block(depth + 1, self.random.randint(0, 2))
            if self.random.random() < 0.3:
                self.line(depth + 1, self.random.choice(("break", "continue")))
        else:
            self.compound(depth)

    def compound(self, depth: int) -> None:
        kind = self.random.choice(("with", "try", "if", "while", "def", "list"))
        if kind == "with":
            context = self.random.choice(
                (
                    "Block()",
                    "Block(True)",
                    "block('b')",
                    "torch.no_grad()",
                    "contextlib.suppress(ValueError)",
                )
            )
            self.line(depth, f"with {context} as held:")
            self.block(depth + 1, self.random.randint(1, 3))
        elif kind == "try":
            self.line(depth, "try:")
            self.block(depth + 1, self.random.randint(1, 3))
            self.line(depth, "except Exception as error:")
            self.line(depth + 1, "out.append((type(error).__name__, str(error)))")
            if self.random.random() < 0.5:
                self.line(depth, "finally:")
                self.block(depth + 1, 1)
        elif kind == "if":
            test = self.random.choice(("n > 2", "box", "NAMES", "x.sum() > 0", "SCALE == 5.0"))
            self.line(depth, f"if {test}:")
            self.block(depth + 1, self.random.randint(1, 2))
            self.line(depth, "else:")
            self.block(depth + 1, 1)
        elif kind == "while":
            self.line(depth, f"left{depth} = 3")
            self.line(depth, f"while left{depth} > 0:")
            self.line(depth + 1, f"left{depth} -= 1")
            self.block(depth + 1, self.random.randint(1, 2))
        elif kind == "def":
            self.line(depth, "def inner(a, b=n, *c, d=SCALE):")
            self.line(depth + 1, "return a * b * d + len(c)")
            self.line(depth, "out.append(inner(x, *NAMES[:0], d=n))")
        else:
            self.line(depth, f"out.append(list(itertools.islice({self.lazy()}, 6)))")


def generate(seed: int) -> Program:
    """Make a function of random statements, and calls with changes of state between them."""
    writer = _Writer(seed)
    writer.block(1, writer.random.randint(3, 8))
    state = "out, list(SEEN), list(NAMES), dict(TABLE), vars(box), net.calls, SCALE"
    body = ["def run(x, n, out):", "    global SCALE, NAMES, TABLE", *writer.lines, ""]
    body += ["def f(x, n):", "    out = []"]
    if writer.random.random() < 0.7:
        body += ["    try:", "        run(x, n, out)", "    except Exception as error:"]
        body += ["        out.append((type(error).__name__, str(error)))"]
    else:
        body += ["    run(x, n, out)"]
    body += [f"    return {state}", ""]
    source = _PRELUDE + "\n".join(body).replace("weft_break()", "torch._C._log_api_usage_once('a')")
    calls = []
    for number in range(writer.random.randint(3, 6)):
        changes = [
            writer.random.choice(_STATE) for _ in range(writer.random.choice((0, 0, 1, 1, 2)))
        ]
        lines = [f"try:\n    {one}\nexcept Exception:\n    pass" for one in changes]
        size = writer.random.choice(("n", "n", "2", "4"))
        args = (
            f"(tensor((3,), seed={number}), {size.replace('n', str(writer.random.choice((1, 3))))})"
        )
        calls.append("\n".join(["SEEN.clear()", "math.sqrt = base_sqrt", *lines, args]))
    dynamic = writer.random.choice((None, None, None, True, False))
    return Program(source, tuple(calls), 0, dynamic)
