"""SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed_training.chain import callers, client, http_server
from distributed_training.common import files
from distributed_training.protocol import metadata, pt_file, synapses
from distributed_training.store import bucket_lease, bucket_reader

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
CALLS = (ROOT / "docs" / "chain-and-calls.md").read_text()
ROWS = [
    line
    for line in PAGE.partition("## Threats")[2].partition("## Attacked")[0].splitlines()
    if re.match(r"\| [^-T]", line)
]
DEFINED = set(
    re.findall(
        r"^\s*(?:async )?def (test_\w+)\(",
        "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py")),
        re.MULTILINE,
    )
)


@pytest.mark.parametrize("row", ROWS)
def test_each_threat_names_tests_that_are_there(row: str) -> None:
    named = re.findall(r"`(test_\w+)`", row.split("|")[3])
    assert named and set(named) <= DEFINED, set(named) - DEFINED


def test_the_table_was_found() -> None:
    assert len(ROWS) >= 25


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).is_file()


def size(count: int) -> str:
    """Bytes, as the pages write them."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    raise AssertionError(count)


@pytest.mark.parametrize(
    ("limit", "page"),
    [
        (size(http_server.MAX_HEAD_BYTES), CALLS),
        (f"{http_server.MAX_HEAD_LINES:,}", CALLS),
        (size(synapses.MAX_BODY_BYTES), CALLS),
        (f"{callers.STRIKES:,}", CALLS),
        (f"{callers._MOST_BLOCKED:,}", CALLS),
        (f"{callers.MOST:,}", CALLS),
        (f"{callers.MOST_VALIDATORS:,}", CALLS),
        (size(callers._LARGEST_FILE), CALLS),
        (size(client.MAX_REPLY_BYTES), CALLS),
        (size(metadata.MAX_METADATA_BYTES), PAGE),
        (size(metadata.MAX_CONFIG_BYTES), PAGE),
        (size(pt_file.MOST_HEADER), PAGE),
        (size(pt_file.MOST_TABLE), PAGE),
        (size(pt_file.MOST_PICKLE), PAGE),
        (size(files.LARGEST_JSON), PAGE),
        (size(files.LONGEST_LINE), PAGE),
        (f"{bucket_lease._MOST_BYTES:,}", PAGE),
        (size(bucket_reader.MOST_BYTES), PAGE),
    ],
)
def test_each_limit_is_on_a_page(limit: str, page: str) -> None:
    rows = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    assert re.search(rf"(?<![\d,.]){re.escape(limit)}(?!\d)", rows), limit
