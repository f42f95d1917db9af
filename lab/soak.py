"""Puts mixed load on a real service for minutes and releases memory in between. Checks that its size does not grow,
that no client waits too long, and that no client gets another's text.

    python -m onedesk.lab.soak --minutes 30 --model Qwen3-0.6B

Each text follows from its seed, so it identifies its request: a seed must give the same text alone and under load.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..service.config import Config, load_config
from ..service.console import write_json
from ..service.errors import OnedeskError, PeerError, RequestError
from ..service.memory.budget import MIB
from ..service.peers.child import Child, Order
from ..service.peers.peer import PeerAddress
from ..service.peers.service import find_service
from ..service.peers.wire import Exchange, ask

DRIFT = 16 * MIB  # how much larger the process may be at the end than after the first round
SHARE = 0.98  # of the requested bytes that a release should give back
SEEDS = range(8)
# More likely actions are repeated.
ACTS = ("stream", "stream", "stream", "stream", "whole", "vector", "vanish", "release", "wrong")
_START_SECONDS = 300.0
_LOOK = 0.05
_SILENCE = 600.0
# A round ends with everything released, so its size can be compared; the first one is a warm-up.
_ROUND_SECONDS, _LEAST_ROUNDS = 60.0, 3


@dataclass(frozen=True, slots=True)
class Load:
    """The load: `clients` for `seconds` on these models. Each client draws its actions at random, from `seed` on."""

    models: Sequence[str]
    seconds: float
    clients: int = 8
    tokens: int = 12  # of the shortest text; the longest is 8 times that
    seed: int = 0

    @property
    def rounds(self) -> int:
        return max(_LEAST_ROUNDS, math.ceil(self.seconds / _ROUND_SECONDS))


@dataclass
class Seen:
    """What the clients observed. Each list is only appended to."""

    acts: Counter[str] = field(default_factory=Counter)
    mixed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    releases: list[tuple[int, int]] = field(default_factory=list)


def question(model: str, seed: int, tokens: int) -> dict[str, Any]:
    """A request whose text and length follow from the seed."""
    messages = [{"role": "user", "content": f"Tell me about the number {seed}."}]
    return {
        "model": model,
        "messages": messages,
        "seed": seed,
        "max_tokens": tokens * (1 + seed),
        "temperature": 1.2,
        "stream": True,
    }


class Crowd:
    """Clients that run until a point in time; `alone` is what each (model, seed) generates alone."""

    def __init__(self, address: PeerAddress, load: Load, alone: Mapping[tuple[str, int], str]) -> None:
        self._address = address
        self._load = load
        self._alone = alone
        self.seen = Seen()

    def live(self, number: int, seconds: float) -> None:
        """Let all clients run for this long; the round's `number` makes their draws different."""
        until = time.monotonic() + seconds
        clients = range(self._load.clients)
        threads = [
            threading.Thread(target=self._client, args=(f"{self._load.seed}/{number}/{at}", until)) for at in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, name: str, until: float) -> None:
        draw = random.Random(name)  # noqa: S311 - repeatable, not secret
        acts: Mapping[str, Callable[[str, int], None]] = {act: getattr(self, f"_{act}") for act in set(ACTS)}
        while time.monotonic() < until:
            act, model, seed = draw.choice(ACTS), draw.choice(self._load.models), draw.choice(SEEDS)
            self.seen.acts[act] += 1
            try:
                acts[act](model, seed)
            except OnedeskError as error:
                self.seen.failed.append(f"{act}: {error}")

    def _stream(self, model: str, seed: int) -> None:
        began, first, text = time.perf_counter(), None, ""
        with self._asking(question(model, seed, self._load.tokens)) as exchange:
            for document in exchange.documents():
                first = first or time.perf_counter()
                text += text_of(document)
        self.seen.waits.append((first or time.perf_counter()) - began)
        self._compare(model, seed, text)

    def _whole(self, model: str, seed: int) -> None:
        body = question(model, seed, self._load.tokens) | {"stream": False}
        document = ask(self._address, "POST", "/chat/completions", body, seconds=_SILENCE)
        message = document["choices"][0]["message"]
        self._compare(model, seed, (message.get("reasoning_content") or "") + (message.get("content") or ""))

    def _compare(self, model: str, seed: int, text: str) -> None:
        if text != self._alone[model, seed]:
            self.seen.mixed.append(f"{model} with seed {seed}: {text[:80]!r}, alone {self._alone[model, seed][:80]!r}")

    def _vector(self, model: str, seed: int) -> None:
        document = ask(
            self._address, "POST", "/embeddings", {"model": model, "input": f"number {seed}"}, seconds=_SILENCE
        )
        length = math.sqrt(sum(value * value for value in document["data"][0]["embedding"]))
        if not math.isclose(length, 1.0, abs_tol=1e-3):
            self.seen.failed.append(f"vector: its length is {length}")

    def _vanish(self, model: str, seed: int) -> None:
        with self._asking(question(model, seed, 50 * self._load.tokens)) as exchange:
            next(exchange.documents(), None)

    def _release(self, model: str, seed: int) -> None:
        try:
            document = ask(self._address, "POST", "/memory/release", {"owner": model}, seconds=_SILENCE)
        except RequestError:  # it is not open now
            return
        self.seen.releases += [(row["asked"], row["measured"]) for row in document["released"]]

    def _wrong(self, model: str, seed: int) -> None:
        try:
            ask(self._address, "POST", "/chat/completions", question(model, seed, -1), seconds=_SILENCE)
        except RequestError:
            return
        self.seen.failed.append("wrong: a negative number of tokens was taken")

    def _asking(self, body: Mapping[str, Any]) -> Exchange:
        return Exchange(self._address, "POST", "/chat/completions", body, silence=_SILENCE)


