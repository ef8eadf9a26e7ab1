"""When `make run` opens its page by itself: on a desktop, for a person, and nowhere else."""

from __future__ import annotations

import sys
import webbrowser
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.localnet.command import _show_page

pytestmark = pytest.mark.timeout(30)
ADDRESS = "http://127.0.0.1:8010/"


@pytest.mark.parametrize(
    ("browser", "terminal", "environment", "opened"),
    [
        (webbrowser.BackgroundBrowser, True, {"DISPLAY": ":0"}, True),
        (webbrowser.BackgroundBrowser, True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        (webbrowser.BackgroundBrowser, True, {}, False),
        (webbrowser.BackgroundBrowser, True, {"DISPLAY": ":0", "CI": "true"}, False),
        (webbrowser.BackgroundBrowser, False, {"DISPLAY": ":0"}, False),
        (webbrowser.GenericBrowser, True, {"DISPLAY": ":0"}, False),  # w3m, in this terminal
        (None, True, {"DISPLAY": ":0"}, False),
    ],
)
def test_only_on_a_desktop(
    browser: Any,
    terminal: bool,
    environment: dict[str, str],
    opened: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def get() -> Any:
        if browser is None:
            raise webbrowser.Error("could not locate runnable browser")
        made = browser("true")
        monkeypatch.setattr(made, "open", calls.append)
        return made

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(webbrowser, "get", get)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    lines: list[str] = []
    view: Any = SimpleNamespace(report=lines.append)
    _show_page(f"page: {ADDRESS}", view)
    assert lines == [f"page: {ADDRESS}"], "it is always said"
    assert calls == ([ADDRESS] if opened else [])
    _show_page("error: the page cannot be served", view)
    assert len(calls) == opened, "an error is no address"
