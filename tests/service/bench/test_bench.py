"""The bench measures what it says, with the counts right; no test asserts a time."""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from kept_kernels import keep_kernels
from onedesk.service.bench import shapes
from onedesk.service.bench import transformers_subject as peer
from onedesk.service.bench.ceiling import read_ceiling
from onedesk.service.bench.kinds import kind_table
from onedesk.service.bench.measuring_child import MeasuringChild
from onedesk.service.bench.page_cache import Residency, evict, read_whole
from onedesk.service.bench.peak_watch import PeakWatch
from onedesk.service.bench.run import BenchPlan, files_of_load, measure
from onedesk.service.bench.subject import SubjectSpec
from onedesk.service.catalog.decode_speed import REACHED
from onedesk.service.cli import command as cli
from onedesk.service.cli.quantize import quantize_model
from onedesk.service.config import Config
from onedesk.service.errors import FileError, ModelError, PeerError, RequestError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.header import read_header
from onedesk.service.loader.names import ModelRoots
from onedesk.service.memory.read_bandwidth import known_ceiling
from onedesk.service.model.families import family_of
from safetensors import safe_open
from tiny_qwen3 import write_tiny_qwen3

MIB = 1 << 20
NORMS = 0.02  # the share of a tiny checkpoint that grows when its norms are held in FP32
SMALL = shapes.SHAPES["qwen3-0.6b"] | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny", context=256, tokenizer=False)


def run(kind: str, model: Path, tmp_path: Path, **changes) -> dict:
    keep_kernels(tmp_path / "cache")
    plan = BenchPlan(kind, str(model), device="cpu", tokens=6, prompt=20, cycles=2, **changes)
    return measure(plan, Config(tree=tmp_path), ModelRoots([]))


def test_decode_beside_transformers_counts_the_same_steps(model, tmp_path):
    """Batches decode together, each row behind a prompt of its own."""
    document = run("decode", model, tmp_path, against="transformers", batches=(1, 3, 8))
    assert (document["kind"], document["model"], document["quant"], document["device"]) == (
        "decode",
        "tiny",
        "none",
        "cpu",
    )
    found = [(row["engine"], row["batch"], row["prompt"], row["tokens"]) for row in document["rows"]]
    assert found == [(engine, batch, 20, 6) for batch in (1, 3, 8) for engine in ("onedesk", "transformers")]
    for row in document["rows"]:
        read = document["checkpoint_bytes"] * row["tokens_per_second"] / row["batch"]
        assert row["bytes_per_second"] == pytest.approx(read, rel=NORMS)
        assert row["share"] == pytest.approx(row["bytes_per_second"] / document["read_bytes_per_second"])
        assert row["peak_bytes"] > document["checkpoint_bytes"]
        assert row["allocations_per_token"] == (0 if row["engine"] == "onedesk" else None)
    assert document["rows"][0]["major_faults_per_token"] == 0
    assert known_ceiling(tmp_path / "cache", "cpu") == document["read_bytes_per_second"]


def test_the_expected_speed_is_that_of_the_last_measurement(model, tmp_path):
    """The first run expects the built-in share, the second the share that the first one reached."""
    first = run("decode", model, tmp_path, against="transformers", batches=(1, 2))
    plan = BenchPlan("decode", str(model), device="cpu", tokens=6, prompt=20, cycles=2)
    second = measure(plan, Config(tree=tmp_path), ModelRoots([]))
    alone, *others = first["rows"]
    reached = alone["bytes_per_second"] / first["read_bytes_per_second"]
    assert alone["expected_ratio"] == pytest.approx(reached / REACHED["cpu"][16], rel=NORMS)
    assert alone["expected_ratio"] == alone["tokens_per_second"] / alone["expected_tokens_per_second"]
    assert {row["expected_ratio"] for row in others} == {None}
    again = second["rows"][0]
    change = second["read_bytes_per_second"] / first["read_bytes_per_second"]
    assert again["expected_tokens_per_second"] == pytest.approx(alone["tokens_per_second"] * change)


def test_sampling_settings_are_measured_in_turn_beside_a_greedy_peer(model, tmp_path):
    document = run("decode", model, tmp_path, against="transformers", samplings=("card", "card+presence"))
    found = [(row["engine"], row["sampling"]) for row in document["rows"]]
    assert found == [("onedesk", "card"), ("onedesk", "card+presence"), ("transformers", "greedy")]
    assert "card+presence" in kind_table(document)


