"""Compares the training code's network with transformers on a checkpoint folder.  python -m training.hf_check FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from . import examples, network, tokenizer


def main() -> None:
    """Print whether ids and template agree, and the largest difference of logits and states."""
    folder = Path(sys.argv[1])
    theirs = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, encode = network.load_network(folder, "cpu"), AutoTokenizer.from_pretrained(folder)
    text = "a red circle left of a blue square, 一只猫"
    ids = torch.tensor([encode(text)["input_ids"]])
    with torch.no_grad():
        out = theirs(ids, output_hidden_states=True)
        logits = (out.logits - ours(ids)).abs().max().item()
        states = (torch.cat([out.hidden_states[3], out.hidden_states[6]], -1) - ours.states(ids, (3, 6))).abs().max().item()
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    rendered = encode.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    print(f"ids equal: {ids[0].tolist() == tokenizer.load(folder).encode(text).ids}; template equal: {rendered == examples.chat('S', 'hi')}; "
          f"logits differ by {logits:.2e}, states by {states:.2e}")  # fmt: skip


if __name__ == "__main__":
    main()
