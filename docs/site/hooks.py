"""Add the documents outside of docs/ to the site, and lead their links to its pages.

mkdocs calls the ``on_`` functions (https://www.mkdocs.org/dev-guide/plugins/#events).
"""

from __future__ import annotations

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


def on_files(files: Files, config: Any) -> Files:
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the site's pages."""
    named = {name: source for source, name in OUTSIDE.items()}
    folder = posixpath.dirname(named.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
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
