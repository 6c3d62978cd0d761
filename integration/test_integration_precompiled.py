"""What one process captured, another one runs without capturing: with real processes."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

HELPERS = """
import torch

SCALE = 3

def helper(x):
    return x * SCALE

def noisy(x):
    y = x + 1
    print("noisy")
    return y.sin()

class Net(torch.nn.Module):
    def __init__(self, act="gelu"):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        self.act = act

    @property
    def scale(self):
        return 2.0

    def forward(self, x):
        x = getattr(torch.nn.functional, self.act)(self.first(x))
        return self.second(x) * self.scale
"""

PROGRAM = """
import json, logging, sys, warnings
import torch, weft
import helpers
from weft import counters

weft.config.caching_precompile = True
weft.config.raise_internal_errors = True
out = {"values": [], "wrong": []}
torch.manual_seed(0)

def run(function, *calls, **how):
    compiled = weft.compile(function, **{"backend": "aot_eager", **how})
    for args in calls:
        got, wanted = compiled(*args), function(*args)
        if not torch.allclose(got, wanted, atol=1e-5):
            out["wrong"].append(str(function))
        out["values"].append(got.sum().item())
    return compiled

def report():
    out["instructions"] = counters["capture"]["instructions"]
    out["precompiled"] = counters["frames"]["precompiled"]
    out["compiled"] = counters["frames"]["compiled"]
    out["not_kept"] = [text for frame in weft.report().frames for text in frame.not_kept]
    print("RESULT" + json.dumps(out))
"""


class Programs:
    """Programs in a folder of their own, each run in a new process."""

    def __init__(self, folder):
        self.folder = folder
        self.write("helpers", HELPERS)

    def write(self, name, text):
        (self.folder / f"{name}.py").write_text(textwrap.dedent(text))

    def edit(self, name, old, new):
        text = (self.folder / f"{name}.py").read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def run(self, body=None, *, seed="1", cache=None):
        if body is not None:
            self.write("main", PROGRAM + textwrap.dedent(body) + "\nreport()\n")
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["WEFT_CACHE_DIR"] = str(cache or self.folder.parent / "cache")
        done = subprocess.run(
            [sys.executable, "main.py"], cwd=self.folder, env=environment, text=True,
            capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.partition("RESULT")[2])
        assert result["wrong"] == []
        return {**result, "text": done.stdout.partition("RESULT")[0], "errors": done.stderr}


@pytest.fixture
def programs(tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    return Programs(folder)


def same_without_capture(programs, body, entries, **how):
    """Run twice: the second process captures nothing, and computes the same."""
    first = programs.run(body)
    assert first["instructions"] > 0 and first["precompiled"] == 0
    assert first["not_kept"] == []
    second = programs.run(seed="2", **how)
    assert second["instructions"] == 0
    assert second["precompiled"] == second["compiled"] == entries
    assert second["values"] == first["values"]
    assert second["text"] == first["text"]
    return second


FUNCTION = """
def f(x, w, b):
    return torch.nn.functional.layer_norm(torch.nn.functional.gelu(x @ w + b), (8,)).sum(-1)

