"""Check the rules of layout that no linter knows.

A file, of C too, has at most 500 lines and a function 60. No package imports what it does not
declare, or what is not in another's interface. No modules import each other in a circle. No two
files of a package share a name, nor two test files, and no test file imports another. The parts of
torch that weft replaces are imported nowhere and named in one file; so is, in each package, what
depends on the version of torch or of CPython. Other libraries are named in one folder of capture.
The packages declare equal bounds.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from check_packages import name_of, package_problems

ROOT = Path(__file__).parent.parent
FILE_LIMIT = 500
FUNCTION_LIMIT = 60
FORBIDDEN = re.compile(
    r"torch\.(_dynamo|_inductor|_C\._dynamo\.(eval_frame|guards)"
    r"|_functorch\.(aot_autograd|_aot_autograd|partitioners|compilers|config))\b"
)
GENERATED = "_abi.py"  # written when weft-codegen is built
SHIM = "torch_compiler_shim.py"  # of weft-core: by these names it is recognised
# Names the types of what imports it, for annotations: those imports count in no circle.
PROTOCOL = "weft_capture.model.protocol"
# What differs between versions is in one file a package, and in one header.
VERSIONS = {
    "torch_compat": r"torch\.(__version__|version\b)|\b(has|get)attr\((torch|aten)[\w.]*, \"",
    "python_compat": r"\bsys\.(version_info|hexversion)|\bPY3\d\d\b|PY_VERSION_HEX",
}
# Of capture, where each instruction is that of a version; and where versions are only printed.
ANY_VERSION = re.compile(r"weft_capture/bytecode/|weft/__main__")
# Other libraries than torch are known to one folder of capture.
LIBRARIES = re.compile(
    r"(import |from |[\"'])"
    r"(numpy|pandas|scipy|triton|sympy|unittest|_?pytest|pydevd|transformers)\b"
)
NAMES_LIBRARIES = {"libraries", "breaks.py"}  # codes of breaks are for users
# Other packages import from their roots; core's and guards' public modules are an interface.
STAGES = {"weft_capture", "weft_aot", "weft_compiled_autograd", "weft_codegen"}
DEEP = {"weft_codegen.kernels.toolchain"}
SOURCES = {".py", ".c", ".h"}
# Installed with torch, which is what they are used for.
WITH_TORCH = {"sympy"}


def source_files() -> list[Path]:
    """Return every Python file under packages/*/src."""
    return [file for package in ROOT.glob("packages/*") for file in python_files(package)]


def python_files(package: Path) -> list[Path]:
    """Return the Python files of a package's source that somebody has written."""
    return sorted(path for path in package.glob("src/**/*.py") if path.name != GENERATED)


