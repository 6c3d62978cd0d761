"""Try weft where it was installed from wheels: `nox -s build` runs this outside of the checkout.

Every package's modules are imported from the environment, its licence is there, its C extension
loads, and `weft.compile` compiles a function with its gradient.
"""

import importlib
import importlib.metadata
import sys

import torch
import weft

EXTENSIONS = {
    "weft-guards": "weft_guards._native",
    "weft-capture": "weft_capture.frame._hook",
    "weft-codegen": "weft_codegen.kernels._entry",
}


def check_distribution(name: str) -> None:
    """Assert that a distribution has a licence file, and that its extension loads."""
    distribution = importlib.metadata.distribution(name)
    assert [f for f in distribution.files or () if f.name == "LICENSE"], f"{name}: no LICENSE"
    if name in EXTENSIONS:
        importlib.import_module(EXTENSIONS[name])
    print(f"{name} {distribution.version} ({distribution.metadata['License-Expression']})")


def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a number of some operators that are fused."""
    return torch.nn.functional.gelu(x @ weight).softmax(-1).square().sum()


def main() -> None:
    """Check each distribution, then compare compiled code with eager."""
    assert weft.__file__.startswith(sys.prefix), weft.__file__
    names = {
        requirement.split("==")[0]
        for requirement in importlib.metadata.requires("weft-compiler") or ()
        if requirement.startswith("weft-")
    }
    for name in sorted({"weft-compiler", *names}):
        check_distribution(name)
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16), torch.randn(16, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x, weight), weight)
    (gradient,) = torch.autograd.grad(weft.compile(loss, fullgraph=True)(x, weight), weight)
    torch.testing.assert_close(gradient, expected)
    assert weft.counters["codegen"]["kernels"] >= 2, weft.report()  # forward and backward
    print(weft.report())


if __name__ == "__main__":
    main()
