"""A bundle is for the eyes of others: no secret is in it, however and wherever it was written."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import string
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distributed_training.config import Config, ConfigError
from distributed_training.config.schema import schema
from distributed_training.health import bundle
from distributed_training.health.bundle import FOLDER_FILES, RUN_FILES, Masked, write_bundle
from distributed_training.protocol.types import Check
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)

#: How programs write a text somewhere.
WAYS: dict[str, Callable[[str], str]] = {
    "bare": lambda text: f"it is {text} here",
    "event": lambda text: json.dumps({"kind": "problem", "text": f"no {text}: x"}),
    "event within": lambda text: json.dumps({"text": json.dumps({"key": text})}),
    "URL": lambda text: f"GET https://example.org/a?x={quote(text, safe='')}&y=1",
    "path": lambda text: f"GET https://example.org/{quote(text)}/b",
    "exception": lambda text: f"ValueError({text!r})",
    "assigned": lambda text: f"export X={text}",
    "base64": lambda text: base64.b64encode(f"id:{text}&more".encode()).decode(),
}
MNEMONIC = "legal winner thank year wave sausage worth useful legal winner thank yellow"
SEED, PRIVATE = "0x" + "7a" * 32, "0x" + "6b" * 64
WEBHOOK = "https://discord.com/api/webhooks/123/hooksecret"
SIGNED = "https://s3.example.org/b/uploads/1?X-Amz-Signature=signedsecret&X-Amz-Date=1"


def secret_settings() -> Iterator[str]:
    return (str(setting.env) for setting in schema("miner") if setting.secret)


class Home:
    """A folder that a miner is started in, with its wallet, and secrets in all of its files."""

    def __init__(self, folder: Path, secrets: dict[str, str], foreign: str = "") -> None:
        self.folder = folder
        self.environ = {"DT_NOTIFY_URL": WEBHOOK, **secrets}
        self.dotenv = folder / ".env"
        self.dotenv.write_text(
            f"OTHER={json.dumps(foreign, ensure_ascii=False)}\n" if foreign else ""
        )
        hotkey = folder / "wallets" / "default" / "hotkeys" / "default"
        hotkey.parent.mkdir(parents=True)
        key = {
            "secretPhrase": MNEMONIC,
            "secretSeed": SEED,
            "privateKey": PRIVATE,
            "ss58Address": "5F",
        }
        hotkey.write_text(json.dumps(key))
        self.log = folder / "pm2.log"
        flags = ["--network", "local", "--wallet.path", str(folder / "wallets")]
        flags += ["--neuron.run_folder", str(folder / "run")]
        self.config: Config = load_config("miner", flags, environ=self.environ, check=False)

    def files(self) -> list[Path]:
        run = [self.folder / "run" / name for name in RUN_FILES]
        return [*run, *(self.folder / name for name in FOLDER_FILES), self.log]

    def plant(self, text: str) -> None:
        for path in self.files():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(text + "\n")

    def bundle(self, checks: list[Check]) -> dict[str, bytes]:
        path = self.folder / "help.tar.gz"
        path.unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(bundle, "distributions", lambda: [])
            lines = write_bundle(
                path, self.config, checks, log=self.log, dotenv=self.dotenv, environ=self.environ
            )
        assert path.stat().st_mode & 0o777 == 0o600
        with tarfile.open(path) as archive:
            found = {}
            for member in archive.getmembers():
                file = archive.extractfile(member)
                assert file is not None
                found[member.name.removeprefix("bundle/")] = file.read()
        assert [line.split()[0] for line in lines] == list(found)
        return found


HEX = "0123456789abcdef"
PRINTED = "".join(set(string.printable) - set(string.whitespace))


@settings(max_examples=12, deadline=None)
@given(
    text=st.text(PRINTED, min_size=8, max_size=30) | st.text(HEX, min_size=32, max_size=64),
    name=st.sampled_from([name for name in secret_settings() if name != "DT_NOTIFY_URL"]),
    foreign=st.text(string.ascii_letters + "äß \"'\\$", min_size=8, max_size=20).filter(
        lambda text: len(text.strip()) > 6
    ),
)  # fmt: skip
@example("pa\"ss'wo\\rd?", "DT_PAGE_TOKEN", "a word or two")
def test_no_secret_is_in_a_bundle(text: str, name: str, foreign: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder), {name: text}, foreign)
        secrets = (text, foreign, MNEMONIC, SEED, PRIVATE, WEBHOOK, SIGNED)
        home.plant("\n".join(write(each) for write in WAYS.values() for each in secrets))
        found = home.bundle([Check("x", "fail", WAYS["bare"](text), WAYS["URL"](text))])
    assert set(found) > {"doctor.json", "settings.txt", "log.txt", "run/events.jsonl", "miner.toml"}
    for member, data in found.items():
        lower = data.decode().lower()
        for secret in (
            text,
            foreign,
            MNEMONIC,
            SEED[2:],
            PRIVATE[2:],
            "hooksecret",
            "signedsecret",
        ):
            forms = {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}
            if secret in (text, foreign, MNEMONIC):
                forms.add(base64.b64encode(f"id:{secret}&more".encode()).decode()[4:-8])
            for form in forms:
                at = lower.find(form.lower())
                assert at < 0, (member, form, lower[max(0, at - 80) : at + 80])


KINDS = {
    "mnemonic": st.lists(
        st.text(string.ascii_lowercase, min_size=3, max_size=8), min_size=12, max_size=12
    ),
    "seed": st.text(HEX, min_size=64, max_size=64).map("0x{}".format),
    "private": st.text(HEX, min_size=128, max_size=128),
    "named": st.tuples(
        st.sampled_from(["password", "HF_TOKEN", "clientSecret", "api-key", "mnemonic",
                         "passphrase", "AWS_SECRET_ACCESS_KEY", "X-Authorization", "secretSeed"]),
        st.text(string.ascii_letters + "+/", min_size=8, max_size=30),
    ),
    "query": st.text(string.ascii_letters + string.digits + "%=&-_.", min_size=8, max_size=60),
    "user": st.text(string.ascii_letters + string.digits + ":", min_size=8, max_size=30),
    "hook": st.text(string.ascii_letters + string.digits + "-_", min_size=8, max_size=30),
    "pem": st.text(string.ascii_letters + "+/", min_size=60, max_size=64),
    "key": st.tuples(
        st.sampled_from(["hf_", "ghp_", "github_pat_", "xoxb-", "AKIA"]),
        st.text(string.ascii_letters + string.digits, min_size=16, max_size=40),
    ).map("".join),
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kind=st.sampled_from(list(KINDS)))
def test_unknown_secret_in_a_bundle_is_masked_by_its_look(data: st.DataObject, kind: str) -> None:
    drawn = data.draw(KINDS[kind])
    if kind == "named":
        name, secret = drawn
        quoted = '"""\n{}"""'.format
        ways = [f"{name}={secret}", f"{name}: {secret}", json.dumps({name: secret}),
                json.dumps({"text": json.dumps({name: secret})}), f"{name} = '{secret}'",
                f"{{{name!r}: {secret!r}}}", json.dumps({name: [secret, secret]}),
                json.dumps({name: {"a": secret}}), f"{name} = {quoted(secret)}"]  # fmt: skip
    elif kind == "mnemonic":
        secret = " ".join(drawn)
        ways = [
            secret,
            f'"{secret}"',
            "\n".join(drawn),
            json.dumps(drawn),
            f"0. {secret.upper()}.",
            json.dumps({"key": drawn}, indent=2),
        ]
    else:
        secret = drawn
        around = {"query": "https://a.org/b?{}", "user": "wss://{}@a.org/b"}
        around["hook"] = "https://hooks.slack.com/services/T0/B0/{}"
        around["pem"] = (
            "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128\n\n{}\n-----END PRIVATE KEY-----"
        )
        url = around.get(kind, "{}").format(secret)
        ways = [url, f"<{url}>", json.dumps({"url": url}), f"for url '{url}': 404", f"({url})"]
        if kind == "hook":
            ways += [url.replace("/", "\\/"), quote(url, safe="")]
    mask = Masked([])
    for written in ways:
        shown = mask(f"2026-01-31 | INFO | {written}\nnext: 1\n")
        for form in (secret, " ".join(secret.split()), secret.upper()):
            assert form not in shown, written
        assert shown.startswith("2026-01-31 | INFO | ") and shown.endswith(": 1\n")


def test_a_bundle_keeps_the_facts_that_a_helper_needs() -> None:
    mask = Masked(["sesame-open"])
    lines = [
        "Outer Step: 7 | Inner Step: 12 | LR: 0.0004 | Loss: 2.512 | Step Time: 3.1s",
        '{"time": 1.5, "kind": "step", "tokens": 4096, "tokens_per_second": 812.5, "seed": 42}',
        "the validator refused the upload of outer step 7 (a copy of uid 3, cosine 0.93)",
        f"digest {'ab' * 32} of the epoch-start weights is not that of the manifest",
        "--neuron.upload_steps 60   (miner.toml)",
        "tokenizer.name: dstrbtd/llama-1b",
    ]
    assert [mask(line) for line in lines] == lines


def test_a_log_is_cut_at_a_line_and_megabytes_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * bundle._MOST_BYTES + "sesame\nend\n")
    assert bundle._end_of(path) == "end\n" and bundle._end_of(tmp_path / "none") is None
    hard = "secretsecret" * 5000 + "\n" + "://" * 5000 + "a" * 60_000 + "word " * 9000
    began = time.process_time()
    Masked(["sesame-open"] * 40)(hard)
    assert time.process_time() - began < 10


def test_a_bundle_is_written_only_to_a_new_file(tmp_path: Path) -> None:
    home = Home(tmp_path, {})
    (tmp_path / "there").write_text("x")
    for name in ("there", "none/help.tar.gz"):
        with pytest.raises(ConfigError, match=r"--bundle .*: give "):
            write_bundle(tmp_path / name, home.config, [], log=None, environ={})
    assert (tmp_path / "there").read_text() == "x"


def test_a_disk_that_fills_leaves_no_part_of_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, path = Home(tmp_path, {}), tmp_path / "help.tar.gz"

    class Full(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", Full)
        with pytest.raises(ConfigError, match=r"No space left on device.*so there is none"):
            write_bundle(path, home.config, [], log=None, environ={})
    assert not path.exists()
    assert write_bundle(path, home.config, [], log=None, environ={})


def test_no_link_is_followed_by_a_bundle(tmp_path: Path) -> None:
    home, path = Home(tmp_path, {}), tmp_path / "help.tar.gz"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is there already"):
        write_bundle(path, home.config, [], log=None, environ={})
    assert not (tmp_path / "elsewhere").exists()
