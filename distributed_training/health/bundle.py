"""Write the facts that a helper needs about a miner into one archive, without secrets.

Every text goes through :class:`Masked`. It masks the secrets that this machine knows, in each form
in which programs write them: from the settings, ``.env``, the environment and the hotkey's file. It
also masks words that look like a secret, rather too many than too few: queries of URLs, webhooks,
seeds, mnemonics, values with a telling name. Files that are no text, and keys such as
``swarm/identity.key``, stay out.
"""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote, quote_plus, urlsplit

import psutil
from pydantic import SecretStr

from distributed_training import __version__
from distributed_training.common.files import read_json_object
from distributed_training.common.processes import is_secret
from distributed_training.config import OPERATORS_FILE, Config, ConfigError
from distributed_training.config.loader import read_dotenv
from distributed_training.config.schema import all_settings, schema
from distributed_training.protocol.types import Check
from distributed_training.telemetry.logs import MASK

_MOST_BYTES = 4 * 2**20  # of a file: its end
_SHORTEST, _SHORTEST_UNKNOWN = 4, 6  # characters: a shorter word is a part of many others
#: Of the run folder: small files of the miner's state, and the ends of those that grow.
RUN_FILES = (
    *("config.txt", "launcher.json", "stage.json", "facts.json", "notify.json", "instance.json"),
    *("exit_status.json", "launcher.prom", "metrics.prom", "micro-batch.json", "score.json"),
    *("chain.json", "uploads.json", "stacks.txt", "events.jsonl", "swarm/hivemind.log"),
)
#: Of the folder that the miner is started in.
FOLDER_FILES = (OPERATORS_FILE.name, "app.config.override.js")

