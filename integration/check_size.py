"""Print the size of each package; fail where one has more lines than its budget.

The budgets stand in pyproject.toml, `[tool.weft.size]`: lines of Python and C below `src`.
"""

import ast
import sys
import tomllib
from pathlib import Path

from check_layout import GENERATED, ROOT, functions, source_files


def lines_of(package: Path, part: str, *suffixes: str) -> int:
    """Count the lines of a package's files of some suffixes below `src` or `tests`."""
    paths = (path for suffix in suffixes for path in package.glob(f"{part}/**/*.{suffix}"))
    return sum(path.read_text().count("\n") for path in paths if path.name != GENERATED)


def print_longest() -> None:
    """Print the longest files and functions."""
    files = sorted(((p.read_text().count("\n"), p) for p in source_files()), reverse=True)
    print("longest files:")
    for lines, path in files[:8]:
        print(f"  {lines:>5}  {path.relative_to(ROOT)}")
    all_functions = [
        (lines, function.name, path)
        for _, path in files
        for lines, function in functions(ast.parse(path.read_text()))
    ]
    print("longest functions:")
    for lines, name, path in sorted(all_functions, reverse=True)[:8]:
        print(f"  {lines:>5}  {name}  {path.relative_to(ROOT)}")


def main() -> int:
    """Print the table of sizes; returns the exit status, 1 if a package is over its budget."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["weft"]["size"]
    total, over = 0, []
    for package in sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")):
        python, c = lines_of(package, "src", "py"), lines_of(package, "src", "c", "h")
        tests, budget = lines_of(package, "tests", "py"), budgets[package.name]
        total += python + c
        if python + c > budget:
            over.append(f"{package.name} has {python + c} lines, its budget is {budget}")
        print(
            f"{package.name:<26}{python:>7} Python {c:>6} C {python + c:>7} of {budget:>6}"
            f"{tests:>7} tests"
        )
    print(f"{'all source':<26}{total:>7} lines")
    print_longest()
    print("\n".join(over) or "size: every package is within its budget")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
