"""Install pip into the running virtual environment without ensurepip.

On Debian, Python lacks ensurepip unless python3-venv is installed. But a pip wheel is a zip file
that Python can run, so the wheel that ``requirements/build.txt`` names can install itself. Only
scripts/setup.sh uses this script.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

LIST = Path(__file__).resolve().parents[1] / "requirements" / "build.txt"


def main() -> int:
    found = re.search(
        r"^pip==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", LIST.read_text(), re.M
    )
    assert found is not None, f"{LIST} names no pip"
    index = f"https://pypi.org/pypi/pip/{found[1]}/json"
    with urllib.request.urlopen(index, timeout=60) as reply:
        files = json.load(reply)["urls"]
    wheel = next(f for f in files if f["packagetype"] == "bdist_wheel")
    # A mirror may answer with relative URLs.
    url = urllib.parse.urljoin(index, wheel["url"])
    with urllib.request.urlopen(url, timeout=120) as reply:
        content = reply.read()
    # The wheel is run next, so accept it only if the list has its digest.
    if hashlib.sha256(content).hexdigest() not in found[2]:
        print("error: the pip wheel is not the listed one; retry, or: apt install python3-venv")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / wheel["filename"]
        path.write_bytes(content)
        command = [sys.executable, f"{path}/pip", "install", "--quiet", "--no-index", str(path)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
