"""``dt-network try``: what each member's script gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_training.localnet.trial import words_of


def test_each_member_gets_its_number_and_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a member's script runs in another folder
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("")
    args = ["NETWORK", "{member}.txt", "--seed={member}", "2.txt"]
    assert [words_of(args, number) for number in range(2)] == [
        ["NETWORK", str(tmp_path / f"{number}.txt"), f"--seed={number}", "2.txt"]
        for number in range(2)
    ]
