"""The cache folder is private, or a temporary one; what is not this user's reads as absent."""

import os
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from weft_core import _privatedir, cachedir, events
from weft_core.errors import CompilerUnavailable


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_privatedir.tempfile, "tempdir", str(tmp_path))
    cachedir._damaged.clear()
    events.notified.clear()


def leftovers(path):
    return list((path.parent / "tmp").iterdir())


def test_folder_is_private_and_overridable(tmp_path):
    path = cachedir.cache_dir("kernels")
    assert path == tmp_path / "cache" / "kernels"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_default_place_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cachedir.cache_dir() == tmp_path / "xdg" / "weft"


@pytest.mark.parametrize("payload", [b"", b"x", b"abc" * 1000])
def test_round_trip(payload):
    path = cachedir.cache_dir() / "entry"
    cachedir.write_checked(path, payload)
    assert cachedir.read_checked(path) == payload


@pytest.mark.parametrize("cut", [0, 3, 20, 45])
def test_damage_reads_as_absent_and_is_logged(cut, caplog):
    path = cachedir.cache_dir() / "entry"
    cachedir.write_checked(path, b"payload that matters")
    path.write_bytes(path.read_bytes()[:cut] + b"!")
    assert cachedir.read_checked(path) is None
    assert "damaged" in caplog.text


def test_absent_is_none():
    assert cachedir.read_checked(cachedir.cache_dir() / "nothing") is None


def test_many_writers_leave_one_whole_file():
    path = cachedir.cache_dir() / "entry"
    payloads = [bytes([n]) * 10_000 for n in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: cachedir.write_checked(path, data), payloads))
    assert cachedir.read_checked(path) in payloads
    assert sorted(p.name for p in path.parent.iterdir()) == ["entry", "key", "tmp"]
    assert leftovers(path) == []


MAKER = """
import fcntl, sys, time
from pathlib import Path
from weft_core import cachedir

def refuse(*arguments):
    raise OSError("no locks here")

if sys.argv[2] == "without locks":
    fcntl.flock = refuse
path = cachedir.cache_dir("made") / "entry"
with cachedir.made_once(path):
    if cachedir.read_checked(path) is None:
        time.sleep(0.3)
        cachedir.write_checked(path, b"whole" * 1000)
        with open(sys.argv[1], "a") as file:
            file.write("made ")
assert cachedir.read_checked(path) == b"whole" * 1000
"""


@pytest.mark.slow
@pytest.mark.parametrize("locks", ["with locks", "without locks"])
def test_of_many_processes_one_makes_an_entry(locks, tmp_path):
    command = [sys.executable, "-c", MAKER, str(tmp_path / "log"), locks]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "made "
    assert leftovers(cachedir.cache_dir("made")) == []


@pytest.mark.parametrize("owner", ["gone from here", "elsewhere", "nobody yet"])
def test_who_does_not_finish_is_not_waited_for(owner):
    path = cachedir.cache_dir("made") / "entry"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    text = {"gone from here": f"{os.uname().nodename} {gone.pid}", "elsewhere": "other-host 1"}
    claim = cachedir.cache_dir("tmp") / "making-entry"
    claim.write_text(text.get(owner, ""))
    with cachedir.made_once(path, patience=60.0 if owner == "gone from here" else 0.1):
        assert str(os.getpid()) in claim.read_text()
    assert not claim.exists()


