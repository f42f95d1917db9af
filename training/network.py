"""The demo writer's network: Qwen3's published architecture in plain torch, with the tensor names of Hugging Face
checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 480,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 8,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


class Norm(nn.Module):
    """Root mean square norm over the last axis, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * self.weight.float()).to(
            x.dtype
        )


def rotary(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [length, head_dim] of the rotary position embedding, halves layout."""
    size = CONFIG["head_dim"]
    frequency = CONFIG["rope_theta"] ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), -1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, head = CONFIG["hidden_size"], CONFIG["head_dim"]
        self.heads, self.groups, self.head = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], head
        self.q_proj = nn.Linear(hidden, self.heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, self.groups * head, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * head, bias=False)
        self.o_proj = nn.Linear(self.heads * head, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(head), Norm(head)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.groups, self.head)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.head).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(CONFIG["hidden_size"]), Norm(CONFIG["hidden_size"])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = nn.ModuleList(Block() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = Norm(CONFIG["hidden_size"])


class WriterNetwork(nn.Module):
    """The language model; the embedding is also the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                depth = (
                    (2 * CONFIG["num_hidden_layers"]) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(weight, std=0.02 * depth if "embed" in name else depth * weight.shape[1] ** -0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B, T] -> logits [B, T, vocabulary]."""
        x = self.model.embed_tokens(ids)
        cos, sin = rotary(ids.shape[1], ids.device)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def states(self, ids: torch.Tensor, after: tuple[int, ...]) -> torch.Tensor:
        """ids [B, T] -> the residual stream after each given number of blocks, concatenated: [B, T, hidden *
        len(after)].
        """
        x = self.model.embed_tokens(ids)
        cos, sin = rotary(ids.shape[1], ids.device)
        kept = []
        for index, layer in enumerate(self.model.layers[: max(after)], start=1):
            x = layer(x, cos, sin)
            if index in after:
                kept.append(x)
        return torch.cat(kept, -1)


def load_network(folder: Path, device: str) -> WriterNetwork:
    """The network with the weights of a checkpoint folder, float32."""
    stored = json.loads((folder / "config.json").read_text("utf-8"))
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if stored[name] != CONFIG[name]:
            raise ValueError(f"{folder.name} has {name} {stored[name]}, this script makes {CONFIG[name]}")
    network = WriterNetwork()
    network.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return network.to(device).eval()


@torch.no_grad()
def generate(
    network: WriterNetwork, prompts: list[list[int]], stops: tuple[int, ...], most: int, temperature: float, seed: int
) -> list[list[int]]:
    """Sample answers for many prompts at once, without a cache; a row is done at its first stop token (kept in the
    row).
    """
    device = network.model.embed_tokens.weight.device
    draw = torch.Generator(device).manual_seed(seed)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), int(lengths.max()) + most, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    done, rows = torch.zeros(len(prompts), dtype=torch.bool, device=device), torch.arange(len(prompts), device=device)
    ends = lengths.clone()
    for _ in range(most):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = network(ids[:, : int(ends.max())])[rows, ends - 1].float()
        picked = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=draw)[:, 0]
        ids[rows[~done], ends[~done]] = picked[~done]
        ends = ends + (~done).long()
        done = done | torch.isin(picked, torch.tensor(stops, device=device))
        if bool(done.all()):
            break
    return [ids[r, int(lengths[r]) : int(ends[r])].tolist() for r in range(len(prompts))]
