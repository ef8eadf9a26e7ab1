"""Test a network's file: it is read strictly, and other rules need another signature."""

from __future__ import annotations

import importlib
import json
import re
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from bittensor_core import Keypair

from distributed_training import network_place
from distributed_training.common.ports import free_ports
from distributed_training.config import Config, ConfigError, describe
from distributed_training.config.types import ConfigAway
from distributed_training.network import (
    NetworkAway,
    NetworkFileError,
    digest_of,
    flatten,
    signed,
    to_toml,
    tree_of,
)
from distributed_training.network_place import save_copy
from distributed_training.protocol.pages import PageDraw
from distributed_training.protocol.types import ExitStatus
from tests.tools.chain_raw import trickle
from tests.tools.chain_world import registry_at
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "docs" / "network.toml").read_text(encoding="utf-8")
#: Replaces "version = 1".
SECOND = f'previous = "sha256:{"0" * 64}"\nfrom_outer_step = 7\nversion = 2 '
ALICE, BOB = (Keypair.create_from_uri(f"//{name}") for name in ("Alice", "Bob"))


def changed(old: str, new: str, *, signer: Keypair | None = ALICE) -> str:
    """Return the example with one change, signed again unless ``signer`` is None."""
    assert old in EXAMPLE
    text = EXAMPLE.replace(old, new)
    return signed(text, signer) if signer else text


def load(text: str, folder: Path, *flags: str, kind: str = "miner") -> Config:
    path = folder / "network.toml"
    path.write_text(text)
    argv = ("--neuron.run_folder", str(folder / "run"), "--network", str(path), *flags)
    return load_config(kind, argv, environ=KEYS, dotenv=None)


def refused(text: str, folder: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(text, folder, *flags)
    assert error.value.status == ExitStatus.BAD_CONFIGURATION
    assert "so nothing was started" in str(error.value) or "and nothing was started" in str(
        error.value
    )
    assert "\n" not in str(error.value) and not (folder / "run").exists()
    return str(error.value)


LONG = "k" * 70_000


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG} = 1\n",
        f'"{LONG}.{LONG}" = 1\n',
        f"[{LONG}]\na = 1\n",
        f'name = "{LONG}"\n',
        f'exchange = "{LONG}"\n',
        f"version = {'9' * 4000}\n",
        f'master_hotkey = "{LONG}"\n',
        f"= {LONG}",
    ],
)
def test_a_refusal_repeats_little_of_a_file(tmp_path: Path, text: str) -> None:
    name = text.partition(" ")[0]
    rest = "\n".join(line for line in EXAMPLE.splitlines() if not line.startswith(f"{name} "))
    for content in (text, text + rest):
        assert len(refused(content, tmp_path).replace(str(tmp_path), "")) < 1000


@pytest.mark.parametrize("kind", ["miner", "validator"])
def test_the_documents_example_is_a_network(tmp_path: Path, kind: str) -> None:
    config = load(EXAMPLE, tmp_path, kind=kind)
    assert config.network.rules_id == config.network.digest[:12] != config.swarm.run_id
    assert config.chain.registry_url == "https://registry.example.org"
    assert config.miner.master_ss58_address == ALICE.ss58_address
    assert config.store.global_model_name == "example-model"
    assert config.averages and config.rounds.grace.total_seconds() == 900
    assert config.sources["training.sequence_length"] == (
        f"training.sequence_length in {tmp_path / 'network.toml'}"
    )
    shown = "\n".join(describe(config))
    assert config.network.line in shown and "sequence_length" not in shown