def functions(tree: ast.AST) -> Iterator[tuple[int, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function of a module with its length in lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node


def imported_names(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the full dotted name of everything a module imports, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module_name(path.parents[node.level - 1]) if node.level else ""
            names = [f"{base}.{node.module or ''}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name.replace("..", ".").strip(".")) for name in names)


def module_name(path: Path) -> str:
    """Return the dotted name of a file or folder of a package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts[parts.index("src") + 1 :] if part != "__init__")


def declared_imports(package: Path) -> set[str]:
    """Return the top-level modules that a package's pyproject.toml allows it to import."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    wanted = [*project.get("dependencies", []), *(r for rows in extras.values() for r in rows)]
    own = {path.parent.name for path in package.glob("src/*/__init__.py")}
    return {name_of(requirement).replace("-", "_") for requirement in wanted} | own | WITH_TORCH


def is_deep(package: str, parts: list[str]) -> bool:
    """Say whether an import goes past the interface of a package: a stage's root and config."""
    deep = len(parts) > 1 and parts[0] != "config" and ".".join([package, *parts]) not in DEEP
    return (package in STAGES and deep) or any(part.startswith("_") for part in parts)


def check_lines(path: Path, text: str) -> Iterator[str]:
    """Yield whether a file is too long, and its lines that name what another file is for."""
    where, lines = path.relative_to(ROOT), list(enumerate(text.splitlines(), 1))
    if len(lines) > FILE_LIMIT:
        yield f"{where}: {len(lines)} lines (limit {FILE_LIMIT})"
    for module, pattern in VERSIONS.items():
        if path.stem != module and not ANY_VERSION.search(str(where)):
            for line, content in lines:
                if re.search(pattern, content):
                    yield f"{where}:{line}: asks for a version; only {module} does"
    if "weft_capture" in path.parts and not NAMES_LIBRARIES & {*path.parts}:
        for line, content in lines:
            if name := LIBRARIES.search(content.partition("#")[0]):
                yield f"{where}:{line}: names {name[2]}; only weft_capture/libraries does"
    if path.name != SHIM:
        for line, content in lines:
            if FORBIDDEN.search(content):
                yield f"{where}:{line}: names what weft replaces; only {SHIM} does"


def check_file(path: Path, declared: set[str]) -> Iterator[str]:
    """Yield what is wrong with one source file."""
    where = path.relative_to(ROOT)
    text = path.read_text()
    tree = ast.parse(text)
    for length, node in functions(tree):
        if length > FUNCTION_LIMIT:
            yield f"{where}:{node.lineno}: {node.name} has {length} lines (limit {FUNCTION_LIMIT})"
    yield from check_lines(path, text)
    for line, name in imported_names(tree, path):
        top, *rest = name.split(".")
        foreign = top.startswith("weft_") and top not in path.parts
        if foreign and is_deep(top, rest):
            yield f"{where}:{line}: imports {name}, which is not in the interface of {top}"
        if FORBIDDEN.match(name):
            yield f"{where}:{line}: imports {name}, which weft replaces"
        elif top not in sys.stdlib_module_names | declared:
            yield f"{where}:{line}: imports {top}, which the package does not declare"


def import_graph(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package that each module imports, for type checking too."""
    modules = {module_name(path): path for path in python_files(package)}
    graph = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        if module == PROTOCOL:
            tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
        names = [name for _, name in imported_names(tree, path)]
        imported = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = imported & modules.keys() - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph that have more than one node."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        return found

    reached = {node: reachable(node) for node in graph}
    groups = {
        frozenset(other for other in reached[node] if node in reached[other])
        for node in graph
        if node in reached[node]
    }
    return sorted(map(sorted, groups))


def check_circles(package: Path) -> Iterator[str]:
    """Yield the modules of a package that import each other in a circle."""
    for circle in circles(import_graph(package)):
        yield f"{package.name}: a circle of imports: {', '.join(circle)}"


def problems() -> Iterator[str]:
    """Yield everything that breaks a rule."""
    for package in sorted(ROOT.glob("packages/*/pyproject.toml")):
        yield from check_circles(package.parent)
        yield from check_names(package.parent)
        declared = declared_imports(package.parent)
        for path in python_files(package.parent):
            yield from check_file(path, declared)
        for path in sorted(package.parent.glob("src/**/*.[ch]")):
            yield from check_lines(path, path.read_text())
    yield from check_tests()
    yield from package_problems()


def check_tests() -> Iterator[str]:
    """Yield the names that test files share, and the test files that import another one."""
    paths = [path for path in ROOT.glob("**/test_*.py") if not {".nox", ".venv"} & {*path.parts}]
    names = Counter(path.name for path in paths)
    yield from (f"{name}: {n} test files have this name" for name, n in names.items() if n > 1)
    for path in paths:
        imported = re.findall(r"^ *(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        yield from (f"{path.relative_to(ROOT)}: imports {name}" for name in imported)


def check_names(package: Path) -> Iterator[str]:
    """Yield the names that more than one source file of a package has."""
    paths = package.glob("src/**/*.*")
    names = Counter(p.name for p in paths if p.suffix in SOURCES and p.stem[:2] != "__")
    for name, count in names.items():
        if count > 1:
            yield f"{package.name}: {count} files are called {name}"


def main() -> int:
    """Check; returns the exit status."""
    found = list(problems())
    print("\n".join(found) or "layout: no problems found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
