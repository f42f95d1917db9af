"""The real ComfyUI as our child: it starts, draws, tells what went wrong, and ends by its process id."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from comfyui import Comfy
from onedesk.service.errors import PeerError
from onedesk.service.setup.comfyui import Client, ComfyProcess, free_port
from PIL import Image


def drawing(*, painter: str = "tiny_painter_16.safetensors", seed: int = 1) -> dict[str, dict[str, object]]:
    """A workflow of stock nodes that draws 64 x 64 pixels in two steps."""
    return {
        "encoder": {"class_type": "TestTextEncoder", "inputs": {"clip_name": "tiny_encoder.safetensors"}},
        "text": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["encoder", 0], "text": "a red circle"}},
        "painter": {"class_type": "UNETLoader", "inputs": {"unet_name": painter, "weight_dtype": "default"}},
        "coder": {"class_type": "VAELoader", "inputs": {"vae_name": "tiny_coder.safetensors"}},
        "canvas": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["painter", 0],
                "positive": ["text", 0],
                "negative": ["text", 0],
                "latent_image": ["canvas", 0],
                "seed": seed,
                "steps": 2,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "picture": {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["coder", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["picture", 0], "filename_prefix": "drawing"}},
    }


def test_stock_nodes_draw_a_picture(comfyui: Comfy) -> None:
    outcome = comfyui.run(drawing())
    assert outcome.ok, outcome.error
    assert "sampler" in outcome.executed()
    (path,) = comfyui.pictures(outcome)
    with Image.open(path) as picture:
        assert picture.size == (64, 64)
        assert len(picture.getcolors(64 * 64) or []) > 100


def test_a_failing_workflow_tells_why(comfyui: Comfy) -> None:
    with pytest.raises(PeerError, match="no-such-file"):
        comfyui.start(drawing(painter="no-such-file.safetensors"))


def test_a_child_that_cannot_start_shows_its_log(comfyui_folder: Path, tmp_path: Path) -> None:
    process = ComfyProcess(
        Path(sys.executable), comfyui_folder, ["--no-such-option"], log=tmp_path / "log", environment={}
    )
    with pytest.raises(PeerError, match="unrecognized arguments: --no-such-option"):
        process.start()
    assert process.child is not None
    assert process.child.poll() is not None


def test_an_interrupt_while_it_starts_leaves_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = tmp_path / "main.py"
    waiting.write_text("import time\ntime.sleep(600)\n")
    process = ComfyProcess(Path(sys.executable), tmp_path, [], log=tmp_path / "log", environment={})

    def interrupt() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.start()
    assert process.child is not None
    assert process.child.poll() is not None


def test_nobody_at_the_port() -> None:
    with pytest.raises(PeerError, match="gave no answer to /system_stats"):
        Client(free_port()).ask("/system_stats")
