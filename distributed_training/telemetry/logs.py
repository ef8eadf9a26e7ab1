"""Logging in the form that pm2 needs: one line per record on stdout, no colours, no secrets."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from pydantic import SecretStr

from distributed_training.config.settings import TelemetrySettings

# The usual names of the levels, since libraries rename them: hivemind turns WARNING into WARN.
_LEVELS = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}
_LIBRARIES = (
    "hivemind", "bittensor", "boto3", "botocore", "s3transfer", "urllib3", "httpx", "httpcore",
    "uvicorn", "asyncio", "websockets", "transformers", "torch", "filelock", "matplotlib",
)  # fmt: skip
_SHORTEST_SECRET = 6  # a shorter secret would mask ordinary words
MASK = "********"

# Control characters, which a text from outside may contain. ESC sequences would otherwise act on
# the reader's terminal.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# The query of a presigned URL: with it, anybody could send the signed request.
_SIGNED_QUERY = re.compile(r"\?(?=[^\s\"'<>?]*\b(?:X-Amz-)?Signature=)[^\s\"'<>]+", re.IGNORECASE)

_secrets: tuple[str, ...] = ()  # the longest first, since a secret may begin with a shorter one


def register_secret(secret: SecretStr | str | None) -> None:
    """Show ``secret`` as ``********`` in every line of this process from now on."""
    global _secrets
    text = secret.get_secret_value() if isinstance(secret, SecretStr) else secret
    if text and len(text) >= _SHORTEST_SECRET:
        in_json = json.dumps(text, ensure_ascii=False)[1:-1]  # the form that it has in an event
        # Make a new tuple, since another thread may be going through the old one.
        _secrets = tuple(sorted({*_secrets, text, in_json}, key=len, reverse=True))


def mask(text: str) -> str:
    """Return ``text`` with registered secrets and signed URLs' queries replaced by ``********``."""
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, MASK)
    if "ignature=" in text:  # this quick check spares most lines the search
        text = _SIGNED_QUERY.sub(f"?{MASK}", text)
    return text


class LineFormatter(logging.Formatter):
    """Formats a record as ``2026-01-31 23:59:59.123+00:00 | INFO | text``.

    Ranks other than 0 add their number. The time is the machine's local time with its UTC offset. A
    record always becomes one line, because pm2 and grep work by lines. A traceback is folded into
    ``(Type: text; at file:line in function < caller)``, innermost first.
    """

    def __init__(self, *, rank: int) -> None:
        super().__init__()
        self._prefix = f"rank {rank} | " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not record.name.startswith(("distributed_training", "neurons", "__main__")):
            message = f"{record.name}: {message}"
        if record.exc_info and (error := record.exc_info[1]) is not None:
            frames = traceback.extract_tb(error.__traceback__)[-6:]  # a few fit into a line
            places = [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames]
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            text += f"; at {' < '.join(reversed(places))}" if places else ""
            cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            text += f"; caused by {type(cause).__name__}: {cause}" if cause else ""
            message = f"{message} ({text})"
        moment = datetime.fromtimestamp(record.created).astimezone()
        head = f"{moment.isoformat(' ', 'milliseconds')} | {level_name(record)} | {self._prefix}"
        # Mask before splitting, since a secret may have several lines.
        body = " / ".join(part for part in mask(message).splitlines() if part.strip())
        return head + _CONTROL.sub("\N{REPLACEMENT CHARACTER}", body)


def level_name(record: logging.LogRecord) -> str:
    """Return the level's usual name, such as WARNING, even if a library has renamed it."""
    return _LEVELS.get(record.levelno, record.levelname)


def moved(path: str | Path, file: int) -> bool:
    """Return whether ``path`` no longer names the open file, as it was replaced or removed.

    logrotate moves a file while it is being written, and ``rm`` removes it. A process that
    continued to write to it would fill the disk with a file that nobody can find. Raises OSError.
    """
    try:
        return not os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return True


def setup_logging(
    settings: TelemetrySettings,
    *,
    rank: int,
    secrets: Iterable[SecretStr | str | None] = (),
) -> None:
    """Set up this process's log as operators expect it. It is safe to call this again.

    Ranks other than 0 print only warnings and errors, and so do libraries. From now on ``secrets``,
    which are all SecretStr values of the configuration, are masked. An uncaught exception in any
    thread becomes a single line as well.
    """
    for secret in secrets:
        register_secret(secret)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Otherwise a badly encoded file name, or a "✓" under an old locale, would make the whole
        # line fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    output = logging.StreamHandler(sys.stdout)
    output.setFormatter(LineFormatter(rank=rank))
    if rank:
        output.setLevel(logging.WARNING)
    root = logging.getLogger()
    # Remove handlers that libraries added. With them, each line would be printed twice, and one of
    # the two would show the secrets.
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.addHandler(output)
    root.setLevel(logging.DEBUG if settings.debug else logging.INFO)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk or a closed pipe must not end training
    # hivemind reads these variables when it is imported, and the processes that it forks get them.
    os.environ.setdefault("HIVEMIND_COLORS", "0")
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if settings.debug else "WARNING")
    for library in _LIBRARIES:
        logger = logging.getLogger(library)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
        # The logging.config of some library may have disabled this logger, even for errors.
        logger.disabled = False
        logger.setLevel(logging.DEBUG if settings.debug else logging.WARNING)
    warnings = logging.getLogger("py.warnings")
    warnings.setLevel(logging.WARNING if settings.debug else logging.ERROR)
    log = logging.getLogger("distributed_training")

    def uncaught(error: BaseException | None, where: str = "") -> None:
        if error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
            log.critical("Uncaught error%s", where, exc_info=error)

    # Python's own hook would write many lines to stderr, and would not mask any secrets.
    sys.excepthook = lambda kind, error, trace: uncaught(error)
    threading.excepthook = lambda failed: uncaught(
        failed.exc_value, f" in thread {failed.thread.name if failed.thread else '?'}"
    )
