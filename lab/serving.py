"""What the local service costs compared with the engine in this process, and the memory that its models release: the
figures of the docs.

    python -m onedesk.lab.serving [--model NAME] [--quant none|int8|int4] [--tokens 48] [--cycles 9] [--streams 8]
    [--json]

Both engines hold the model and generate the same tokens in turn, through the handle that nodes use. OMP_NUM_THREADS
sets the threads of each engine: with as many as there are cores, the server and the reader have no core to themselves.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from ..service.api import OpenModel
from ..service.bench.onedesk_subject import NEVER
from ..service.bench.run import end_tokens, find_model, random_prompt
from ..service.catalog.inventory import model_roots
from ..service.config import Config, load_config
from ..service.console import columns, write_json
from ..service.core import ModelSpec, Request, Result, Sampling
from ..service.errors import OnedeskError, PeerError
from ..service.kernels.cpu.compile import compile_library
from ..service.loader.checkpoint import Checkpoint, open_checkpoint
from ..service.loader.names import ModelRoots
from ..service.peers.remote import RemoteModel
from ..service.peers.service import LocalService
from ..service.registry import Registry

PROMPT = 32
IDLE_SECONDS = 10.0
SETTLE_SECONDS = 2.0
# Pause between two turns: compute threads spin for some ms after their last product, on cores that the other engine's
# turn needs.
PAUSE_SECONDS = 0.05
RELEASES = 3


def measure_serving(plan: argparse.Namespace, config: Config, roots: ModelRoots) -> dict[str, Any]:
    """The document, with medians of plan.cycles, inside the process and through the service: seconds to the first
    token, the part of it without prefill ("way"), seconds per further token; tokens per second of one stream and of
    plan.streams; the share of a core that the idle service takes; the bytes and the time of a release.

    Starts a service of its own, in a tree of its own. Raises ModelError, FileError, MemoryFull, PeerError.
    """
    path = find_model(plan.model, config, roots)
    checkpoint = open_checkpoint(path, roots=roots.bases)
    with tempfile.TemporaryDirectory(prefix="onedesk-serving-") as folder:
        file = Path(folder) / "onedesk.toml"
        file.write_text(f"[service]\nconcurrency = {plan.streams}\n", encoding="utf-8")
        _carry_kernels(config.cache, Path(folder) / "cache")
        registry = Registry()
        registry.configure(load_config(file))
        try:
            return _measured(registry, path, checkpoint, plan)
        finally:
            registry.close()


def _carry_kernels(cache: Path, new: Path) -> None:
    """Copy the compiled kernels, so that they are not compiled again."""
    new.mkdir()
    compile_library(cache)
    for library in cache.glob("kernels-*.so"):
        shutil.copy(library, new)


def _measured(registry: Registry, path: Path, checkpoint: Checkpoint, plan: argparse.Namespace) -> dict[str, Any]:
    roots = ModelRoots([path.parent])
    context = PROMPT + plan.tokens
    inside = registry.open(
        path, roots=roots, context=context, quant=plan.quant, device=plan.device, sequences=plan.streams
    )
    served = registry.open_in_service(ModelSpec(path.name, context, plan.quant, plan.device), roots=roots)
    samples: dict[str, list[tuple[float, ...]]] = {"inside": [], "service": []}
    spent = dict.fromkeys(samples, 0.0)
    for cycle in range(plan.cycles + 1):  # the first one loads, and does not count
        turns: list[tuple[str, OpenModel | RemoteModel]] = [("inside", inside), ("service", served)]
        for name, model in turns if cycle % 2 else reversed(turns):
            time.sleep(PAUSE_SECONDS)
            before = _spent(served) if cycle else 0.0
            turn = _turn(model, [_request(checkpoint, plan.tokens, cycle)])
            if cycle:
                spent[name] += _spent(served) - before
                first, read = turn.times[0], turn.results[0].stages["prefill"].seconds
                samples[name].append((first, first - read, (turn.times[-1] - first) / (len(turn.times) - 1)))
    return {
        "kind": "serving",
        "model": checkpoint.name,
        "quant": plan.quant,
        "cycles": plan.cycles,
        "threads": torch.get_num_threads(),
        "cores": psutil.cpu_count(),
        "first_token": _beside(samples, 0),
        "way": _beside(samples, 1),
        "token": _beside(samples, 2),
        "processor_seconds_a_token": {name: seconds / plan.cycles / plan.tokens for name, seconds in spent.items()},
        "streams": _streams(served, checkpoint, plan),
        "idle_share_of_a_core": _idle_share(served),
        "release": _released(served, checkpoint),
        # Last: a service without requests may end meanwhile.
        "streams_inside": _streams(inside, checkpoint, plan),
    }


def _beside(samples: dict[str, list[tuple[float, ...]]], which: int) -> dict[str, float]:
    """Medians, and the median and quartiles of what the service added per cycle."""
    inside, service = ([sample[which] for sample in samples[name]] for name in ("inside", "service"))
    more = sorted(there - here for here, there in zip(inside, service, strict=True))
    added, middle, quarter = statistics.median(more), statistics.median(inside), len(more) // 4
    found = {"inside": middle, "service": statistics.median(service), "added": added, "added_share": added / middle}
    return found | {"added_low": more[quarter], "added_high": more[-1 - quarter]}


@dataclass(frozen=True, slots=True)
class _Turn:
    """Seconds from the start until each token, over all requests, and until each request's first token."""

    times: list[float]
    begun: list[float]
    results: list[Result]


