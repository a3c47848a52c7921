"""The pages as a site: `make docs`. The sources are the pages themselves, from the top of the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

project = "wanrun"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = "README"
include_patterns = ["*.md", "benchmarks/*.md", "docs/*.md", "docs/*/*.md", "training/*.md"]
exclude_patterns = [".*", "artifacts", "build", "dist", "runtime", "tests"]

myst_heading_anchors = 4  # GitHub's
myst_fence_as_directive = ["mermaid"]
mermaid_fullscreen = False
mermaid_height = "auto"
highlight_language = "none"
smartquotes = False

html_theme = "furo"
html_title = "wanrun"
html_show_copyright = html_show_sphinx = html_copy_source = False

NAVIGATION = {
    "Use": "commands python recipes errors steps guidance loras live long-videos tiny-decoder demo",
    "Machines": "targets planning small-cards meshes trust /benchmarks/RESULTS",
    "Serving and sharing": "serving deploy/README sharing format /SECURITY",
    "Inside": "/CONTRIBUTING /BUILD_NOTES notes/runtime notes/programs-and-cache notes/convert "
    "notes/sampling notes/media notes/quantised notes/cpu notes/chips notes/lent-gpu notes/meshes "
    "notes/faults notes/testing /training/README /CHANGELOG",
}
"""The pages in their order, those of docs/ without its name. A page that is missing here is an error."""


def _navigation(_: Sphinx, page: str, text: list[str]) -> None:
    if page == root_doc:
        for caption, names in NAVIGATION.items():
            lines = [name if name.startswith("/") else f"/docs/{name}" for name in names.split()]
            text[0] += "\n".join(
                ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```", ""]
            )


def _index(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _navigation)
    app.connect("build-finished", _index)