_TELLING = (
    "secret|passw|phrase|mnemonic|private[_-]?key|api[_-]?key|access[_-]?key|credential|invitation"
    "|authorization|cookie"
)
_OF_FIGURES = "seed|token(?!i)"  # figures have such names too, as tokens of a second
_FIGURE = r"(?:-?[0-9.]+(?:e[+-]?\d+)?|true|false|null|none)\s*(?:[,}\]\n]|\Z)"
_IS = r"""[\w.-]{0,40}\\?["']?\s{0,4}[:=]\s{0,4}"""
_VALUE = "|".join(  # bounded: texts are long, and some are made to be hard
    (
        r'"""(?:.|\n){0,4000}?"""',  # of TOML
        r'"(?:[^"\\\n]|\\.){0,4000}"',
        r"'(?:[^'\\\n]|\\.){0,4000}'",
        r'\\"[^"\\\n]{0,4000}\\"',  # JSON in a string of JSON
        r"\[[^\]]{0,4000}\]",
        r"\{[^}]{0,4000}\}",
        r"[^\s,;}\]]+",
    )
)
_PATTERNS = (
    # Whoever has the query of a signed URL may do the signed request; user and password; the
    # path of a webhook is its secret.
    (re.compile(r"""(://[^\s"'<>?#]{0,2000})[?#][^\s"'<>]+"""), rf"\1?{MASK}"),
    (re.compile(r"""(://)[^\s"'<>/@]{1,400}@"""), rf"\1{MASK}@"),
    (
        re.compile(
            r"""(?i)((?:hooks\.slack\.com|discord(?:app)?\.com|api\.telegram\.org"""
            r"""|ntfy\.[\w.-]+)(?::\d+)?)(?:\\?/|%2f)[^\s"'<>]+"""
        ),
        rf"\1/{MASK}",
    ),
    # Also where a whole URL was written into another one.
    (re.compile(r"""(?i)(signature(?:=|%3d))[^\s"'<>&]+"""), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {MASK}"),
    (re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:.|\n){0,8000}?-----END"), MASK),
    # Keys that show whose they are: of Hugging Face, GitHub, Slack, Amazon.
    (re.compile(r"\b(?:hf_|gh[opsu]_|github_pat_|xox[a-z]-|AKIA|ASIA)[\w-]{12,}"), MASK),
    # Seeds and private keys; a digest has half as many digits, and no 0x.
    (re.compile(r"(?i)\b0x[0-9a-f]{64,}\b|\b[0-9a-f]{128,}\b"), MASK),
    (re.compile(r"""(?i)(?<![a-z])(?:[a-z]{3,8}[\s,"'\\]{1,20}){11,}[a-z]{3,8}(?![a-z])"""), MASK),
    (re.compile(rf"(?i)((?:{_TELLING}){_IS})(?:{_VALUE})"), rf"\1{MASK}"),
    (re.compile(rf"(?i)((?:{_OF_FIGURES}){_IS})(?!{_FIGURE})(?:{_VALUE})"), rf"\1{MASK}"),
)


class Masked:
    """Mask ``secrets`` in texts, and words that look like one."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets for form in _forms(secret)}
        self._known = sorted(forms, key=len, reverse=True)  # one may begin with another

    def __call__(self, text: str) -> str:
        for known in self._known:
            text = text.replace(known, MASK)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text


def _forms(secret: str) -> Iterator[str]:
    """Yield a secret as it is, and as JSON, Python, URLs and base64 write it."""
    for text in {secret, secret.strip(), *secret.splitlines()}:
        if len(text) < _SHORTEST:
            continue
        yield from (text, text.lower(), text.upper())  # a hexadecimal one may be either
        for ascii_only in (True, False):
            yield json.dumps(text, ensure_ascii=ascii_only)[1:-1]
            yield json.dumps(json.dumps(text, ensure_ascii=ascii_only)[1:-1])[1:-1]  # in a line
        yield repr(text)[1:-1]
        yield quote(text, safe="")
        yield quote(text)
        yield quote_plus(text)
        data = text.encode(errors="replace")
        for before in range(3):  # within a longer text; its ends are mixed with the text around it
            coded = base64.b64encode(bytes(before) + data).decode()
            coded = coded[-(-before * 4 // 3) : (before + len(data)) * 4 // 3]
            yield from (coded, coded.replace("+", "-").replace("/", "_"))


def find_secrets(config: Config, dotenv: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the secrets of this miner that this machine knows."""
    for value in config.values.values():
        if isinstance(value, SecretStr):
            text = value.get_secret_value()
            yield text
            if "://" in text:  # programs write a part of it
                yield from filter(_long, (urlsplit(text).path, urlsplit(text).query))
    open_names = {setting.env for setting in schema(config.kind) if not setting.secret}
    try:
        lines = read_dotenv(dotenv)
    except ConfigError:  # a damaged file stays out, too
        lines = {}
    for name, text in lines.items():
        # What is not ours may be anything.
        telling = is_secret(name) and len(text) >= _SHORTEST
        if telling or (name not in open_names and _long(text)):
            yield text
    yield from (text for name, text in environ.items() if is_secret(name) and _long(text))
    chain = config.chain
    wallet = Path(os.path.expanduser(chain.wallet_path)) / chain.wallet_name
    key = read_json_object(wallet / "hotkeys" / chain.wallet_hotkey) or {}
    for name in ("secretPhrase", "secretSeed", "privateKey"):
        found = str(key.get(name, ""))
        if _long(found):
            yield found
            yield found.removeprefix("0x")


def _long(text: str) -> bool:
    return len(text) >= _SHORTEST_UNKNOWN


def find_log(pid: int | None) -> Path | None:
    """Return the file that pm2 writes this miner's lines to, or that they were redirected to."""
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
    config: Config, checks: Sequence[Check], log: Path | None, dotenv: Path
) -> Iterator[tuple[str, str, str]]:
    """Yield name, text and description of each member; the text is not masked yet."""
    rows = json.dumps([asdict(check) for check in checks], indent=2)
    yield "doctor.json", rows, "the doctor's rows"
    packages = sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()})
    versions = [
        f"distributed_training {__version__}",
        platform.platform(),
        platform.python_version(),
    ]
    yield "versions.txt", "\n".join([*versions, *packages]) + "\n", "versions of all packages"
    yield "settings.txt", all_settings(config), "all settings, as they are now"
    try:
        names = "".join(f"{name}={MASK}\n" for name in read_dotenv(dotenv))
    except ConfigError as error:
        names = f"{error}\n"
    yield "env.txt", names, "the names in .env"
    for name in FOLDER_FILES:
        if (text := _end_of(Path(name))) is not None:
            yield name, text, "your settings"
    for name in RUN_FILES:
        if (text := _end_of(config.run_folder / name)) is not None:
            yield f"run/{name}", text, "of the run folder"
    if log is not None and (text := _end_of(log)) is not None:
        yield "log.txt", text, f"the end of {log}"


def _end_of(path: Path) -> str | None:
    """Return the last lines of a file; None without one."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES)
            file.seek(start)
            data = file.read(_MOST_BYTES)
    except OSError:
        return None
    if start:  # of a line that is cut nothing: it may begin in a secret
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace")


def refuse_existing(path: Path) -> None:
    """Raise ConfigError for a file that a bundle would replace."""
    if os.path.lexists(path):
        raise ConfigError(
            f"--bundle {path} is there already, so nothing was written: give another name"
        )


def write_bundle(
    path: Path,
    config: Config,
    checks: Sequence[Check],
    *,
    log: Path | None,
    dotenv: Path = Path(".env"),
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Write the archive ``path``, readable only by its owner; return a line for each member.

    ``log``: the miner's log, whose end goes into the archive. Raises ConfigError.
    """
    mask = Masked(find_secrets(config, dotenv, environ))
    lines, packed = [], io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text, about in _contents(config, checks, log, dotenv):
            data = mask(text).encode(errors="replace")
            member = tarfile.TarInfo(f"bundle/{name}")
            member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(data))
            lines.append(f"{name:<24} {len(data) / 1000:8.1f} kB  {mask(about)}")
    refuse_existing(path)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed.getvalue())
        except OSError:
            path.unlink()  # a part of it would be in the way of the next one
            raise
    except OSError as error:
        raise ConfigError(
            f"--bundle {path} cannot be written ({error.strerror}), so there is none: give a "
            "folder of yours with room"
        ) from None
    return lines
