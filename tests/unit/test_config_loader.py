from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from distributed_training.config import Config, ConfigError, all_settings, describe
from distributed_training.config.schema import schema
from distributed_training.health.machine import Examination, check_configuration
from tests.tools import r2_keys
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(30)

ROOT = Path(__file__).parents[2]
KEYS = r2_keys.KEYS | {"R2_WRITE_SECRET_ACCESS_KEY": "wr1te" + "e" * 59}  # seen where it leaks


def load(*argv: str, environ: dict[str, str] | None = None, dotenv: Path | None = None) -> Config:
    return load_config("miner", argv, environ={**KEYS, **(environ or {})}, dotenv=dotenv)


def refused(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load(*argv, environ=environ)
    text = str(error.value)
    assert "\n" not in text and ": " in text
    return text


@pytest.mark.parametrize(
    "argv",
    [
        ("--neuron.checkpoint_steps", "60"),
        ("--neuron.checkpoint-steps=60",),
        ("--neuron.checkpoint_steps", "5", "--neuron.checkpoint_steps", "60"),
    ],
)
def test_dashes_underscores_and_equals_are_the_same(argv: tuple[str, ...]) -> None:
    assert load(*argv).get("neuron.checkpoint_steps") == 60


def test_unknown_flags_name_the_nearest() -> None:
    assert "did you mean --neuron.upload_steps?" in refused("--neuron.upload_stepz", "5")
    assert "did you mean --neuron.upload_steps?" in refused("--upload_steps", "5")
    assert "did you mean --dht.port?" in refused("--dht.prot=1")
    for name in ("zzzzqqqq", "nonsense", "neuron.nonsense", "verbose", "batch", "validator.foo"):
        assert refused(f"--{name}").endswith(": see --help"), "a guess misleads more than none"
    assert "is not a flag" in refused("start")


def test_switches_with_and_without_a_value() -> None:
    name = "logging.debug"
    assert load(f"--{name}").get(name) is True
    assert load(f"--{name}", "false").get(name) is False
    assert load(f"--{name}=true").get(name) is True
    assert load(f"--{name}", "--neuron.name", "x").get(name) is True
    assert "is not true or false" in refused(f"--{name}=maybe")


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/operator")
    config = load("--neuron.run_folder", "~/run", "--data.source", "jsonl:~/text")
    assert config.run_folder == Path("/home/operator/run")
    assert config.data.spec.folder == Path("/home/operator/text")


def test_lists_take_several_words_commas_and_repetition() -> None:
    one, two, three, name = "a", "b", "c", "--data.own_text"
    for argv in ((name, one, two, three), (name, f"{one},{two}", name, three)):
        found = load_config("miner", argv, environ=KEYS, dotenv=None, check=False)
        assert found.get("data.own_text") == (one, two, three)
    for word in ("none", ""):
        assert load(name, word).get("data.own_text") == ()


def test_the_operators_file_is_read_unless_another_is_named(tmp_path: Path) -> None:
    ours, other = tmp_path / "miner.toml", tmp_path / "other.toml"

    def port(*argv: str) -> int:
        return load_config("miner", argv, environ=KEYS, dotenv=None, file=ours).swarm.dht_port

    assert port() == 8009
    example = re.sub(r"(?m)^#(?=\w)", "", (ROOT / "miner.toml.example").read_text())
    ours.write_text(example.replace('"network.toml"', '"local"'))  # all that it suggests
    config = load_config("miner", (), environ=KEYS, dotenv=None, file=ours, check=False)
    assert config.swarm.dht_external_port == 48009 and not config.warnings
    ours.write_text("[dht]\nport = 7001\n")
    other.write_text("[dht]\nport = 7002\n")
    assert port() == 7001
    assert port("--config", str(other)) == 7002 and port("--dht.port", "7003") == 7003
    ours.write_text("[dht]\nprot = 7001\n")
    with pytest.raises(ConfigError, match=r"dht.prot.*did you mean --dht.port"):
        port()


def test_a_misspelled_name_in_dotenv_is_named(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("R2_WRITE_ACCES_KEY_ID=x\nBT_WALLET_NAM=me\nR2_BUCKET=b\nOTHER=1\n")
    dotenv.chmod(0o600)
    assert load(dotenv=dotenv).warnings == (
        "nothing reads R2_WRITE_ACCES_KEY_ID of .env: did you mean R2_WRITE_ACCESS_KEY_ID?",
        "nothing reads BT_WALLET_NAM of .env: did you mean BT_WALLET_NAME?",
        "nothing reads R2_BUCKET of .env: it can be removed",
    )
    with pytest.raises(ConfigError, match=r"not set.*nothing reads R2_WRITE_ACCES_KEY_ID") as error:
        load_config("miner", [], environ={}, dotenv=dotenv)
    assert "\n" not in str(error.value)
    rows = [*check_configuration(Examination(load(dotenv=dotenv), ranks=1))]
    assert [row.status for row in rows] == ["warn"] * 3 and rows[0].remedy.startswith("did you")


def test_secrets_come_from_dotenv_and_are_never_shown(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    secret = "s$ecret{}#value" + "x" * 49
    lines = [f"export {name}={value}" for name, value in KEYS.items() if "WRITE_SECRET" not in name]
    dotenv.write_text("\n".join(lines) + f"\nR2_WRITE_SECRET_ACCESS_KEY='{secret}'\n")
    config = load_config("miner", [], environ={}, dotenv=dotenv)
    found = [v.get_secret_value() for v in config.values.values() if isinstance(v, SecretStr)]
    assert secret in found and KEYS["R2_READ_SECRET_ACCESS_KEY"] in found
    for text in (repr(config), str(config), "\n".join(describe(config)), repr(config.store)):
        assert secret not in text and KEYS["R2_READ_SECRET_ACCESS_KEY"] not in text
    assert any("R2_WRITE_SECRET_ACCESS_KEY" in x and "********" in x for x in describe(config))


def test_secrets_are_refused_on_the_command_line_and_in_files(tmp_path: Path) -> None:
    (line,) = load("--neuron.influxdb_token", "t0ken-value").warnings
    assert line.endswith("can be taken out: --neuron.influxdb_token")
    secret = next(s for s in schema("miner") if s.env == "R2_WRITE_SECRET_ACCESS_KEY")
    text = refused(f"--{secret.name}", "hunter2hunter2")
    assert "R2_WRITE_SECRET_ACCESS_KEY=" in text and "hunter2" not in text
    toml = tmp_path / "m.toml"
    toml.write_text(f'"{secret.name}" = "hunter2hunter2"\n')
    text = refused("--config", str(toml))
    assert "must not stand in a configuration file" in text and "hunter2" not in text


def test_a_start_prints_given_settings_and_keeps_all(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("R2_WRITE_SECRET_ACCESS_KEY=" + "a" * 64 + "\n")
    dotenv.chmod(0o600)
    config = load("--neuron.checkpoint_steps", "60", dotenv=dotenv)
    network, first, *lines = describe(config)
    assert network == f"This is {config.network.line}"
    assert len(lines) < 12 and "config.txt" in first
    (line,) = [x for x in lines if "checkpoint_steps" in x]
    assert line.split() == ["--neuron.checkpoint_steps", "60", "(command", "line)"]
    everything = all_settings(config).splitlines()
    named = {x.split()[0] for x in everything if x.startswith("  ")}
    flags = {s.env if s.secret else f"--{s.name}" for s in schema("miner").flags}
    assert named == flags | {s.name for s in schema("miner") if s.is_rule}
    assert all(len(x.split()) > 1 for x in everything if x.startswith("  ")), "- for empty ones"
    assert "a" * 64 not in all_settings(config) and "********" in all_settings(config)


FORMS = """
N=V|N='V'|N="V"| N = V |export N=V|N=V # comment|N="V" # comment|N=V\r|N: V|set N=V|N|N V|{"N": "V"}
N="V|N='V|N=“V”|N=‘V’|N=V |N=\u200bV|n=V|$env:N="V"|N=V;N=old|N=V;N=V|-N=V|N+=V|N=;V
"""


def test_a_key_in_a_dotenv_is_read_or_named(tmp_path: Path) -> None:
    """However people write it; and neither a value nor another line is ever shown."""
    dice, name, read = random.Random(5), "R2_WRITE_SECRET_ACCESS_KEY", 0
    dotenv = tmp_path / ".env"
    for case in range(120):
        form = dice.choice(FORMS.strip().replace("\n", "|").split("|")).replace(";", "\n")
        value = "".join(dice.choices(dice.choice(("aZ09$/+=", "abc012")), k=64))
        lines = ["", "# comment", "OTHER=1"] * dice.randint(0, 2)
        text = form.replace("V", value).replace("N", name).replace("n=", f"{name.lower()}=")
        dotenv.write_text("\n".join([*lines, text, *lines, "R2_ACCOUNT_ID=" + "c" * 32]), "utf-8")
        dotenv.chmod(0o600)
        try:
            config = load_config("miner", [], environ={}, dotenv=dotenv, check=False)
        except ConfigError as error:
            said = [str(error)]
            assert name in said[0] and "\n" not in said[0]
            assert (
                f"line {len(lines) + 1}:" in said[0]
                or "its value is not" in said[0]
                or ("cannot be printed" in said[0])
            )
        else:
            said = list(config.warnings)
            held = config.store.write_secret_access_key
            came = held is not None and held.get_secret_value() == value
            read += came
            named = any(name in line or "is not NAME=value" in line for line in said)
            assert came or named, (case, text)
            assert config.store.account_id == "c" * 32
        assert not any(value in line or value[:20] in line for line in said)
    assert 20 < read < 110


def test_a_key_given_twice_or_a_quote_left_open_is_named_with_its_lines(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("BT_WALLET_NAME=a\n\nBT_WALLET_HOTKEY=h\nBT_WALLET_NAME=b\n")
    dotenv.chmod(0o600)
    config = load(dotenv=dotenv)
    twice = f"{dotenv}, lines 1 and 4: BT_WALLET_NAME is given twice, and the later one counts"
    assert config.get("wallet.name") == "b" and [w for w in config.warnings if twice in w]
    for quote in "'\"":
        secret = "c" * 32
        dotenv.write_text(f"R2_ACCOUNT_ID={quote}{secret}\nBT_WALLET_NAME=b\n")
        with pytest.raises(ConfigError) as refusal:
            load(dotenv=dotenv)
        line = str(refusal.value)
        assert f"line 1: the value of R2_ACCOUNT_ID begins with {quote}" in line
        assert "no second one closes it" in line and secret not in line


def test_a_dotenv_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_bytes("\ufeffBT_WALLET_NAME=w".encode())
    assert load(dotenv=dotenv).get("wallet.name") == "w"


def test_a_dotenv_that_others_may_read_is_a_warning(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("R2_ACCOUNT_ID=" + "a" * 32)
    for mode, warned in ((0o600, False), (0o644, True), (0o666, True), (0o700, False)):
        dotenv.chmod(mode)
        found = [line for line in describe(load(dotenv=dotenv)) if "chmod 600" in line]
        assert len(found) == warned
        assert not warned or f"warning: {dotenv} has mode {mode:04o}" in found[0]


def test_the_user_part_of_a_url_is_never_shown() -> None:
    url = "wss://operator:hunter2@node.example:443"
    config = load("--subtensor.chain_endpoint", url)
    assert config.chain.chain_endpoint == url
    assert "hunter2" not in "\n".join(describe(config))
    for bad in ("http://operator:hunter2@store.example", "http://operator:hun/ter2@store.example"):
        text = refused("--r2.endpoint_url", bad)
        assert "without user and password" in text and "ter2" not in text


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://a.r2.cloudflarestorage.com/llama-007", "leave out '/llama-007', the bucket's"),
        ("https://a.example/?x=1", r"leave out '/\?x=1'"),
        ("https://a.example?x=1", r"leave out '\?x=1'"),
        ("https://a.example//b", "leave out '//b'"),
        ("http://a.example:9000/#f", "leave out '/#f'"),
        ("https://a.eu.r2.cloudflarestorage.com/some/path", "leave out '/some/path'"),
        ("https://a.example/storage/v1/s3?x=1", r"leave out '/storage/v1/s3\?x=1'"),
        ("https://a.example/storage/v1/s3/local/", "leave out /local$"),
        ("https://a.example/storage/v1/s3/local-007", "leave out /local-007$"),
        ("https://pub-12ab.r2.dev", "cloudflarestorage.com"),
        ("https://a.r2.cloudflarestorage.com", ""),
        ("https://project.supabase.co/storage/v1/s3", ""),
        ("https://gateway.example/s3/", ""),
        ("http://[::1]:9000/", ""),
    ],
)
def test_an_endpoint_holds_no_bucket(url: str, text: str) -> None:
    if not text:
        assert load("--r2.endpoint_url", url).store.endpoint_url == url
        return
    assert re.search(text, refused("--r2.endpoint_url", url))
    assert re.search(text, refused("--network", "local", environ={"R2_ENDPOINT_URL": url}))
