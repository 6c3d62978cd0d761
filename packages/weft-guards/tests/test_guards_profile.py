"""What varies is kept for the next process, by program and code; no damage to a file is noticed."""

import json
import sys
import threading

import pytest
import torch
from weft_core import cachedir
from weft_core.events import notified
from weft_guards import profile
from weft_guards.config import settings
from weft_guards.dynamic import DynamicPolicy
from weft_guards.profile import Profile
from weft_guards.sources import LocalSource

X, N = LocalSource("x"), LocalSource("n")


def program(x, n):
    return x * n


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    with settings.patch(automatic_dynamic_local_pgo=True):
        yield tmp_path


@pytest.fixture
def another_process(monkeypatch):
    """Forget what this process has written, as another one would not know it."""
    return lambda: monkeypatch.setattr(profile, "_written", set())


def policy(dynamic=None, code=program.__code__):
    return DynamicPolicy(dynamic, Profile(code))


def learn():
    learning = policy()
    for size in (4, 5):
        learning.dims(X, torch.empty(size, 3))
        learning.int_is_dynamic(N, size)
    learning.store_profile()


def test_what_varied_is_symbolic_at_once_in_the_next_process(another_process):
    learn()
    another_process()
    later = policy()
    assert later.dims(X, torch.empty(7, 3)) == (True, False)
    assert later.dims(X, torch.empty(7)) == (False,)
    assert later.dims(N, torch.empty(7, 3)) == (False, False)
    assert later.int_is_dynamic(N, 7)
    assert not later.int_is_dynamic(X, 7)
    assert not later.int_is_dynamic(N, 1)


def test_what_is_symbolic_at_once_is_told_with_its_file(folder, another_process):
    learn()
    another_process()
    before = dict(notified)
    policy().dims(X, torch.empty(7, 3))
    (text,) = notified.keys() - before.keys()
    (path,) = folder.rglob("*.json")
    assert f"size 0 of {X}" in text and str(N) in text and str(path) in text
    assert "WEFT_PGO=0" in text and "cache clear" in text and __file__ in text


def test_it_adds_up(another_process):
    learn()
    another_process()
    more = policy()
    more.dims(X, torch.empty(7, 3))
    more.dims(X, torch.empty(7, 4))
    more.store_profile()
    another_process()
    assert policy().dims(X, torch.empty(7, 3)) == (True, True)


def test_a_process_does_not_read_what_it_wrote():
    learn()
    assert policy().dims(X, torch.empty(7, 3)) == (False, False)


def test_only_the_automatic_policy_uses_it(another_process):
    learn()
    another_process()
    assert policy(False).dims(X, torch.empty(7, 3)) == (False, False)
    with settings.patch(automatic_dynamic_local_pgo=False):
        assert policy().dims(X, torch.empty(7, 3)) == (False, False)
    with settings.patch(automatic_dynamic_shapes=False):
        assert policy().dims(X, torch.empty(7, 3)) == (False, False)


def test_nothing_is_written_without_need(folder):
    static = policy()
    static.dims(X, torch.empty(4))
    static.store_profile()
    with settings.patch(automatic_dynamic_local_pgo=False):
        learn()
    assert list(folder.rglob("*.json")) == []


def test_other_code_has_another_profile(another_process):
    learn()
    another_process()
    changes = {
        "co_name": {"co_qualname": "other"},
        "line": {"co_firstlineno": program.__code__.co_firstlineno + 1},
        "file": {"co_filename": "other.py"},
        "code": {"co_code": program.__code__.co_code[:-2] + bytes([9, 0])},
        "constant": {"co_consts": (*program.__code__.co_consts, 3)},
    }
    for change in changes.values():
        assert not any(policy(code=program.__code__.replace(**change)).dims(X, torch.empty(7, 3)))


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"[1, 2]", b"{}", b"[[[]]]", b"null", b"[[null, {}]]", b"\xff"],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_damaged_files_are_empty_ones(folder, content, sealed):
    learn()
    (path,) = folder.rglob("*.json")
    profile._written.clear()
    (cachedir.write_checked if sealed else cachedir.atomic_write)(path, content)
    assert policy().dims(X, torch.empty(7, 3)) == (False, False)
    learn()
    profile._written.clear()
    assert policy().dims(X, torch.empty(7, 3)) == (True, False)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_cannot_be_used(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(folder / "file"))
    learn()
    assert policy().dims(X, torch.empty(7, 3)) == (False, False)


def test_many_writers_leave_a_whole_file(folder):
    ours = Profile(program.__code__)
    threads = [threading.Thread(target=ours.add, args=([(f"L[{index}]",)],)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = folder.rglob("*.json")
    facts = json.loads(cachedir.read_checked(path))
    assert facts
    assert {tuple(fact) for fact in facts} <= {(f"L[{index}]",) for index in range(8)}


def test_jobs_have_profiles_of_their_own(another_process):
    with settings.patch(job_id="training/7"):
        learn()
        another_process()
        assert policy().int_is_dynamic(N, 9)
    assert not policy().int_is_dynamic(N, 9)


def test_programs_that_share_code_have_profiles_of_their_own(another_process, monkeypatch):
    """The forward of a library's module is the code of many programs."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "/programs/train.py", raising=False)
    learn()
    another_process()
    assert policy().int_is_dynamic(N, 9)
    monkeypatch.setattr(main, "__file__", "/programs/serve.py")
    assert not policy().int_is_dynamic(N, 9)
    with settings.patch(job_id="both"):
        learn()
        another_process()
        monkeypatch.setattr(main, "__file__", "/programs/train.py")
        assert policy().int_is_dynamic(N, 9)
