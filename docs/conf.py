"""How Sphinx builds these pages: `nox -s docs`."""

project = "weft"
copyright = "2026, the weft contributors"
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build", "changes"]
# Links into the source tree are for readers of the repository.
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]