def test_a_bias_logprobs_and_a_schema_are_measured_relative_to_the_first(tmp_path):
    named = write_tiny_qwen3(tmp_path / "named", context=256)
    asked = ("card", "card+bias", "card+logprobs", "card+schema")
    rows = run("decode", named, tmp_path, batches=(1, 2), samplings=asked)["rows"]
    assert [(row["batch"], row["sampling"]) for row in rows] == [(batch, name) for batch in (1, 2) for name in asked]
    for row in rows:
        plain = next(other for other in rows if other["batch"] == row["batch"])
        assert row["of_first"] == row["tokens_per_second"] / plain["tokens_per_second"]


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [("decode", "card,hot", "'hot' is none of greedy, card"), ("prefill", "card", "only decode is measured with")],
)
def test_sampling_settings_that_cannot_be_measured_are_refused(model, kind, value, told, capsys):
    assert cli.main(["bench", kind, "--model", str(model), "--sampling", value]) == 2
    assert told in capsys.readouterr().err


def test_an_end_token_does_not_end_a_measurement(model, tmp_path):
    wanted = json.loads(_generate(model))["ids"]
    ending = write_tiny_qwen3(
        tmp_path / "ending", context=256, tokenizer=False, generation={"eos_token_id": sorted(set(wanted))}
    )
    assert run("decode", ending, tmp_path)["rows"][0]["tokens"] == 6


def _generate(model: Path) -> str:
    command = [sys.executable, "-m", "onedesk.service", "generate", "--ids", "1,2", "--greedy", "--max-tokens", "6"]
    return subprocess.run(
        [*command, "--model", str(model), "--json"], capture_output=True, text=True, check=True
    ).stdout


def test_prefill_reads_the_whole_prompt(model, tmp_path):
    row = run("prefill", model, tmp_path)["rows"][0]
    assert (row["engine"], row["tokens"]) == ("onedesk", 20)
    assert row["tokens_per_second"] == pytest.approx(20 / row["seconds"])


def test_load_has_cold_and_warm_rows_beside_the_raw_read(model, tmp_path):
    document = run("load", model, tmp_path)
    assert [(row["engine"], row["state"]) for row in document["rows"]] == [("onedesk", "cold"), ("onedesk", "warm")]
    for row in document["rows"]:
        assert row["share"] == pytest.approx(row["raw_seconds"] / row["seconds"])
        assert row["fresh_share"] == pytest.approx(row["fresh_seconds"] / row["seconds"])
        assert row["read_bytes"] == document["checkpoint_bytes"]
        assert row["peak_share"] == pytest.approx(row["peak_bytes"] / row["read_bytes"])
    assert document["rows"][1]["cached_before_bytes"] >= document["checkpoint_bytes"]


def test_a_load_of_a_converted_model_is_held_against_what_was_made_of_it(tmp_path):
    """Evicting the checkpoint would leave its other form in the page cache, and the raw read would be of twice the
    bytes.
    """
    model = write_tiny_qwen3(tmp_path / "tiny", dtype="bfloat16", tokenizer=False)
    config, plan, checkpoint = (
        Config(tree=tmp_path),
        BenchPlan("load", str(model), quant="int8", device="cpu"),
        open_checkpoint(model),
    )
    assert files_of_load(plan, checkpoint, config.cache) == dict.fromkeys(checkpoint.files, checkpoint.weight_bytes)
    keep_kernels(config.cache)
    made = quantize_model(str(model), "int8", None, True, config)
    ((file, nbytes),) = files_of_load(plan, checkpoint, config.cache).items()
    assert file.parent == Path(made.path)
    assert nbytes == sum(info.nbytes for info in read_header(file).tensors.values()) < 0.6 * checkpoint.weight_bytes


def test_a_measurement_that_cannot_fit_the_context_is_refused(model, tmp_path):
    with pytest.raises(RequestError, match="takes 272 tokens of context and tiny allows 256"):
        measure(
            BenchPlan("decode", str(model), device="cpu", tokens=256, prompt=16), Config(tree=tmp_path), ModelRoots([])
        )


