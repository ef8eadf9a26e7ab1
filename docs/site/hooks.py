"""Add the generated pages and the documents outside of docs/ to the site, and lead links to them.

Language models get ``llms.txt`` (https://llmstxt.org), an index of the pages, and next to each page
its text under the page's name and ``.md``.

mkdocs calls the ``on_`` functions (https://www.mkdocs.org/dev-guide/plugins/#events).
"""

from __future__ import annotations

import posixpath
import re
import runpy
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
#: Documents outside of docs/, and their names on the site.
OUTSIDE = {
    "SECURITY.md": "security.md",
    "AGENTS.md": "agents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benches.md",
    "ops/README.md": "ops.md",
    "docs/threats.toml": "threats.md",
}
#: Pages that are written while the site is built, by their name there.
GENERATED = runpy.run_path(str(Path(__file__).with_name("generated.py")))["PAGES"]
#: The page of the site for each file that a document links.
_LINKED = OUTSIDE | {
    "distributed_training/config/settings.py": "flags.md",
    "distributed_training/telemetry/metrics.py": "metrics.md",
    "pyproject.toml": "commands.md",
}
_ABOUT = (
    "Train one language model together over the internet, among people who need not trust each "
    "other: a long-running miner, validator and registry in PyTorch (DiLoCo)."
)
#: A paragraph that only links to a file of settings, which the site shows in its place.
_SHOWN = re.compile(r"^\[[^\]]+\]\(([\w-]+\.toml)\)$", re.M)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CELL = re.compile(r"<td.*?</td>", re.S)
_CODE = re.compile(r"<code>(?:[^<]|<wbr>)+</code>")
_FLAG = re.compile(r"(?<![\w-])--?\w+")
_LONG_CODE = re.compile(r"<code>[^<\s]{16,}</code>")
_TEXTS: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    for source, name in OUTSIDE.items():
        text = (ROOT / source).read_text()
        text = threats(text) if source.endswith(".toml") else text
        files.append(File.generated(config, name, content=text))
    for name, page in GENERATED.items():
        files.append(File.generated(config, name, content=page()))
    return files


def threats(text: str) -> str:
    """Return the page of the threats that ``text`` lists as TOML, a table for each part."""
    lines = ["# Threats and their tests", "", "A test checks that each of these tests is there."]
    part = ""
    for row in tomllib.loads(text)["threat"]:
        if row["part"] != part:
            part = row["part"]
            lines += ["", f"## {part}", "", "| Threat | What happens | Test |", "|---|---|---|"]
        tests = ", ".join(f"`{name}`" for name in row["tests"])
        lines.append(f"| {row['threat']} | {row['answer']} | {tests} |")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put files in that a page shows, and lead links to the site's pages."""
    shown = lambda found: f"```toml\n{(ROOT / 'docs' / found[1]).read_text()}```"
    markdown = _SHOWN.sub(shown, markdown)
    _TEXTS[page.file.src_uri] = markdown
    named = {name: source for source, name in OUTSIDE.items()}
    folder = posixpath.dirname(named.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    place = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda found: link(found[1], found[2], folder, place), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Break code where a reader expects it: in a cell after ``/`` and ``_``, never in ``--flag``.

    A long path or name in a cell made its column wider than the page. Also, Python-Markdown keeps
    the backslash before a ``|`` in a cell's code.
    """
    broken = lambda code: re.sub(r"(?<=\w)[/_](?=\w)", r"\g<0><wbr>", code[0])
    in_cell = lambda cell: _LONG_CODE.sub(broken, cell[0].replace(r"\|", "|"))
    whole = lambda code: _FLAG.sub(r'<span class="flag">\g<0></span>', code[0])
    return _CODE.sub(whole, _CELL.sub(in_cell, html))


def on_post_build(config: Any) -> None:
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(llms_txt(config.site_name, config.nav, _TEXTS))
    for name, text in _TEXTS.items():
        (site / address(name)).write_text(text)


def llms_txt(site_name: str, nav: list[Any], texts: Mapping[str, str]) -> str:
    """Return the index of all pages of ``nav``; ``texts`` are theirs, by path."""
    lines = [f"# {site_name}", "", f"> {_ABOUT}"]
    for section in nav:
        ((title, entries),) = section.items()
        lines += ["", f"## {title}", ""]
        for name, path in pages(entries):
            about = summary(texts[path])
            lines.append(f"- [{name}]({address(path)})" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"


def pages(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield title and path of each page of a part of the navigation."""
    for entry in entries:
        for title, inside in entry.items():
            if isinstance(inside, str):
                yield title, inside
            else:
                yield from ((f"{title}: {name}", path) for name, path in pages(inside))


def address(path: str) -> str:
    """Return where the text of a page is, from the site's root."""
    return f"{path.removesuffix('.md')}.html.md"


def summary(markdown: str) -> str:
    """Return the first sentence of a page's text; empty where none stands before its parts."""
    text = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.S)
    for paragraph in re.split(r"\n\s*\n", text.partition("\n## ")[0]):
        # No title, picture, table, comment or code, and no list of other pages.
        if re.match(r"(?!```|Before:)[\w*(`\[]", paragraph := paragraph.strip()):
            plain = _LINK.sub(r"\1", " ".join(paragraph.split())).replace("**", "")
            return re.split(r"(?<=[.?!])\s", plain)[0].rstrip(":")
    return ""


def link(text: str, target: str, folder: str, place: str = "") -> str:
    """Return a link of a file in ``folder`` as the site's page in the folder ``place`` has it.

    Files that are no pages are only named.
    """
    if target.startswith(("http:", "https:", "#")):
        return f"[{text}]({target})"
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))
    if path not in _LINKED and not path.startswith("docs/"):
        return text if path == "README.md" else f"{text} (`{path}`)"
    path = posixpath.relpath(_LINKED.get(path) or path.removeprefix("docs/"), place or ".")
    return f"[{text}]({path}{'#' if anchor else ''}{anchor})"
