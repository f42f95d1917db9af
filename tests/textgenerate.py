"""ComfyUI's own TextGenerate and our engine on the same random Qwen3-0.6B, one after the other on the same machine.

    python tests/textgenerate.py COMFYUI_FOLDER CHECKPOINT_FOLDER      # CHECKPOINT: <cache>/bench/qwen3-0.6b of
    `onedesk bench`

A measurement, not a test. Tokens a second come from the difference of a long and a short answer, so that loading does
not count.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from comfyui import Comfy, Prompt
from node_graphs import node
from onedesk.service.core import Request, Sampling
from onedesk.service.registry import REGISTRY
from onedesk.service.setup.comfyui import ComfyProcess

SHORT, LONG = 4, 16
ROUNDS = 3
WEIGHTS = "random-qwen3.safetensors"
IDS = tuple(range(100, 130))


def their_graph(tokens: int, round_: int) -> Prompt:
    """TextGenerate, greedy; the text differs from round to round, so that nothing comes from the cache."""
    options = {"prompt": f"round {round_}", "max_length": tokens, "sampling_mode": "off"}
    return {
        "1": node("CLIPLoader", clip_name=WEIGHTS, type="lumina2"),
        "2": node("TextGenerate", clip=["1", 0], **options),
        "3": node("PreviewAny", source=["2", 0]),
    }


def rate(seconds: Callable[[int, int], float]) -> float:
    """Median tokens a second of `seconds(tokens, round)`, after one round that does not count."""
    seconds(SHORT, -1)
    return statistics.median((LONG - SHORT) / (seconds(LONG, i) - seconds(SHORT, i)) for i in range(ROUNDS))


def measure_theirs(comfyui: Path, checkpoint: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for name in ("models/text_encoders", "custom_nodes", "input", "output", "user", "temp"):
            (base / name).mkdir(parents=True)
        (base / "models" / "text_encoders" / WEIGHTS).symlink_to(checkpoint / "model.safetensors")
        arguments = [
            "--base-directory",
            folder,
            "--database-url",
            "sqlite:///:memory:",
            "--disable-auto-launch",
            "--disable-api-nodes",
            "--cpu",
        ]
        process = ComfyProcess(Path(sys.executable), comfyui, arguments, log=base / "log", environment={})
        process.start()
        try:
            comfy = Comfy(process, base)

            def seconds(tokens: int, round_: int) -> float:
                started = time.perf_counter()
                outcome = comfy.run(their_graph(tokens, 100 * round_ + tokens), timeout=600)
                if not outcome.ok:
                    raise SystemExit(outcome.error)
                return time.perf_counter() - started

            return rate(seconds)
        finally:
            process.stop()


def measure_ours(checkpoint: Path) -> float:
    model = REGISTRY.open(checkpoint, context=512, device="cpu")
    endless = Sampling(temperature=0, logit_bias={151645: -1e9, 151643: -1e9})

    def seconds(tokens: int, _: int) -> float:
        started = time.perf_counter()
        list(model.generate(Request(ids=IDS, sampling=endless, max_tokens=tokens)))
        return time.perf_counter() - started

    return rate(seconds)


if __name__ == "__main__":
    theirs = measure_theirs(Path(sys.argv[1]), Path(sys.argv[2]))
    ours = measure_ours(Path(sys.argv[2]))
    print(f"TextGenerate {theirs:.2f} tokens/s, Onedesk {ours:.2f} tokens/s: {ours / theirs:.1f}x")
