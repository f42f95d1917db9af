"""The process-wide registry: the open models, and the pool of each device that they share."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .api import OpenModel, open_model, pick_device
from .config import Config, PeerSettings, load_config
from .core import CancelCheck, ModelSpec, ProgressReport
from .engine.leaks import LeakReport
from .errors import RequestError
from .loader.names import ModelRoots
from .memory.budget import MemorySettings
from .memory.machine_pool import make_pool
from .memory.pool import Pool, Released
from .memory.thermal import merge, read_nvidia, read_zones
from .memory.watch import MemoryWatch
from .peers.choose import engine_of, make_peer, wanted_of
from .peers.peer import Peer
from .peers.remote import RemoteModel
from .peers.service import LocalService

_Key = tuple[ModelSpec, int]  # its name is the resolved path; sequences


class Registry:
    """Handles by ModelSpec: the same model, context, quantization and device is one handle for all callers.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._models: dict[_Key, OpenModel] = {}
        self._pools: dict[str, Pool] = {}
        self._watches: dict[str, MemoryWatch] = {}
        self._peers: dict[PeerSettings | None, Peer] = {}
        self._remotes: dict[tuple[Peer, ModelSpec], RemoteModel] = {}
        self._config: Config | None = None

    def configure(self, config: Config) -> None:
        """Set the configuration for pools and models opened from now on. By default the installation's own is read at
        first use."""
        with self._lock:
            self._config = config

    @property
    def config(self) -> Config:
        with self._lock:
            if self._config is None:
                self._config = load_config(None)
            return self._config

    def pool(self, device: str = "auto") -> Pool:
        """The pool of a device, made when first asked for."""
        kind = pick_device(device).type
        with self._lock:
            if kind not in self._pools:
                values: dict[str, Any] = dict(self.config.memory)
                pool = make_pool(kind, MemorySettings(**values), lambda: self._slow(kind))
                self._pools[kind], self._watches[kind] = pool, _watch(pool).start()
            return self._pools[kind]

    def _slow(self, kind: str) -> bool:
        watch = self._watches.get(kind)
        return watch is not None and watch.slow

    def watch(self, device: str = "auto") -> MemoryWatch:
        """The watch over a device's pool; it runs as soon as the pool exists."""
        pool = self.pool(device)
        with self._lock:
            return self._watches[torch.device(pool.device).type]

    def open(
        self,
        model: str | Path,
        *,
        roots: ModelRoots | None = None,
        context: int | None = None,
        quant: str = "none",
        device: str = "auto",
        load: bool = True,
        progress: ProgressReport | None = None,
        cancel: CancelCheck | None = None,
        sequences: int = 1,
    ) -> OpenModel:
        """As api.open_model, but equal arguments return the same handle."""
        if not isinstance(model, Path):
            roots = roots or ModelRoots(self.config.model_roots)
        path = model if isinstance(model, Path) else (roots or ModelRoots([])).resolve(model)
        kind = pick_device(device).type
        key = ModelSpec(str(path.resolve()), context, quant, kind), sequences
        with self._lock:
            opened = self._models.get(key)
            if opened is not None and opened.stale:
                # The files were replaced: holders of the old handle may finish, all others get the new model.
                opened.give_way()
                opened = None
            if opened is None:
                # A template runs in a process of 20 MB: handles of one checkpoint share it, and the tokenizer.
                alike = (
                    other for (spec, _), other in self._models.items() if spec.name == key[0].name and not other.stale
                )
                opened = open_model(
                    model,
                    pool=self.pool(kind),
                    roots=roots,
                    context=context,
                    quant=quant,
                    device=kind,
                    load=False,
                    kernel_cache=self.config.cache,
                    sequences=sequences,
                    draft=self.config.draft,
                    language=next((other.language for other in alike), None),
                )
                self._models[key] = opened
        if load:
            opened.load(progress=progress, cancel=cancel)
        return opened

    def open_in_service(self, spec: ModelSpec, *, roots: ModelRoots) -> RemoteModel:
        """The handle of a model in the local service, which starts on demand with these model folders. Loads and asks
        nothing."""
        path = roots.resolve(spec.name)
        folder = path if path.is_dir() else path.parent
        return self._remote(self.service(roots, spec.device), replace(spec, device="auto"), folder)

    def open_at_peer(self, settings: PeerSettings) -> RemoteModel:
        """The handle of the model of a [peers.NAME]. Starts, loads and asks nothing."""
        with self._lock:
            engine = engine_of(settings)
            if engine not in self._peers:
                self._peers[engine] = make_peer(engine, self.config.cache, self.pool)
            return self._remote(self._peers[engine], wanted_of(settings), None)

    def service(self, roots: ModelRoots, device: str = "auto") -> LocalService:
        """The local service as a peer; `roots` and `device` are used if it must be started."""
        with self._lock:
            found = self._peers.get(None)
            if not isinstance(found, LocalService):
                config = ["--config", str(self.config.file)] if self.config.file else []
                folders = [word for root in roots.roots for word in ("--roots", str(root))]
                arguments = ["--port", "0", "--on-demand", "--device", device, *config, *folders]
                found = self._peers[None] = LocalService(self.config.cache, arguments)
            return found

    def _remote(self, peer: Peer, wanted: ModelSpec, folder: Path | None) -> RemoteModel:
        with self._lock:
            if (peer, wanted) not in self._remotes:
                self._remotes[peer, wanted] = RemoteModel(wanted, peer, folder)
            return self._remotes[peer, wanted]

    def remotes(self) -> list[RemoteModel]:
        """Every handle of a model in another process, oldest first."""
        with self._lock:
            return list(self._remotes.values())

    def forget(self, model: OpenModel) -> None:
        """Close a handle for good; the next one for its spec is new."""
        with self._lock:
            self._models = {key: handle for key, handle in self._models.items() if handle is not model}
        model.close()

    def models(self) -> list[OpenModel]:
        """Every handle, loaded or not, oldest first."""
        with self._lock:
            return list(self._models.values())

    def leak_reports(self) -> list[LeakReport]:
        """Memory that each handle's stages left over its last uses; unused handles are left out."""
        return [report for report in (model.leak_report() for model in self.models()) if report.uses]

    def release(self, owner: str | None = None) -> list[Released]:
        """Release one model (by name) or all; busy ones stay. For an unknown name the RequestError lists the open
        models."""
        models = self.models()
        if owner is not None:
            models = [model for model in models if model.name == owner]
            if not models:
                names = ", ".join(sorted({model.name for model in self.models()})) or "none"
                raise RequestError(f"no open model is called {owner!r}; open are: {names}")
        return [released for model in models for released in model.give_way()]

    def close(self) -> None:
        """Close every model, end the engines that we started, and drop the pools. The next ones are made as configured
        then."""
        with self._lock:
            models, self._models = list(self._models.values()), {}
            pools, self._pools = list(self._pools.values()), {}
            watches, self._watches = list(self._watches.values()), {}
            peers, self._peers, self._remotes = list(self._peers.values()), {}, {}
        for watch in watches:
            watch.stop()
        for model in models:
            model.close()
        for peer in peers:
            peer.close()
        for pool in pools:
            pool.claims.withdraw()


def _watch(pool: Pool) -> MemoryWatch:
    """Frees memory when it runs short, releases what is due by its time, and reads the machine's temperature if there
    is a sensor."""

    def tick() -> None:
        pool.arbiter.release_due()
        pool.claims.update(pool.used())

    on_cuda = torch.device(pool.device).type == "cuda"
    return MemoryWatch(
        pool.read_truth,
        pool.make_room,
        pool.settings,
        loading=lambda: pool.loading,
        thermal=(lambda: merge(read_zones(), read_nvidia())) if on_cuda else read_zones,
        tick=tick,
    )


REGISTRY = Registry()
