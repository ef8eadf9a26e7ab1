"""Open the page in a real browser, as an operator does."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from distributed_training.common.ports import free_ports
from distributed_training.telemetry import EventLog
from distributed_training.telemetry.facts import FACTS_FILE
from tests.tools import chromium
from tests.tools.chromium import CHECKS, card
from tests.tools.miner_states import HOTKEY, STATES, facts_of, make_miner, step_fields
from tests.tools.page import TOKEN, served
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow, chromium.needed]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium.opened(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def step(events: EventLog, number: int, *, loss: float) -> None:
    events.write("step", **step_fields(3, number, loss))


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[tuple[Path, EventLog]]:
    folder = tmp_path / "miner-017"
    folder.mkdir()
    with EventLog(folder / "events.jsonl") as events:
        for number in range(1, 41):
            step(events, number, loss=4.0 - number / 20)
        events.write("outer_step", outer_step=3)
        events.write("round", outer_step=2, ok=True, fault="", detail="", seconds=3.0)
        events.write(
            "publication", revision="5.3.40", ok=True, seconds=2.0, bytes_sent=5e6, reason=""
        )
        events.write("problem", level="WARNING", text="<b>disk</b> nearly full: free some")
        yield folder, events


def test_the_page_shows_training_and_survives_a_restart(
    browser: Any, run_folder: tuple[Path, EventLog]
) -> None:
    folder, events = run_folder
    (port,) = free_ports(1)
    with served(folder, port=port) as page:
        browser.get(page.url)
        wait_for(lambda: "3 . 40" in card(browser, "Step"), "the history on the page")
        assert "2.000" in card(browser, "Loss") and "MFU 52.0 %" in card(
            browser, "Tokens per second"
        )
        assert "merged" in card(browser, "Last close")
        assert verdict(browser) == ["training", "", "good"]
        facts = facts_of("counts", time.time())
        (folder / FACTS_FILE).write_text(json.dumps(asdict(facts)))
        events.write("start", uid=17)
        wait_for(lambda: verdict(browser)[0] == "counts", "that it counts")
        text = browser.find_element("tag name", "body").text
        assert "5.3.40" in text and "<b>disk</b> nearly full: free some" in text
        assert len(browser.find_elements("css selector", "svg[role=img] polyline")) >= 4
        step(events, 41, loss=1.5)
        wait_for(lambda: "3 . 41" in card(browser, "Step"), "a new step, live")
        for _ in range(2):  # so that there are three tabs
            browser.switch_to.new_window("tab")
            browser.get(page.url)
            wait_for(lambda: "3 . 41" in card(browser, "Step"), "the same in another tab")
    wait_for(lambda: "lost" in browser.find_element("id", "connection").text, "that it is away")
    step(events, 42, loss=1.4)
    with served(folder, port=port):
        wait_for(lambda: "3 . 42" in card(browser, "Step"), "what happened in between")
        wait_for(lambda: browser.find_element("id", "connection").text == "live", "it again")
    problems = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert all("ERR_" in e["message"] for e in problems), problems


def test_a_page_without_its_server_says_so(browser: Any, run_folder: tuple[Path, EventLog]) -> None:
    folder, _ = run_folder
    with served(folder) as page:
        browser.get(page.url)
        wait_for(lambda: browser.find_element("id", "connection").text == "live", "it")
        assert not browser.title.startswith("⚠")
        os.kill(page.pid, signal.SIGSTOP)  # like a broken tunnel, which causes no error
        try:
            wait_for(lambda: browser.title.startswith("⚠"), "the warning")
        finally:
            os.kill(page.pid, signal.SIGCONT)
        wait_for(lambda: browser.find_element("id", "connection").text == "live", "it again")
    wait_for(lambda: browser.title.startswith("⚠"), "that it is away")
    word, words, kind = verdict(browser)
    assert (word, kind) == ("connection lost", "bad")
    assert "the dashboard, its machine or the tunnel" in words and "figures of" in words


def is_grey(browser: Any) -> bool:
    return "old" in browser.find_element("id", "work").get_attribute("class").split()


def test_the_verdict_of_each_state_is_on_top(browser: Any, tmp_path: Path) -> None:
    """Show a neuron in each state, and a validator, on a laptop and on a phone."""
    folders = [make_miner(tmp_path, name, uid) for uid, name in enumerate(STATES)]
    folders.append(tmp_path / "validator")
    folders[-1].mkdir()
    figures = {"random": 1.0, "assigned": 0.1, "train": 0.2, "all_reduce": 1, "total": 0.875}
    with EventLog(folders[-1] / "events.jsonl") as validator:
        validator.write("scores", scores={str(uid): figures for uid in range(len(STATES))})
    with served(*folders) as page:
        browser.get(page.url)
        wait_for(lambda: verdict(browser)[0] == "counts", "the first one's")
        buttons = browser.find_elements("css selector", "#neurons button")
        marked = [button.get_attribute("textContent") for button in buttons]
        titles = {f"{name} miner": colour == "bad" for name, (_, colour, _) in STATES.items()}
        assert marked == [f"{'⚠ ' * bad}{t}" for t, bad in titles.items()] + ["validator"]
        for uid, (name, (word, colour, alive)) in enumerate(STATES.items()):
            browser.execute_script("arguments[0].click()", buttons[uid])
            title = f"{name} miner, uid {uid}"
            wait_for(lambda at=title: at in browser.title, "its page")
            assert [verdict(browser)[i] for i in (0, 2)] == [word, colour]
            assert browser.title == f"{'⚠ ' * (colour == 'bad')}{title}"
            assert "0.875" in card(browser, "Score")
            for at, (width, height) in enumerate(((1280, 900), (390, 844))):
                with sized(browser, width, height):
                    if uid % 2 == at:  # so each colour is checked at both sizes
                        assert browser.execute_script(CHECKS) == []
                    assert browser.execute_script(ABOVE_THE_FOLD), "verdict and score"
            assert [SAYS.get(name, {}).get(c, "") in card(browser, c) for c in CARDS] == [True] * 6
            grey = not alive or name in ("starting", "refused")
            # On a busy machine the page may lose its server for a moment, and is grey meanwhile.
            wait_for(lambda at=grey: is_grey(browser) == at, "its colour")
        assert table(browser, "Rounds")[0].split()[1] == "9"
        browser.execute_script("arguments[0].click()", buttons[-1])
        wait_for(lambda: verdict(browser) == ["waiting", "", "good"], "the validator's")


def test_solved_and_repeated_warnings_are_forgotten_and_downtime_is_a_gap(
    browser: Any, tmp_path: Path
) -> None:
    folder = make_miner(tmp_path, "counts")
    now, events = time.time(), list[dict[str, Any]]()
    fate = {"outer_step": 7, "ok": True, "fault": "", "detail": "", "seconds": 0.2}
    for ago, text in ((1200, "solved"), (90, "no room for 3 MB"), (60, "no room for 4 MB")):
        events.append({"time": now - ago, "kind": "problem", "level": "WARNING", "text": text})
    for base, fate_of in (("kept", "too early"), ("refused", "refused"), ("kept", "missed")):
        events.append({"time": now, "kind": "round", "base": base, "fate": fate_of, **fate})
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    with served(folder) as page:
        browser.get(page.url)
        wait_for(lambda: verdict(browser)[0] == "counts", "the verdict")
        warnings = browser.find_element("id", "problems").text
        assert "no room for 4 MB (2 times)" in warnings, warnings
        assert "solved" not in warnings and "3 MB" not in warnings
        cells = "[...document.querySelectorAll('#rounds span span')]"
        colours = browser.execute_script(f"return {cells}.map((s) => s.className)")
        assert colours[:3] == ["not", "not", ""]
        assert "missed" in card(browser, "Last close")
        # A step every half hour for two weeks, and then one every 15 s, must give one curve.
        lines = "return document.querySelectorAll('#loss polyline').length"
        assert browser.execute_script(lines) == 2, "each step faintly, and the mean"
        gap = "[...neurons.values()][0].steps.at(-1)[0] += 40000; draw();"
        assert browser.execute_script(f"{gap} {lines}") == 4


CARDS = ("Uploaded", "Start", "Next try", "Restarts", "Last close", "Closes merged")
#: Words on the cards in some of the states.
SAYS = {
    "counts": {"Uploaded": "of outer step 9: merged"},
    "starting": {"Start": "min left"},
    "refused": {"Next try": "attempt 7"},
    "behind": {"Restarts": "rank 1 was killed by SIGKILL"},
    "merged": {
        "Last close": "merged",
        "Closes merged": "43 of 50",
        "Uploaded": "of outer step 9: not judged yet",
    },
    "not-merged": {"Last close": "late: by 3 s", "Closes merged": "42 of 50"},
}


def test_page_shows_a_days_tokens_cost_and_the_weeks(browser: Any, tmp_path: Path) -> None:
    with served(make_miner(tmp_path, "counts")) as page:
        browser.get(page.url)
        wait_for(lambda: "pauses counted" in card(browser, "Tokens a day"), "the tokens")
        text = browser.find_element("tag name", "body").text
        assert not re.search(r"\b(paid|pays|incentive|emission|earn)", text, re.IGNORECASE)
        drawn = "return document.querySelector(arguments[0])?.getAttribute('aria-label') || ''"
        assert "by the day" in browser.execute_script(drawn, "#counts svg")
        assert "this miner could not apply the update" in " ".join(table(browser, "Rounds"))
        assert "LOCAL" not in browser.find_element("tag name", "body").text


#: Return whether the verdict and then the score are visible without scrolling, the warnings come
#: before the charts, and the whole hotkey is visible.
ABOVE_THE_FOLD = """
const at = (selector) => document.querySelector(selector).getBoundingClientRect();
const score = [...document.querySelectorAll('.card')]
    .find((card) => card.querySelector('h2').textContent === 'Score').getBoundingClientRect();
