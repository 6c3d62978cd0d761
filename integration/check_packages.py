"""Check that the packages agree with each other in what their pyproject.toml files declare.

Versions, bounds of Python, of torch and of every other dependency, licence, authors and addresses
are the same everywhere, and each package carries a copy of LICENSE. check_layout.py runs this.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SAME = ("version", "requires-python", "license", "license-files", "authors", "urls")


def tables() -> dict[Path, dict[str, Any]]:
    """Return the parsed pyproject.toml of each package by the package's folder."""
    paths = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return {path.parent: tomllib.loads(path.read_text()) for path in paths}


def requirements(table: dict[str, Any]) -> list[str]:
    """Return what a package requires to be built, to run, and for its extras."""
    project = table["project"]
    groups = project.get("optional-dependencies", {}).values()
    extras = [requirement for group in groups for requirement in group]
    return [*table["build-system"]["requires"], *project["dependencies"], *extras]


def name_of(requirement: str) -> str:
    """Return the distribution that a requirement names."""
    return re.split(r"[^\w.-]", requirement)[0]


def check_equal(values: dict[str, set[str]], what: str) -> Iterator[str]:
    """Yield a line if more than one value is declared; `values` has the files of each."""
    if len(values) > 1:
        rows = (f"{value} ({', '.join(sorted(files))})" for value, files in values.items())
        yield f"{what} differs: {'; '.join(rows)}"


def check_fields(packages: dict[Path, dict[str, Any]]) -> Iterator[str]:
    """Yield the fields of `project` in which packages differ."""
    for field in SAME:
        values: dict[str, set[str]] = defaultdict(set)
        for folder, table in packages.items():
            values[repr(table["project"].get(field))].add(folder.name)
        yield from check_equal(values, field)


def check_requirements(packages: dict[Path, dict[str, Any]]) -> Iterator[str]:
    """Yield the distributions that are required with different bounds."""
    bounds: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    files = {folder.name: requirements(table) for folder, table in packages.items()}
    lines = (ROOT / "integration/requirements.txt").read_text().splitlines()
    files["integration/requirements.txt"] = [line for line in lines if line and line[0] != "#"]
    for file, wanted in files.items():
        for requirement in wanted:
            bounds[name_of(requirement)][requirement].add(file)
    for name, values in bounds.items():
        yield from check_equal(values, f"the requirement of {name}")
    projects = [table["project"] for table in packages.values()]
    versions = {project["name"]: project["version"] for project in projects}
    for name in bounds.keys() & versions.keys():
        if set(bounds[name]) != {f"{name}=={versions[name]}"}:
            yield f"{name} is required as {', '.join(bounds[name])}, not =={versions[name]}"


def check_versions(packages: dict[Path, dict[str, Any]]) -> Iterator[str]:
    """Yield where the sources or the changelog's settings have another version than a package."""
    changelog = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["version"]
    if any(table["project"]["version"] != changelog for table in packages.values()):
        yield f"pyproject.toml: towncrier's version is {changelog}"
    for folder, table in packages.items():
        for path in folder.glob("src/*/__init__.py"):
            found = re.search(r'^__version__ = "(.*)"', path.read_text(), re.MULTILINE)
            if found and found[1] != table["project"]["version"]:
                yield f"{path.relative_to(ROOT)}: __version__ is {found[1]}"


def package_problems() -> Iterator[str]:
    """Yield everything in which packages differ that should be the same."""
    packages = tables()
    yield from check_fields(packages)
    yield from check_requirements(packages)
    yield from check_versions(packages)
    licence = (ROOT / "LICENSE").read_text()
    for folder in packages:
        copy = folder / "LICENSE"
        if not copy.exists() or copy.read_text() != licence:
            yield f"{copy.relative_to(ROOT)}: not the text of LICENSE"
