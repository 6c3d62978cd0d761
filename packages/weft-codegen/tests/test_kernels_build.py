"""Building: two caches, damage, many writers, a missing compiler, source that is not C."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from kernel_programs import softmax_program, unary
from weft_codegen.config import settings
from weft_codegen.kernels import build, compile_program, emit_program
from weft_codegen.kernels.build import Sources, split
from weft_codegen.kernels.toolchain import find
from weft_core import events
from weft_core.cachedir import read_checked
from weft_core.errors import BackendCompilerError, CompilerNotFound, CompilerUnavailable


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _forbid_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def _fake_compiler(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cc-of-the-test"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


HANGS = "echo $$ >> $0.pids; sleep 600 & echo $! >> $0.pids; wait"


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    quick: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = f'case $* in *probe*) exec cc "$@";; esac; {HANGS}' if quick else HANGS
    compiler = _fake_compiler(tmp_path, hangs)
    monkeypatch.setenv("CC", str(compiler))
    with settings.patch(compiler_timeout=0.5):
        wanted = "longer than 0.5 s" if quick else "empty program: it does not end"
        with pytest.raises(CompilerUnavailable, match=wanted):
            compile_program(softmax_program(8, 16))
        asked = len(Path(f"{compiler}.pids").read_text().split())
        with pytest.raises(CompilerUnavailable):
            compile_program(softmax_program(8, 32))
    pids = Path(f"{compiler}.pids").read_text().split()
    assert (len(pids) > asked) is quick  # one that cannot compile at all is not asked again
    assert [pid for pid in pids if _runs(pid)] == []
    assert list((cache / "tmp").iterdir()) == []


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


NO_COMPILERS = {
    "makes nothing": "exit 0",
    "refuses": "echo cannot; exit 1",
    "no program": None,
    "crashes": 'case $* in *probe*) exec cc "$@";; esac; '
    "echo 'cc: fatal error: Killed signal terminated program cc1'; exit 1",
}


@pytest.mark.parametrize("kind", NO_COMPILERS)
def test_what_is_no_compiler_is_not_a_bug_to_report(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = _fake_compiler(tmp_path, NO_COMPILERS[kind] or "")
    if NO_COMPILERS[kind] is None:
        compiler.write_text("\x7fELF nonsense")
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(CompilerUnavailable) as caught:
        compile_program(softmax_program(8, 16))
    assert "report it" not in str(caught.value)


@pytest.mark.parametrize("wanted", ["gcc 'x", "/nowhere/gcc -O2", "''"])
@pytest.mark.filterwarnings("ignore")
def test_a_cc_that_names_nothing_is_told(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events.notified.clear()
    monkeypatch.setenv("CC", wanted)
    compile_program(softmax_program(8, 16))
    assert any(f"CC={wanted} is not used" in text for text in events.notified)


@pytest.mark.filterwarnings("ignore")
def test_a_full_cache_folder_is_left_for_a_temporary_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = f"case $* in *{cache}*) echo 'as: No space left on device'; exit 1;; esac; exec cc"
    monkeypatch.setenv("CC", str(_fake_compiler(tmp_path, f'{full} "$@"')))
    graph = compile_program(softmax_program(8, 16))
    assert not graph.path.is_relative_to(cache) and graph.path.is_relative_to(tmp_path)
    full = full.replace(str(cache), str(tmp_path))
    monkeypatch.setenv("CC", str(_fake_compiler(tmp_path, f'{full} "$@"')))
    with pytest.raises(CompilerUnavailable, match="No space left"):
        compile_program(softmax_program(8, 32))


def test_an_entry_of_another_name_is_not_taken(cache: Path) -> None:
    paths = [build.build(emit_program(unary(name, torch.float32, 8))[0]) for name in ("exp", "sin")]
    one, other = (path.read_bytes() for path in paths)
    for path in paths:
        path.unlink()
    paths[0].write_bytes(other)
    paths[1].write_bytes(one)
    for path in paths:
        path.chmod(0o600)
    graph = compile_program(unary("exp", torch.float32, 8))
    x = torch.randn(8)
    torch.testing.assert_close(graph(x)[0], x.exp())


def test_a_program_built_before_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_program(softmax_program(8, 16))
    _forbid_processes(monkeypatch)
    second = compile_program(softmax_program(8, 16))
    assert second.path == first.path


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_program_is_built_again(
    damage: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = build.build(emit_program(softmax_program(8, 16))[0])
    data = path.read_bytes()
    changed = {"truncated": data[:100], "changed": data[:200] + b"?" + data[201:], "empty": b""}
    path.unlink()
    path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING, "weft.core.cachedir"):
        graph = compile_program(softmax_program(8, 16))
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    expected = ((x.softmax(-1)) @ w).softmax(-1)
    torch.testing.assert_close(graph(x, w)[0], expected)
    assert read_checked(path) is not None
    assert "damaged cache file" in caplog.text


def test_a_damaged_object_is_compiled_again(cache: Path) -> None:
    build.build(emit_program(unary("exp", torch.float32, 8))[0])
    for path in [*(cache / "objects").iterdir(), *(cache / "programs").iterdir()]:
        path.write_bytes(b"garbage")
    graph = compile_program(unary("exp", torch.float32, 8))
    x = torch.randn(8)
    torch.testing.assert_close(graph(x)[0], x.exp())


def test_a_known_kernel_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = emit_program(softmax_program(8, 16))[0]
    build.build(sources)
    compiled: list[str] = []
    compile_all = build.compile_all

    def record(jobs: list[build._Job], tools: build.Toolchain) -> None:
        compiled.extend(job.source.name for job in jobs)
        compile_all(jobs, tools)

    monkeypatch.setattr(build, "compile_all", record)
    build.build(Sources(sources.host + "\n/* another program */", sources.kernels))
    assert compiled == ["host.c"]


@pytest.mark.slow
def test_processes_may_build_the_same_program_at_once(cache: Path) -> None:
    code = (
        "import torch\n"
        "from kernel_programs import softmax_program\n"
        "from weft_codegen.kernels import compile_program\n"
        "graph = compile_program(softmax_program(4, 32))\n"
        "x, w = torch.randn(4, 32), torch.randn(32, 32)\n"
        "torch.testing.assert_close(graph(x, w)[0], (x.softmax(-1) @ w).softmax(-1))\n"
    )
    here = Path(__file__).parent
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=here) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert not list((cache / "tmp").iterdir())


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompilerNotFound, match="apt install gcc"):
        compile_program(softmax_program(8, 16))


@pytest.mark.parametrize(("name", "own"), [("gcc", True), ("clang", False)])
def test_flags_of_gccs_own_go_to_gcc_only(
    name: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / name
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert ("-fno-split-loops" in find().kernel_flags) is own


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
def test_clang_builds_programs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "clang")
    x = torch.randn(100)
    (result,) = compile_program(unary("exp", torch.float32, 100))(x)
    torch.testing.assert_close(result, x.exp())


def test_source_that_does_not_compile_is_kept_and_named(cache: Path) -> None:
    with pytest.raises(BackendCompilerError) as caught:
        build.build(Sources("this is not C;", {}))
    (kept,) = (cache / "failed").iterdir()
    assert str(kept) in str(caught.value)
    assert "this is not C;" in kept.read_text()


def test_kernels_are_dealt_into_units_of_similar_size() -> None:
    kernels = {f"k{n}": "x" * (1000 * n) for n in range(1, 9)}
    units = split(kernels, 3)
    sizes = [sum(len(kernels[name]) for name in unit) for unit in units]
    assert len(units) == 3
    assert max(sizes) - min(sizes) <= 8000
    assert sorted(name for unit in units for name in unit) == sorted(kernels)
    assert split({}, 3) == []
