"""``python -m distributed_training doctor [...]``."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    if argv[:1] == ["doctor"]:
        from distributed_training.doctor import main as doctor

        return doctor(argv[1:])
    print("usage: python -m distributed_training doctor [--help]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
