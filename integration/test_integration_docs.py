"""The code in the README and in the tutorials runs, and each example of a break breaks."""

import functools
import re
from pathlib import Path

import pytest
import torch
import weft
import weft_capture

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]


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


def test_the_package_pages_that_the_index_names_exist():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = re.findall(r"^((?:tutorials|architecture)/\S+)$", index, re.MULTILINE)
    assert [page for page in pages if not (ROOT / "docs" / f"{page}.md").exists()] == []
    assert len(pages) >= 8
