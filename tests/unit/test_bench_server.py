"""What the bench of the signed server is asked for."""

from __future__ import annotations

import pytest

from bench import server
from bench.strangers import ATTACKS

pytestmark = pytest.mark.timeout(60)


def test_a_word_that_names_no_attack_is_refused_in_one_line_that_names_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        server.main(["--only", "attacks", "--attacks", "chunks", "nonsense"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "'nonsense'" in line and "'chunks'" not in line
    assert all(name in line for name in ATTACKS)
