"""The code in the README and in the tutorials runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]


def blocks(page):
    """Return a page's Python blocks, padded so that line numbers in a traceback fit the page."""
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield "\n" * (text[: found.start(1)].count("\n")) + found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tutorial", "model": torch.nn.Linear(2, 2)}
    found = list(blocks(page))
    assert found
    for block in found:
        exec(compile(block, str(page), "exec"), names)


def test_the_package_pages_that_the_index_names_exist():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = re.findall(r"^((?:tutorials|architecture)/\S+)$", index, re.MULTILINE)
    assert [page for page in pages if not (ROOT / "docs" / f"{page}.md").exists()] == []
    assert len(pages) >= 8
