"""Write the facts about a miner that a helper needs into one archive, without secrets.

Only the files below are packed. Our programs write all of them except ``miner.toml``, which may not
contain secrets, and mask the secrets that they know. This machine's secrets are masked here once
more, because libraries also print lines into the log.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path

import psutil
from pydantic import SecretStr

from distributed_training import __version__
from distributed_training.common.processes import is_secret
from distributed_training.config import OPERATORS_FILE, Config, ConfigError
from distributed_training.config.loader import read_dotenv
from distributed_training.config.schema import all_settings
from distributed_training.protocol.types import Check
from distributed_training.telemetry.logs import mask, register_secret

_MOST_BYTES = 4 * 2**20  # most bytes that are packed from the end of a file
#: Files of the run folder. Most are small and hold the miner's state; of growing files, the end is
#: packed. Never add chain.json, because its commitments contain the read keys of all buckets.
RUN_FILES = (
    *("config.txt", "launcher.json", "stage.json", "facts.json", "notify.json", "instance.json"),
    *("exit_status.json", "launcher.prom", "metrics.prom", "micro-batch.json"),
    *("stacks.txt", "events.jsonl"),
)


def find_log(pid: int | None) -> Path | None:
    """Return the file with this miner's output: the log of pm2, or the target of a redirection."""
    if pid is not None:
        try:
            process = psutil.Process(pid)
            for place in (process.environ().get("pm_out_log_path", ""), f"/proc/{pid}/fd/1"):
                if place and (path := Path(place)).is_file():
                    return path.resolve()
        except (psutil.Error, OSError):
            pass
    logs = Path(os.environ.get("PM2_HOME", "~/.pm2")).expanduser() / "logs"
    found = [path for path in logs.glob("distributed_training_miner*out*.log") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _contents(
    config: Config, checks: Sequence[Check], log: Path | None
) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the text and a description of each file. The text is not masked yet."""
    rows = json.dumps([asdict(check) for check in checks], indent=2)
    yield "doctor.json", rows, "the doctor's rows"
    packages = sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()})
    system = (f"distributed_training {__version__}", platform.platform(), platform.python_version())
    yield "versions.txt", "\n".join([*system, *packages]) + "\n", "versions of all packages"
    yield "settings.txt", all_settings(config), "all settings, as they are now"
    files = {OPERATORS_FILE.name: Path(OPERATORS_FILE.name)}
    files |= {f"run/{name}": config.run_folder / name for name in RUN_FILES}
    if log is not None:
        files["log.txt"] = log
    for name, path in files.items():
        if (text := _end_of(path)) is not None:
            yield name, text, f"the end of {path}"


def _end_of(path: Path) -> str | None:
    """Return the last lines of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES)
            file.seek(start)
            data = file.read(_MOST_BYTES)
    except OSError:
        return None
    if start:  # leave out the incomplete first line, because it may begin inside a secret
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def write_bundle(
    path: Path,
    config: Config,
    checks: Sequence[Check],
    *,
    log: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Write the archive ``path``, readable only by its owner; return a line for each file in it.

    ``log``: the miner's log, whose end goes into the archive. Raises ConfigError if ``path`` exists
    already or cannot be written.
    """
    settings = config.values.values()
    secrets = [value.get_secret_value() for value in settings if isinstance(value, SecretStr)]
    with contextlib.suppress(ConfigError):  # raised if .env is damaged
        environ = {**read_dotenv(Path(".env")), **environ}
    secrets += [text for name, text in environ.items() if is_secret(name)]
    for secret in secrets:
        for text in {secret, *secret.splitlines()}:
            register_secret(text)
    lines, packed = [], io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text, about in _contents(config, checks, log):
            data = mask(text).encode(errors="replace")
            member = tarfile.TarInfo(f"bundle/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))
            lines.append(f"{name:<24} {len(data) / 1000:8.1f} kB  {mask(about)}")
    try:
        # O_EXCL makes sure that no link is followed and no file is replaced.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed.getvalue())
        except OSError:
            path.unlink()  # an incomplete file would block the next bundle
            raise
    except OSError as error:
        raise ConfigError(
            f"--bundle {path} cannot be written ({error.strerror}), so there is no bundle: choose "
            "a new name in a folder of yours, on a disk with free space"
        ) from None
    return lines
