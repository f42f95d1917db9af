"""The main use in one command: an idea becomes a prompt, and the prompt an image, in a real ComfyUI that runs as a
child.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import Config, load_config
from ..console import UsageError, ends_as_interrupted, write_json, write_text
from ..errors import FileError, PeerError, RequestError
from ..setup.comfyui import ComfyProcess
from ..setup.desk import device_arguments, folder_arguments, need_desk
from ..setup.tree import Desk, Tree
from ..tree_names import DEMO_WRITER
from .options import SUCCESS, Subcommands

LOG = logging.getLogger(__name__)
PAINTER = "onedesk-demo-painter.safetensors"
CODER = "onedesk-demo-painter-vae.safetensors"
# What the image model was trained with: the language model's states after these blocks, for the bare text; images of
# this side length.
LAYERS = "3, 6"
TEMPLATE = "raw text"
SIDE = 128
STEPS = 12
WORKFLOW_SECONDS = 300.0

Graph = dict[str, dict[str, Any]]


def add_to(subcommands: Subcommands) -> None:
    """Add `demo` to the command."""
    parser = subcommands.add(
        "demo", run, "Idea in, written prompt and picture out, with the toy models that come along."
    )
    parser.add_argument("idea", metavar="IDEA", help="what the picture should show, in a few words")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print the result; returns the exit status."""
    if args.model is not None or args.quant != "none" or args.context is not None:
        raise UsageError(
            "the demo has its own two models: leave --model, --quant and --context out; onedesk generate takes them"
        )
    with ends_as_interrupted():
        result = run_demo(args.idea, load_config(args.config))
    if args.json:
        write_json(asdict(result) | {"picture": str(result.picture)})
    else:
        write_text(f"idea:    {result.idea}\nprompt:  {result.prompt}\npicture: {result.picture}")
    return SUCCESS


@dataclass(frozen=True, slots=True)
class DemoModels:
    """The three files of the demo, under the names that ComfyUI lists, and the layers that connect them."""

    writer: str = DEMO_WRITER
    painter: str = PAINTER
    coder: str = CODER
    layers: str = LAYERS


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of an idea: the prompt that the language model wrote, and the image."""

    idea: str
    prompt: str
    picture: Path


def graph(idea: str, seed: int, models: DemoModels) -> Graph:
    """The workflow, in API format. The nodes "write" and "save" output the prompt and the image."""
    return {
        "load": {
            "class_type": "OnedeskLoadModel",
            "inputs": {"model": models.writer, "weights": "as stored", "context": 1024, "policy": "stay"},
        },
        "ask": {
            "class_type": "OnedeskPrompt",
            "inputs": {"preset": "natural", "system": "", "text": idea, "dynamic": False, "seed": 0},
        },
        "write": {
            "class_type": "OnedeskGenerate",
            "inputs": {"model": ["load", 0], "messages": ["ask", 0], "seed": seed, "max_tokens": 128},
        },
        "encode": {
            "class_type": "OnedeskTextEncoder",
            "inputs": {
                "model": ["load", 0],
                "text": ["write", 0],
                "layers": models.layers,
                "template": TEMPLATE,
                "min_tokens": 0,
            },
        },
        "painter": {"class_type": "UNETLoader", "inputs": {"unet_name": models.painter, "weight_dtype": "default"}},
        "canvas": {"class_type": "EmptySD3LatentImage", "inputs": {"width": SIDE, "height": SIDE, "batch_size": 1}},
        "draw": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["painter", 0],
                "positive": ["encode", 0],
                "negative": ["encode", 0],
                "latent_image": ["canvas", 0],
                "seed": seed,
                "steps": STEPS,
                "cfg": 1.0,
                "sampler_name": "dpmpp_2m",
                "scheduler": "beta",
                "denoise": 1.0,
            },
        },
        "coder": {"class_type": "VAELoader", "inputs": {"vae_name": models.coder}},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["draw", 0], "vae": ["coder", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "onedesk-demo"}},
    }


def run_demo(idea: str, config: Config, *, seed: int = 1, models: DemoModels | None = None) -> DemoResult:
    """Start the tree's ComfyUI without a browser, run the workflow, end ComfyUI.

    Raises FileError if nothing is installed or a model is missing, PeerError if ComfyUI does not start or the workflow
    fails.
    """
    if not idea.strip():
        raise RequestError("the idea is empty; write what the picture should show, such as 'a red circle on blue'")
    if config.tree is None:
        raise FileError(
            "the demo needs an installation: run ./install.sh, then PREFIX/run.sh demo or"
            " PREFIX/envs/onedesk/bin/onedesk demo"
        )
    tree, models = Tree(config.tree), models or DemoModels()
    desk = need_desk(tree)
    _check_models(tree, models)
    with ComfyProcess(
        Path(desk.python),
        Path(desk.comfyui),
        _arguments(tree, desk),
        log=tree.logs / "demo-comfyui.log",
        environment=tree.environment(),
    ) as process:
        LOG.info("ComfyUI runs as process %s on port %d", process.child and process.child.pid, process.client.port)
        entry = process.client.wait(process.client.queue(graph(idea, seed, models)), timeout=WORKFLOW_SECONDS)
    return _result(idea, entry, tree)


def _arguments(tree: Tree, desk: Desk) -> list[str]:
    alone = [
        "--disable-all-custom-nodes",
        "--whitelist-custom-nodes",
        desk.pack,
        "--disable-auto-launch",
        "--disable-api-nodes",
    ]
    database = ["--database-url", "sqlite:///:memory:"]
    return [*folder_arguments(tree, desk, own_folders=True), *database, *device_arguments(Path(desk.python)), *alone]


def _check_models(tree: Tree, models: DemoModels) -> None:
    wanted = (
        tree.models / models.writer,
        tree.image_models / "diffusion_models" / models.painter,
        tree.image_models / "vae" / models.coder,
    )
    for path in wanted:
        if not path.exists():
            raise FileError(
                f"the demo model {path.name} is not in {path.parent.relative_to(tree.prefix)}; run install.sh again"
            )


def _result(idea: str, entry: dict[str, Any], tree: Tree) -> DemoResult:
    outputs = entry["outputs"]
    if entry["status"]["status_str"] != "success" or "save" not in outputs:
        errors = [data for kind, data in entry["status"]["messages"] if kind == "execution_error"]
        reason = (
            "; ".join(f"{error['node_type']}: {error['exception_message'].strip()}" for error in errors)
            or "it made no picture"
        )
        raise PeerError(f"the demo workflow failed: {reason}")
    image = outputs["save"]["images"][0]
    return DemoResult(idea, outputs["write"]["text"][0], tree.data / "output" / image["subfolder"] / image["filename"])