@pytest.mark.parametrize(
    "options", [["decode", "--batch", "9"], ["decode", "--batch", "0"], ["prefill", "--batch", "2"]]
)
def test_other_batches_are_wrong_usage(model, options, capsys):
    assert cli.main(["bench", *options, "--model", str(model), "--json"]) == 2
    assert "batch" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_command_prints_the_document_and_can_make_a_table_of_it(model, tmp_path, capsys):
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    options = ["bench", "prefill", "--model", str(model), "--prompt", "20", "--cycles", "1", "--config", str(config)]
    assert cli.main([*options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"kind", "model", "quant", "device", "read_bytes_per_second", "rows"} <= set(document)
    assert "TOKENS/s" in kind_table(document)


def test_an_unknown_model_names_the_shapes(tmp_path):
    with pytest.raises(ModelError, match=r"no model 'lost'.*qwen3-0\.6b, qwen3-1\.7b"):
        measure(BenchPlan("decode", "lost"), Config(tree=tmp_path), ModelRoots([]))


def task(model: Path, tmp_path: Path) -> SubjectSpec:
    return SubjectSpec(model, "cpu", "none", 64, tmp_path, {}, ())


def test_a_worker_raises_the_childs_own_error(tmp_path):
    with (
        MeasuringChild("onedesk", task(tmp_path / "lost", tmp_path)) as worker,
        pytest.raises(FileError, match="does not exist"),
    ):
        worker.ask("load")


def test_a_worker_that_died_is_told(model, tmp_path):
    with MeasuringChild("onedesk", task(model, tmp_path)) as worker:
        os.kill(worker.pid, 9)
        with pytest.raises(PeerError, match="the measuring process of onedesk ended, status -9"):
            worker.ask("load")


def test_an_absent_peer_is_told(model, tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    with pytest.raises(PeerError, match="transformers is not installed here"):
        peer.Transformers(task(model, tmp_path))


def test_a_random_checkpoint_is_written_once_and_can_be_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"qwen3-small": SMALL})
    monkeypatch.setattr(shapes, "_CHUNK_ELEMENTS", 1000)
    folder = shapes.random_checkpoint("qwen3-small", tmp_path)
    assert folder == tmp_path / "bench" / "qwen3-small"
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert shapes.random_checkpoint("qwen3-small", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weight_bytes == 2 * (
        512 * 64 + 2 * (64 * (128 + 64 + 64 + 128) + 3 * 64 * 128 + 2 * 64 + 2 * 32) + 64
    )
    with safe_open(folder / "model.safetensors", "pt") as file:
        embedding, norm = file.get_tensor("model.embed_tokens.weight"), file.get_tensor("model.norm.weight")
    assert embedding.dtype == torch.bfloat16
    assert 0.015 < float(embedding.float().std()) < 0.025
    assert len(embedding.float().unique()) > 500
    assert bool((norm == 1).all())
    assert [path.name for path in (tmp_path / "bench").iterdir()] == ["qwen3-small"]


def test_the_published_shapes_have_their_sizes():
    def parameters(name: str) -> int:
        family = family_of(shapes.SHAPES[name])
        return sum(
            math.prod(s.shape) for d in family.destinations(family.read_config(shapes.SHAPES[name])) for s in d.sources
        )

    assert {name: round(parameters(name) / 1e9, 2) for name in shapes.SHAPES} == {
        "qwen3-toy": 0.04,
        "qwen3-0.6b": 0.60,
        "qwen3-1.7b": 1.72,
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3.5-toy": 0.20,
        "qwen3.5-0.8b": 0.75,
        "qwen3.5-4b": 4.21,
    }


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", {"qwen3-small": SMALL})
    usage = shapes.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shapes.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(FileError, match="has 1,000 free"):
        shapes.random_checkpoint("qwen3-small", tmp_path)
    assert list((tmp_path / "bench").iterdir()) == []


def test_the_read_ceiling_is_a_speed():
    speed = read_ceiling("cpu", available=512 * MIB, repeats=2)
    assert 1e8 < speed < 1e13


def test_raw_reads_and_residency_speak_of_the_same_bytes(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 * MIB + 17))
    os.sync()
    residency = Residency([file])
    assert read_whole([file]) > 0
    assert read_whole([file], fresh=True) > 0
    assert residency.resident() == -(-(3 * MIB + 17) // mmap.PAGESIZE) * mmap.PAGESIZE
    evict([file])
    assert residency.resident() in (0, -(-(3 * MIB + 17) // mmap.PAGESIZE) * mmap.PAGESIZE)  # a tmpfs keeps its pages
    residency.close()


def test_the_peak_counts_what_was_held_in_between(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with PeakWatch([file]) as watch:
        held = torch.ones(64 * MIB // 4)
        watch.look()
        del held
    assert 60 * MIB < watch.peak < 160 * MIB


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_bench_leaves_no_child(tmp_path, number):
    endless = write_tiny_qwen3(tmp_path / "endless", context=200_000, layers=12, tokenizer=False)
    command = [
        sys.executable,
        "-m",
        "onedesk.service",
        "bench",
        "decode",
        "--model",
        str(endless),
        "--tokens",
        "190000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as bench:
        children = psutil.Process(bench.pid).children()
        while not children:
            assert bench.poll() is None
            time.sleep(0.05)
            children = psutil.Process(bench.pid).children()
        bench.send_signal(number)
        bench.communicate(timeout=60)
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert (len(gone), alive) == (1, [])
    assert bench.returncode == (-signal.SIGTERM if number == signal.SIGTERM else 130)
