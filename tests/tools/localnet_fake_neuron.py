"""A neuron that only writes the events of a real neuron, to test the orchestrator.

The real neurons run in tests/end_to_end. Behaviour: ``--fake`` good | stubborn | misses.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def all_started(subnet: Path) -> bool:
    neurons = json.loads((subnet / "localnet.json").read_text())["neurons"]
    return all(neuron["pid"] for neuron in neurons)


def main() -> int:
    words = sys.argv[1:]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    behaviour = flags.get("--fake", "good")
    folder = Path(flags["--neuron.run_folder"])
    validator = flags["--neuron.name"] == "validator"
    file = (folder / "events.jsonl").open("a")

    def write(kind: str, **fields: object) -> None:
        file.write(json.dumps({"time": time.time(), "kind": kind, **fields}) + "\n")
        file.flush()

    def stop(number: int, frame: FrameType | None) -> None:
        if behaviour == "stubborn":
            return
        write("stop")
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    write("start", outer_step=0)
    print("ready", flush=True)
    while validator and not all_started(
        folder.parent
    ):  # a real validator has no round without miners
        time.sleep(0.05)
    for outer in (1, 2):
        if validator:
            write("held_out", outer_step=outer, before=5.0 - outer, after=4.5 - outer)
        else:
            write("step", outer_step=outer - 1, inner_step=1, loss=6.0 - outer, tokens=9, seconds=1)
            revision = f"5.{outer - 1}.1"
            write("publication", revision=revision, ok=True, seconds=1, bytes_sent=10)
        if behaviour == "misses" and outer == 2:
            break
        write("round", outer_step=outer - 1, ok=True, peers=["a", "b", "c"], seconds=1.5)
        write("outer_step", outer_step=outer)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