const hotkey = document.getElementById('hotkey');
return at('#verdict').bottom <= score.top && score.bottom <= innerHeight
    && hotkey.scrollWidth <= hotkey.clientWidth && at('#problems').top <= at('#loss').top
    && at('#loss').top <= at('#speed').top;"""


@contextmanager
def sized(browser: Any, width: int, height: int) -> Iterator[None]:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def verdict(browser: Any) -> list[str]:
    """Return the verdict's word, its sentence and its colour."""
    script = """
        const place = document.getElementById('verdict'), said = (e) => e ? e.textContent : '';
        return [said(place.children[0]), said(place.children[1]), place.className];"""
    return list(browser.execute_script(script))


def test_the_page_can_be_read_on_a_phone_in_the_dark_and_without_a_mouse(
    browser: Any, run_folder: tuple[Path, EventLog], tmp_path: Path
) -> None:
    from selenium.webdriver import ActionChains, Keys

    folder, _events = run_folder
    other = tmp_path / "miner-018"
    other.mkdir()
    with EventLog(other / "events.jsonl") as second, served(folder, other) as page:
        step(second, 7, loss=3.0)
        for scheme, width in itertools.product(("dark", "light"), (400, 1300)):
            emulate = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulate)
            with sized(browser, width, 900):
                browser.get(page.url)
                wait_for(lambda: "3 . 40" in card(browser, "Step"), "the history on the page")
                assert browser.execute_script(CHECKS) == [], (scheme, width)
        for _ in range(3):  # the skip link, the first neuron's button, the second's
            ActionChains(browser).send_keys(Keys.TAB).perform()
        assert focused(browser) == "miner-018"
        ActionChains(browser).send_keys(Keys.ENTER).perform()
        wait_for(lambda: "3 . 7" in card(browser, "Step"), "the other neuron by keyboard")
        assert focused(browser) == "miner-018", "the focus stays"