run(f, (torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)))
"""


def test_a_function(programs):
    same_without_capture(programs, FUNCTION, 1)


def test_generated_code(programs):
    body = FUNCTION.replace("run(f, ", "run(f, *2 * [").replace("randn(8)))", "randn(8))], **how)")
    same_without_capture(programs, 'how = {"backend": "codegen"}\n' + body, 1)


def test_a_module_in_training(programs):
    body = """
    net = helpers.Net()
    compiled = weft.compile(net, backend="aot_eager")
    x = torch.randn(3, 4)
    with torch.no_grad():
        out["values"].append(compiled(x).sum().item())
    for _ in range(2):
        net.zero_grad()
        compiled(x).sum().backward()
        out["values"].append([p.grad.sum().item() for p in net.parameters()])
    net.zero_grad()
    net(x).sum().backward()
    out["values"].append([p.grad.sum().item() for p in net.parameters()])
    """
    result = same_without_capture(programs, body, 2)
    assert result["values"][2] == pytest.approx(result["values"][3])


def test_breaks_at_any_depth_and_several_entries(programs):
    body = """
    def f(x, n):
        x = helpers.noisy(x) + n
        weft.graph_break()
        x = helpers.noisy(x * 2)
        return x.cos()

    run(f, (torch.randn(4), 2), (torch.randn(4), 3), (torch.randn(4).double(), 2))
    """
    first = programs.run(body)
    second = programs.run(seed="2")
    assert first["compiled"] > 3 and first["not_kept"] == []
    assert second["precompiled"] == second["compiled"] > 2 and second["instructions"] == 0
    assert second["values"] == first["values"] and second["text"] == first["text"]


def test_symbolic_sizes(programs):
    body = """
    def f(x, y):
        return (x * 2).sum(0) + y.shape[0] * y.sum() * x.shape[0]

    run(f, *[(torch.randn(n, 4), torch.randn(n + 1, 3)) for n in (4, 5, 6, 11)])
    """
    first = programs.run(body)
    assert first["compiled"] == 2
    second = programs.run(seed="2")
    assert second["instructions"] == 0 and second["precompiled"] <= 2
    assert second["values"] == first["values"]


def test_sizes_that_nobody_kept_are_captured(programs):
    body = """
    sizes = [3]

    def f(x):
        return x.sum() + len(x)

    run(f, *[(torch.ones(n),) for n in sizes])
    """
    programs.run(body)
    programs.edit("main", "sizes = [3]", "sizes = [3, 4, 9]")
    result = programs.run(seed="2")
    assert result["values"] == [6, 8, 18]
    assert result["precompiled"] == 1 and result["compiled"] > 1


USES_ALL = """
net = helpers.Net(*sys.argv[1:])

def f(x):
    return helpers.helper(net(x))

run(f, (torch.ones(2, 4),))
"""


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * SCALE", "return x * SCALE + 1"),
        ("SCALE = 3", "SCALE = 4"),
        ('act="gelu"', 'act="relu"'),
        ("return 2.0", "return 2.5"),
        ("self.second(x) * self.scale", "self.second(x) / self.scale"),
        ("    @property\n    def scale(self):\n        return 2.0", "    scale = 7.0"),
        ("class Net(torch.nn.Module)", "class Net(Base)"),
    ],
)
def test_a_changed_program_is_captured_anew(programs, old, new):
    base = "class Base(torch.nn.Module):\n    def __call__(self, x):\n        return x.tanh()\n\n"
    programs.edit("helpers", "class Net", base + "class Net")
    first = programs.run(USES_ALL)
    assert programs.run()["instructions"] == 0
    programs.edit("helpers", old, new)
    changed = programs.run()
    assert changed["instructions"] > 0
    assert changed["values"] != first["values"]
    assert programs.run()["instructions"] == 0


def test_a_changed_library_is_noticed(programs):
    body = """
    import string
    string.greeting = len(sys.argv) + 4

    def f(x):
        return x + string.greeting

    run(f, (torch.ones(2),))
    """
    assert programs.run(body)["values"] == [12]
    assert programs.run()["instructions"] == 0
    programs.edit("main", "+ 4", "+ 5")
    # The line of f is the same, and so is its code.
    assert programs.run()["values"] == [14]


@pytest.mark.every(3)
@pytest.mark.parametrize("damage", ["cut", "foreign", "empty"])
def test_damaged_files_are_left_alone(programs, damage, tmp_path):
    first = programs.run(FUNCTION)
    (path,) = (tmp_path / "cache" / "precompiled").iterdir()
    script = """
    import pathlib, sys
    from weft_core.cachedir import write_checked
    path = pathlib.Path(sys.argv[1])
    {"cut": lambda: path.write_bytes(path.read_bytes()[:-40]),
     "foreign": lambda: write_checked(path, b"something else"),
     "empty": lambda: path.write_bytes(b"")}[sys.argv[2]]()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), path, damage], check=True)
    second = programs.run(seed="2")
    assert second["values"] == first["values"]
    assert second["instructions"] > 0 and second["precompiled"] == 0
    assert str(path) in second["errors"]


