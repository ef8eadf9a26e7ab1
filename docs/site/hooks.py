"""What the site has besides docs/: the top level's documents, and tables of measured figures.

mkdocs calls the ``on_`` functions (https://www.mkdocs.org/dev-guide/plugins/#events).
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
#: Documents outside of docs/, and their names on the site.
OUTSIDE = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benches.md",
    "ops/README.md": "ops.md",
}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_FIGURE = re.compile(r"^\[.*?\]\(figures/([\w-]+)\.json\)$", re.M)


def on_files(files: Files, config: Any) -> Files:
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the site's pages, and put tables where a line links to figures."""
    named = {name: source for source, name in OUTSIDE.items()}
    folder = posixpath.dirname(named.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    markdown = _FIGURE.sub(lambda found: figure_table(found[1]), markdown)
    return _LINK.sub(lambda found: link(found[1], found[2], folder), markdown)


def link(text: str, target: str, folder: str) -> str:
    """Return a link of a file in ``folder`` as the site has it; other files are only named."""
    if target.startswith(("http:", "https:", "#")):
        return f"[{text}]({target})"
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))
    if path not in OUTSIDE and not path.startswith("docs/"):
        return text if path == "README.md" else f"{text} (`{path}`)"
    path = OUTSIDE.get(path) or path.removeprefix("docs/")
    return f"[{text}]({path}{'#' if anchor else ''}{anchor})"


def figure_table(name: str) -> str:
    """Return the table of docs/figures/NAME.json, with where and how it was measured."""
    figure = json.loads((ROOT / "docs" / "figures" / f"{name}.json").read_text())
    rows = [figure["columns"], ["---"] * len(figure["columns"]), *figure["rows"]]
    source = f"`{figure['command']}`, {figure['date']}, recorded in commit {figure['commit']}"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"*{source}; {figure['machine']}.*"])