def focused(browser: Any) -> str:
    """Return the focused element's text with one script, since the page may redraw it."""
    return str(browser.execute_script("return document.activeElement.innerText"))


def table(browser: Any, title: str) -> list[str]:
    """Return the text of each row of a table."""
    script = """
        for (const place of document.querySelectorAll('.tables > div'))
            if (place.querySelector('h2')?.textContent === arguments[0])
                return [...place.querySelectorAll('tbody tr')].map((row) => row.innerText);
        return [];"""
    return list(browser.execute_script(script, title))


def test_a_whole_subnet_on_one_page(browser: Any, tmp_path: Path) -> None:
    """Check that ranks, scores and the end of a miner are shown from its events and metrics."""
    folders = [tmp_path / name for name in ("miner-000", "validator")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "metrics.prom").write_text(
        "# TYPE dt_rank_memory_bytes gauge\n"
        'dt_rank_memory_bytes{rank="0"} 5e9\ndt_rank_memory_bytes{rank="1"} 4e9\n'
        "# TYPE dt_rank_gpu_utilization_percent gauge\n"
        'dt_rank_gpu_utilization_percent{rank="1"} 97\n'
    )
    with (
        EventLog(folders[0] / "events.jsonl") as miner,
        EventLog(folders[1] / "events.jsonl") as validator,
        served(*folders) as page,
    ):
        miner.write("start", uid=0)
        step(miner, 7, loss=3.0)
        figures = {"random": 1.0, "assigned": 0.1, "train": 0.2, "all_reduce": 1, "total": 0.875}
        validator.write("scores", scores={"0": figures})
        browser.get(page.url)
        wait_for(lambda: "0.875" in card(browser, "Score"), "the miner's score")
        assert "by the validator of this subnet" in card(browser, "Score")
        for reason in ("too old", ""):
            validator.write("upload_scored", uid=0, ok=not reason, reason=reason)
        wait_for(
            lambda: "1 of 2 uploads scored; last reset: too old" in card(browser, "Score"),
            "how its uploads fared",
        )
        assert [row.split() for row in table(browser, "Ranks")] == [
            ["0", "5.00", "GB", "–"],
            ["1", "4.00", "GB", "97", "%"],
        ]
        rows = table(browser, "All neurons")
        assert "miner-000" in rows[0] and "3 . 7" in rows[0] and "validator" in rows[1]
        miner.write("stop", reason="deregistered", exit_status=3)
        wait_for(lambda: verdict(browser)[0] == "stopped", "that it ended")
        assert "deregistered" in verdict(browser)[1] and verdict(browser)[2] == "bad"


