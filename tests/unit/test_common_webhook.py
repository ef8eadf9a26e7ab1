from __future__ import annotations

import time

import pytest
from pydantic import SecretStr

from distributed_training.common.webhook import NotSent, send, service_of
from distributed_training.config import ConfigError
from tests.tools.settings import load_config
from tests.tools.webhooks import webhooks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("service", "url"),
    [("ntfy", "https://ntfy.sh/topic"), ("ntfy", "ntfys://ntfy.example.org/topic"),
     ("Slack", "https://hooks.slack.com/services/T0000000/B0000000/aaaaaaaaaaaaaaaaaaaaaaaa"),
     ("Discord", "https://discord.com/api/webhooks/1/x"), ("JSON", "jsons://example.org/hook"),
     ("Telegram", "tgram://123456789:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/-5")],
)  # fmt: skip
def test_the_urls_of_the_operator_guide_are_known(service: str, url: str) -> None:
    assert service_of(SecretStr(url)) == service


@pytest.mark.parametrize(
    "url",
    [
        "https://ntfy.example.org/sesame",
        "https://api.telegram.org/bot1:sesame/sendMessage?chat_id=-5",
        "https://example.org/hook?key=sesame",
        "sesame",
        "https://[::1",
    ],
)
def test_a_url_that_cannot_be_used_is_one_line_without_it(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config("miner", [], environ={"DT_NOTIFY_URL": url}, dotenv=None, check=False)
    line = str(refusal.value)
    assert (
        "DT_NOTIFY_URL: its value is not" in line
        and "\n" not in line
        and "jsons://HOST/PATH" in line
    )
    assert "sesame" not in line + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("manner", "words"),
    [("hang", "did not answer within"), ("drip", "did not answer within"),
     ("elsewhere", "error=302"), (500, "error=500"), ("nonsense", "onnection error")],
)  # fmt: skip
def test_a_service_that_takes_none_is_one_line_in_time(manner: str | int, words: str) -> None:
    with webhooks() as world:
        world.manner = manner
        began = time.monotonic()
        with pytest.raises(NotSent) as refusal:
            send(SecretStr(world.url), "a", "b", bad=True, seconds=1.0)
    assert time.monotonic() - began < 60 and world.asked == 1  # "drip" would never end
    assert words in str(refusal.value) and "secretsecret" not in repr(refusal.value)
