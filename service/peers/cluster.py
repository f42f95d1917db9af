"""Several machines for one model: how vLLM splits it, and the command line of each machine. Only a plan: the user
starts the machines.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

from ..config import PeerSettings
from ..errors import RequestError
from ..memory.budget import show
from . import vllm

# Placeholder for each machine's own address on the network between them.
HEAD = "HEAD_ADDRESS"
RAY_PORT = 6379
_NAME = "cluster"


@dataclass(frozen=True, slots=True)
class Share:
    """One machine's memory and its share of the model, in bytes: `memory` in total, `budget` for the model, of which
    `kv` are for keys and values at `context` tokens.
    """

    memory: int
    budget: int
    kv: int
    context: int


def cluster(model: str, share: Share, *, nodes: int, heads: int | None, gpus: int = 1) -> dict[str, Any]:
    """The document: the split, each machine's command lines for vLLM's own processes and for Ray, and the entry for
    onedesk.toml.

    `model` is the folder, the same on each machine. Raises RequestError for a single machine, or a budget that a
    machine cannot hold.
    """
    if nodes < 2:
        raise RequestError(f"a cluster has 2 machines or more, {nodes} was asked for; leave --nodes out")
    if share.budget > share.memory:
        raise RequestError(
            f"each machine is to hold {show(share.budget)} and has {show(share.memory)}; use more machines, or a"
            " smaller form"
        )
    budget = min(share.memory, share.budget + vllm.process_bytes(gpus))
    settings = PeerSettings(
        _NAME, "vllm", model=model, memory=budget, context=share.context, gpus=gpus, nodes=nodes, address=HEAD
    )
    split = vllm.split_words(gpus, nodes, heads)
    common = [
        *vllm.COMMAND,
        "serve",
        model,
        *vllm.budget_words(settings, share.memory, math.ceil(share.kv / gpus)),
        *split,
    ]
    here = ["--served-model-name", _NAME, "--host", "127.0.0.1"]
    native = [[*common, *([] if rank else here), *vllm.node_words(nodes, rank, HEAD)] for rank in range(nodes)]
    join = ["ray", "start", "--block", f"--address={HEAD}:{RAY_PORT}"]
    head = ["ray", "start", "--head", f"--node-ip-address={HEAD}", f"--port={RAY_PORT}"]
    serve = [*common, *here, "--distributed-executor-backend", "ray"]
    return {
        "split": "layers" if "--pipeline-parallel-size" in split else "matrices",
        "bytes": {"memory": share.memory, "budget": budget, "kv": share.kv},
        "context": share.context,
        "native": native,
        "ray": [[head, serve], *([[join]] * (nodes - 1))],
        "entry": _entry(settings),
    }


def cluster_text(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    sizes = document["bytes"]
    how = "each matrix over all machines" if document["split"] == "matrices" else "layers between the machines"
    lines = [
        (
            f"vLLM splits {how}; each holds up to {show(sizes['budget'])} of {show(sizes['memory'])},"
            f" {show(sizes['kv'])} of it keys and values for {document['context']:,} tokens."
        ),
        f"{HEAD} is the first machine's address on the network between them; see docs/cluster.md.",
        "",
        "By vLLM's own processes:",
        *(f"  machine {rank}: {shlex.join(argv)}" for rank, argv in enumerate(document["native"])),
        "Or over Ray:",
        *(f"  machine {rank}: {shlex.join(argv)}" for rank, steps in enumerate(document["ray"]) for argv in steps),
        (
            "With this entry in onedesk.toml of machine 0, its first command is not typed: the engine is started when"
            " it is needed."
        ),
        *(f"  {line}" for line in document["entry"].splitlines()),
    ]
    return "\n".join(lines)


def _entry(settings: PeerSettings) -> str:
    lines = [f"[peers.{settings.name}]", 'kind = "vllm"', f'model = "{settings.model}"', f"memory = {settings.memory}"]
    lines += [f"context = {settings.context}", f"nodes = {settings.nodes}", f'address = "{settings.address}"']
    return "\n".join(lines + ([f"gpus = {settings.gpus}"] if settings.gpus > 1 else [])) + "\n"