def test_a_token_is_asked_for_once_and_leaves_the_address(
    browser: Any, run_folder: tuple[Path, EventLog]
) -> None:
    folder, _ = run_folder
    with served(folder, token=TOKEN) as page:
        browser.get(page.url)
        assert "token is missing or wrong" in browser.find_element("tag name", "body").text
        browser.get(f"{page.url}?token={TOKEN}")
        wait_for(lambda: "3 . 40" in card(browser, "Step"), "the page")
        assert browser.current_url == page.url
        browser.get(page.url)
        wait_for(lambda: "3 . 40" in card(browser, "Step"), "the page, by the cookie")


@pytest.mark.parametrize("silent", [False, True])
def test_a_validator_shows_how_its_network_does(browser: Any, tmp_path: Path, silent: bool) -> None:
    folder = tmp_path / "validator"
    folder.mkdir()
    figures = {
        "members": 3, "members_alive": 2, "members_needed": 2, "members_scored": 2,
        "outer_step": 7, "next_round_timestamp_seconds": time.time() + 1800,
        "tokens": 39e9, "tokens_per_second": 208_334,
    }  # fmt: skip
    lines = (
        f"# TYPE dt_network_{name} gauge\ndt_network_{name} {v}\n" for name, v in figures.items()
    )
    (folder / "metrics.prom").write_text("".join(lines))
    with EventLog(folder / "events.jsonl") as events, served(folder) as page:
        events.write("start", uid=0, hotkey=HOTKEY, outer_step=7)
        events.write("held_out", outer_step=7, before=3.5, after=3.25, text="English")
        events.write(
            "network",
            verdict="waiting for members",
            words="a round takes 2, and <b>1</b> answers",
            level="wait",
            next_report=-1.0 if silent else 900.0,
        )
        browser.get(page.url)
        wanted = ["validator silent", "bad"] if silent else ["waiting for members", "wait"]
        wait_for(lambda: verdict(browser)[::2] == wanted, "its verdict")
        assert silent or "<b>1</b>" in verdict(browser)[1]
        with sized(browser, 390, 844):
            wait_for(lambda: "2 of 3" in card(browser, "Members at work"), "its figures")
            assert browser.execute_script(CHECKS) == []
        assert "in 29 min" in card(browser, "Next round") or "30 min" in card(browser, "Next round")
        assert "208,334" in card(browser, "Tokens a second")
        assert "3.250" in card(browser, "Held-out loss")
