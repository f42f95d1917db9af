"""The real service with real models in this process, so that a test can inject a fault into any part."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from onedesk.service.config import load_config
from onedesk.service.peers.note import Note
from onedesk.service.registry import Registry
from onedesk.service.server.app import ListenAddress, listen, make_app
from onedesk.service.server.guard import Guard, own_names
from onedesk.service.server.models import Models, ServedModels
from onedesk.service.server.service import Service
from serving import Server

TOKEN = "a-token-that-is-long-enough"


@dataclass
class Inside(Server):
    """As serving.Server, on an event loop in a thread of this process. It has its own `service` and `registry`."""

    service: Service = field(init=False)
    registry: Registry = field(init=False)
    runner: web.AppRunner = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)
    _end: asyncio.Event = field(init=False)
    _thread: threading.Thread = field(init=False)

    @property
    def token(self) -> str:
        return TOKEN

    def start(self) -> Inside:
        """Serve, on any free port."""
        listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listening)), daemon=True)
        self._thread.start()
        assert listening.wait(60)
        return self

    async def _serve(self, listening: threading.Event) -> None:
        config = load_config(self.tree / "onedesk.toml")
        self.registry, self.loop, self._end = Registry(), asyncio.get_running_loop(), asyncio.Event()
        self.registry.configure(config)
        self.service = Service(config.service, Models(config, self.registry, ServedModels()), self.registry, "0")
        app = make_app(self.service, Guard(TOKEN, own_names("127.0.0.1")))
        self.runner, address = await listen(app, ListenAddress("127.0.0.1", 0), config.cache)
        self.note = Note(0, "0", address.host, address.port, None, None)
        self.service.ready = True
        listening.set()
        await self._end.wait()
        await self.service.stop(0)
        await self.runner.cleanup()
        assert await self.service.close()
        self.registry.close()

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, run on the event loop."""

        async def done() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(60)

    def stop(self, kind: int = 0) -> int:
        """Stop it; all of its threads must end."""
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        assert not self._thread.is_alive()
        return 0
