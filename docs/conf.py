"""How Sphinx builds these pages: `nox -s docs`."""

import re
from itertools import groupby
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from weft import list_mode_options, list_options
from weft_core.events import ARTIFACTS

project = "weft"
copyright = "2026, the weft contributors"
html_title = "weft"
html_theme = "furo"
html_theme_options = {
    "light_css_variables": {"code-font-size": "0.74rem"},  # figures of 97 columns fit
    "dark_css_variables": {"code-font-size": "0.74rem"},
}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "changes"]
myst_heading_anchors = 3

default_role = "py:obj"  # docstrings quote code in single backticks
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

Rows = list[tuple[str, ...]]


def _code(text: object) -> str:
    return f"`{text}`"


def _option_rows() -> Rows:
    return [(_code(k), _code(default), doc) for k, (default, doc) in list_options().items()]


def _mode_rows() -> Rows:
    modes = list_mode_options().items()
    return [(_code(mode), ", ".join(map(_code, chosen)) or "nothing") for mode, chosen in modes]


def _artifact_rows() -> Rows:
    return [(_code(name), row.shows, row.skipped_by) for name, row in ARTIFACTS.items()]


TABLES = {
    "options": (("option", "default", "effect"), _option_rows),
    "modes": (("mode", "sets"), _mode_rows),
    "artifacts": (("artifact", "shows", "cache not read meanwhile"), _artifact_rows),
}
"""Tables that are made of the code's own: heads and rows."""


class Table(SphinxDirective):
    """The directive `{weft-table} options`, for Markdown pages."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        heads, rows = TABLES[self.arguments[0]]
        lines = [heads, ("---",) * len(heads), *rows()]
        return self.parse_text_to_nodes("\n".join(f"| {' | '.join(line)} |" for line in lines))


_SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")


def _as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a docstring: blocks with indented lines are figures or code."""
    result: list[str] = []
    for is_text, block in groupby(lines, key=lambda line: bool(line.strip())):
        block = [line for line in block if line != "::"]
        if block and is_text and not _SECTION.match(block[0]) and any(x[0] == " " for x in block):
            block = ["::", "", *(f"    {line}" for line in block)]
        elif is_text:
            block = [re.sub(r"(?<![\w`*])(\*{1,2})(?=\w)", r"\\\1", line) for line in block]
        result += block
    lines[:] = result


def setup(app: Any) -> None:
    """Add the directive, and the form of docstrings."""
    app.add_directive("weft-table", Table)
    app.connect("autodoc-process-docstring", _as_rst, priority=400)  # before napoleon
