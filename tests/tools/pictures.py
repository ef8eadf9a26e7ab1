"""Draw docs/images/page.png and page-phone.png, the dashboard of a healthy local subnet.

    python -m tests.tools.pictures                 # about eight minutes, needs chromium
    python -m tests.tools.pictures --url http://127.0.0.1:8877/    # of a subnet that runs already

It runs ``make run ARGS="--exchange store"`` and waits until the last close has merged the upload of
each miner, several times in a row. The date and the commit go into the documents that show the
pictures, in the line that names this command.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed_training.common.ports import free_ports
from tests.tools import chromium

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m tests.tools.pictures"
#: The caption of a drawn picture: its command, the date and the commit.
CAPTION = re.compile(r"`([^`]+)`, (\d{4}-\d\d-\d\d), at commit ([0-9a-f]{8})")
PHONE = (400, 860)  # pixels
LAPTOP = 1280  # pixels wide; as high as the page down to its second row of cards
_MERGED = 3  # closes in a row, after which the dashboard shows a healthy network
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


@contextmanager
def _subnet(folder: Path) -> Iterator[str]:
    """Run a local subnet of the store kind; yield the address of its dashboard."""
    (port,) = free_ports(1)
    command = [sys.executable, "scripts/localnet.py", "--exchange", "store", "--folder"]
    command += [str(folder / "subnet"), "--page-port", str(port), "--outer-steps", "20"]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    end = time.monotonic() + _LONGEST
    try:
        while f"http://127.0.0.1:{port}/" not in (folder / "out").read_text():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((folder / "out").read_text())
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)


def dated(markdown: str, date: str, commit: str) -> str:
    """Return a page with the date and the commit of its pictures that this program draws."""
    new = f"`{COMMAND}`, {date}, at commit {commit}"
    return CAPTION.sub(lambda found: new if found[1] == COMMAND else found[0], markdown)


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="the dashboard of a subnet that runs already")
    url = parser.parse_args().url
    images = ROOT / "docs" / "images"
    if url:
        draw(url, images)
    else:
        with TemporaryDirectory() as folder, _subnet(Path(folder)) as address:
            draw(address, images)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)[:8]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        if (new := dated(text, datetime.now(UTC).date().isoformat(), commit)) != text:
            page.write_text(new)


if __name__ == "__main__":
    main()
