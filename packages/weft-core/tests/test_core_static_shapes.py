"""Static programs do not load sympy; the stand-in answers as the real module does."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental import symbolic_shapes
from weft_core.fake import make_shape_env, new_symint
from weft_core.static_shapes import _ANSWERS, _StandIn

_STATIC = """
import sys, torch
from weft_core.fake import fake_mode, make_shape_env, to_fake

x = to_fake(fake_mode(), torch.randn(2, 6, 8, requires_grad=True))
with x.fake_mode:
    y = torch.nn.functional.layer_norm(x.relu() + 1, [8]).to(torch.bfloat16).transpose(0, 1)
    y.reshape(-1).float().softmax(0).sum().backward()
assert "sympy" not in sys.modules

name = "torch.fx.experimental.symbolic_shapes"
borrower = {}
imports = f"from {name} import guard_or_false, GuardOnDataDependentSymNode"
exec(imports, borrower)
assert "sympy" not in sys.modules
assert borrower["guard_or_false"](True) is True

late = to_fake(fake_mode(make_shape_env()), torch.randn(6, 8), [0])
assert isinstance(late.shape[0], torch.SymInt)
assert "sympy" in sys.modules
real = sys.modules[name]
assert real.__file__.endswith("symbolic_shapes.py")
assert torch.fx.experimental.symbolic_shapes is real
assert borrower["guard_or_false"] is real.guard_or_false
assert borrower["GuardOnDataDependentSymNode"] is real.GuardOnDataDependentSymNode
"""


def test_static_shapes_load_no_sympy_and_symbolic_ones_the_real_module() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STATIC], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


ASKED: dict[str, list[tuple[Any, ...]]] = {
    "guard_or_true": [(True,), (False,)],
    "guard_or_false": [(True,), (False,)],
    "guard_size_oblivious": [(True,), (False,)],
    "statically_known_true": [(True,), (False,)],
    "expect_true": [(True,), (False,)],
    "guard_bool": [(True,), (False,)],
    "guard_int": [(3,)],
    "guarding_hint_or_throw": [(3,)],
    "sym_eq": [(3, 3), (3, 4), ([2, 3], (2, 3)), ((2, 3), (2, 4)), ((2,), (2, 3)), ((), ())],
    "sym_and": [(True, False), (True, True, True), (False,)],
    "sym_or": [(False, True), (False, False), (True,)],
    "has_guarding_hint": [(3,)],
    "has_hint": [(3,)],
    "size_hint": [(3,)],
    "is_nested_int": [(3,)],
    "free_unbacked_symbols": [((2, 3),), (torch.ones(2),)],
    "has_free_unbacked_symbols": [((2, 3),), (torch.ones(2),)],
    "_iterate_exprs": [((2, 3),), (torch.ones(2),)],
    "_iterate_nodes": [((2, 3),), (torch.ones(2),)],
    "compute_unbacked_bindings": [(None, torch.ones(2))],
}
FUNCTIONS = {name: answer for name, answer in _ANSWERS.items() if name in ASKED}


def test_every_answer_is_asked_for() -> None:
    classes = {name for name, answer in _ANSWERS.items() if type(answer) is type}
    assert set(FUNCTIONS) | classes == set(_ANSWERS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted(name for name in ASKED if hasattr(symbolic_shapes, name)))
def test_answers_for_plain_values_are_the_real_ones(name: str) -> None:
    for args in ASKED[name]:
        expected = getattr(symbolic_shapes, name)(*args)
        answered = FUNCTIONS[name](*args)
        if not isinstance(expected, bool | int | None):
            expected, answered = list(expected), list(answered)
        assert answered == expected, args


@pytest.mark.parametrize("name", ["guard_or_true", "sym_eq", "sym_and", "sym_or", "is_nested_int"])
def test_symbolic_values_are_passed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = new_symint(make_shape_env(), 7, "x")
    args = (size, 7) if name == "sym_eq" else (size,) if name == "is_nested_int" else (size > 3,)
    stand_in, asked = _StandIn(symbolic_shapes.__name__), []
    real = SimpleNamespace(**{name: lambda *given: asked.append(given)})
    monkeypatch.setattr(stand_in, "load", lambda: real)
    getattr(stand_in, name)(*args)
    assert asked == [args]
