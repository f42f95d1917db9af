"""The rules that no server is needed for: names, addresses, tokens, paths, waiting, progress."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.config import load_config
from onedesk.service.errors import FileError, ModelError, PeerError, RequestError
from onedesk.service.hub.addresses import Reach, kind_of
from onedesk.service.hub.names import endpoints, parse_name
from onedesk.service.hub.paths import NAME_BYTES, check_paths, refused
from onedesk.service.hub.progress import Meter, clock
from onedesk.service.hub.tokens import find_token, token_file
from onedesk.service.hub.transfer import Pace
from onedesk.service.hub.web import Endpoint, wait_asked
from onedesk.service.loader.names import ModelRoots
from yarl import URL

PUBLIC, MIRROR, LOCAL = URL("https://huggingface.co"), URL("http://192.168.1.5:8080"), URL("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("text", "repo", "revision", "path"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B", None, None),
        ("Qwen3-4B", "Qwen/Qwen3-4B", None, None),
        ("https://huggingface.co/Qwen/Qwen3-4B", "Qwen/Qwen3-4B", None, None),
        ("https://huggingface.co/Qwen/Qwen3-4B/tree/main", "Qwen/Qwen3-4B", "main", None),
        ("https://huggingface.co/a/b/blob/main/x/y.gguf", "a/b", "main", "x/y.gguf"),
        ("https://huggingface.co/a/b/resolve/v1/y.gguf?download=true", "a/b", "v1", "y.gguf"),
        ("https://modelscope.cn/models/Qwen/Qwen3-4B", "Qwen/Qwen3-4B", None, None),
        ("https://www.modelscope.ai/models/Qwen/Qwen3-4B", "Qwen/Qwen3-4B", None, None),
    ],
)
def test_names_and_addresses_of_pages_are_read(text: str, repo: str, revision: str | None, path: str | None):
    wanted = parse_name(text)
    assert (wanted.repo, wanted.revision, wanted.path) == (repo, revision, path)
    assert (wanted.endpoint is None) == ("://" not in text)


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "../etc", "a/..", "llama", "https://huggingface.co/one", "ftp://h/a/b", "https://u:p@h/a/b", "a b/c"],
)
def test_what_names_no_model_is_refused(text: str):
    with pytest.raises(RequestError):
        parse_name(text)


def test_hubs_are_asked_in_the_configured_order_and_variables_are_honoured(tmp_path: Path):
    (tmp_path / "onedesk.toml").write_text("")
    config = load_config(tmp_path / "onedesk.toml")
    asked = endpoints(config, parse_name("a/b"), None, {})
    assert [str(one.url) for one in asked] == ["https://huggingface.co", "https://modelscope.cn"]
    asked = endpoints(
        config,
        parse_name("a/b"),
        None,
        {"HF_ENDPOINT": "https://mirror.example", "MODELSCOPE_ENDPOINT": "https://modelscope.ai"},
    )
    assert [(one.hub, str(one.url)) for one in asked] == [
        ("hf", "https://mirror.example"),
        ("modelscope", "https://modelscope.ai"),
    ]
    (tmp_path / "onedesk.toml").write_text(
        '[hub]\nendpoints = ["https://one.example", "https://two.example"]\norder = ["hf"]\n'
    )
    config = load_config(tmp_path / "onedesk.toml")
    asked = endpoints(config, parse_name("a/b"), None, {"HF_ENDPOINT": "https://mirror.example"})
    assert [one.title for one in asked] == ["one.example", "two.example"]
    assert [one.hub for one in endpoints(config, parse_name("a/b"), "modelscope", {})] == ["modelscope"]


def test_a_mirror_that_is_not_configured_gets_no_token(tmp_path: Path):
    (tmp_path / "onedesk.toml").write_text("")
    config, environment = load_config(tmp_path / "onedesk.toml"), {"HF_TOKEN": "hf_secret_token"}
    assert endpoints(config, parse_name("a/b"), "https://mirror.example", environment)[0].token is None
    found = endpoints(config, parse_name("a/b"), "hf", environment)[0]
    assert found.token == "hf_secret_token"
    assert "secret" not in repr(found)
    assert found.headers_for(URL("https://huggingface.co/x")) == {"Authorization": "Bearer hf_secret_token"}
    for other in (
        "https://cdn.example/x",
        "http://huggingface.co/x",
        "https://huggingface.co:8443/x",
        "https://huggingface.co.evil.example/x",
    ):
        assert found.headers_for(URL(other)) == {}


def test_the_token_file_comes_first_and_must_be_private(tmp_path: Path):
    (tmp_path / "onedesk.toml").write_text("")
    config = load_config(tmp_path / "onedesk.toml")
    path = token_file(config, "hf")
    path.parent.mkdir()
    path.write_text("hf_from_the_file\n")
    path.chmod(0o600)
    assert find_token(config, "hf", {"HF_TOKEN": "hf_other_one"}) == "hf_from_the_file"
    path.chmod(0o644)
    with pytest.raises(FileError, match="chmod 600") as found:
        find_token(config, "hf", {})
    assert "hf_from" not in str(found.value)
    path.unlink()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_of_the_client")
    assert find_token(config, "hf", {"HF_HOME": str(tmp_path / "home")}) == "hf_of_the_client"
    assert find_token(config, "hf", {"HF_HOME": str(tmp_path / "absent")}) is None
    for wrong in ("two words", "line\nbreak", "semi;colon"):
        with pytest.raises(FileError, match="characters that no token has"):
            find_token(config, "hf", {"HF_TOKEN": wrong})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("8.8.8.8", "public"),
        ("2606:4700::1111", "public"),
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("10.1.2.3", "private"),
        ("192.168.0.1", "private"),
        ("100.64.0.1", "private"),
        ("fd00::1", "private"),
        ("64:ff9b::a00:1", "private"),
        ("2002:a00:1::", "private"),
        ("169.254.169.254", "never"),
        ("fe80::1", "never"),
        ("0.0.0.0", "never"),
        ("224.0.0.1", "never"),
    ],
)
def test_addresses_are_of_one_kind(text: str, kind: str):
    assert kind_of(ipaddress.ip_address(text)) == kind


@given(st.ip_addresses())
def test_a_public_hub_leads_to_public_addresses_alone(address: ipaddress.IPv4Address | ipaddress.IPv6Address):
    reach = Reach([PUBLIC], [])
    if kind_of(address) == "public":
        reach.check_resolved("cdn.example", [str(address)])
    else:
        with pytest.raises(PeerError, match="your own network"):
            reach.check_resolved("cdn.example", [str(address)])


def test_a_private_mirror_may_lead_to_private_addresses_but_not_to_this_machine():
    reach = Reach([MIRROR], [])
    reach.check_resolved("storage.example", ["192.168.1.6"])
    with pytest.raises(PeerError, match="loopback"):
        reach.check_resolved("storage.example", ["127.0.0.1"])
    with pytest.raises(PeerError, match="never"):
        reach.check_resolved("storage.example", ["169.254.169.254"])


def test_a_name_of_the_mirror_itself_says_which_addresses_are_allowed():
    reach = Reach([URL("http://nas.example")], [])
    with pytest.raises(PeerError):
        reach.check_resolved("storage.example", ["10.0.0.9"])
    reach.check_resolved("nas.example", ["10.0.0.8"])
    reach.check_resolved("storage.example", ["10.0.0.9"])


def test_a_proxy_may_be_private_without_making_others_so():
    reach = Reach([PUBLIC], ["proxy.example"])
    reach.check_resolved("proxy.example", ["10.0.0.1"])
    with pytest.raises(PeerError):
        reach.check_resolved("cdn.example", ["10.0.0.2"])


def test_plain_http_is_for_a_mirror_that_is_named_with_it():
    with pytest.raises(PeerError, match="without encryption"):
        Reach([PUBLIC], []).check_url(URL("http://huggingface.co/x"), PUBLIC)
    Reach([MIRROR], []).check_url(URL("http://192.168.1.5:9000/x"), MIRROR)
    Reach([LOCAL], []).check_url(URL("http://127.0.0.1:10/x"), LOCAL)
    with pytest.raises(PeerError, match="without encryption"):
        Reach([MIRROR], []).check_url(URL("http://elsewhere.example/x"), MIRROR)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"ratelimit": '"api";r=0;t=41', "Retry-After": "7"}, 42),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"Retry-After": "-1"}, None),
        ({}, None),
    ],
)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None):
    assert wait_asked(headers) == seconds


@given(st.text(max_size=40))
def test_a_path_that_is_accepted_stays_below_its_folder(path: str):
    if refused(path) is None:
        target = Path("/models/name") / path
        assert Path(os.path.normpath(target)).is_relative_to("/models/name")
        assert all(len(part.encode()) <= NAME_BYTES for part in path.split("/"))


@pytest.mark.parametrize("path", ["a/onedesk.json", "model.safetensors", "深/度.json", "a b.json"])
def test_honest_paths_are_accepted(path: str):
    check_paths([path])


def test_the_rate_is_that_of_the_last_seconds_and_gives_what_remains():
    now = [0.0]
    meter = Meter(1000, 0, lambda: now[0])
    for second in range(1, 21):
        now[0] = float(second)
        reading = meter.read(10 * second if second <= 10 else 100 + 50 * (second - 10))
    assert reading.rate == pytest.approx(50, rel=0.1)
    assert reading.remaining == pytest.approx((1000 - 600) / reading.rate)
    assert reading.line.startswith(" 60%")
    assert [clock(48), clock(725), clock(11045)] == ["0:48", "12:05", "3:04:05"]


def test_an_endpoint_shows_the_hubs_name_or_the_mirrors_host():
    assert Endpoint("hf", PUBLIC).title == "Hugging Face"
    assert Endpoint("modelscope", URL("https://www.modelscope.ai")).title == "ModelScope"
    assert Endpoint("hf", MIRROR).title == "192.168.1.5"


def test_the_pace_spreads_bytes_over_time(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = Pace(1e6)

    async def take() -> None:
        for _ in range(10):
            await pace.take(1_000_000)

    asyncio.run(take())
    assert pace.received == 10_000_000
    assert len(waits) == 10
    assert waits[-1] > 8  # the tenth second of bytes waits for the nine before it


def test_a_missing_models_error_names_the_command_to_copy(tmp_path: Path):
    (tmp_path / "models").mkdir()
    roots = ModelRoots([tmp_path / "models"])
    for name, command in (("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), ("Qwen3-4B", "Qwen3-4B"), ("my model", "OWNER/NAME")):
        for look in (roots.find, roots.resolve):
            with pytest.raises(ModelError, match=f"onedesk pull {command}$"):
                look(name)
