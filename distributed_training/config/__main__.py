"""``python -m distributed_training.config --markdown [FILE]``: write the table of all flags."""

from __future__ import annotations

import sys
from pathlib import Path

from .help import PUBLIC_DOCUMENT, markdown


def main(argv: list[str]) -> int:
    if argv[:1] != ["--markdown"] or len(argv) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    Path(argv[1] if len(argv) > 1 else PUBLIC_DOCUMENT).write_text(markdown(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
