"""Open a real browser for tests of pages, and check what every page must fulfil."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needed = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian packages)"
)


@contextmanager
def opened(profile: Path) -> Iterator[Any]:
    """Open a headless browser that sends no requests to other servers."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--window-size=1300,1100",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(service=Service(DRIVER), options=options)
    try:
        yield driver
    finally:
        driver.quit()


def card(browser: Any, title: str) -> str:
    script = """
        for (const card of document.querySelectorAll('.card'))
            if (card.querySelector('h2').textContent === arguments[0]) return card.innerText;
        return '';"""
    return str(browser.execute_script(script, title))


#: Return the faults of the open page: poor contrast, a missing name for screen readers, a resource
#: of another server, or content that is wider than the screen.
CHECKS = """
const luminance = (colour) => {
  const c = colour.match(/[0-9.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
};
const ground = (e) => { for (; e; e = e.parentElement) {
  const colour = getComputedStyle(e).backgroundColor;
  if (!colour.startsWith('rgba(0, 0, 0, 0')) return colour; } return 'rgb(255, 255, 255)'; };
const found = [];
const texts = 'h1, h2, p, small, td, th, button, li, span, text, figcaption b';
for (const e of document.querySelectorAll(texts)) {
  if (!e.textContent.trim()) continue;
  const style = getComputedStyle(e), ink = e.tagName === 'text' ? style.fill : style.color;
  const [a, b] = [luminance(ink), luminance(ground(e))].sort((x, y) => y - x);
  const said = `${e.tagName} "${e.textContent.slice(0, 30)}"`;
  if ((a + 0.05) / (b + 0.05) < 4.5) found.push(`contrast of ${said}`);
}
for (const e of document.querySelectorAll('svg, meter'))
  if (!e.getAttribute('aria-label')) found.push(`${e.tagName} has no name`);
for (const e of document.querySelectorAll('button'))
  if (!e.textContent.trim()) found.push('a button has no name');
if (!document.documentElement.lang) found.push('no language');
// Not innerWidth: under mobile emulation it grows with what is too wide.
const all = document.documentElement;
if (all.scrollWidth > all.clientWidth + 1) found.push('wider than the screen');
for (const r of performance.getEntriesByType('resource'))
  if (new URL(r.name).origin !== location.origin) found.push(`foreign ${r.name}`);
return found;
"""