def test_the_cache_can_be_carried_elsewhere(programs, tmp_path):
    programs.run(FUNCTION)
    script = """
    import pathlib, sys, weft
    path = pathlib.Path("blob")
    if path.exists():
        weft.load_cache_artifacts(path.read_bytes())
    else:
        path.write_bytes(weft.save_cache_artifacts()[0])
    """
    for folder in ("cache", "elsewhere"):
        environment = {**os.environ, "WEFT_CACHE_DIR": str(tmp_path / folder)}
        command = [sys.executable, "-c", textwrap.dedent(script)]
        subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    assert programs.run(seed="2", cache=tmp_path / "elsewhere")["instructions"] == 0


def test_without_a_cache_folder_everything_is_captured(programs, tmp_path):
    (tmp_path / "file").write_text("")
    result = programs.run(FUNCTION, cache=tmp_path / "file")
    assert result["instructions"] > 0 and result["precompiled"] == 0


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            "return x + (hash('a') % 7)",
            "[process-bound] not found again in another process: a hash",
        ),
        ("return x + [len(w) for w in {'a', 'bb', 'ccc'} | {'dddd'}][0]", "the order of a set"),
        ("return x + constant()", "the result of constant"),
        ("return x + (y is SENTINEL)", "[unnamed-object]"),
        ("return x + Other.value", "[unnamed-object]"),
        ("return x + random.random()", "[process-bound]"),
    ],
)
def test_what_is_another_in_each_process_is_not_kept(programs, lines, reason):
    body = f"""
    import random
    SENTINEL = y = object()

    def make():
        class Local:
            value = 3

        return Local

    Other = make()

    @weft.assume_constant_result
    def constant():
        return 4

    def f(x):
        {lines}

    random.seed(0)
    compiled = weft.compile(f, backend="eager")
    compiled(torch.ones(3))
    """
    for seed in ("1", "2"):
        result = programs.run(body, seed=seed)
        assert result["instructions"] > 0 and result["precompiled"] == 0
        assert len(result["not_kept"]) == 1 and reason in result["not_kept"][0]


def test_nothing_is_kept_unless_asked(programs, tmp_path):
    programs.run(FUNCTION.replace("def f", "weft.config.caching_precompile = False\ndef f"))
    assert not (tmp_path / "cache" / "precompiled").exists()


def test_fullgraph_does_not_take_what_was_captured_with_breaks(programs):
    body = """
    def f(x):
        weft.graph_break()
        return x + 1

    run(f, (torch.ones(2),))
    try:
        run(f, (torch.ones(2),), fullgraph=True)
    except weft.Unsupported as error:
        out["values"].append(error.code)
    """
    assert programs.run(body)["values"][1] == "graph-break"
    assert programs.run()["values"][1] == "graph-break"


@pytest.mark.slow
def test_artifacts_show_the_same_where_the_capture_is_on_disk(programs):
    """A new artifact that capture writes needs `skipped_by="captures"`."""
    first, second = (
        programs.run(
            """
            from weft_core import events

            TEXT = "def broken(x):\\n    y = x.sin()\\n    weft.graph_break()\\n    return y * {}"

            out["shown"] = {}
            for number, artifact in enumerate(events.ARTIFACTS):
                weft.reset()
                exec(TEXT.format(number))  # which nothing has captured yet in the first process
                records = []
                handler = logging.Handler()
                handler.emit = lambda record: records.append(record.name)
                logging.getLogger("weft").addHandler(handler)
                weft.set_logs(**{artifact: True})
                run(broken, (torch.ones(3, requires_grad=True),))
                weft.set_logs(**{artifact: False})
                logging.getLogger("weft").removeHandler(handler)
                shown = {name for name in records if name.endswith("." + artifact)}
                out["shown"][artifact] = sorted(shown)  # of timings there are fewer
            """
        )
        for _ in range(2)
    )
    assert second["precompiled"] and not first["precompiled"]
    assert first["shown"] == second["shown"]
    for artifact in ("graph", "graph_code", "graph_breaks", "bytecode", "guards", "aot_graphs"):
        assert first["shown"][artifact], artifact
