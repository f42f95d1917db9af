"""Trains the demo writer.  python -m training.writer --out FOLDER [--seconds 240] [--rows 1200000]"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from . import examples, tokenizer
from .network import CONFIG, WriterNetwork

TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 20,
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": tokenizer.SPECIALS[2],
    "pad_token": tokenizer.SPECIALS[0],
    "unk_token": None,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 2048,
}


def write_checkpoint(network: torch.nn.Module, folder: Path) -> None:
    """config.json, generation_config.json, tokenizer_config.json, chat_template.jinja and model.safetensors in BF16."""
    added = {
        str(i): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, t in enumerate(tokenizer.SPECIALS)
    }
    files = {
        "config.json": CONFIG,
        "generation_config.json": _GENERATION,
        "tokenizer_config.json": {**_TOKENIZER, "added_tokens_decoder": added},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _groups(network: torch.nn.Module) -> list[dict]:
    matrices = [p for p in network.parameters() if p.ndim == 2]
    vectors = [p for p in network.parameters() if p.ndim != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def rate(done: float, warm: float, peak: float) -> float:
    """Learning rate at a share `done` of the time: a linear rise, then half a cosine down to one percent."""
    if done < warm:
        return peak * done / warm
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warm) / (1 - warm)))))


def train(
    rows: np.ndarray, seconds: float, batch: int, peak: float, seed: int, device: str, compiled: bool
) -> WriterNetwork:
    """Train for a fixed wall-clock time; the learning rate follows the clock, so that the run always ends at the lowest
    rate.
    """
    torch.manual_seed(seed)
    network = WriterNetwork().to(device)
    data = torch.from_numpy(rows.astype(np.int32)).to(device)
    optimizer = torch.optim.AdamW(_groups(network), lr=peak, betas=(0.9, 0.95), fused=device == "cuda")
    column = torch.arange(examples.ROW, device=device)

    def loss_of(ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        logits = network(ids[:, :-1]).float()
        wanted = (column[None, 1:] >= start[:, None]) & (column[None, 1:] < end[:, None])
        labels = torch.where(wanted, ids[:, 1:], -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    run = torch.compile(loss_of) if compiled else loss_of
    begin, step, order = time.perf_counter(), 0, torch.randperm(len(data), device=device)
    while (passed := time.perf_counter() - begin) < seconds:
        at = (step * batch) % max(1, len(data) - batch + 1)
        if step and at < batch:
            order = torch.randperm(len(data), device=device)
        picked = data[order[at : at + batch]].long()
        for group in optimizer.param_groups:
            group["lr"] = rate(passed / seconds, 0.03, peak)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = run(picked[:, : examples.ROW], picked[:, examples.ROW], picked[:, examples.ROW + 1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0:
            print(f"writer step {step} loss {loss.item():.4f} at {time.perf_counter() - begin:.0f} s", flush=True)
        step += 1
        if step == 20:  # compilation is done: start the clock of the schedule
            begin += 0.0 if device == "cpu" else time.perf_counter() - begin
    print(f"writer: {step} steps of {batch} rows, last loss {loss.item():.4f}", flush=True)
    return network


def main() -> None:
    """Tokenizer, rows, training, checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rows", type=int, default=1_200_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if not (arguments.out / "tokenizer.json").exists():
        tokenizer.train().save(str(arguments.out / "tokenizer.json"))
    rows = examples.writer_rows(arguments.out, arguments.rows, arguments.seed * 1_000_000, arguments.workers)
    print(f"writer: {len(rows)} rows in {time.perf_counter() - begin:.0f} s", flush=True)
    network = train(
        rows, arguments.seconds, arguments.batch, arguments.rate, arguments.seed, arguments.device, arguments.compile
    )
    write_checkpoint(network, arguments.out)


if __name__ == "__main__":
    main()
