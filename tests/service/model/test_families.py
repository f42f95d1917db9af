"""Every family against transformers on the same checkpoint: all scores, and what is written, however it is cut and
who runs beside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.engine import runner as runner_module
from onedesk.service.engine.session import Opening, Session, draw_blueprint, open_session
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.families import FAMILIES, read_family
from onedesk.service.model.ngram import head_sizes, multipliers, table_rows
from onedesk.service.model.shape import NgramShape
from onedesk.service.quant.weight import QuantizedWeight, dequantize
from oracle import load_model
from safetensors.torch import load_file, save_file
from tiny_families import write_family

CPU = torch.device("cpu")
CONTEXT = 288
EOS = 2
STEPS = 6
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding."
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
PARTIAL = {
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "beta_fast": 8,
    "truncate": False,
}
# Of each family the ordinary model, and what its config may change of it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3_next": ("qwen3_next", {"mlp_only_layers": [2]}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, attention first": (
        "qwen3_5",
        {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
    ),
    "qwen3_5_moe": ("qwen3_5_moe", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}),
    "qwen4_exp": ("qwen4_exp", {}),
    "qwen4_exp, two tables": (
        "qwen4_exp",
        {
            "ple_layer_ids": [1, 3],
            "ngram_size": 4,
            "ple_embed_dim": 96,
            "hc_count": 2,
            "indexer_compress_ratio": 8,
            "output_gate_type": None,
        },
    ),
    "qwen3_moe, YaRN": ("qwen3_moe", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen4_exp, YaRN": ("qwen4_exp", {"rope_parameters": YARN | PARTIAL}),
    "qwen3_5_moe with pictures": ("qwen3_5_moe", {"vision": True, "linear_value_head_dim": 32}),
}


def start(folder: Path, cache: Path, quant: str = "none", sequences: int = 4) -> Session:
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    blueprint = replace(draw_blueprint(open_checkpoint(folder), CPU, CONTEXT, quant), sequences=sequences)
    session = open_session("test", blueprint, Opening(pool, cache))
    session.settle()
    return session


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids with the end token among them."""
    ids = torch.randint(3, 490, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()
    return [EOS if place % 17 == 11 else token for place, token in enumerate(ids)]


def all_logits(session: Session, ids: list[int], size: int) -> torch.Tensor:
    """Scores of every position, the ids read in chunks of `size`."""
    runner, rows = session.runner, []
    with runner.kv.open(len(ids)) as kv:
        for at in range(0, len(ids), size):
            chunk, places = runner.chunk.fill(kv, ids[at : at + size])
            state = runner.network.forward(chunk, places, runner.kv, runner.scratch).clone()
            kv.advance(len(chunk))
            rows += [runner.network.logits(row[None], runner.scratch)[0].clone() for row in state]
    return torch.stack(rows)


def greedy(session: Session, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """What is written behind each prompt, all of them together."""
    runner = session.runner
    sequences = [runner.kv.open(len(ids) + steps) for ids in prompts]
    scores = [runner.prefill(kv, ids, None, lambda _: None).clone() for kv, ids in zip(sequences, prompts, strict=True)]
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        for ids, row in zip(written, scores, strict=True):
            ids.append(int(row.argmax()))
        scores = list(runner.decode(sequences, [ids[-1] for ids in written]).clone())
    for kv in sequences:
        kv.close()
    runner.kv.check()
    return written


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Iterator[tuple[Session, Any]]:
    family, changes = MODELS[request.param]
    folder = write_family(tmp_path_factory.mktemp("model") / "tiny", family, seed=len(request.param), **changes)
    session = start(folder, cache)
    yield session, load_model(folder)
    session.release()


@pytest.mark.parametrize("length", [7, 130])
def test_scores_equal_transformers(pair: tuple[Session, Any], length: int) -> None:
    session, theirs = pair
    ids = prompt(length)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    assert wanted.abs().max() > 1, "scores that say nothing"
    for size in (1, 3, 16, CONTEXT):
        difference = (all_logits(session, ids, size) - wanted).abs().max().item()
        assert difference <= 2e-4, f"chunks of {size}"


def test_greedy_ids_equal_transformers_alone_and_together(
    pair: tuple[Session, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, theirs = pair
    prompts = [prompt(length, 1) for length in (70, 1, 33)]
    wanted = []
    for ids in prompts:
        with torch.no_grad():
            found = theirs.generate(torch.tensor([ids]), max_new_tokens=STEPS, do_sample=False, eos_token_id=-1)
        wanted.append(found[0, len(ids) :].tolist())
    assert greedy(session, prompts, STEPS) == wanted
    for size in (1, 3, 16):
        monkeypatch.setattr(runner_module, "CHUNK", size)
        assert greedy(session, prompts[:1], STEPS) == wanted[:1], f"chunks of {size}"
    monkeypatch.undo()
    uncached = list(prompts[2])
    for _ in range(STEPS):
        uncached += greedy(session, [uncached], 1)[0]
    assert uncached[33:] == wanted[2]


def change(folder: Path, edit: Any) -> None:
    """Let `edit` change the dictionary of a checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors")


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as one tensor a layer of gates and ups, and one of downs."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for at in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        each = [[tensors[f"{at}.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(8)]
        found[f"{at}.experts.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in each])
        found[f"{at}.experts.down_proj"] = torch.stack([parts[2] for parts in each])
    return found


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model") / "tiny", "qwen3_5_moe", seed=3)


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_experts_in_one_tensor_are_the_same_network(sparse: Path, tmp_path: Path, cache: Path) -> None:
    whole = copied(sparse, tmp_path / "joined")
    change(whole, joined)
    sessions = [start(folder, cache) for folder in (sparse, whole)]
    torch.testing.assert_close(*(all_logits(session, prompt(20), 20) for session in sessions), rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", ""])
def test_the_text_network_may_lie_under_other_names(sparse: Path, tmp_path: Path, cache: Path, prefix: str) -> None:
    moved = copied(sparse, tmp_path / "moved")
    head = "language_model.lm_head." if prefix.startswith("language_model.") else "lm_head."
    beside = {"mtp.norm.weight": torch.ones(4), "model.visual.blocks.0.norm1.bias": torch.ones(4)}
    change(
        moved,
        lambda tensors: (
            {n.replace("model.", prefix, 1).replace("lm_head.", head): t for n, t in tensors.items()} | beside
        ),
    )
    ids = prompt(9)
    torch.testing.assert_close(
        all_logits(start(moved, cache), ids, 9), all_logits(start(sparse, cache), ids, 9), rtol=0, atol=0
    )


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_experts_are_converted_on_load_and_routers_are_not(
    sparse: Path, tmp_path: Path, cache: Path, quant: str
) -> None:
    """The scores are those of the numbers that the converted weights mean."""
    session = start(sparse, cache, quant)
    held = session._arrival.tensors
    formats = {
        name.split(".", 1)[-1]: w.format.name if isinstance(w, QuantizedWeight) else "float" for name, w in held.items()
    }
    assert (formats["router"], formats["shared_gate"], formats["rates"]) == ("float", "float", "int8")
    assert formats["experts_gate_up"] == formats["experts_down"] == formats["projection"] == quant
    meant = copied(sparse, tmp_path / "meant")
    plan = {
        tensor.destination.key: tensor.destination
        for tensor in draw_blueprint(open_checkpoint(sparse), CPU, 8, quant).plan.tensors
    }
    tensors = load_file(meant / "model.safetensors")
    for key, weight in held.items():
        if isinstance(weight, QuantizedWeight):
            wide, row = dequantize(weight), 0
            for source in plan[key].sources:
                tensors[source.name] = wide[row : row + source.shape[0]].clone()
                row += source.shape[0]
    save_file(tensors, meant / "model.safetensors")
    ids = prompt(30)
    difference = (all_logits(session, ids, 30) - all_logits(start(meant, cache), ids, 30)).abs().max().item()
    assert difference <= 1e-2, "beyond what activations of 15 bits cost"


def test_half_weights_equal_transformers_in_fp32(sparse: Path, tmp_path: Path, cache: Path) -> None:
    half = copied(sparse, tmp_path / "half")
    change(half, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    ids = prompt(40)
    with torch.no_grad():
        wanted = load_model(half)(torch.tensor([ids])).logits[0]
    for size in (1, 40):
        assert (all_logits(start(half, cache), ids, size) - wanted).abs().max().item() <= 2e-3


def test_tensors_that_do_not_fit_are_refused(sparse: Path, tmp_path: Path) -> None:
    def both(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | joined(tensors)

    def fewer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if "layers.2.mlp.experts.7.up" not in name}

    def wrong(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor[:7] if name.endswith("experts.down_proj") else tensor
            for name, tensor in joined(tensors).items()
        }

    for place, (edit, message) in enumerate(
        (
            (
                both,
                (
                    r"stores the same weights twice, as model\.layers\.0\.mlp\.experts\.gate_up_proj and as"
                    r" .*experts\.0\.gate_proj"
                ),
            ),
            (fewer, r"lacks the tensor model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight"),
            (wrong, r"experts\.down_proj: wanted \[8, 64, 32\] by config.json, found \[7, 64, 32\]"),
            (
                lambda tensors: tensors | {"model.layers.0.bias": torch.ones(4)},
                r"1 tensors that its config.json does not account for",
            ),
        )
    ):
        folder = copied(sparse, tmp_path / str(place))
        change(folder, edit)
        with pytest.raises(ModelError, match=message):
            draw_blueprint(open_checkpoint(folder), CPU, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen9"},
            r"model_type 'qwen9' .*is not supported; supported: qwen2, .*, qwen4_exp",
        ),
        ({"num_experts": 7}, r"layers\.0\.mlp\.gate\.weight: wanted \[7, 64\] by config.json, found \[8, 64\]"),
        ({"num_experts": 9}, r"layers\.0\.mlp\.gate\.weight: wanted \[9, 64\] by config.json, found \[8, 64\]"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok = 9 of num_experts = 8"),
        ({"norm_topk_prob": False}, r"norm_topk_prob = False; only True"),
        (
            {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
            r"layer_types that are not 4 of 'full_attention' and",
        ),
        ({"layer_types": ["linear_attention"] * 3}, r"layer_types that are not 4 of"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads = 3 and linear_num_key_heads = 2"),
        ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim = 1; at least 2"),
        ({"linear_key_head_dim": 8}, r"in_proj_qkv\.weight: wanted \[96, 64\] by config.json, found \[128, 64\]"),
        ({"output_gate_type": "sigmoid"}, r"output_gate_type = 'sigmoid'; only 'silu'"),
        ({"attn_output_gate": False}, r"attn_output_gate = False"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            r"rotary scaling that is not supported: rope_type 'dynamic', factor",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.3}},
            r"partial_rotary_factor = 0.3 of head_dim = 32: 9 dimensions",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, r"partial_rotary_factor = 1.5 of head_dim = 32"),
        (
            {"num_hidden_layers": 2**31 - 1, "layer_types": None},
            "num_hidden_layers = 2147483647; a whole number from 1",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    sparse: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = copied(sparse, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        draw_blueprint(open_checkpoint(folder), CPU, 64)


def test_every_family_that_is_listed_is_tried_here() -> None:
    seeing = {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}  # tried in test_seeing.py
    assert {family for family, _ in MODELS.values()} | {"qwen3"} | seeing == set(FAMILIES)


def test_quantized_layers_are_found_under_other_names(sparse: Path, tmp_path: Path) -> None:
    moved = copied(sparse, tmp_path / "moved")
    change(
        moved,
        lambda tensors: {
            name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()
        },
    )
    config = json.loads((moved / "config.json").read_text(encoding="utf-8"))
    names = ["model.language_model.layers.0.mlp.gate", "lm_head", "re:.*gate$", "model.visual*"]
    told = {"ignore": names, "quantized_layers": {names[0]: {"bits": 4}}}
    (moved / "config.json").write_text(json.dumps(config | {"quantization_config": told}), encoding="utf-8")
    known = read_family(open_checkpoint(moved))[2].config["quantization_config"]
    assert known == {
        "ignore": ["model.layers.0.mlp.gate", *names[1:]],
        "quantized_layers": {"model.layers.0.mlp.gate": {"bits": 4}},
    }


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1]}
    return write_family(tmp_path_factory.mktemp("model") / "tiny", "qwen4_exp", seed=8, **changes)


def test_the_table_stays_in_its_file_in_parts_whole_or_in_fp8(hashed: Path, tmp_path: Path, cache: Path) -> None:
    ids = prompt(25)
    wanted = all_logits(session := start(hashed, cache), ids, 25)
    assert not any("table" in key for key in session._arrival.tensors)
    stored = sum(tensor.nbytes for tensor in load_file(hashed / "model.safetensors").values())
    assert session.leases[0].nbytes < stored - 4096 * 16 * 4 + (16 << 10)

    def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = [tensors.pop(f"{TABLE}shard_{i}.weight") for i in range(4)]
        return tensors | {TABLE + "weight": torch.cat(parts)}

    def scaled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = {
            name: (tensor * 4).to(torch.float8_e4m3fn) for name, tensor in tensors.items() if name.startswith(TABLE)
        }
        return tensors | parts | {TABLE + "weight_scale": torch.tensor([0.25], dtype=torch.bfloat16)}

    def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            n: (t * 4).to(torch.float8_e4m3fn).float() / 4 if n.startswith(TABLE) else t for n, t in tensors.items()
        }

    found = {}
    for edit in (whole, scaled, rounded):
        folder = copied(hashed, tmp_path / edit.__name__)
        change(folder, edit)
        found[edit.__name__] = all_logits(start(folder, cache), ids, 25)
    torch.testing.assert_close(found["whole"], wanted, rtol=0, atol=0)
    torch.testing.assert_close(found["scaled"], found["rounded"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_stored_hashes_that_are_others_are_refused(hashed: Path, tmp_path: Path, name: str) -> None:
    folder, key = copied(hashed, tmp_path / "other"), f"{TABLE.removesuffix('ngram_embedding.')}{name}"
    change(folder, lambda tensors: tensors | {key: tensors[key] + torch.eye(len(tensors[key]), dtype=torch.int64)[-1]})
    with pytest.raises(ModelError, match=rf"tensor {re.escape(key)} has .*: other rows of the table would be read"):
        read_family(open_checkpoint(folder))
    change(folder, lambda tensors: tensors | {key: tensors[key][:2]})
    with pytest.raises(ModelError, match=rf"tensor {re.escape(key)} has I64 \[2\], and the hashes"):
        read_family(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t | {TABLE + "shard_3.weight": torch.ones(1000, 16)},
            r"shard_3\.weight: wanted \[1024, 16\] by config.json, found \[1000",
        ),
        (
            lambda t: {n: v for n, v in t.items() if "shard_2" not in n},
            r"lacks the tensor model\.layers\.0\.ple\..*shard_2\.weight",
        ),
        (
            lambda t: t | {TABLE + "shard_1.weight": torch.ones(1024, 16).to(torch.float8_e4m3fn)},
            r"stored as F8_E4M3; supported: BF16",
        ),
        (
            lambda t: t | {TABLE + "weight_scale": torch.ones(2)},
            r"weight_scale is F32 \[2\]; one floating number|stored as F32; supported",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(hashed: Path, tmp_path: Path, edit: Any, message: str) -> None:
    folder = copied(hashed, tmp_path / "tiny")
    change(folder, edit)
    with pytest.raises(ModelError, match=message):
        draw_blueprint(open_checkpoint(folder), CPU, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_layer_ids": [3]}, r"ple_layer_ids \[3\] of 2 layers"),
        ({"ple_embed_dim": 66}, r"ple_embed_dim = 66 for 4 rows a token"),
        ({"eos_token_id": None}, r"eos_token_id = None; n-grams need the token"),
        ({"indexer_budget": 18}, r"indexer_budget = 18, indexer_compress_ratio = 4"),
        ({"indexer_compress_ratio": 3, "indexer_budget": 18}, r"the ratio must divide the budget and 32"),
        ({"indexer_kv_heads": 2}, r"indexer_kv_heads = 2; only 1"),
        ({"indexer_head_dim": None}, r"indexer_head_dim = None"),
        ({"output_gate_type": "tanh"}, r"output_gate_type = 'tanh'; supported are 'silu' and 'sigmoid'"),
        ({"hc_count": 3}, r"norm_key\.weight: wanted \[192\] by config.json, found \[256\]"),
        (
            {"ngram_vocab_size_base": 2000},
            r"ngram_heads_vocab_sizes has \[1009, 1013, 1019\] and so on, and the hashes",
        ),
    ],
)
def test_an_invalid_stream_or_table_config_is_refused(
    hashed: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = copied(hashed, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        draw_blueprint(open_checkpoint(folder), CPU, 64)


def test_published_hashes_match_the_index() -> None:
    """Figures of Qwen3.8-Flash-Next's checkpoint: rows of each head, rows of the table, and the factors that it
    stores.
    """
    shape = NgramShape((1,), 2560, 4, 3, 8, 20_000_000, 128, 1234, 248044, 128)
    sizes = head_sizes(shape, 0)
    assert (sizes[0], sizes[7], sizes[8], sizes[15]) == (20000003, 20000077, 20000081, 20000171)
    assert table_rows(shape, 0) == 320_001_536
    assert multipliers(shape, 248320, 0) == [23703573157769, 20109073645365, 8052911324071]
