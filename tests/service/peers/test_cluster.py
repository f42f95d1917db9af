"""Several machines: the words for each of them, and an entry that onedesk.toml takes."""

from __future__ import annotations

import pytest
import tomllib
from onedesk.service.config import load_config
from onedesk.service.errors import RequestError
from onedesk.service.memory.budget import GIB
from onedesk.service.peers.cluster import Share, cluster, cluster_text
from onedesk.service.peers.vllm import process_bytes

SHARE = Share(memory=121 * GIB, budget=90 * GIB, kv=4 * GIB, context=32768)


def test_each_machine_has_its_words():
    document = cluster("/srv/Qwen", SHARE, nodes=2, heads=32)
    first, second = (" ".join(argv) for argv in document["native"])
    shared = "vllm serve /srv/Qwen --gpu-memory-utilization 0.754 --kv-cache-memory-bytes 4294967296 --max-num-seqs 1"
    assert first.startswith(shared) and second.startswith(shared)  # noqa: PT018 - the same for both
    assert first.endswith("--host 127.0.0.1 --nnodes 2 --node-rank 0 --master-addr HEAD_ADDRESS --master-port 29501")
    assert second.endswith("--nnodes 2 --node-rank 1 --master-addr HEAD_ADDRESS --master-port 29501 --headless")
    assert "--tensor-parallel-size 2" in first
    assert document["split"] == "matrices"
    [[start, serve], [join]] = document["ray"]
    assert start[:3] == ["ray", "start", "--head"]
    assert join[-1] == "--address=HEAD_ADDRESS:6379"
    assert serve[-2:] == ["--distributed-executor-backend", "ray"]


def test_layers_are_split_where_heads_do_not_divide():
    document = cluster("/srv/Qwen", SHARE, nodes=3, heads=32)
    assert document["split"] == "layers"
    assert "--pipeline-parallel-size 3" in " ".join(document["native"][2])
    assert len(document["ray"]) == 3


def test_the_entry_is_one_that_is_read(tmp_path):
    entry = cluster("/srv/Qwen", SHARE, nodes=2, heads=32, gpus=4)["entry"]
    assert tomllib.loads(entry)["peers"]["cluster"]["gpus"] == 4
    (tmp_path / "onedesk.toml").write_text(entry)
    peer = load_config(tmp_path / "onedesk.toml").peers["cluster"]
    assert (peer.memory, peer.nodes, peer.address, peer.context) == (
        90 * GIB + process_bytes(4),
        2,
        "HEAD_ADDRESS",
        32768,
    )


def test_it_is_told_for_people():
    text = cluster_text(cluster("/srv/my models/Qwen", SHARE, nodes=2, heads=32))
    assert "each holds up to 91.2 GiB of 121 GiB, 4 GiB of it keys and values for 32,768 tokens" in text
    assert "machine 1: vllm serve '/srv/my models/Qwen'" in text
    assert text.count("machine 0:") == 3


def test_what_is_no_cluster():
    with pytest.raises(RequestError, match="a cluster has 2 machines or more, 1 was asked for"):
        cluster("m", SHARE, nodes=1, heads=32)
    with pytest.raises(RequestError, match="each machine is to hold 90 GiB and has 64 GiB; use more machines"):
        cluster("m", Share(64 * GIB, 90 * GIB, GIB, 4096), nodes=2, heads=32)
