"""Draw docs/images/page.png and page-phone.png, which show a healthy local subnet.

    make run ARGS="--exchange store --outer-steps 20"    # then, with the address that it prints:
    python -m tests.tools.pictures http://127.0.0.1:8877/    # needs chromium

It waits until the last close has merged the upload of each miner, several times in a row. The date
and the commit go into the documents that show the pictures, in the line that names this command.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.tools import chromium

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.tools.pictures"
#: The caption of a picture that was drawn, with its command, the date and the commit.
CAPTION = re.compile(r"`([^`]+)`, (\d{4}-\d\d-\d\d), at commit ([0-9a-f]{8})")
PHONE = (400, 860)  # pixels
LAPTOP = 1280  # pixels wide; the height ends below the second row of cards
_MERGED = 3  # consecutive closes that make a healthy network
_LONGEST = 1200.0  # seconds


def draw(url: str, folder: Path) -> None:
    """Write ``page.png`` and ``page-phone.png`` into ``folder``, of the dashboard at ``url``.

    Raises TimeoutError if the subnet does not get healthy.
    """
    with TemporaryDirectory() as profile, chromium.opened(Path(profile)) as browser:
        browser.get(url)
        end = time.monotonic() + _LONGEST
        while not _is_healthy(browser):
            if time.monotonic() > end:
                raise TimeoutError(f"{url} shows no healthy subnet after {_LONGEST:.0f} s")
            time.sleep(1)
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        _resize(browser, LAPTOP, 1000, mobile=False)
        bottom = "return document.getElementById('speed').getBoundingClientRect().bottom"
        _resize(browser, LAPTOP, int(browser.execute_script(bottom)) + 12, mobile=False)
        _save(browser, folder / "page.png")
        _resize(browser, *PHONE, mobile=True)
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [dark]})
        _save(browser, folder / "page-phone.png")


def _is_healthy(browser: Any) -> bool:
    merged = re.search(r"^(\d+) of (\d+)$", chromium.card(browser, "Closes merged"), re.M)
    return (
        browser.find_element("id", "verdict").get_attribute("class") == "good"
        and not browser.find_element("id", "problems").text
        and "merged" in chromium.card(browser, "Uploaded")
        and merged is not None
        and merged[1] == merged[2]
        and int(merged[1]) >= _MERGED
    )


def _resize(browser: Any, width: int, height: int, *, mobile: bool) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile},
    )


def _save(browser: Any, path: Path) -> None:
    time.sleep(1)  # the page draws its curves again when its size or its colors change
    browser.save_screenshot(str(path))


def dated(markdown: str, date: str, commit: str) -> str:
    """Return a page with a new date and commit in the captions of this program's pictures."""
    new = f"`{COMMAND}`, {date}, at commit {commit}"
    return CAPTION.sub(lambda found: new if found[1] == COMMAND else found[0], markdown)


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="the dashboard of a local subnet that runs")
    draw(parser.parse_args().url, ROOT / "docs" / "images")
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)[:8]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        if (new := dated(text, datetime.now(UTC).date().isoformat(), commit)) != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
