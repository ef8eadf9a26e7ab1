"""Write the tables of docs/figures/*.json into the documents: python docs/site/figures.py.

A table stands where a page has ``<!-- figure: NAME -->`` and ``<!-- figure: end -->``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"^<!-- figure: ([\w-]+) -->\n.*?^<!-- figure: end -->$", re.M | re.S)


def with_tables(markdown: str) -> str:
    """Return a page with the text between its markers written again."""
    return _TABLE.sub(lambda found: _block(found[1]), markdown)


def _block(name: str) -> str:
    figure = json.loads((DOCS / "figures" / f"{name}.json").read_text())
    rows = [figure["columns"], ["---"] * len(figure["columns"]), *figure["rows"]]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    source = f"`{figure['command']}`, {figure['date']}, recorded in commit {figure['commit']}"
    lines = f"{table}\n*{source}; {figure['machine']}.*\n"
    return f"<!-- figure: {name} -->\n{lines}<!-- figure: end -->"


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(with_tables(page.read_text()))