def test_the_run_s_id_stays_through_versions_and_is_another_networks_for_another_model(
    tmp_path: Path,
) -> None:
    run_id = load(EXAMPLE, tmp_path).swarm.run_id
    later = changed("version = 1 ", SECOND).replace("0.9\n", "0.8\n")
    config = load(signed(later, ALICE), tmp_path)
    assert config.network and config.network.head.from_outer_step == 7
    assert config.swarm.run_id == run_id
    for old, new in (
        ('name = "example"', 'name = "other"'),
        ("vocab_size = 264", "vocab_size = 272"),
        ('name = "bytes"', f'name = "bytes"\nrevision = "{"0" * 40}"'),
    ):
        assert load(changed(old, new), tmp_path).swarm.run_id != run_id, new
    for head in (SECOND.partition("\n")[0] + "\nversion = 1 ", "version = 2 "):
        assert "let dt-network sign write" in refused(changed("version = 1 ", head), tmp_path)


def test_comments_and_layout_do_not_count(tmp_path: Path) -> None:
    plain = re.sub(r" +#.*", "", EXAMPLE)
    inline = to_toml(tomllib.loads(EXAMPLE))
    digests = {load(text, tmp_path).network.digest for text in (EXAMPLE, plain, inline)}
    assert len(digests) == 1


def test_private_addresses_are_right_only_in_a_private_network(tmp_path: Path) -> None:
    private = changed("version = 1 ", "private = true\nversion = 1 ")
    for address in ("10.0.0.5", "172.16.3.4", "192.168.1.9", "100.64.0.7"):
        assert load(private, tmp_path, "--dht.ip", address).get("dht.ip") == address
        with pytest.raises(ConfigError, match="give its public address"):
            load(EXAMPLE, tmp_path, "--dht.ip", address)
    for text, address in ((private, "127.0.0.1"), (EXAMPLE, "127.0.0.1"), (EXAMPLE, "224.0.0.1")):
        with pytest.raises(ConfigError, match=f"--dht.ip {address} cannot be reached"):
            load(text, tmp_path, "--dht.ip", address)
    alone = private.replace("https://registry.example.org", "http://127.0.0.1:8100")
    assert load(signed(alone, ALICE), tmp_path, "--dht.ip", "127.0.0.1")


def test_pages_are_drawn_by_the_rule_that_the_file_names(tmp_path: Path) -> None:
    """A page that is held out stays so in all versions, since they do not change the draw."""
    assert load(EXAMPLE, tmp_path).draw_pages.held_out_pages == 0
    second = EXAMPLE.replace("\nrevision = ", "\nselection = 2\nheld_out_pages = 8\nrevision = ")
    draws = [
        load(signed(text, ALICE), tmp_path, kind=kind).draw_pages
        for text in (second, second.replace("version = 1 ", SECOND))
        for kind in ("miner", "validator")
    ]
    run_id = load(EXAMPLE, tmp_path).swarm.run_id
    rule = PageDraw(run_id, f"example {ALICE.ss58_address}", 100, 8)
    assert draws == [rule] * 4


