"""The docs: their code runs, examples of breaks break, and what pages name is in the sources."""

import functools
import re
import types
from pathlib import Path

import pytest
import torch
import weft
import weft_aot
import weft_capture
import weft_codegen
import weft_compiled_autograd
import weft_guards

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "index.md"]
PAGES += sorted([*DOCS.glob("tutorials/*.md"), *DOCS.glob("how-to/*.md")])
ARCHITECTURE = sorted(DOCS.glob("architecture/*.md"))
CODE = sorted(
    path
    for folder in ("packages", "integration", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".pyi", ".c", ".h", ".toml")
)


def blocks(page):
    """Return a page's Python blocks, padded so that line numbers in a traceback fit the page."""
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield "\n" * (text[: found.start(1)].count("\n")) + found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tutorial", "model": torch.nn.Linear(2, 2)}
    found = list(blocks(page))
    assert found
    printed = 0
    for block in found:
        exec(compile(block, str(page), "exec"), names)
        printed += check_printed(page, block, names)
    assert printed > 3 or "which prints\n\n```text" not in page.read_text()


SECTIONS = dict(
    re.findall(
        r"^### (\S+)\n(.*?)(?=^##+ |\Z)", (ROOT / "docs" / "breaks.md").read_text(), re.M | re.S
    )
)


def test_each_break_code_has_a_section():
    assert list(SECTIONS) == list(weft_capture.REASONS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", [code for code in SECTIONS if "```python" in SECTIONS[code]])
def test_the_example_of_a_break_code_breaks(code, monkeypatch):
    monkeypatch.setattr(weft, "compile", functools.partial(weft.compile, backend="eager"))
    example = re.search(r"```python\n(.*?)```", SECTIONS[code], re.S)[1]
    weft.reset()
    before = weft.counters["graph_break"][code]
    names = {"__name__": "example", "torch": torch, "weft": weft, "x": torch.ones(4)}
    with weft.config.patch(instruction_limit=10_000):
        exec(compile(example, code, "exec"), names)
    lost = [record.code for frame in weft.report().frames for record in frame.lost]
    assert code in lost or weft.counters["graph_break"][code] > before


def check_printed(page, block, names):
    """Count the lines that a page says a block prints; they are in `lines`, but for numbers."""
    after = page.read_text().split("\n", block.count("\n"))[-1]
    printed = re.match(r"(?ms)```\n\nwhich prints\n\n```text\n(.*?)^```", after)
    if printed is None:
        return 0
    real = [re.sub(r"\d+", "0", line.strip()) for line in names["lines"].text.splitlines()]
    wanted = [re.sub(r"\d+", "0", line.strip()) for line in printed[1].splitlines()]
    wanted = [line for line in wanted if line not in ("", "...")]
    assert [line for line in wanted if line not in real] == []
    return len(wanted)


@pytest.mark.parametrize("page", ARCHITECTURE, ids=lambda page: page.stem)
def test_an_architecture_page_is_short_and_has_a_figure_or_a_table(page):
    text = page.read_text()
    assert "```text" in text or "\n|---" in text
    for figure in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert max(map(len, figure.splitlines())) <= 97  # more does not fit the page
    if page.stem != "names":
        assert len(text.split()) <= 900
        assert text.count("\n## ") >= 1


@functools.cache
def words_of_the_sources():
    return {word for path in CODE for word in re.findall(r"\w+", path.read_text(errors="ignore"))}


NOT_OURS = {"-ffast-math", "produce_guards", "aoti_torch_get_*"}


@pytest.mark.parametrize("page", ARCHITECTURE, ids=lambda page: page.stem)
def test_what_an_architecture_page_names_is_in_the_sources(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    if page.stem == "names":  # the old names in the first column are gone
        text = re.sub(r"^\|[^|]*\|", "", text, flags=re.M)
    unknown = []
    for quoted in set(re.findall(r"`([^`\n]+)`", text)) - NOT_OURS:
        if re.fullmatch(r"[\w/.-]+\.(py|c|h)", quoted):
            if not any(f"/{path}".endswith(f"/{quoted}") for path in CODE):
                unknown.append(quoted)
        elif set(re.findall(r"[A-Za-z_]\w{2,}", quoted)) - words_of_the_sources():
            unknown.append(quoted)
    assert unknown == []


@functools.cache
def names_of_tests():
    files = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("integration/test_*.py")]
    defined = {
        name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    return defined | {path.name for path in files}


@pytest.mark.parametrize(
    "page",
    sorted({*DOCS.glob("coverage/*.md")} - {DOCS / "coverage/cpython.md"}),  # CPython's own tests
    ids=lambda page: page.stem,
)
def test_the_tests_that_a_table_names_are_there(page):
    named = re.findall(r"`(?:[\w/.-]*/)?(test_\w+(?:\.py)?)(?:::(test_\w+))?`", page.read_text())
    assert {name for pair in named for name in pair if name} - names_of_tests() == set()


def test_every_row_of_torch_compile_has_a_verdict():
    pages = [path.read_text() for path in sorted(DOCS.glob("coverage/peer-*.md"))]
    rows = [
        row
        for page in pages
        for row in re.findall(r"^\| ([A-Z]\d+) \| .* \| (.*) \| (.*) \|$", page, re.M)
    ]
    assert len(rows) == len({row for row, *_ in rows}) == 216
    assert [
        row for row, weft, test in rows if weft.startswith("works") and "`test_" not in test
    ] == []


@pytest.mark.parametrize(
    "package", [weft, weft_capture, weft_guards, weft_aot, weft_codegen, weft_compiled_autograd]
)
def test_the_reference_has_every_public_name_of_a_package(package):
    name = package.__name__
    text = (DOCS / "reference" / f"{name.replace('_', '-')}.rst").read_text()
    if re.search(rf"automodule:: {name}\n(?!   :no-members:)", text):
        return  # all of them
    public = [name for name in getattr(package, "__all__", vars(package)) if name[0] != "_"]
    public = [n for n in public if not isinstance(getattr(package, n), types.ModuleType)]
    listed = set(re.findall(r"auto\w+:: (?:[\w.]+\.)?(\w+)(?:\(.*)?$", text, re.MULTILINE))
    modules = re.findall(r"automodule:: (\S+)", text)
    public = [n for n in public if getattr(getattr(package, n), "__module__", "") not in modules]
    assert set(public) - {"settings"} <= listed


def test_the_reference_has_every_public_module_of_core():
    text = (DOCS / "reference" / "weft-core.rst").read_text()
    modules = {path.stem for path in (ROOT / "packages/weft-core/src/weft_core").glob("[a-z]*.py")}
    assert modules == set(re.findall(r"automodule:: weft_core\.(\w+)$", text, re.MULTILINE))


def test_the_pages_that_sources_name_exist():
    named = {
        (path.name, page)
        for path in CODE
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(errors="ignore"))
    }
    assert len(named) > 10
    assert [(name, page) for name, page in sorted(named) if not (ROOT / page).exists()] == []
