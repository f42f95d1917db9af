"""Everything at once: streams, vectors, releases, clients that vanish, wrong requests. No text is mixed up and no memory is lost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import openai
import psutil
import pytest
from serving import MODEL, THINKER, Server

THREADS = 6
ROUNDS = 15
DRIFT = 16 << 20  # bytes of the process that may be left behind
SEEDS = range(6)


def asked(seed: int) -> Any:
    """The model and the length follow from the seed, so that a text tells whose it is."""
    name = (MODEL, THINKER)[seed % 2]
    messages: list[Any] = [{"role": "user", "content": f"number {seed}"}]
    return {"model": name, "messages": messages, "seed": seed, "max_tokens": 5 + 7 * seed, "temperature": 1.5, "extra_body": {"top_k": 0}}


class Crowd:
    """Clients that each do `rounds` things, drawn by chance."""

    def __init__(self, server: Server, texts: dict[int, str]) -> None:
        self._server = server
        self._texts = texts
        self.done: Counter[str] = Counter()
        self.wrong: list[Any] = []

    def run(self, rounds: int) -> None:
        threads = [threading.Thread(target=self._live, args=(number, rounds)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)

    def _live(self, number: int, rounds: int) -> None:
        draw, client = random.Random(number), self._server.client()
        for _ in range(rounds):
            what = draw.choice(("stream", "stream", "stream", "whole", "vector", "vanish", "release", "wrong"))
            self.done[what] += 1
            getattr(self, f"_{what}")(client, draw.choice(SEEDS))

    def _stream(self, client: openai.OpenAI, seed: int) -> None:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked(seed), stream=True))
        self._compare(seed, text)

    def _whole(self, client: openai.OpenAI, seed: int) -> None:
        self._compare(seed, client.chat.completions.create(**asked(seed)).choices[0].message.content)

    def _compare(self, seed: int, text: str) -> None:
        if text != self._texts[seed]:
            self.wrong.append((seed, text))

    def _vector(self, client: openai.OpenAI, seed: int) -> None:
        if len(client.embeddings.create(model=MODEL, input=f"number {seed}").data) != 1:
            self.wrong.append(("vector", seed))

    def _vanish(self, client: openai.OpenAI, seed: int) -> None:
        connection = self._server.open_stream({"model": (MODEL, THINKER)[seed % 2], "max_tokens": 400, "temperature": 2.0, "top_k": 0})
        connection.recv(100)
        connection.close()

    def _release(self, client: openai.OpenAI, seed: int) -> None:
        released = self._server.ask("POST", "/v1/memory/release", {"owner": (MODEL, THINKER)[seed % 2]})[2]["released"]
        if sum(row["measured"] for row in released) < 0.98 * sum(row["asked"] for row in released):
            self.wrong.append(released)

    def _wrong(self, client: openai.OpenAI, seed: int) -> None:
        try:
            client.chat.completions.create(**asked(seed) | {"max_tokens": -seed})
        except openai.BadRequestError:
            return
        self.wrong.append(("taken", seed))


@pytest.fixture
def texts(server: Server) -> dict[int, str]:
    """What each seed writes alone."""
    client = server.client()
    return {seed: client.chat.completions.create(**asked(seed)).choices[0].message.content for seed in SEEDS}


def test_a_crowd_leaves_nothing_behind(server: Server, texts: dict[int, str]) -> None:
    assert server.note is not None
    process = psutil.Process(server.note.pid)
    crowd = Crowd(server, texts)
    sizes = []
    for _ in range(2):
        crowd.run(ROUNDS)
        server.until("onedesk_working", 0)
        server.until("onedesk_waiting", 0)
        server.ask("POST", "/v1/memory/sleep", {})
        sizes.append(process.memory_info().rss)
        server.ask("POST", "/v1/memory/wake", {})
    assert crowd.wrong == []
    assert sum(crowd.done.values()) == 2 * THREADS * ROUNDS
    assert sizes[1] - sizes[0] < DRIFT
    assert {row["owner"] for row in server.ask("GET", "/v1/memory")[2]["leases"]} <= {MODEL, THINKER}