def test_the_canonical_form_is_the_documents() -> None:
    import hashlib

    flat = {"b": 1, "signature": "0x", "a.é": [0.00025, 1e-5, "x y", True]}
    form = b'{"a.\\u00e9":[0.00025,1e-05,"x y",true],"b":1}'
    assert digest_of(flat) == hashlib.sha256(form).hexdigest()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("format = 3", "format = 4", "its format is 4, but this program reads 2 and 3"),
        ("format = 3", "format = 2", "is 2 with exchange 'hivemind', for the protocol of subnet"),
        ("format = 3", "format = true", "its format is True, but"),
        ("format = 3", "format = 1", "has not spoken since commit 10170bb9"),
        ('exchange = "hivemind"', 'exchange = "pigeons"', "exchange 'pigeons'"),
        ('exchange = "hivemind"', "", "exchange is missing"),
        ("\nrows = 1", "\nselection = 3\nrows = 1", "3 is more than 2"),
        ("\nrows = 1_200_000", "\nselection = 2", "data.selection is 2 without data.rows"),
        ("\nrows = 1_200_000", "\nselection = 2\nrows = 3299", "makes 32 pages of 100 rows and"),
        ("\nrows = 1_200_000", '\nselection = 2\nrows = "a"', "data.rows in"),
        ("\nrows = 1", '\nheld_out = "pages"\nrows = 1', "only data.selection 2 holds pages out"),
        (
            "\nrows = 1",
            '\nheld_out = "held.txt"\nrows = 1',
            "'held.txt' is not held-out text: pages",
        ),
        ("\nrows = 1", '\nheld_out = "http://a/b#0"\nrows = 1', "is not held-out text"),
        *(
            ("\nrows = 1", f"\nheld_out = {json.dumps(files)}\nrows = 1", words)
            for files, words in (
                (["a=b"], "'a=b' is not held-out text"),
                (["a=b#" + "0" * 63], "NAME*WEIGHT=FILE"),
                ([f"{name}=b#{'0' * 64}" for name in "ab"] + ["c#" + "1" * 64], "a name of its"),
                ([f"a=b#{'0' * 64}"] * 2, "a name of its own"),
                ([f"a*0=b#{'0' * 64}"], "weight 0"),
                ([f"a*1e9=b#{'0' * 64}", f"b=b#{'0' * 64}"], "a name of its own"),
                ([f"n{i}=b#{'0' * 64}" for i in range(17)], "up to 16"),
            )
        ),
        ("[round]\n", "[round]\nheld_out_rise = -1.0\n", "-1.0 is less than 0"),
        ("version = 1 ", 'private = "LAN"\nversion = 1 ', "private in "),
        ("version = 1 ", 'software = "--index-url=a"\nversion = 1 ', "software '--index-url=a'"),
        ("version = 1 ", 'software = "a; b"\nversion = 1 ', "software 'a; b'"),
        ("warmup_steps", "warmup_step", "did you mean training.warmup_steps?"),
        ("gradient_clip = 1.0\n", "", "training.gradient_clip is missing"),
        ("sequence_length = 1024", "sequence_length = 1", "1 is less than 2"),
        ("sequence_length = 1024", 'sequence_length = "x"', "'x' is not a whole number"),
        ("outer_momentum = 0.9", "outer_momentum = 1.5", "training.outer_momentum in"),
        ("outer_momentum = 0.9", "outer_momentum = nan", "a date, nan or inf"),
        ("outer_momentum = 0.9", "outer_momentum = 2026-01-01", "a date, nan or inf"),
        ('"900s"', '"2d"', "2d is more than 24h"),
        ("max_uids = 256", "max_uids = 1", "1 is less than 2"),
        ("[training]", '[training]\nschedule = "linear"', "training.schedule in"),
        ("[training]", "[training]\ndecay_steps = 0", "0 is less than 1"),
        ("[training]", "[training]\ndecay_from = -1", "-1 is less than 0"),
        ("[training]", "[training]\nweight_decay_on = 1", "training.weight_decay_on in"),
        ("[limits]", "[stop]\nouter_steps = 0\n[limits]", "stop.outer_steps"),
        ("[limits]", "[stop]\ntokens = 1.5\n[limits]", "stop.tokens"),
        ("[limits]", '[stop]\nloss = "low"\n[limits]', "stop.loss"),
        ("[limits]", "[stop]\nsteps = 5\n[limits]", "'stop.steps' is not a key of it"),
        ('name = "example"', 'name = "Ex ample"', "name 'Ex ample'"),
        ("version = 1 ", "version = true ", "version True"),
        (
            "\nurl = ",
            "\nnetuid = 3\nurl = ",
            "chain.netuid does not fit chain.kind 'registry'",
        ),
        ("version = 1 ", 'run_id = "v1_2_7_r5"\nversion = 1 ', "it names a run_id"),
        ("[limits]", "[limits", "it is not TOML"),
        ("version = 1 ", f"version = {'5' * 5000} ", "it is not TOML"),
        # tomllib would need 1 GB for this.
        ("[limits]", f"[limits]\n{'.'.join('a' * 16000)} = 1", "nested too deeply"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    try:
        bad = changed(old, new)
    except ValueError:  # such a file cannot be signed
        bad = changed(old, new, signer=None)
    assert text in refused(bad, tmp_path)


_DEEP = ".".join("a" * 65) + " = 1"


@pytest.mark.parametrize(
    "text",
    [
        f"x = [{', '.join(['1.5'] * 200)}] # {_DEEP}",
        f"""x = ["\\" {_DEEP}", '{_DEEP}', \"""\\\""" {_DEEP}\""", '''it's\n{_DEEP}''']""",
        ".".join("a" * 64) + " = 1",
    ],
)
def test_dots_in_strings_numbers_and_comments_are_no_nesting(text: str) -> None:
    assert tree_of(text)
    peers = [f"/ip4/203.0.113.{i}/tcp/8009/p2p/12D3KooW.{i}" for i in range(64)]
    swarm = {"swarm": {"initial_peers": peers}}
    assert tree_of(to_toml(swarm)) == swarm


@pytest.mark.parametrize(
    "text",
    [
        _DEEP,
        _DEEP.replace(".", "\t . "),
        _DEEP.replace("a", '"\\".b"'),
        _DEEP.replace("a", "'a'"),
        f"[{_DEEP.partition(' ')[0]}]",
        *(
            f"x = [{string}, {{{_DEEP}}}]"
            for string in ('"\\\\"', "''", '""', "'''\n\"'''", '"""\n\'"""""', "'''a'''''", '"#"')
        ),
    ],
)
def test_a_key_of_many_parts_is_refused_wherever_it_stands(text: str) -> None:
    with pytest.raises(NetworkFileError, match="nested too deeply"):
        tree_of(text)


def test_unsigned_altered_and_signed_by_another(tmp_path: Path) -> None:
    unsigned = re.sub(r"^signature.*\n", "", EXAMPLE, flags=re.M)
    assert "it is not signed" in refused(unsigned, tmp_path)
    altered = changed("max_uids = 256", "max_uids = 255", signer=None)
    assert "it was altered" in refused(altered, tmp_path)
    by_bob = changed("max_uids = 256", "max_uids = 255", signer=BOB)
    assert "it was altered" in refused(by_bob, tmp_path)
    assert load(changed("max_uids = 256", "max_uids = 255"), tmp_path)


def test_a_networks_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for place in ("nowhere.toml", "/", "http://example.org/n.toml", "https://a:b@example.org/n",
                  "https://[a/n"):  # fmt: skip
        with pytest.raises(ConfigError, match=r"^--network") as error:
            load_config("miner", ("--network", place), environ=KEYS, dotenv=None)
        assert error.value.status == ExitStatus.BAD_CONFIGURATION


LARGE = [("hidden_size = 192", "hidden_size = 16384"), ("_layers = 4", "_layers = 400"),
         ("head_dim = 32", "head_dim = 2048"), ("te_size = 512", "te_size = 65536"),
         ("1_872_576 ", "1_610_634_510_336 ")]  # fmt: skip


def large() -> str:
    text = EXAMPLE
    for old, new in LARGE:
        assert old in text
        text = text.replace(old, new)
    return signed(text, ALICE)


OF_RANKS = "--neuron.run_folder run --neuron.device cpu --network network.toml"
PROGRAMS = {
    "miner.__main__": OF_RANKS,
    "validator.__main__": OF_RANKS,
    "join_command": "--wallet.path wallets network.toml",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_model_too_large_for_the_machine_ends_a_program_before_it_writes(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "network.toml").write_text(large())
    monkeypatch.chdir(tmp_path)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    main = importlib.import_module(f"distributed_training.{program}").main
    assert main(PROGRAMS[program].split()) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "error: " in line and "network.toml" in line
    assert "host memory: at least" in line and not said.out
    assert [entry.name for entry in tmp_path.iterdir()] == ["network.toml"]


def test_a_flag_that_only_a_network_may_set_is_one_warning(tmp_path: Path) -> None:
    config = load(EXAMPLE, tmp_path, "--neuron.sequence_length", "512")
    (line,) = config.warnings
    assert config.training.sequence_length == 1024 and "training.sequence_length = 1024" in line


def test_the_server_of_the_rows_api_in_a_file_of_earlier_editions_has_no_effect(
    tmp_path: Path,
) -> None:
    text = changed("\nrows = 1", '\nrows_url = "https://datasets-server.example"\nrows = 1')
    assert load(text, tmp_path).data == load(EXAMPLE, tmp_path).data


def by(answer: Callable[[httpx.Request], httpx.Response]) -> Callable[[str], httpx.AsyncClient]:
    """Make clients that get what ``answer`` returns."""

    def unread(request: httpx.Request) -> httpx.Response:
        made = answer(request)
        stream = httpx.ByteStream(made.content)
        return httpx.Response(made.status_code, headers=made.headers, stream=stream)

    transport = httpx.MockTransport(unread)
    return lambda url: httpx.AsyncClient(transport=transport, follow_redirects=True)


def test_certificates_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", __file__)
    url = "https://127.0.0.1:9/network.toml"
    for start in (
        lambda: load_config("miner", ("--network", url), environ=KEYS, dotenv=None),
        lambda: registry_at(url, None),
    ):
        with pytest.raises(ConfigError, match=r"SSL_CERT_FILE.* cannot be read .*: correct that"):
            start()


HOSTS = {"founder.example": "203.0.112.7", "inside.example": "10.0.0.5", "own.lan": "10.0.0.9"}
PUBLIC, OWN = "https://founder.example/a/network.toml", "https://own.lan/network.toml"


@pytest.mark.parametrize(
    ("url", "steps", "words"),
    [
        (PUBLIC, [], ""),
        (PUBLIC, ["other.toml"], ""),
        (PUBLIC, ["https://founder.example/b", "/c", "d", "../e", "?f=1"], ""),
        (PUBLIC, ["/b"] * 6, "redirects more than 5 times"),
        (PUBLIC, ["http://founder.example/b"], "leads to http://founder"),
        (PUBLIC, ["/b", "http://inside.example/admin"], "leads to http://inside"),
        (PUBLIC, ["https://inside.example/admin"], "an internal address"),
        (PUBLIC, ["https://[::ffff:10.0.0.1]/"], "an internal address"),
        (PUBLIC, ["https://2130706433/", ""], "an internal address"),
        (PUBLIC, ["https://me:word@founder.example/"], "anybody on the way"),
        (PUBLIC, ["file:///etc/passwd"], "anybody on the way"),
        (PUBLIC, ["https://[x/"], "'https://[x/', which is no URL"),
        (PUBLIC, ["https://founder.example:x/"] * 3, "does not answer (Invalid URL"),
        (
            OWN,
            ["https://inside.example/network.toml"],
            "",
        ),  # redirects inside an operator's own network are allowed
        (OWN, ["http://inside.example/network.toml"], "leads to http://inside"),
    ],
)
def test_redirects_lead_over_https_and_not_inside(
    url: str, steps: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is sent to a place to which a redirect must not lead."""
    real = socket.getaddrinfo

    def resolve(host: str, port: object, **how: int) -> object:
        return real(HOSTS.get(host, host), port, flags=socket.AI_NUMERICHOST, **how)

    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if len(asked) <= len(steps):
            return httpx.Response(302, headers={"location": steps[len(asked) - 1]})
        return httpx.Response(200, text="found")

    monkeypatch.setattr("distributed_training.common.addresses.socket.getaddrinfo", resolve)
    monkeypatch.setattr(network_place, "_FIRST_WAIT", 0.0)
    monkeypatch.setattr(network_place, "_client", by(answer))
    if not words:
        assert network_place._fetch(url) == "found" and len(asked) == 1 + len(steps)
        return
    with pytest.raises(NetworkAway, match=re.escape(words)):
        network_place._fetch(url)
    assert not [place for place in asked if "http://" in place or "admin" in place]
    assert all(place.startswith(url[:20]) for place in asked)


def test_a_digest_or_a_copy_says_whose_file_comes_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, argv = "http://10.0.0.5:8100/network.toml", ("--neuron.run_folder", str(tmp_path))
    bobs = signed(EXAMPLE.replace(ALICE.ss58_address, BOB.ss58_address), BOB)
    served = {"text": EXAMPLE}
    monkeypatch.setattr(network_place, "_client", by(lambda _: httpx.Response(200, **served)))

    def configuration(place: str) -> Config:
        return load_config("miner", (*argv, "--network", place), environ=KEYS, dotenv=None)

    with pytest.raises(ConfigError, match="not an https:// URL"):
        configuration(url)
    digest = digest_of(flatten(tree_of(EXAMPLE)))
    for wrong in ("0" * 64, digest[:-1] + "x", "short"):
        with pytest.raises(ConfigError, match=r"those of the invitation|is not a digest"):
            configuration(f"{url}#{wrong}")
    config = configuration(f"{url}#{digest}")
    save_copy(config.network, tmp_path)
    assert configuration(url).network == config.network
    served["text"] = bobs  # whoever is on the way
    with pytest.raises(ConfigError, match="those of the invitation"):
        configuration(f"{url}#{digest}")
    assert configuration(url).network == config.network


@pytest.mark.slow
def test_network_given_by_url_is_read_from_its_kept_copy_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_place, "_FIRST_WAIT", 0.0)
    url = f"https://127.0.0.1:{free_ports(1)[0]}/network.toml"
    argv = ("--neuron.run_folder", str(tmp_path / "run"), "--network", url)

    def configuration() -> Config:
        return load_config("miner", argv, environ=KEYS, dotenv=None)

    with pytest.raises(ConfigAway, match="does not answer") as error:  # nobody listens
        configuration()
    assert error.value.status == ExitStatus.FAULT and not (tmp_path / "run").exists()
    with monkeypatch.context() as answered:
        answered.setattr(network_place, "_client", by(lambda _: httpx.Response(200, text=EXAMPLE)))
        config = configuration()
    (tmp_path / "run").mkdir()
    save_copy(config.network, tmp_path / "run")
    again = configuration()
    assert again.network == config.network
    (line,) = again.warnings
    assert "does not answer" in line and "the copy of an earlier start" in line
    other = ("--neuron.run_folder", str(tmp_path / "run"), "--network", url + "l")
    with pytest.raises(ConfigAway):  # the copy is of another URL
        load_config("miner", other, environ=KEYS, dotenv=None)
    bobs = signed(EXAMPLE.replace(ALICE.ss58_address, BOB.ss58_address), BOB)
    answers = {
        "<html>back soon</html>": "is not a network's file",
        "x" * (2 << 20): "is not a network's file",
        bobs: f"from another founder ({BOB.ss58_address})",
    }
    for text, words in answers.items():
        with monkeypatch.context() as answered:
            says = by(lambda _, text=text: httpx.Response(200, text=text))
            answered.setattr(network_place, "_client", says)
            again = configuration()
            assert again.network == config.network
            assert [words in line and "the copy" in line for line in again.warnings] == [True]
            if text is not bobs:
                with pytest.raises(ConfigAway, match="not a network's file"):  # without a copy
                    load_config("miner", other, environ=KEYS, dotenv=None)

    with monkeypatch.context() as answered, trickle() as port:
        answered.setattr(network_place, "_LONGEST", 0.5)
        answered.setattr(
            network_place, "_client", lambda _: httpx.AsyncClient(proxy=f"http://127.0.0.1:{port}")
        )
        assert "not complete within" in configuration().warnings[0]
    for damaged in (b"\xff\xfe", b"name = ["):
        (tmp_path / "run" / "network" / "network.toml").write_bytes(damaged)
        with pytest.raises(ConfigAway, match="does not answer"):
            configuration()
