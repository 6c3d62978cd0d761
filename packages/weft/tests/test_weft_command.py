"""`python -m weft`, and carrying the disk cache about."""

import pytest
import weft
from weft.__main__ import main
from weft_core import cachedir


def test_environment_report(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("weft", "torch", "C compiler", "cache folder"))


def test_cache_info_and_clear(capsys):
    cachedir.write_checked(cachedir.cache_dir("kernels") / "a", b"x" * 100)
    main(["cache"])
    assert "1 files" in capsys.readouterr().out
    main(["cache", "clear"])
    assert "deleted 1 files" in capsys.readouterr().out
    main(["cache", "info"])
    assert "0 files" in capsys.readouterr().out


def test_cache_travels_as_bytes(tmp_path, monkeypatch):
    assert weft.save_cache_artifacts() is None
    cachedir.write_checked(cachedir.cache_dir("kernels/deep") / "a", b"payload")
    blob, info = weft.save_cache_artifacts()
    assert info.entries == ("kernels/deep/a",)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "other"))
    assert weft.load_cache_artifacts(blob) == info
    assert cachedir.read_checked(cachedir.cache_dir("kernels/deep") / "a") == b"payload"
    with pytest.raises(weft.WeftError, match="not a blob"):
        weft.load_cache_artifacts(b"nonsense")
