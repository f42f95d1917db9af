"""The layer for multi-token prediction against its equations in plain torch, and what is refused of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from onedesk.service.cli.quantize import quantize_model
from onedesk.service.config import Config
from onedesk.service.engine.drafting import HELD_ROWS
from onedesk.service.engine.session import Opening, Session, draw_blueprint, open_session
from onedesk.service.errors import ModelError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.draft import carried_width
from onedesk.service.quant.weight import QuantizedWeight
from published import BLOCKS
from safetensors.torch import load_file
from tiny_drafts import Tensors, add_draft, change, write_drafter
from tiny_families import write_family

CPU = torch.device("cpu")
CONTEXT = 288
TOKENS = 45  # more than the indexer's budget of 16
DRAFTING = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp"]
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
OF_FAMILY = {"qwen4_exp": {"ple_layer_ids": [1]}}


def write(folder: Path, family: str) -> Path:
    return write_drafter(folder, family, **TWO_LAYERS, **OF_FAMILY.get(family, {}))


@pytest.fixture(scope="module", params=DRAFTING)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny", request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "small", "qwen3_5_moe")


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def start(folder: Path, quant: str = "none", cache: Path | None = None) -> Session:
    pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
    blueprint = replace(draw_blueprint(open_checkpoint(folder), CPU, CONTEXT, quant, cache), sequences=1)
    session = open_session("test", blueprint, Opening(pool, folder / "no-kernels"))
    session.settle()
    assert blueprint.need.kv + blueprint.need.scratch + blueprint.need.weights >= session.held_bytes()
    return session


class Oracle:
    """The equations, one after the other, over the checkpoint's own tensors."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.c = config.get("text_config", config)
        self.w = load_file(folder / "model.safetensors")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.w[name])

    def rope(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """x [T, heads, dim]: the first quarter of a head of 32 turned, as halves; an indexer's head turns as many
        numbers.
        """
        width = 8
        angles = torch.outer(places.float(), 1e7 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)[:, None]
        part = x[..., :width]
        turned = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
        return torch.cat((part * angles.cos() + turned * angles.sin(), x[..., width:]), -1)

    def visible(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """Which places each row attends to."""
        count = len(x)
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        if "indexer_budget" not in self.c:
            return seen
        heads, dim, ratio = self.c["indexer_n_heads"], self.c["indexer_head_dim"], self.c["indexer_compress_ratio"]
        projected = (x @ self.w[at + "index_qk_proj.weight"].t()).view(count, heads + 1, dim)
        queries = self.rope(self.norm(projected[:, :heads], at + "q_layernorm.weight"), torch.arange(count))
        full = count // ratio
        means = projected[: full * ratio, heads].view(full, ratio, dim).mean(1)
        keys = self.rope(self.norm(means, at + "k_layernorm.weight")[:, None], torch.arange(full) * ratio)[:, 0]
        for row in range(count):
            blocks = (row + 1) // ratio
            scores = torch.relu(queries[row] @ keys[:blocks].t()).sum(0)
            best = scores.topk(min(blocks, self.c["indexer_budget"] // ratio)).indices
            chosen = torch.zeros(count, dtype=torch.bool)
            for block in best.tolist():
                chosen[block * ratio : block * ratio + ratio] = True
            chosen[blocks * ratio : row + 1] = True
            seen[row] &= chosen
        return seen

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        at, count, dim = "mtp.layers.0.self_attn.", len(x), self.c["head_dim"]
        heads, shared = self.c["num_attention_heads"], self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        queries, gates = (x @ self.w[at + "q_proj.weight"].t()).view(count, heads, 2, dim).unbind(2)
        keys, values = ((x @ self.w[f"{at}{p}_proj.weight"].t()).view(count, -1, dim) for p in ("k", "v"))
        places = torch.arange(count)
        queries = self.rope(self.norm(queries, at + "q_norm.weight"), places)
        keys = self.rope(self.norm(keys, at + "k_norm.weight"), places)
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        scores = torch.einsum("ihd,jhd->hij", queries, keys) * dim**-0.5
        scores = scores.masked_fill(~self.visible(x, at + "indexer."), float("-inf"))
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values) * torch.sigmoid(gates)
        return mixed.reshape(count, -1) @ self.w[at + "o_proj.weight"].t()

    def gated(self, x: torch.Tensor, at: str) -> torch.Tensor:
        gate, up, down = (self.w[f"{at}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = "mtp.layers.0.mlp."
        if at + "gate.weight" not in self.w:
            return self.gated(x, at)
        weights, chosen = (x @ self.w[at + "gate.weight"].t()).softmax(-1).topk(self.c["num_experts_per_tok"])
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.sigmoid(x @ self.w[at + "shared_expert_gate.weight"].t()) * self.gated(x, at + "shared_expert.")
        for row in range(len(x)):
            for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
                out[row] += weight * self.gated(x[row], f"{at}experts.{expert}.")
        return out

    def read(self, streams: torch.Tensor, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        """streams [T, 4, H]: what a half of the layer reads of them, and the normed streams side by side."""
        count = streams.shape[1]
        weight = self.w[at + ".hc_norm.weight"].view(count, -1)
        normed = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)
        low = F.silu(normed.flatten(1) @ self.w[at + ".input_mix_weight_down.weight"].t() / count)
        mix = torch.sigmoid(low @ self.w[at + ".input_mix_weight_up.weight"].t()).view_as(streams)
        return (mix * normed).mean(1), normed.flatten(1)

    def scores(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """hidden [T, wide] of places 0.., ids [T] of places 1..: scores for places 2.."""
        table = next(tensor for name, tensor in self.w.items() if name.endswith("embed_tokens.weight"))
        head = self.w.get("lm_head.weight", table)
        token = self.norm(table[ids], "mtp.pre_fc_norm_embedding.weight")
        state = self.norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        if "hc_count" not in self.c:
            x = torch.cat((token, state), 1) @ self.w["mtp.fc.weight"].t()
            x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm.weight"))
            x = x + self.forward(self.norm(x, "mtp.layers.0.post_attention_layernorm.weight"))
            return self.norm(x, "mtp.norm.weight") @ head.t()
        count = self.c["hc_count"]
        streams = state.view(len(ids), count, -1) @ self.w["mtp.fc_hidden.weight"].t()
        streams = streams + (token @ self.w["mtp.fc_embedding.weight"].t())[:, None]
        for which, half in (("attn", self.attention), ("mlp", self.forward)):
            at = f"mtp.layers.0.{which}_hyper_connection"
            mixed, normed = self.read(streams, at)
            inject = 2 * torch.sigmoid(normed @ self.w[at + ".block_inject_weight.weight"].t() / count)
            streams = streams + inject[:, :, None] * half(mixed)[:, None]
        return self.read(streams, "mtp.hyper_connection_mixer")[0] @ head.t()


def draft_scores(session: Session, hidden: torch.Tensor, ids: list[int], pieces: list[int]) -> torch.Tensor:
    """The layer's scores behind every place, read in pieces of these lengths."""
    drafting = session.runner.drafting
    assert drafting is not None
    sequence, found, at = drafting.cache.open(CONTEXT), [], 0
    scratch, inputs = session.runner.scratch, drafting._rows
    with sequence:
        for piece in pieces:
            scratch.rows(piece)["draft_hidden"].copy_(hidden[at : at + piece])
            inputs.fill(sequence, piece, ids[at : at + piece])
            state = drafting._draft.forward(inputs.ids[:piece], inputs.rows[piece], drafting.cache, scratch).clone()
            sequence.advance(piece)
            found += [drafting._draft.network.logits(state[row : row + 1], scratch).clone() for row in range(piece)]
            at += piece
    return torch.cat(found)


def test_its_scores_are_those_of_the_equations(folder: Path) -> None:
    session, oracle = start(folder), Oracle(folder)
    draw = torch.Generator().manual_seed(3)
    wide = carried_width(draw_blueprint(open_checkpoint(folder), CPU, CONTEXT).config)
    hidden, ids = torch.randn(TOKENS, wide, generator=draw), torch.randint(0, 512, (TOKENS,), generator=draw)
    wanted = oracle.scores(hidden, ids)
    assert wanted.std() > 0.1
    for pieces in ([8] * 5 + [5], [7, *[1] * 38], [3] * 15):
        torch.testing.assert_close(draft_scores(session, hidden, ids.tolist(), pieces), wanted, rtol=0, atol=2e-4)
    session.release()


def test_further_draft_tokens_use_the_draft_layers_own_state(folder: Path) -> None:
    """Guess by guess the same as reading one token more; nothing of it stays in the layer's sequence."""
    session = start(folder)
    runner, drafting = session.runner, session.runner.drafting
    assert drafting is not None
    ids = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    with runner.kv.open(CONTEXT) as text:
        runner.prefill(text, ids, None, lambda _: None)
        assert drafting.unread(text, len(ids)) == HELD_ROWS
        several = drafting.draft(text, len(ids), 7, 4)
        assert (drafting.unread(text, len(ids)), len(several)) == (
            HELD_ROWS,
            4,
        )  # it has read all; who asks again asks for all of it
        assert [drafting.draft(text, len(ids), 7, count) for count in (1, 2, 3)] == [
            several[:1],
            several[:2],
            several[:3],
        ]
        drafting.cache.check()
        runner.check(text, [7, 8])
        text.advance(2)
        assert drafting.unread(text, len(ids) + 1) == 1
        assert drafting.unread(text, len(ids) + 2) == 2
        assert drafting.unread(text, len(ids) + 3) == 0
        assert drafting.draft(text, len(ids) + 3, 9, 1) == []
    session.release()


def test_a_partial_draft_layer_is_refused_an_absent_one_ignored(small: Path, tmp_path: Path) -> None:
    folder = copied(small, tmp_path / "half")
    whole = draw_blueprint(open_checkpoint(small), CPU, CONTEXT)
    change(
        folder,
        lambda tensors: {
            n: t for n, t in tensors.items() if n not in ("mtp.fc.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight")
        },
    )
    with pytest.raises(
        ModelError, match=r"has 39 of the 41 tensors of its layer .* first that is missing is mtp\.fc\.weight"
    ):
        draw_blueprint(open_checkpoint(folder), CPU, CONTEXT)
    left_out = draw_blueprint(open_checkpoint(folder), CPU, CONTEXT, draft=False)
    plain = draw_blueprint(
        open_checkpoint(write_family(tmp_path / "plain", "qwen3_5_moe", seed=5, **TWO_LAYERS)), CPU, CONTEXT
    )
    assert left_out.need == plain.need == whole.without_draft().need
    assert (left_out.config.draft, left_out.draft_bytes, left_out.draft_token_bytes) == (False, 0, 0)
    assert whole.draft_bytes == whole.need.weights - plain.need.weights > 0
    assert whole.pass_bytes == plain.pass_bytes
    config = json.loads((folder / "config.json").read_text())
    for said, is_there in ((0, False), (None, False)):
        (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": said}))
        assert draw_blueprint(open_checkpoint(folder), CPU, CONTEXT).config.draft is is_there
    add_draft(folder, said=None)
    assert draw_blueprint(open_checkpoint(folder), CPU, CONTEXT).config.draft
    change(folder, lambda tensors: tensors | {"mtp.fc.weight": torch.zeros(64, 64)})
    with pytest.raises(ModelError, match=r"mtp\.fc\.weight: wanted \[64, 128\] by config.json, found \[64, 64\]"):
        draw_blueprint(open_checkpoint(folder), CPU, CONTEXT)
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 2}))
    assert not draw_blueprint(open_checkpoint(folder), CPU, CONTEXT).config.draft


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.", ""])
def test_other_names_and_stacked_experts_are_read(small: Path, tmp_path: Path, prefix: str) -> None:
    folder = copied(small, tmp_path / "moved")

    def packed(tensors: Tensors) -> Tensors:
        experts = {n: tensors.pop(n) for n in list(tensors) if n.startswith("mtp.layers.0.mlp.experts.")}
        each = [
            [experts[f"mtp.layers.0.mlp.experts.{e}.{p}_proj.weight"] for e in range(8)] for p in ("gate", "up", "down")
        ]
        tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.cat((torch.stack(each[0]), torch.stack(each[1])), 1)
        tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.stack(each[2])
        return {
            prefix + name.removeprefix("model.") if name.startswith(("model.", "mtp.")) else name: t
            for name, t in tensors.items()
        }

    change(folder, packed)
    hidden, ids = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), list(range(9, 18))
    first, other = start(small), start(folder)
    torch.testing.assert_close(
        draft_scores(other, hidden, ids, [8, 1]), draft_scores(first, hidden, ids, [8, 1]), rtol=0, atol=0
    )
    for session in (first, other):
        session.release()


def test_the_draft_layer_is_converted_and_kept_by_quantize(small: Path, tmp_path: Path) -> None:
    config = Config(tree=tmp_path)
    done = quantize_model(str(small), "int8", None, True, config)
    assert done.written
    session, fresh = start(small, "int8", config.cache), start(small, "int8")
    held = session._arrival.tensors
    formats = {key: w.format.name if isinstance(w, QuantizedWeight) else "float" for key, w in held.items()}
    assert (formats["draft_fc"], formats["2.qkv"], formats["2.experts_down"], formats["2.router"]) == (
        "int8",
        "int8",
        "int8",
        "float",
    )
    hidden, ids = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), list(range(9, 18))
    found, wanted = draft_scores(session, hidden, ids, [8, 1]), Oracle(small).scores(hidden, torch.tensor(ids))
    torch.testing.assert_close(found, draft_scores(fresh, hidden, ids, [8, 1]), rtol=0, atol=0)
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
    for one in (session, fresh):
        one.release()


def test_experts_in_fp8_with_a_scale_a_block_mean_what_they_say(small: Path, tmp_path: Path) -> None:
    """As the published FP8 checkpoint has them: the experts of this layer, and nothing else of it."""
    folders = [copied(small, tmp_path / name) for name in ("stored", "meant")]
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))

    def stored(tensors: Tensors, *, wide: bool) -> Tensors:
        found = dict(tensors)
        for place, name in enumerate(name for name in tensors if name.startswith("mtp.layers.0.mlp.experts.")):
            scale = torch.full((1, 1), 0.01 + 0.001 * place, dtype=torch.bfloat16)
            numbers = (tensors[name] / scale.float()).to(torch.float8_e4m3fn)
            found |= {name: numbers.float() * scale.float()} if wide else {name: numbers, f"{name}_scale_inv": scale}
        return found

    for folder, wide in zip(folders, (False, True), strict=True):
        change(folder, lambda tensors, wide=wide: stored(tensors, wide=wide))
    sessions = [start(folder) for folder in folders]
    hidden, ids = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), list(range(9, 18))
    found, meant = (draft_scores(session, hidden, ids, [8, 1]) for session in sessions)
    torch.testing.assert_close(found, meant, rtol=0, atol=2e-4)
    for session in sessions:
        session.release()
