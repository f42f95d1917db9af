"""qwen3 against transformers on the same checkpoint, and configs that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.engine.runner import Stopped
from onedesk.service.engine.session import Opening, Session, draw_blueprint, open_session
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.qwen3 import destinations, read_config
from onedesk.service.model.spec import Destination
from onedesk.service.model.weights import plan_weights
from oracle import load_model
from safetensors.torch import load_file, save_file
from tiny_qwen3 import write_tiny_qwen3

CPU = torch.device("cpu")
LENGTHS = (1, 7, 40, 200)


def start(folder: Path, cache: Path, context: int = 512) -> Session:
    pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
    session = open_session("test", draw_blueprint(open_checkpoint(folder), CPU, context), Opening(pool, cache))
    session.settle()
    return session


def all_logits(session: Session, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Scores of every position, the ids read in chunks of `sizes`."""
    runner, rows, at = session.runner, [], 0
    with runner.kv.open(len(ids)) as kv:
        for size in sizes:
            chunk, places = runner.chunk.fill(kv, ids[at : at + size])
            state = runner.network.forward(chunk, places, runner.kv, runner.scratch).clone()
            kv.advance(size)
            rows += [runner.network.logits(row[None], runner.scratch)[0].clone() for row in state]
            at += size
    return torch.stack(rows)


def prompt(length: int, vocab: int = 490) -> list[int]:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(
    scope="module",
    params=[{"tied": True}, {"tied": False, "shards": 3, "head_dim": 16}],
    ids=["tied", "untied-sharded"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Session, Any]:
    folder = write_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", **request.param)
    return start(folder, cache), load_model(folder)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(pair: tuple[Session, Any], length: int) -> None:
    session, theirs = pair
    ids = prompt(length)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    ways = {
        "whole": [min(length, 256)],
        "one by one": [1] * length,
        "chunks of 3": [3] * (length // 3) + [length % 3] * (length % 3 > 0),
    }
    for name, sizes in ways.items():
        difference = (all_logits(session, ids, sizes) - wanted).abs().max().item()
        assert difference <= 1e-4, name


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_ids_equal_transformers(pair: tuple[Session, Any], length: int) -> None:
    session, theirs = pair
    ids = prompt(length)
    with torch.no_grad():
        wanted = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1)[
            0, length:
        ].tolist()
    runner = session.runner
    with runner.kv.open(512) as kv:
        scores, cached = runner.prefill(kv, ids, None, lambda _: None), []
        for _ in wanted:
            cached.append(int(scores.argmax()))
            scores = runner.decode([kv], [cached[-1]])[0]
    uncached = list(ids)
    for _ in wanted:
        with runner.kv.open(512) as kv:
            uncached.append(int(runner.prefill(kv, uncached, None, lambda _: None).argmax()))
    assert cached == wanted
    assert uncached[length:] == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_weights_equal_transformers_in_fp32(tmp_path: Path, cache: Path, dtype: str) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny", dtype=dtype)
    session, theirs = start(folder, cache), load_model(folder, torch.float32)
    ids = prompt(40)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    for sizes in ([40], [1] * 40):
        assert (all_logits(session, ids, sizes) - wanted).abs().max().item() <= 2e-3
    weights = session.leases[0]
    assert weights.nbytes < 1.1 * sum(t.nbytes for t in load_file(folder / "model.safetensors").values()), (
        "weights were widened"
    )


def test_an_unfinished_chunk_leaves_the_sequence_as_it_was(pair: tuple[Session, Any]) -> None:
    runner = pair[0].runner
    stops = iter([False, False, True])
    with runner.kv.open(64) as kv, runner.kv.open(64) as other:
        for sequence in (kv, other):
            runner.prefill(sequence, prompt(7), None, lambda _: None)
        with pytest.raises(Stopped):
            runner.prefill(kv, prompt(40), lambda: next(stops), lambda _: None)
        assert kv.length == 7
        again = runner.decode([kv], [11]).clone()
        torch.testing.assert_close(again, runner.decode([other], [11]))
        runner.kv.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            r"model_type 'llama' \(LlamaForCausalLM\) is not supported; supported: qwen2, ",
        ),
        ({"hidden_size": "64"}, r"hidden_size = '64'; a whole number from 1"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0"),
        ({"num_hidden_layers": True}, r"num_hidden_layers = True"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'; only 'silu'"),
        ({"attention_bias": True}, r"attention_bias = True"),
        ({"use_sliding_window": True}, r"use_sliding_window = True"),
        ({"num_key_value_heads": 3}, r"4 attention heads and 3 key/value heads"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            r"rotary scaling that is not supported: rope_type 'linear', factor",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "finetuned": True}},
            r"not supported: rope_type 'yarn', finetuned",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, r"factor = 0; a number above 0 is needed"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
            r"rope_theta = 1 for YaRN; .* above 1",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 2}}, r"beta_fast = 1, beta_slow = 2"),
        ({"rope_scaling": "yarn"}, r"rope_scaling = 'yarn'; an object is needed"),
        ({"layer_types": ["sliding_attention"] * 4}, r"layer_types other than 4 times 'full_attention'"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings = 'yes'; true or false"),
        (
            {"intermediate_size": 96},
            r"model\.layers\.0\.mlp\.gate_proj\.weight: wanted \[96, 64\] by config.json, found \[128, 64\]",
        ),
        (
            {"num_hidden_layers": 3},
            r"has 11 tensors that its config.json does not account for, the first is model\.layers\.3\.",
        ),
        ({"num_hidden_layers": 5}, r"lacks the tensor model\.layers\.4\."),
        ({"tie_word_embeddings": False}, r"lacks the tensor lm_head\.weight, wanted \[512, 64\]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        draw_blueprint(open_checkpoint(folder), CPU, 64)


def test_a_huge_layer_count_is_read_only_as_far_as_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_qwen3(tmp_path / "tiny", layers=4))
    taken: list[Destination] = []

    def wanted() -> Iterator[Destination]:
        for destination in destinations(read_config(checkpoint.config | {"num_hidden_layers": 1000})):
            taken.append(destination)
            yield destination

    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.4\."):
        plan_weights(wanted(), checkpoint)
    assert len(taken) == 1 + 4 * 8 + 1
    with pytest.raises(ModelError, match=r"layer_types other than 1000 times"):
        read_config(checkpoint.config | {"num_hidden_layers": 1000, "layer_types": ["full_attention"] * 4})


def test_a_type_that_is_not_computed_with_is_named(tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as F8_E4M3; supported: BF16, F16, F32"):
        draw_blueprint(open_checkpoint(folder), CPU, 64)


def test_tensors_that_belong_together_must_have_one_type(tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"different types \(.*k_proj\.weight BF16"):
        draw_blueprint(open_checkpoint(folder), CPU, 64)
