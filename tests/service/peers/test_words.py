"""The words that other engines are started with: exactly these, from budgets, and never a key."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.config import PeerSettings
from onedesk.service.errors import FileError, PeerError
from onedesk.service.memory.budget import GIB, MIB
from onedesk.service.peers import llama_server, vllm
from onedesk.service.peers.launch import EngineEndpoint, Launch, LaunchMachine, environment

KEY = "s3cr3t-s3cr3t-s3cr3t"
H200 = LaunchMachine(140 * GIB, "discrete")
SPARK = LaunchMachine(120 * GIB, "integrated")
CPU = LaunchMachine(32 * GIB, "cpu")
# What 4 GiB of one pool leave for weights and keys.
SPARE = 4 * GIB - 3 * vllm.PROCESS_BYTES
KV = SPARE - math.ceil(SPARE * vllm.SCRATCH_SHARE)


@pytest.fixture
def place(tmp_path: Path) -> EngineEndpoint:
    return EngineEndpoint(9001, KEY, tmp_path / "x.key")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 64 MiB, which takes no room on the disk."""
    made = tmp_path / "model"
    made.mkdir()
    with (made / "model.safetensors").open("wb") as file:
        file.truncate(64 * MIB)
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(1000))
    return path


def vllm_settings(folder: Path, **more: Any) -> PeerSettings:
    return PeerSettings("big", "vllm", model=str(folder), **{"memory": 4 * GIB, **more})


def llama_settings(path: Path, **more: Any) -> PeerSettings:
    return PeerSettings("small", "llama-server", model=str(path), **{"memory": GIB, **more})


def knows(_: str) -> bool:
    return True


def test_vllm_gets_its_bytes_by_number(folder, place):
    launch = vllm.launch(vllm_settings(folder, context=8192, sequences=4, options=("--enforce-eager",)), SPARK, place)
    kv = KV - 64 * MIB
    assert list(launch.argv) == [
        *("vllm", "serve", str(folder), "--served-model-name", "big", "--host", "127.0.0.1", "--port", "9001"),
        *("--gpu-memory-utilization", "0.0333", "--kv-cache-memory-bytes", str(kv)),
        *("--max-num-seqs", "4", "--max-model-len", "8192", "--tensor-parallel-size", "1", "--enforce-eager"),
    ]
    assert dict(launch.variables) == {"VLLM_API_KEY": KEY}
    assert not launch.sleeps
    assert KEY not in repr(launch)


def test_a_share_is_of_one_gpu(folder, place):
    argv = vllm.launch(vllm_settings(folder, memory=200 * GIB, gpus=2), H200, place).argv
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.7142"
    assert argv[argv.index("--tensor-parallel-size") + 1] == "2"
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(100 * GIB - 32 * MIB - 10 * GIB)
    assert "--max-model-len" not in argv


def test_sleep_only_where_the_gpu_has_memory_of_its_own(folder, place):
    launch = vllm.launch(vllm_settings(folder, sleep=True), H200, place)
    assert launch.sleeps
    assert "--enable-sleep-mode" in launch.argv
    assert launch.variables["VLLM_SERVER_DEV_MODE"] == "1"
    for machine in (SPARK, CPU):
        with pytest.raises(PeerError, match="sleep = true helps a GPU with memory of its own; here it would move"):
            vllm.launch(vllm_settings(folder, sleep=True), machine, place)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"num_attention_heads": 32}', "--tensor-parallel-size 2 "),
        ('{"text_config": {"num_attention_heads": 16}}', "--tensor-parallel-size 2 "),
        ('{"num_attention_heads": 25}', "--tensor-parallel-size 1 --pipeline-parallel-size 2 "),
        ("{}", "--tensor-parallel-size 1 --pipeline-parallel-size 2 "),
        ("no json", "--tensor-parallel-size 1 --pipeline-parallel-size 2 "),
    ],
)
def test_the_first_of_several_machines(folder, place, config, words):
    (folder / "config.json").write_text(config)
    argv = vllm.launch(vllm_settings(folder, nodes=2, address="192.168.1.10"), SPARK, place).argv
    assert words + "--nnodes 2 --node-rank 0 --master-addr 192.168.1.10 --master-port 29501" in " ".join(argv)
    assert "--headless" not in argv
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(KV - 32 * MIB)


def test_budgets_that_cannot_be_kept(folder, place):
    with pytest.raises(
        PeerError,
        match=(
            r"memory is 70 MiB; its processes take 0 B of it, the weights 64 MiB a GPU, scratch 7 MiB.*than 71\.1 MiB"
        ),
    ):
        vllm.launch(vllm_settings(folder, memory=70 * MIB), H200, place)
    with pytest.raises(
        PeerError,
        match=r"memory is 1 GiB; its processes take 1\.2 GiB of it, .*; use more than 1\.3 GiB, or more machines",
    ):
        vllm.launch(vllm_settings(folder, memory=GIB), SPARK, place)
    with pytest.raises(PeerError, match="memory is 200 GiB a GPU, and there are 120 GiB; use less"):
        vllm.launch(vllm_settings(folder, memory=200 * GIB), SPARK, place)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileError, match="model has no weights"):
        vllm.launch(vllm_settings(folder), SPARK, place)
    with pytest.raises(
        FileError, match="the model gone cannot be read: No such file or directory; correct model in its table"
    ):
        vllm.launch(vllm_settings(folder.with_name("gone")), SPARK, place)


