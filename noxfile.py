"""What can be run here: `nox -l` lists the sessions, `nox -s <name>` runs one.

The two that a newcomer needs are `nox -s demo` and `nox -s tests`. Every session
installs what it needs into its own virtual environment under `.nox/`, under the
versions of constraints.txt.
"""

import os
import re
import shutil
import sys
import tomllib
from functools import partial
from pathlib import Path

import nox

ROOT = Path(__file__).parent
# Folders, in the order in which they may import each other; weft's distribution is weft-compiler.
PACKAGES = [
    "weft-core",
    "weft-guards",
    "weft-capture",
    "weft-aot",
    "weft-compiled-autograd",
    "weft-codegen",
    "weft",
]
SOURCES = [f"packages/{name}/src" for name in PACKAGES]
OTHER_CODE = ["integration", "benchmarks", "examples", "docs", "noxfile.py"]

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def _table(package: str) -> dict:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def _project(package: str) -> dict:
    return _table(package)["project"]


def _build_tools() -> list[str]:
    """Return what the packages need to be built."""
    return sorted({tool for name in PACKAGES for tool in _table(name)["build-system"]["requires"]})


def _local_dependencies(package: str) -> list[str]:
    """The weft packages that `package` declares, and theirs, in import order."""
    wanted = set()
    todo = [package]
    while todo:
        declared = _project(todo.pop())["dependencies"]
        names = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
        new = (names & set(PACKAGES)) - wanted
        wanted |= new
        todo += new
    return [name for name in PACKAGES if name in wanted]


def _torch_index() -> list[str]:
    """An index with torch's CPU wheels (a tenth of the size), where WEFT_TORCH_INDEX names one."""
    index = os.environ.get("WEFT_TORCH_INDEX")
    return ["--extra-index-url", index] if index else []


def _constraints() -> list[str]:
    """The pinned torch, unless WEFT_TORCH asks for another one (as `torch==2.11.*`)."""
    return [] if "WEFT_TORCH" in os.environ else ["-c", "constraints.txt"]


def _install_torch(session: nox.Session) -> None:
    wanted = os.environ.get("WEFT_TORCH", "torch")
    # What packages are built with, besides.
    session.install(*_constraints(), *_torch_index(), wanted, *_build_tools())


def _install(session: nox.Session, packages: list[str], tested: list[str], editable: bool) -> None:
    """Install torch, then packages of the repository with what they declare and nothing else.

    `tested` are those of them whose extra `test` is wanted too.
    """
    _install_torch(session)
    arguments: list[str] = []
    for name in packages:
        extras = _project(name).get("optional-dependencies", {})
        path = f"./packages/{name}" + ("[test]" if name in tested and "test" in extras else "")
        arguments += ["-e", path] if editable else [path]
    session.install("--no-build-isolation", *_constraints(), *arguments)


def _install_all(session: nox.Session, *requirements: str) -> None:
    """Install every package in place, and what the models and tests of integration/ need."""
    _install(session, PACKAGES, tested=PACKAGES, editable=True)
    session.install("-r", "integration/requirements.txt", *requirements, *_constraints())


def _pytest(session: nox.Session, *arguments: str) -> None:
    session.run("python", "-m", "pytest", *(session.posargs or arguments))


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of every package, and the integration tests, in one environment."""
    _all_tests(session, "not exhaustive")


@nox.session
def exhaustive(session: nox.Session) -> None:
    """Run what `tests` leaves out: further cases of tests that take long."""
    _all_tests(session, "exhaustive")


def _all_tests(session: nox.Session, marked: str) -> None:
    _install_all(session)
    # Two processes of one thread each: with OpenMP's threads on top they would wait on each other.
    session.env["OMP_NUM_THREADS"] = "1"
    workers = ("-n", "2", "--dist", "worksteal")
    _pytest(session, "packages", "integration", "-m", marked, *workers, "-q")


def _package_session(package: str) -> None:
    @nox.session(name=f"tests-{package}")
    def run(session: nox.Session) -> None:
        needed = [*_local_dependencies(package), package]
        _install(session, needed, tested=[package], editable=False)
        _pytest(session, f"packages/{package}/tests")

    run.__doc__ = f"Test {package} with its declared dependencies only, to find undeclared imports."


for _name in PACKAGES:
    _package_session(_name)


@nox.session
def fast(session: nox.Session) -> None:
    """Run the tests that are not marked slow, package by package: -- weft-aot weft-guards."""
    _install(session, PACKAGES, tested=PACKAGES, editable=True)
    session.env["OMP_NUM_THREADS"] = "1"
    for name in session.posargs or PACKAGES:
        folder = f"packages/{name}/tests"
        session.run("python", "-m", "pytest", folder, "-m", "not slow", "-q")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style (ruff), import contracts (import-linter) and the rules of layout."""
    session.install("ruff==0.17.5", "import-linter==2.16")
    session.run("ruff", "check", "packages", *OTHER_CODE)
    session.run("ruff", "format", "--check", "--exclude", "*.md", "packages", *OTHER_CODE)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": os.pathsep.join(SOURCES)})
    session.run("python", "integration/check_layout.py")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check the types of every package with mypy --strict."""
    _install_torch(session)
    session.install("mypy==2.4.1", "numpy")
    session.run("mypy", "--strict", *(session.posargs or SOURCES))


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels and source archives of all packages in dist/, install and try the wheels."""
    session.install("build", *_build_tools(), *_constraints())
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    leftovers = shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__")
    for name in PACKAGES:
        # A copy without what builds in place left; the wheel is built from the source archive.
        folder = Path(session.create_tmp(), name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT / "packages" / name, folder, ignore=leftovers)
        session.run("python", "-m", "build", "-n", "-o", str(dist), str(folder))
    for file in sorted(dist.iterdir()):
        session.log(f"{file.stat().st_size:>9,} bytes  {file.name}")
    _try_wheels(session, dist)


