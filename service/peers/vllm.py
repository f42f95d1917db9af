"""vLLM as a child: its arguments from budgets.

Based on vLLM's own documentation of its arguments (0.33). On a machine whose CPU and GPU share memory, its share of
"GPU memory" refers to all memory, and the page cache counts as used. So keys and values get an explicit number of
bytes, and the share only limits the rest.
"""

from __future__ import annotations

import math
from pathlib import Path

from ..config import PeerSettings
from ..errors import FileError, ModelError, PeerError
from ..loader.json_files import read_json_object
from ..memory.budget import show
from .launch import EngineEndpoint, Launch, LaunchMachine, check_options, weight_bytes

COMMAND = ("vllm",)
HEALTH = "/health"
MASTER_PORT = 29501
# Part of its allowed bytes for activations, graphs and its libraries, besides weights, keys and values.
SCRATCH_SHARE = 0.10
# Host memory of each of its processes (the server, the core, a worker per GPU) besides weights and keys: 421, 389 and
# 424 MiB, measured on a CPU with a model of 1 MB (0.32). On shared memory it comes out of the same bytes.
PROCESS_BYTES = 424 << 20
OURS = (
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--uds",
    "--api-key",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--max-model-len",
    "--max-num-seqs",
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--headless",
    "--enable-sleep-mode",
)


def launch(settings: PeerSettings, machine: LaunchMachine, endpoint: EngineEndpoint) -> Launch:
    """Its arguments on this machine, the first of `settings.nodes`. Raises PeerError for budgets that cannot be met,
    FileError.

    A machine's memory is divided by its `gpus`. Sleep is refused on shared memory: what it moves to the host takes the
    same bytes.
    """
    title = f"[peers.{settings.name}]"
    check_options(title, settings.options, OURS)
    if settings.sleep and machine.one_pool:
        raise PeerError(
            f"{title}: sleep = true helps a GPU with memory of its own; here it would move the weights within one"
            " memory and free nothing. Take it out: the process then ends when it gives way"
        )
    kv = kv_bytes(settings, machine, weight_bytes(title, Path(settings.model)))
    words = [
        *(settings.command or COMMAND),
        "serve",
        settings.model,
        "--served-model-name",
        settings.name,
        "--host",
        "127.0.0.1",
    ]
    words += ["--port", str(endpoint.port), *budget_words(settings, machine.total, kv)]
    words += split_words(settings.gpus, settings.nodes, attention_heads(Path(settings.model)))
    words += node_words(settings.nodes, 0, settings.address) if settings.nodes > 1 else []
    words += ["--enable-sleep-mode"] if settings.sleep else []
    # Its sleep routes exist in this mode only. They require no key, so any user of this machine can call them.
    variables = {"VLLM_API_KEY": endpoint.key} | ({"VLLM_SERVER_DEV_MODE": "1"} if settings.sleep else {})
    return Launch((*words, *settings.options), variables, sleeps=settings.sleep)


def kv_bytes(settings: PeerSettings, machine: LaunchMachine, weights: int) -> int:
    """Bytes of keys and values on each GPU: its memory minus its part of the weights and the scratch memory. Raises
    PeerError.
    """
    if settings.memory // settings.gpus > machine.total:
        asked = show(settings.memory // settings.gpus)
        raise PeerError(
            f"[peers.{settings.name}]: memory is {asked} a GPU, and there are {show(machine.total)}; use less"
        )
    aside = process_bytes(settings.gpus) if machine.one_pool else 0
    memory = max(0, settings.memory - aside) // settings.gpus
    part = math.ceil(weights / (settings.gpus * settings.nodes))
    scratch = math.ceil(memory * SCRATCH_SHARE)
    kv = memory - part - scratch
    if kv <= 0:
        least = show(math.ceil(part / (1 - SCRATCH_SHARE)) * settings.gpus + aside)
        raise PeerError(
            f"[peers.{settings.name}]: memory is {show(settings.memory)}; its processes take {show(aside)} of it, the"
            f" weights {show(part)} a GPU, scratch {show(scratch)}, so nothing is left for keys and values; use more"
            f" than {least}, or more machines"
        )
    return kv


def process_bytes(gpus: int) -> int:
    """Host memory of all its processes on one machine."""
    return (2 + gpus) * PROCESS_BYTES


def budget_words(settings: PeerSettings, total: int, kv: int) -> list[str]:
    """The arguments that limit its memory and its batch."""
    share = math.floor(settings.memory / settings.gpus / total * 10_000) / 10_000
    words = ["--gpu-memory-utilization", f"{min(0.95, max(0.01, share)):g}", "--kv-cache-memory-bytes", str(kv)]
    words += ["--max-num-seqs", str(settings.sequences)]
    return words + (["--max-model-len", str(settings.context)] if settings.context else [])


def attention_heads(folder: Path) -> int | None:
    """The number of attention heads in the model's config; None if it cannot be read: vLLM then reports the reason."""
    try:
        config = read_json_object(folder / "config.json", "config.json")
    except (FileError, ModelError):
        return None
    inner = config.get("text_config")
    heads = (inner if isinstance(inner, dict) else config).get("num_attention_heads")
    return heads if type(heads) is int and heads > 0 else None


def split_words(gpus: int, nodes: int, heads: int | None) -> list[str]:
    """Tensor parallelism over all GPUs if the number of heads is divisible by theirs: then all GPUs work on each token.
    Otherwise layers are split between machines.
    """
    across = nodes == 1 or (heads is not None and heads % (gpus * nodes) == 0)
    words = ["--tensor-parallel-size", str(gpus * nodes if across else gpus)]
    return words if across else [*words, "--pipeline-parallel-size", str(nodes)]


def node_words(nodes: int, rank: int, address: str) -> list[str]:
    """This machine's rank among `nodes`, for vLLM's own processes; `address` is the first machine's."""
    words = ["--nnodes", str(nodes), "--node-rank", str(rank)]
    return [*words, "--master-addr", address, "--master-port", str(MASTER_PORT), *(["--headless"] if rank else [])]