@pytest.mark.parametrize(
    "option", ["--api-key", "--host=0.0.0.0", "--port", "--gpu-memory-utilization", "--enable-sleep-mode"]
)
def test_what_we_say_is_not_said_twice(folder, place, option):
    with pytest.raises(PeerError, match="in options is set from its table or by us; take it out of options"):
        vllm.launch(vllm_settings(folder, options=(option, "1")), SPARK, place)


@given(
    memory=st.integers(MIB, 140 * GIB),
    weights=st.integers(1, 200 * GIB),
    gpus=st.integers(1, 8),
    nodes=st.integers(1, 4),
)
def test_what_a_gpu_gets_never_exceeds_its_memory(memory, weights, gpus, nodes):
    settings = PeerSettings("big", "vllm", model="m", memory=memory, gpus=gpus, nodes=nodes, address="a")
    try:
        kv = vllm.kv_bytes(settings, H200, weights)
    except PeerError as error:
        assert "use " in str(error)  # noqa: PT017 - most draws do not fit, and each must say what to do
        return
    assert kv > 0
    assert kv + weights / (gpus * nodes) + memory // gpus * vllm.SCRATCH_SHARE <= memory / gpus


def test_llama_server_reads_into_memory_that_is_counted(gguf, place):
    launch = llama_server.launch(llama_settings(gguf, context=4096, sequences=2, idle=90.4), CPU, place, knows)
    assert list(launch.argv) == [
        *("llama-server", "-m", str(gguf), "--alias", "small", "--ctx-size", "8192", "--parallel", "2"),
        *("--load-mode", "none", "--n-gpu-layers", "0", "--sleep-idle-seconds", "90"),
        *("--host", "127.0.0.1", "--port", "9001", "--api-key-file", str(place.key_file)),
    ]
    assert dict(launch.variables) == {"LLAMA_ARG_OFFLINE": "1"}
    argv = llama_server.launch(
        llama_settings(gguf, command=("nice", "llama-server")), SPARK, place, lambda _: False
    ).argv
    assert "--no-mmap" in argv
    assert "--load-mode" not in argv
    assert argv[:3] == ("nice", "llama-server", "-m")
    assert argv[argv.index("--n-gpu-layers") + 1] == "999"
    assert argv[argv.index("--ctx-size") + 1] == "0"


def test_a_folder_must_hold_one_model(gguf, place, tmp_path):
    folder = tmp_path / "gguf"
    folder.mkdir()
    with pytest.raises(
        FileError, match="the folder gguf must hold one GGUF model and has: none; name the file in model"
    ):
        llama_server.launch(llama_settings(folder), CPU, place, knows)
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-a.gguf"):
        (folder / name).write_bytes(bytes(1000))
    argv = llama_server.launch(llama_settings(folder), CPU, place, knows).argv
    assert argv[2] == str(folder / "a-00001-of-00002.gguf")
    with pytest.raises(PeerError, match="the weights alone take 2 KiB"):
        llama_server.launch(llama_settings(folder, memory=1500), CPU, place, knows)
    (folder / "b.gguf").write_bytes(bytes(10))
    with pytest.raises(FileError, match=r"has: a-00001-of-00002.gguf, b.gguf; name the file"):
        llama_server.launch(llama_settings(folder), CPU, place, knows)


def test_settings_of_other_runs_and_keys_stay_outside(monkeypatch, tmp_path):
    for name in ("LLAMA_ARG_HOST", "LLAMA_API_KEY", "VLLM_API_KEY", "VLLM_PORT"):
        monkeypatch.setenv(name, "0.0.0.0")
    seen = environment(Launch(("x",), {"VLLM_API_KEY": KEY}), tmp_path)
    assert seen["VLLM_API_KEY"] == KEY
    assert not {"LLAMA_ARG_HOST", "LLAMA_API_KEY", "VLLM_PORT"} & set(seen)
    assert seen["HF_HUB_OFFLINE"] == seen["DO_NOT_TRACK"] == "1"
    assert seen["VLLM_CACHE_ROOT"].startswith(str(tmp_path))
    assert seen["PATH"] == os.environ["PATH"]


def test_the_settings_of_a_peer_can_be_a_key():
    settings = PeerSettings("a", "vllm", model="m", memory=1)
    assert len({settings, replace(settings), replace(settings, memory=2)}) == 2