def text_of(document: Mapping[str, Any]) -> str:
    """The text that a chunk adds, reasoning first."""
    deltas = [choice.get("delta", {}) for choice in document.get("choices", ())]
    return "".join((delta.get("reasoning_content") or "") + (delta.get("content") or "") for delta in deltas)


def soak(load: Load, config: Config, *, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Start the service of the tree of `config`, put it under load, end it, and return the report. Raises PeerError and
    the service's errors.
    """
    if config.file is None:
        raise PeerError("there is no onedesk.toml; name one with --config")
    words = [sys.executable, "-m", "onedesk.service", "serve", "--port", "0", "--config", str(config.file)]
    order = Order("the service", words, dict(os.environ), config.cache / "logs" / "soak.log")
    if find_service(config.cache) is not None:
        raise PeerError("a service of this tree runs already, and a soak needs one of its own; end it first")
    child = Child(order)
    try:
        address = _await_service(child, config)
        alone = {
            (model, seed): _written(address, question(model, seed, load.tokens))
            for model in load.models
            for seed in SEEDS
        }
        crowd = Crowd(address, load, alone)
        sizes = []
        for number in range(load.rounds):
            crowd.live(number, load.seconds / load.rounds)
            sizes.append(_quiet_size(address, child, load.models))
            say(
                f"round {number + 1} of {load.rounds}: {sum(crowd.seen.acts.values())} requests, {sizes[-1] / MIB:.1f}"
                " MiB at rest"
            )
        if not child.running:
            raise PeerError(child.ending())
    finally:
        child.stop()
    return _document(load, config, crowd.seen, sizes)


def _await_service(child: Child, config: Config) -> PeerAddress:
    until = time.monotonic() + _START_SECONDS
    while (found := find_service(config.cache)) is None or found.note.pid != child.pid:
        if not child.running:
            raise PeerError(child.ending())
        if time.monotonic() > until:
            raise PeerError(f"the service does not listen {_START_SECONDS:g} s after its start{child.last_words()}")
        time.sleep(_LOOK)
    return found.address


def _written(address: PeerAddress, body: Mapping[str, Any]) -> str:
    with Exchange(address, "POST", "/chat/completions", body, silence=_SILENCE) as exchange:
        return "".join(text_of(document) for document in exchange.documents())


def _quiet_size(address: PeerAddress, child: Child, models: Sequence[str]) -> int:
    """Bytes of the service after it has released everything. Requests left by disconnected clients end first."""
    until = time.monotonic() + _SILENCE
    while (
        ask(address, "POST", "/memory/sleep", {"wake": "manual"}, seconds=_SILENCE).get("busy")
        and time.monotonic() < until
    ):
        time.sleep(_LOOK)
    # A reading stays valid for a quarter of a second.
    time.sleep(0.3)
    size = child.own_bytes()
    ask(address, "POST", "/memory/wake", {}, seconds=_SILENCE)
    return size


def _document(load: Load, config: Config, seen: Seen, sizes: Sequence[int]) -> dict[str, Any]:
    waits = sorted(seen.waits) or [0.0]
    asked, measured = (sum(row[at] for row in seen.releases) for at in (0, 1))
    deadline = config.service.deadline
    p99 = waits[min(len(waits) - 1, math.ceil(len(waits) * 0.99) - 1)]
    drift = max(sizes[1:]) - sizes[0]
    right = (
        not seen.mixed
        and not seen.failed
        and drift <= DRIFT
        and measured >= SHARE * asked
        and (not deadline or p99 < deadline)
    )
    return {
        "kind": "soak",
        "ok": right,
        "models": list(load.models),
        "seconds": load.seconds,
        "clients": load.clients,
        "requests": dict(sorted(seen.acts.items())),
        "mixed": len(seen.mixed),
        "failed": len(seen.failed),
        "examples": [*seen.mixed[:3], *seen.failed[:3]],
        "waiting": {"p50": waits[len(waits) // 2], "p99": p99, "most": waits[-1], "deadline": deadline},
        "released": {"times": len(seen.releases), "asked": asked, "measured": measured},
        "bytes_at_rest": list(sizes),
        "drift_bytes": drift,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; exit 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", action="append", help="may be repeated; default: the configured one")
    parser.add_argument("--tokens", type=int, default=12, help="of the shortest text; the longest is 8 times that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=None)
    args = parser.parse_args(arguments)
    if args.clients < 1 or args.tokens < 1 or not 0 < args.minutes <= 7 * 24 * 60:
        parser.error("--clients and --tokens are whole numbers from 1, --minutes is above 0 and at most a week")
    try:
        config = load_config(args.config)
        names = args.model or [name for name in [config.default_model] if name]
        if not names:
            parser.error("name a model with --model")
        document = soak(Load(names, 60 * args.minutes, args.clients, args.tokens, args.seed), config, say=_say)
    except OnedeskError as error:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    write_json(document)
    return 0 if document["ok"] else 1


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
