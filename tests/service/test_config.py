"""onedesk.toml: what is read, what is refused, and which message says so."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service import config as config_module
from onedesk.service.config import (
    ComfyUISettings,
    Config,
    ServiceSettings,
    installed_file,
    load_config,
    package_folder,
)
from onedesk.service.errors import FileError, RequestError
from onedesk.service.memory.budget import SETTING_NAMES, MemorySettings
from onedesk.service.toml_file import parse_bytes

DEMO = [package_folder() / "models"] if (package_folder() / "models").is_dir() else []


def write(folder: Path, text: str) -> Path:
    path = folder / "onedesk.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_gives_the_defaults_and_the_trees_models(tmp_path):
    config = load_config(write(tmp_path, ""))
    assert config.tree == tmp_path
    assert list(config.model_roots) == [tmp_path / "models", *DEMO]
    assert config.service == ServiceSettings()
    assert config.comfyui == ComfyUISettings(correct_free_memory=True)
    assert dict(config.memory) == {}
    assert config.cache == tmp_path / "cache"


def test_every_table_is_read(tmp_path):
    text = """
    [memory]
    limit = 0.555
    floor = "2GiB"
    initial_slab = 1048576
    debug = true
    [models]
    roots = ["llm", "/srv/qwen"]
    default = "小模型"
    context = 4096
    [service]
    host = "127.0.0.2"
    port = 9000
    concurrency = 2
    queue = 3
    deadline = 1.5
    [comfyui]
    correct_free_memory = false
    """
    config = load_config(write(tmp_path, text))
    assert dict(config.memory) == {"limit": 0.555, "floor": 2 * 1024**3, "initial_slab": 1048576, "debug": True}
    assert list(config.model_roots) == [tmp_path / "llm", Path("/srv/qwen"), *DEMO]
    assert (config.default_model, config.context) == ("小模型", 4096)
    assert config.service == ServiceSettings("127.0.0.2", 9000, 2, 3, 1.5)
    assert not config.comfyui.correct_free_memory


def test_the_memory_table_has_the_pools_settings():
    assert tuple(config_module.MEMORY_KEYS) == SETTING_NAMES


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = tmp_path / "onedesk.toml"
    path.write_bytes(b"\xef\xbb\xbf[service]\nport = 1\n")
    assert load_config(path).service.port == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[memroy]\n", "unknown table or key 'memroy'; known tables: memory, models, service, comfyui, hub, peers"),
        ("port = 1\n", "unknown table or key 'port'"),
        (
            "[service]\nprot = 1\n",
            "unknown key 'prot' in [service]; known keys: host, port, concurrency, queue, deadline",
        ),
        ("service = 3\n", "service is 3; write it as a table, [service]"),
        ('[service]\nport = "80"\n', "port in [service] is '80'; use a whole number"),
        ("[service]\nport = true\n", "port in [service] is True; use a whole number"),
        ("[service]\nport = 65536\n", "port in [service] is 65536; use 0 to 65535"),
        ("[service]\ndeadline = nan\n", "deadline in [service] is nan; use a number"),
        ("[service]\nhost = 1\n", "host in [service] is 1; use a text"),
        ("[models]\nroots = 'models'\n", "roots in [models] is 'models'; use a list of texts"),
        ("[models]\ncontext = 1\n", "context in [models] is 1; use 2 to 2147483648"),
        ("[memory]\nfloor = '4 potatoes'\n", "floor in [memory]: '4 potatoes' is not a size"),
        ("[memory]\nfloor = -1\n", "floor in [memory] is -1; use whole bytes"),
        ("[memory]\ndebug = 1\n", "debug in [memory] is 1; use true or false"),
        ("[comfyui]\ncorrect_free_memory = 'no'\n", "correct_free_memory in [comfyui] is 'no'; use true or false"),
        ("[comfyui]\nfree_memory = true\n", "unknown key 'free_memory' in [comfyui]; known keys: correct_free_memory"),
        ("[service\n", "is not valid TOML"),
        ("[service]\nport = " + "9" * 5000 + "\n", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, wanted):
    with pytest.raises(FileError) as caught:
        load_config(write(tmp_path, text))
    assert wanted in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(FileError, match=r"cannot read the configuration absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[models]\ndefault = "\xe9"\n')
    with pytest.raises(FileError, match=r"latin\.toml is not UTF-8"):
        load_config(latin)


def test_the_tree_of_the_running_python_is_found(tmp_path, monkeypatch):
    prefix = tmp_path / "envs" / "onedesk"
    prefix.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert installed_file() is None
    assert load_config() == Config(model_roots=tuple(DEMO))
    write(tmp_path, "[service]\nport = 5\n")
    assert load_config().tree == tmp_path
    assert load_config().service.port == 5
    other = write(prefix, "[service]\nport = 6\n")
    assert load_config(other).service.port == 6


def test_without_a_tree_the_toy_models_are_offered(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(config_module, "package_folder", lambda: tmp_path)
    assert load_config().model_roots == ()
    (tmp_path / "models").mkdir()
    assert load_config() == Config(model_roots=(tmp_path / "models",))
    tree = tmp_path / "tree"
    tree.mkdir()
    assert load_config(write(tree, "")).model_roots == (tree / "models", tmp_path / "models")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("121GiB", 121 * 1024**3),
        ("1.5 gib", 3 * 1024**3 // 2),
        ("2K", 2000),
        ("3KiB", 3072),
        ("7B", 7),
        (" 4 MB ", 4_000_000),
    ],
)
def test_sizes(text, wanted):
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1GiBs", "1e9", "4 PiB", "nan", "9" * 400 + "GiB", "1 \N{KELVIN SIGN}iB", "١GiB"]
)
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models]\nroots = ["a\\u0000b"]', "roots in .models. has 'a.x00b', which is not a path"),
        ('[models]\nroots = ["~nobody-of-this-name/x"]', "whose home folder is not known; write the whole path"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("#" * (1 << 20) + "\n", "more than 1048576 bytes"),
    ],
)
def test_a_hostile_file_is_refused_with_a_reason(tmp_path, text, said):
    with pytest.raises(FileError, match=said):
        load_config(write(tmp_path, text))


def test_what_is_no_plain_file_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(FileError, match="is not a regular file"):
            load_config(path)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().context = 1


PEERS = """
[peers.big]
kind = "vllm"
model = "models/Qwen3-235B"
memory = "100GiB"
context = 32768
sequences = 4
gpus = 1
nodes = 2
address = "192.168.1.10"
sleep = true
command = ["/opt/vllm/bin/vllm"]
options = ["--enforce-eager"]
[peers.small]
kind = "llama-server"
model = "/srv/x.gguf"
memory = 1000000
idle = 60
port = 9001
start = 5
[peers.other]
kind = "openai"
url = "http://127.0.0.1:8000/v1"
key_file = "cache/other.key"
model = "qwen"
"""


def test_other_engines_are_read(tmp_path):
    peers = load_config(write(tmp_path, PEERS)).peers
    assert list(peers) == ["big", "small", "other"]
    big, small, other = peers.values()
    assert (big.kind, big.memory, big.model) == ("vllm", 100 * 1024**3, str(tmp_path / "models/Qwen3-235B"))
    assert (big.context, big.sequences, big.nodes, big.address, big.sleep) == (32768, 4, 2, "192.168.1.10", True)
    assert (big.command, big.options) == (("/opt/vllm/bin/vllm",), ("--enforce-eager",))
    assert (small.model, small.idle, small.port, small.start, small.ours) == ("/srv/x.gguf", 60, 9001, 5, True)
    assert (other.url, other.key_file, other.model, other.ours) == (
        "http://127.0.0.1:8000/v1",
        tmp_path / "cache" / "other.key",
        "qwen",
        False,
    )


def test_an_engine_of_several_models_is_an_entry_for_each(tmp_path):
    table = (
        '[peers.many]\nkind = "llama-server"\nmodels = ["a.gguf", "big/b-00001-of-00003.gguf", "folder"]\nmemory ='
        " 9\nloaded = 2\n"
    )
    peers = load_config(write(tmp_path, table)).peers
    assert {name: (entry.name, entry.asked) for name, entry in peers.items()} == {
        f"many/{name}": ("many", name) for name in ("a", "b", "folder")
    }
    assert {entry.models for entry in peers.values()} == {
        (str(tmp_path / "a.gguf"), str(tmp_path / "big/b-00001-of-00003.gguf"), str(tmp_path / "folder"))
    }
    assert {entry.loaded for entry in peers.values()} == {2}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("peers = 3\n", "peers is not a table of tables; write each as [peers.NAME]"),
        ('[peers]\nkind = "vllm"\n', "peers is not a table of tables; write each as [peers.NAME]"),
        ('[peers."a b"]\nkind = "openai"\n', "a peer is called 'a b'; use up to 64 letters"),
        ("[peers.a]\n", "kind in [peers.a] is None; use one of openai, vllm, llama-server"),
        ('[peers.a]\nkind = "ollama"\n', "kind in [peers.a] is 'ollama'; use one of openai, vllm, llama-server"),
        ('[peers.a]\nkind = "vllm"\nmodel = "m"\nmemory = "0GiB"\n', "memory in [peers.a] is '0GiB'; use 1 to"),
        ('[peers.a]\nkind = "openai"\n', "[peers.a] is of kind openai and lacks url; write url = ..."),
        ('[peers.a]\nkind = "vllm"\nmodel = "m"\n', "[peers.a] is of kind vllm and lacks memory"),
        (
            '[peers.a]\nkind = "vllm"\nmodle = "m"\n',
            "unknown key 'modle' in [peers.a]; known keys: kind, url, key_file",
        ),
        (
            '[peers.a]\nkind = "openai"\nurl = "http://x"\nmemory = 1\n',
            "memory in [peers.a] does not belong to kind openai; its keys are url",
        ),
        (
            '[peers.a]\nkind = "llama-server"\nmodel = "m"\nmemory = 1\nsleep = true\n',
            "sleep in [peers.a] does not belong to kind llama-",
        ),
        ('[peers.a]\nkind = "llama-server"\nmemory = 1\n', "[peers.a] needs either model or models"),
        (
            '[peers.a]\nkind = "llama-server"\nmemory = 1\nmodel = "m"\nmodels = ["n"]\n',
            "[peers.a] needs either model or models",
        ),
        (
            '[peers.a]\nkind = "llama-server"\nmemory = 1\nmodels = ["x/n.gguf", "y/n"]\n',
            "models in [peers.a] has 'n' twice",
        ),
        (
            '[peers.a]\nkind = "llama-server"\nmemory = 1\nmodels = ["a]b.gguf"]\n',
            "has 'a]b' twice or with characters that",
        ),
        ('[peers.a]\nkind = "vllm"\nmodel = "m"\nmemory = 1\nnodes = 2\n', "has nodes = 2 and lacks address"),
        ('[peers.a]\nkind = "vllm"\nmodel = "m"\nmemory = 1\nnodes = 0\n', "nodes in [peers.a] is 0; use 1 to 1024"),
        ('[peers.a]\nkind = "vllm"\nmodel = "m"\nmemory = "much"\n', "memory in [peers.a]: 'much' is not a size"),
        (
            '[peers.a]\nkind = "vllm"\nmodel = "m"\nmemory = 1\ncommand = "vllm"\n',
            "command in [peers.a] is 'vllm'; use a list of texts",
        ),
        (
            '[peers.a]\nkind = "vllm"\nmodel = "a\\u0000b"\nmemory = 1\n',
            "model in [peers.a] has 'a\\x00b', which is not a path",
        ),
    ],
)
def test_a_wrong_peer_names_itself(tmp_path, text, wanted):
    with pytest.raises(FileError) as raised:
        load_config(write(tmp_path, text))
    assert wanted in str(raised.value)


def test_the_hub_settings_are_read_and_held_to_their_ranges(tmp_path):
    text = (
        '[hub]\nendpoints = ["https://mirror.example"]\norder = ["modelscope"]\nconnections = 2\nlimit_mb_per_s ='
        " 12.5\n"
    )
    hub = load_config(write(tmp_path, text)).hub
    assert (hub.endpoints, hub.order, hub.connections, hub.limit_mb_per_s) == (
        ("https://mirror.example",),
        ("modelscope",),
        2,
        12.5,
    )
    for wrong in (
        "order = []",
        'order = ["ftp"]',
        'order = ["hf", "hf"]',
        "connections = 0",
        "connections = 99",
        "stall = 0",
    ):
        with pytest.raises(FileError, match=r"in \[hub\]"):
            load_config(write(tmp_path, f"[hub]\n{wrong}\n"))


@pytest.mark.parametrize(
    ("table", "key"),
    [(table, key) for table, keys in config_module._TABLES.items() for key, kind in keys.items() if kind == "number"],
)
@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "inf", "nan"])
def test_a_number_beyond_any_float_is_refused_by_name(tmp_path, table, key, value):
    with pytest.raises(FileError, match=rf"{key} in \[{table}\] is .*; use ") as refused:
        load_config(write(tmp_path, f"[{table}]\n{key} = {value}\n"))
    assert len(str(refused.value)) < 200


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([2**50 + 1, 2**63, 10**400, 1e161, 1e308, -0.0, 5e-324, True, 2**40]),
)


@given(name=st.sampled_from(sorted(field.name for field in dataclasses.fields(MemorySettings))), value=NUMBERS)
def test_every_memory_setting_is_bounded_and_named_when_it_is_read(name: str, value: float) -> None:
    """Accepted values are within what any machine has; all others are refused by the name of the setting."""
    if name in ("debug", "lock", "managed", "oversubscribe"):
        return
    error = None
    try:
        MemorySettings(**{name: value})  # type: ignore[arg-type]
    except RequestError as refused:
        error = str(refused)
    if error is None:
        assert value is None or 0 <= value <= 2**50
    else:
        assert name in error
        assert len(error) < 200
