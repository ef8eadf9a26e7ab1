"""Run an example as a member of a trial. Its folder decides which: ``member-1`` is the first host.

    dt-network try tests/tools/host_member.py --members 4 --args "NETWORK BASE TEXT"

After the first outer step the process that has joined is killed, and the host is started again as
before. The notebook is interrupted, and its cells are run again in the same kernel.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from distributed_training.common.files import read_json_object
from distributed_training.telemetry import read_events
from tests.tools.waiting import wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
HOSTS = {
    "member-1": (str(EXAMPLES / "join_trainer.py"),),
    "member-2": (str(EXAMPLES / "join_lightning.py"),),
    "member-3": (*ACCELERATE, str(EXAMPLES / "join_accelerate.py")),
}
RUN = Path("run")  # the member's run folder
PATIENCE = 3600.0  # seconds; the trial ends this program earlier


def first_outer_step_is_taken() -> bool:
    events = RUN / "events.jsonl"
    return events.exists() and any(True for _ in read_events(events, "outer_step"))


def joined() -> int:
    """Return the id of the process that has joined."""
    return int((read_json_object(RUN / "instance.json") or {})["pid"])


def run_script(words: list[str]) -> int:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    with subprocess.Popen(words) as first:
        wait_for(first_outer_step_is_taken, "an outer step", PATIENCE, every=0.5)
        os.kill(joined(), signal.SIGKILL)
        print(
            f"\nkilled; status {first.wait(PATIENCE)}", flush=True
        )  # a progress bar may come before it on the line
    return subprocess.run(words).returncode


def run_notebook(base: str, text: str) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name, path in (("base", base), ("text.txt", text)):
        Path(name).symlink_to(path)
    notebook = nbformat.read(EXAMPLES / "join.ipynb", 4)
    client = NotebookClient(
        notebook, timeout=None, allow_errors=True, resources={"metadata": {"path": os.getcwd()}}
    )

    def interrupt() -> None:
        wait_for(first_outer_step_is_taken, "an outer step", PATIENCE, every=0.5)
        os.kill(joined(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with client.setup_kernel():
        for _ in range(2):
            for index, cell in enumerate(notebook.cells[:-1]):  # the last cell leaves the network
                client.execute_cell(cell, index)
                for output in cell.get("outputs", ()):
                    print(output.get("text") or output.get("ename"), flush=True)


if __name__ == "__main__":
    if host := HOSTS.get(Path.cwd().name):
        sys.exit(run_script([sys.executable, *host, *sys.argv[1:]]))
    run_notebook(*sys.argv[2:])
