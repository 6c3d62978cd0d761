"""`python -m weft`, and carrying the disk cache about."""

import hashlib
import io
import subprocess
import sys
import tarfile

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
    cachedir.write_checked(cachedir.cache_dir("kernels") / "a", b"payload")
    blob, info = weft.save_cache_artifacts()
    assert info.entries == ("kernels/a",)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "other"))
    assert weft.load_cache_artifacts(blob) == info
    assert cachedir.read_checked(cachedir.cache_dir("kernels") / "a") == b"payload"
    for bad in (b"nonsense", blob[:-1], blob[:-3] + b"abc", _blob_of("key")):
        with pytest.raises(weft.WeftError, match="not a blob"):
            weft.load_cache_artifacts(bad)


def _blob_of(name):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return b"weft-cache1" + hashlib.sha256(packed.getvalue()).digest() + packed.getvalue()


@pytest.mark.parametrize("name", ["../a/b", "/kernels/a", "kernels/../../a", "tmp/a", "failed/a.c"])
def test_a_blob_writes_entries_and_nothing_else(name):
    with pytest.raises(weft.WeftError, match="not a blob"):
        weft.load_cache_artifacts(_blob_of(name))


_TRAIN = """
import sys, pathlib, torch, weft
blob = pathlib.Path(sys.argv[1])
if blob.exists():
    weft.load_cache_artifacts(blob.read_bytes())
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8)
model(x).sum().backward()
wanted = model[0].weight.grad.clone()
model.zero_grad()
weft.compile(model)(x).sum().backward()
torch.testing.assert_close(model[0].weight.grad, wanted)
print(weft.counters["codegen"]["graphs"], weft.counters["codegen"]["known_graphs"])
if not blob.exists():
    blob.write_bytes(weft.save_cache_artifacts()[0])
"""


@pytest.mark.slow
def test_an_artifact_saves_another_machine_the_lowering(tmp_path, monkeypatch):
    said = []
    for folder in ("first", "second"):
        monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / folder))
        command = [sys.executable, "-c", _TRAIN, str(tmp_path / "blob")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said.append(done.stdout.split())
    assert said == [["2", "0"], ["2", "2"]]
