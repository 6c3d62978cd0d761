"""The package without the rest of weft: torch.compile as the compiler of an eager model."""

import subprocess
import sys

CODE = """
import importlib.abc, sys

class NoOtherWeft(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        if top == "weft" or top.startswith("weft_") and top not in ALLOWED:
            raise ImportError(name + " is not installed")

ALLOWED = ("weft_core", "weft_compiled_autograd")
sys.meta_path.insert(0, NoOtherWeft())

import torch
import torch._dynamo
from weft_compiled_autograd import counters, enable

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
seen = []
model[0].weight.register_hook(lambda grad: grad * 2)
model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

def compiler(gm):
    return torch.compile(gm, backend="aot_eager")

for size in (10, 100, 10, 37):
    x = torch.randn(size, 6)
    model.zero_grad()
    model(x).square().sum().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    with enable(compiler):
        model(x).square().sum().backward()
    for p, expected in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, expected)
assert len(seen) == 8
assert counters["compiled_autograd"]["captures"] == 2, counters
assert counters["compiled_autograd"]["eager"] == 0, counters
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
assert not [name for name in sys.modules if name in ("weft", "weft_aot", "weft_capture")]
"""


def test_torch_compile_is_the_compiler_and_nothing_else_of_weft_is_there():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
