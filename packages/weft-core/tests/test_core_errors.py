"""Error texts name what happened, why, and what to do."""

import copy
import pickle
import subprocess
import sys
import traceback

import pytest
from weft_core.errors import (
    BackendCompilerError,
    CompilerNotFound,
    InvalidBackend,
    InvalidOption,
    RecompileLimit,
    Unsupported,
    WeftError,
    nearest,
)

EVERY = [
    Unsupported("data-dependent-branch", "the branch needs a value", "use torch.where"),
    BackendCompilerError("codegen.lower", "no rule", "aten.foo", "model.py:3", "report it"),
    CompilerNotFound(["cc", "gcc"]),
    RecompileLimit("too often"),
    InvalidBackend("inducter", ["inductor", "eager"]),
    InvalidOption("epilog_fusion", ["epilogue_fusion"]),
]


def test_nearest_finds_a_misspelling_and_refuses_nonsense():
    assert nearest("inducter", ["eager", "inductor"]) == "inductor"
    assert nearest("zzzzzz", ["eager", "inductor"]) is None


@pytest.mark.parametrize("error", EVERY, ids=lambda e: type(e).__name__)
def test_every_error_is_a_weft_error_and_survives_pickling(error):
    assert isinstance(error, WeftError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(copy.copy(error)) == str(error)


@pytest.mark.parametrize("error", EVERY, ids=lambda e: type(e).__name__)
def test_every_error_can_be_made_again_of_its_text(error):
    again = type(error)(f"{error}\nmore")
    assert str(again) == f"{error}\nmore"
    assert str(pickle.loads(pickle.dumps(again))) == str(copy.deepcopy(again)) == str(again)


def test_texts_have_cause_remedy_and_user_line():
    stack = traceback.extract_stack(limit=1)
    text = str(Unsupported("code", "cause", "remedy", stack))
    assert all(part in text for part in ("[code] cause", "remedy", __file__))
    assert "model.py:3" in str(EVERY[1])
    assert "apt install gcc" in str(EVERY[2])


def test_invalid_names_suggest_and_list():
    assert "did you mean 'inductor'" in str(EVERY[4])
    assert isinstance(EVERY[4], ValueError)


def test_free_threaded_builds_are_refused():
    program = "import sys; sys.abiflags = 't'; import weft_core.errors"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode
    assert "free-threaded" in ended.stderr.splitlines()[-1]
