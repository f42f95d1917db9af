"""Which models are served, by name, and their handles."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ..api import OpenModel
from ..catalog.inventory import default_model, is_toy, model_roots, usual_context
from ..config import Config
from ..core import ModelSpec
from ..errors import OnedeskError
from ..loader.files import short
from ..loader.names import ModelEntry, ModelRoots, pull_advice
from ..registry import Registry
from .error_documents import ApiError

VARIANTS_LIMIT = 8  # handles that are kept per model, one per context length and quantization


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Which models are served, every listed one without `names`, and how they are opened: `usual` has the command's
    common options and no name."""

    names: tuple[str, ...] = ()
    usual: ModelSpec = field(default_factory=lambda: ModelSpec(""))


@dataclass(slots=True)
class Uses:
    """The handles that one request has found. They stay open until the request has ended."""

    models: list[OpenModel] = field(default_factory=list)
    ended: bool = False


class Models:
    """The models of a service. Thread-safe; every method may read files."""

    def __init__(self, config: Config, registry: Registry, served: ServedModels) -> None:
        self.served = served
        self._config = config
        self._registry = registry
        self._roots: ModelRoots = model_roots(config)
        self._lock = threading.Lock()
        self._open: dict[ModelSpec, OpenModel] = {}  # most recently requested last
        self._uses_lock = threading.Lock()  # held briefly: the event loop takes it
        self._uses: Counter[OpenModel] = Counter()  # requests that have found a handle and have not ended

    def entries(self) -> list[ModelEntry]:
        """The available models, listed again at each call, so that a folder added to the roots appears at once."""
        found = self._roots.list()
        with self._lock:
            self._forget_stale({spec.name for spec in self._open} - {entry.name for entry in found})
        return [entry for entry in found if entry.name in self.served.names] if self.served.names else found

    @contextmanager
    def using(self) -> Iterator[Uses]:
        """Handles found by a request stay open until the block ends, even if many other contexts of the model are
        requested meanwhile.
        """
        uses = Uses()
        try:
            yield uses
        finally:
            with self._uses_lock:
                uses.ended = True
                self._uses -= Counter(uses.models)

    def _hold(self, opened: OpenModel, uses: Uses | None) -> None:
        with self._uses_lock:
            if uses is not None and not uses.ended:
                uses.models.append(opened)
                self._uses[opened] += 1

    def _unused(self, opened: OpenModel) -> bool:
        return not opened.loaded and not opened.busy and not self._uses[opened]

    def spec(self, name: str) -> ModelSpec:
        """A served model as it is opened when a request names nothing else."""
        return replace(self.served.usual, name=name, context=None)

    def find(self, spec: ModelSpec, uses: Uses | None = None) -> tuple[str, OpenModel]:
        """The name and the handle of a requested model. The handle loads at its first use. Raises as `name_of` and
        `open`.
        """
        opened = self._open.get(spec)
        # The usual case, with a single check of its files: each check is a dozen system calls before the first token.
        if opened is not None and not opened.stale:
            with self._lock:
                if self._open.get(spec) is opened:
                    self._open[spec] = self._open.pop(spec)
                    self._hold(opened, uses)
                    return spec.name, opened
        name = self.name_of(spec.name)
        return name, self.open(replace(spec, name=name), uses)

    def name_of(self, asked: str) -> str:
        """The served name for a requested name, "" for the default model. Raises ApiError 404 for an unknown model, 400
        if a name is needed."""
        if not asked:
            default = self.served.names[0] if self.served.names else default_model(self._config)
            if default is None:
                raise ApiError(400, "model is missing; give a name of /v1/models", code="missing_field", param="model")
            return default
        if any(spec.name == asked and not opened.stale for spec, opened in list(self._open.items())):
            return asked
        names = [entry.name for entry in self.entries()]
        if asked not in names:
            shown = ", ".join(map(short, names[:10])) or "none"
            message = f"there is no model {short(asked)}; the models: {shown}; {pull_advice(asked)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return asked

    def open(self, spec: ModelSpec, uses: Uses | None = None) -> OpenModel:
        """The handle of a served model. It loads at its first use. Raises ModelError, FileError, RequestError."""
        with self._lock:
            opened = self._open.get(spec)
            if opened is None or opened.stale:
                try:
                    opened = self._opened(spec)
                except OnedeskError:
                    self._forget_stale({spec.name})
                    raise
            self._open.pop(spec, None)
            self._open[spec] = opened
            self._hold(opened, uses)
            self._forget_variants(spec.name)
            return opened

    def _opened(self, spec: ModelSpec) -> OpenModel:
        path = self._roots.resolve(spec.name)
        return self._registry.open(
            spec.name,
            roots=self._roots,
            context=spec.context or self.served.usual.context or usual_context(self._config, path, self._roots),
            quant=spec.quant,
            device=spec.device,
            load=False,
            sequences=self._config.service.concurrency,
        )

    def _forget_stale(self, names: AbstractSet[str]) -> None:
        """Release models that can no longer be opened. One that is generating keeps its bytes until a later check finds
        it idle.
        """
        for key in [key for key, opened in self._open.items() if key.name in names and opened.stale]:
            opened = self._open[key]
            opened.give_way()
            if self._unused(opened):
                self._registry.forget(self._open.pop(key))

    def _forget_variants(self, name: str) -> None:
        """A client may request many contexts in turn: of the variants that are neither loaded nor in use, keep only the
        latest few.
        """
        variants = [key for key in self._open if key.name == name and key.context is not None]
        for key in variants[:-VARIANTS_LIMIT]:
            if self._unused(self._open[key]):
                self._registry.forget(self._open.pop(key))

    def document(self, entry: ModelEntry, spec: ModelSpec | None = None) -> dict[str, Any]:
        """A model as /v1/models shows it. A broken one has the reason."""
        more: dict[str, Any] = {
            "toy": is_toy(entry.name),
            "context": None,
            "loaded": False,
            "bytes": None,
            "held": 0,
            "reason": "",
        }
        try:
            opened = self.open(replace(spec or self.spec(entry.name), name=entry.name))
            more |= {
                "context": opened.context,
                "loaded": opened.loaded,
                "bytes": opened.need.total,
                "held": opened.held_bytes(),
            }
        except OnedeskError as error:
            more["reason"] = str(error)
        return {"id": entry.name, "object": "model", "created": _changed(entry), "owned_by": "onedesk", "onedesk": more}


def _changed(entry: ModelEntry) -> int:
    try:
        return int(entry.path.stat().st_mtime)
    except OSError:
        return 0
