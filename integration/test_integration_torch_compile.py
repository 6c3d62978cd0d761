"""weft and torch.compile in one program: each may compile what calls into the other."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import torch, weft

    def by_torch(function=None, **flags):
        return torch.compile(function, backend="eager", **flags)

    outer, inner = {outer}, {inner}

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x).relu() + 1

    class Outer(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x) * 2

    def makes(compile):
        return lambda x: compile(lambda y: y * 3)(x + 1)

    def trains(compile):
        square = compile(lambda x: (x ** 2).sum())

        def step(x):
            x = x.clone().requires_grad_()
            square(x).backward()
            return x.grad

        return step

    net, x = Net(), torch.linspace(-1, 1, 6).reshape(2, 3)
    programs = [lambda run: Outer(run(net)), lambda run: run(net), makes, trains]
    for program in programs:
        compiled = outer(program(inner))
        for _ in range(2):
            torch.testing.assert_close(compiled(x), program(lambda function: function)(x))
    from torch._subclasses.fake_tensor import FakeTensorMode

    alone = weft.compile(lambda x: x.sin())
    with FakeTensorMode():
        assert alone(torch.ones(3)).shape == (3,)
    report = weft.report()
    assert not report.lost, str(report)
"""


@pytest.mark.parametrize(
    ("outer", "inner"), [("by_torch", "weft.compile"), ("weft.compile", "by_torch")]
)
def test_one_compiler_inside_the_other(outer, inner):
    code = textwrap.dedent(PROGRAM).replace("{outer}", outer).replace("{inner}", inner)
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