def _try_wheels(session: nox.Session, wheels: Path) -> None:
    """Install the wheels of a folder into an empty environment, and compile a function there."""
    folder = Path(session.create_tmp(), "environment").resolve()
    session.run("python", "-m", "venv", "--clear", str(folder))
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q"]
    declared = {item for name in PACKAGES for item in _project(name)["dependencies"]}
    others = sorted(item for item in declared if not item.startswith("weft-"))
    run = partial(session.run, external=True)
    run(*pip, *_constraints(), *_torch_index(), os.environ.get("WEFT_TORCH", "torch"), *others)
    run(*pip, "--no-index", "--find-links", str(wheels), "weft-compiler")
    script = str(ROOT / "integration/try_installed.py")
    # From another folder and in isolated mode, so that nothing of the checkout is imported.
    with session.chdir(folder):
        cache = {"WEFT_CACHE_DIR": str(folder / "cache")}
        run(str(folder / "bin/python"), "-I", script, env=cache)


@nox.session(name="try-wheels")
def try_wheels(session: nox.Session) -> None:
    """Install the wheels that are in dist/ into an empty environment and try them."""
    _try_wheels(session, ROOT / "dist")


@nox.session
def integration(session: nox.Session) -> None:
    """Run whole models through the whole stack and compare with eager."""
    _install_all(session)
    _pytest(session, "integration")


@nox.session
def docs(session: nox.Session) -> None:
    """Run the code of the tutorials, then build the documentation."""
    _install_all(session, "sphinx==9.0.4", "myst-parser==5.2.0", "furo==2025.12.19")
    session.run("python", "-m", "pytest", "-q", "integration/test_integration_docs.py")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session
def changelog(session: nox.Session) -> None:
    """Show the changelog that the fragments of docs/changes make; `-- --yes` writes it."""
    session.install("towncrier==26.9.0")
    session.run("towncrier", "build", *(session.posargs or ["--draft"]))


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT in eager and with weft side by side, and show both."""
    _install(session, PACKAGES, tested=[], editable=True)
    session.install("matplotlib", "numpy")
    session.run("python", "examples/train_gpt.py", *session.posargs)


def _example_on_two_processes(session: nox.Session, script: str) -> None:
    _install(session, PACKAGES, tested=[], editable=True)
    session.env["OMP_NUM_THREADS"] = "1"
    launcher = ("torchrun", "--standalone", "--nproc-per-node", "2")
    session.run(*launcher, f"examples/{script}", *session.posargs)


@nox.session
def ddp(session: nox.Session) -> None:
    """Train a small GPT with DistributedDataParallel on two processes, eager and weft."""
    _example_on_two_processes(session, "train_gpt_ddp.py")


@nox.session
def fsdp(session: nox.Session) -> None:
    """Train a small GPT with fully_shard on two processes, eager and weft."""
    _example_on_two_processes(session, "train_gpt_fsdp.py")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure weft, torch.compile and eager in turn, print memory and bandwidth; fill README."""
    _install_all(session)
    session.run("python", "benchmarks/compare.py", "--write-readme", *session.posargs)


@nox.session
def runtimes(session: nox.Session) -> None:
    """Compare weft with ONNX Runtime and OpenVINO on this CPU; fill docs/.../runtimes.md."""
    _install_all(session)
    session.install("onnxruntime", "onnx", "onnxscript", "openvino")
    words = session.posargs or ["--cpu-time", "--write"]
    session.run("python", "benchmarks/runtimes.py", *words)


@nox.session
def coverage(session: nox.Session) -> None:
    """Compare every operator of torch's database with eager; write both pages on operators."""
    _install_all(session)
    session.run("python", "benchmarks/op_coverage.py", "aten", "--write")
    session.run("python", "benchmarks/op_coverage.py", "run", *session.posargs)
    session.run("python", "benchmarks/op_coverage.py", "report", "--write")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run random programs in eager and under weft: -- --generator all --seeds 0:100 --minutes 5."""
    _install_all(session)
    default = ["--generator", "all", "--minutes", "10"]
    session.run("python", "-m", "integration.fuzz", *(session.posargs or default))


@nox.session
def stress(session: nox.Session) -> None:
    """Search for what threads, killed compiles and broken cache folders lose: -- kills."""
    _install_all(session)
    for what in session.posargs or ("threads", "kills", "faults"):
        session.run("python", "-m", "integration.stress", what)


@nox.session(name="fuzz-codegen")
def fuzz_codegen(session: nox.Session) -> None:
    """Run random operator programs with generated code under AddressSanitizer: -- --minutes 5."""
    _install_all(session)
    default = ["--generator", "operators,dynamic-operators", "--minutes", "10"]
    default += ["--sanitizer", "address"]
    session.run("python", "-m", "integration.fuzz", *default, *session.posargs)


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
@nox.parametrize("torch", ["2.11", "2.12", "2.13", "2.14", "2.15"])
def versions(session: nox.Session, torch: str) -> None:
    """Run the packages' tests on a torch and a CPython: a cell of docs/coverage/versions.md."""
    os.environ["WEFT_TORCH"] = f"torch=={torch}.*"
    _install(session, PACKAGES, tested=PACKAGES, editable=True)
    interpreter = str(Path(session.bin, "python"))
    session.run("python", "integration/versions.py", interpreter, "--", *session.posargs)


@nox.session(venv_backend="none")
def size(session: nox.Session) -> None:
    """Count the lines of every package; fail where one is over its budget in pyproject.toml."""
    session.run(sys.executable, "integration/check_size.py")
