"""The site of the documents in a real browser, as wide as a laptop's window."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import chromium

pytestmark = [pytest.mark.timeout(600), pytest.mark.long, chromium.needed]
ROOT = Path(__file__).parents[2]

#: Each table that is wider than its column, and the page itself if it scrolls sideways.
CUT = """
const found = [];
for (const table of document.querySelectorAll('.md-typeset table:not([class])')) {
  const column = table.closest('.md-content__inner').clientWidth;
  const heads = [...table.querySelectorAll('th')].map((each) => each.textContent).join(' | ');
  if (table.scrollWidth > column + 1) found.push(`${heads}: ${table.scrollWidth} > ${column}`);
}
if (document.documentElement.scrollWidth > innerWidth + 1) found.push('wider than the window');
return found;
"""


def test_no_table_of_the_site_is_cut_at_1300_pixels(tmp_path: Path) -> None:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    assert len(pages) > 20
    cut = {}
    with chromium.opened(tmp_path / "profile") as browser:
        for page in pages:
            browser.get(page.as_uri())
            if found := browser.execute_script(CUT):
                cut[page.name] = found
    assert cut == {}