def _turn(model: OpenModel | RemoteModel, requests: Sequence[Request]) -> _Turn:
    started = time.perf_counter()
    times: list[float] = []
    begun: dict[int, float] = {}
    results: list[Result] = []
    for event in model.generate_batch(requests):
        if event.token is not None:
            times.append(time.perf_counter() - started)
            begun.setdefault(event.request, times[-1])
        if event.result is not None:
            results.append(event.result)
    if len(times) != sum(request.max_tokens for request in requests):
        raise PeerError(
            f"{len(times)} tokens came of {sum(request.max_tokens for request in requests)}; see the service's log"
        )
    return _Turn(times, list(begun.values()), results)


def _request(checkpoint: Checkpoint, tokens: int, seed: int) -> Request:
    sampling = Sampling(
        temperature=1.0, top_k=0, top_p=1.0, logit_bias=dict.fromkeys(end_tokens(checkpoint), NEVER), seed=seed
    )
    return Request(
        ids=tuple(random_prompt(checkpoint, PROMPT, seed)), sampling=sampling, max_tokens=tokens, repetition_stop=False
    )


def _streams(model: OpenModel | RemoteModel, checkpoint: Checkpoint, plan: argparse.Namespace) -> dict[str, float]:
    """Tokens per second from the request to the last token, and seconds until all streams had their first one.

    Medians after a warm-up turn, which may prepare this batch size: on CUDA that takes a second.
    """
    rates: dict[int, list[float]] = {1: [], plan.streams: []}
    begun: list[float] = []
    for cycle in range(max(1, plan.cycles // 3) + 1):
        for count, found in rates.items():
            time.sleep(PAUSE_SECONDS)
            asked = [_request(checkpoint, plan.tokens, 1000 + 100 * cycle + 10 * count + i) for i in range(count)]
            turn = _turn(model, asked)
            if cycle:
                found.append(plan.tokens * count / turn.times[-1])
                begun += [max(turn.begun)] if count > 1 else []
    one, many = (statistics.median(found) for found in rates.values())
    return {
        "count": plan.streams,
        "one": one,
        "many": many,
        "ratio": many / one,
        "begun": statistics.median(begun or [0.0]),
    }


def _idle_share(served: RemoteModel) -> float:
    family = _family(served)
    time.sleep(SETTLE_SECONDS)
    before = _processor_seconds(family)
    time.sleep(IDLE_SECONDS)
    return (_processor_seconds(family) - before) / IDLE_SECONDS


def _family(served: RemoteModel) -> list[psutil.Process]:
    """The service and its children."""
    service = served.peer
    if not isinstance(service, LocalService) or service.pid is None:
        raise PeerError(
            "the service was not started for this measurement, or has ended; end the one that runs, then measure again"
        )
    return [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]


def _spent(served: RemoteModel) -> float:
    """Processor seconds of this process and the service so far."""
    return _processor_seconds([psutil.Process(), *_family(served)])


def _processor_seconds(family: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in family))


def _released(served: RemoteModel, checkpoint: Checkpoint) -> dict[str, float]:
    """Bytes requested and measured, and the longest call; the model loads again between calls."""
    asked = measured = 0
    longest = 0.0
    for cycle in range(RELEASES):
        started = time.perf_counter()
        for released in served.give_way():
            asked, measured = asked + released.asked, measured + released.measured
        longest = max(longest, time.perf_counter() - started)
        _turn(served, [_request(checkpoint, 2, cycle)])
    return {"asked": asked, "measured": measured, "share": measured / asked if asked else 0.0, "seconds": longest}


def summary(document: dict[str, Any]) -> str:
    """The document for people."""
    parts = ("inside", "service", "added", "added_low", "added_high")
    rows: list[tuple[str, ...]] = [
        ("", "IN PROCESS, ms", "SERVICE, ms", "ADDED, ms", "A QUARTER BELOW", "ABOVE", "ADDED")
    ]
    for name, key in (("first token", "first_token"), ("of it not reading", "way"), ("each further token", "token")):
        found = document[key]
        rows.append((name, *(f"{1000 * found[part]:.2f}" for part in parts), f"{found['added_share']:.1%}"))
    release, (inside, service) = document["release"], document["processor_seconds_a_token"].values()
    streams = "".join(
        f"{found['count']} streams {where} write {found['many']:.1f} tokens/s, one {found['one']:.1f}:"
        f" {found['ratio']:.2f}x; all had begun after {1000 * found['begun']:.1f} ms\n"
        for where, found in (("through the service", document["streams"]), ("in process", document["streams_inside"]))
    )
    return (
        f"the service with {document['model']}, {document['quant']}, {document['threads']} computing threads on"
        f" {document['cores']} cores, medians of {document['cycles']}\n{columns(rows)}\nprocessor time a token, of both"
        f" processes: {1000 * inside:.2f} ms in process, {1000 * service:.2f} ms through the service\n{streams}idle it"
        f" takes {document['idle_share_of_a_core']:.2%} of a core; releases gave back {release['share']:.1%}, the"
        f" longest in {release['seconds']:.2f} s\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="serving", description="measure what the local service adds")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--quant", default="int8", choices=("none", "int8", "int4"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--cycles", type=int, default=9)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="one document on stdout, the summary on stderr")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.cycles < 1 or not 1 <= args.streams <= 8:
        parser.error("--tokens begins at 2, --cycles at 1, and --streams is 1 to 8")
    try:
        config = load_config(args.config)
        document = measure_serving(args, config, model_roots(config))
    except OnedeskError as error:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    (sys.stderr if args.json else sys.stdout).write(summary(document))
    if args.json:
        write_json(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
