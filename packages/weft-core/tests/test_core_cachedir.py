"""The cache folder is private; damaged files read as absent."""

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from weft_core import cachedir


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))


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
    assert [p.name for p in path.parent.iterdir()] == ["entry"]


def test_failed_write_leaves_nothing(monkeypatch):
    path = cachedir.cache_dir() / "entry"

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(cachedir.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cachedir.atomic_write(path, b"data")
    assert list(path.parent.iterdir()) == []