def test_failed_write_leaves_nothing(monkeypatch):
    path = cachedir.cache_dir() / "entry"

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(cachedir.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cachedir.atomic_write(path, b"data")
    assert not path.exists() and leftovers(path) == []


def entry(payload=b"payload"):
    path = cachedir.cache_dir("kernels") / "entry"
    cachedir.write_checked(path, payload)
    return path


def renamed(path):
    return path.rename(path.with_name("other"))


def moved(path):
    return path.rename(cachedir.cache_dir("programs") / path.name)


def with_another_key(path):
    (path.parent.parent / "key").write_bytes(bytes(32))
    return path


def with_a_key_that_others_can_read(path):
    (path.parent.parent / "key").chmod(0o644)
    return path


def of_another_user(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    return path


def writable_by_others(path):
    path.chmod(0o666)
    return path


def a_link(path):
    shutil.move(path, path.with_name("target"))
    path.symlink_to("target")
    return path


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)
    return path


CHANGES = (
    renamed, moved, with_another_key, with_a_key_that_others_can_read, of_another_user,
    writable_by_others, a_link, a_pipe,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_this_user_did_not_write_there_reads_as_absent(change, monkeypatch):
    path = entry()
    assert cachedir.read_checked(path) == b"payload"
    more = (monkeypatch,) if change is of_another_user else ()
    path = change(path, *more)
    assert cachedir.read_checked(path) is None
    monkeypatch.undo()


def test_the_key_is_this_users_alone_and_made_once():
    path = entry()
    key = path.parent.parent / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    entry(b"more")
    assert key.read_bytes() == before and len(before) == 32


def test_folders_that_others_can_write_to_are_closed(tmp_path):
    for folder in (tmp_path / "cache", tmp_path / "cache" / "kernels"):
        folder.mkdir()
        folder.chmod(0o777)
    assert stat.S_IMODE(entry().parent.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o755


def a_file(root):
    root.write_text("")


def a_dangling_link(root):
    root.symlink_to("nowhere")


def a_file_above(root):
    shutil.rmtree(root.parent / "above", ignore_errors=True)
    (root.parent / "above").write_text("")
    os.environ["WEFT_CACHE_DIR"] = str(root.parent / "above" / "cache")


def a_file_inside(root):
    root.mkdir()
    (root / "kernels").write_text("")


def a_link_inside(root):
    (root / "target").mkdir(parents=True)
    (root / "kernels").symlink_to("target")


PLACES = (a_file, a_dangling_link, a_file_above, a_file_inside, a_link_inside)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", PLACES, ids=lambda f: f.__name__)
def test_a_place_that_cannot_be_used_is_replaced_and_told_once(make, tmp_path):
    make(tmp_path / "cache")
    for _ in range(2):
        path = entry()
        assert cachedir.read_checked(path) == b"payload"
    assert path.parent.parent.name.startswith("weft-")
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert len(events.notified) == 1 and "cannot be used" in next(iter(events.notified))


@pytest.mark.filterwarnings("ignore")
def test_no_place_at_all_is_an_error_that_a_compilation_survives(tmp_path, monkeypatch):
    a_file(tmp_path / "cache")
    monkeypatch.setattr(_privatedir.tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(CompilerUnavailable, match="no temporary folder"):
        cachedir.cache_dir()


@pytest.mark.filterwarnings("ignore")
def test_a_full_disk_is_told_once_and_left_once(tmp_path, monkeypatch):
    path = entry()
    with monkeypatch.context() as patch:
        patch.setattr(cachedir.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        for _ in range(2):
            cachedir.try_write(path, b"other")
    assert len(events.notified) == 1 and cachedir.read_checked(path) == b"payload"
    cachedir.abandon(tmp_path / "cache", OSError(28, "full"))
    cachedir.abandon(tmp_path / "cache", OSError(28, "full"))  # of another thread
    assert cachedir.cache_dir() != tmp_path / "cache"
    with pytest.raises(CompilerUnavailable, match="full"):
        cachedir.abandon(cachedir.cache_dir(), OSError(28, "full"))


KILLED = """
import os, sys
from weft_core import cachedir
with cachedir.scratch("build-") as folder:
    (folder / "half").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def end(process):
    process.kill()
    process.communicate()


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not():
    processes = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append((process, process.stdout.readline().strip()))
    (dead, left), (alive, used) = processes
    end(dead)
    entry()  # sweeps: somebody works there
    assert Path(left).exists() and Path(used).exists()
    os.utime(left, (time.time() - 1e6,) * 2)
    _privatedir._swept.clear()
    entry()
    assert not Path(left).exists() and Path(used).exists()
    end(alive)
    _privatedir._swept.clear()
    entry()
    assert not Path(used).exists()


@pytest.mark.slow
def test_a_temporary_folder_goes_with_its_process(tmp_path):
    a_file(tmp_path / "cache")
    code = "from weft_core.cachedir import cache_dir; print(cache_dir('kernels'))"
    for wait in ("", "; import os; os.kill(os.getpid(), 9)"):
        done = subprocess.run(
            [sys.executable, "-c", code + wait],
            env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        made = done.stdout.strip()
        assert made.startswith(str(tmp_path / "weft-"))
        assert Path(made).exists() is bool(wait)
    root = Path(made).parent
    os.utime(root, (time.time() - 1e3,) * 2)
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True
    )
    assert not Path(root).exists()
