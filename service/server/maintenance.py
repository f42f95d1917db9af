"""Reloads an idle model after a set number of hours, or when its pool is too fragmented."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..api import OpenModel
from ..config import ServiceSettings
from ..core import CancelCheck
from ..errors import OnedeskError
from .worker import Worker

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
IDLE_SECONDS = 300.0  # idle for this long: probably no request comes in the seconds that a load takes


class Renewal:
    """Remembers when each model was loaded. `now` is a monotonic clock in seconds."""

    def __init__(self, settings: ServiceSettings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._since: dict[OpenModel, float] = {}

    def due(self, model: OpenModel, idle: float) -> bool:
        """Whether a model should be reloaded now; `idle` is the seconds since its last use. Call it per model every
        LOOK_SECONDS.
        """
        if not model.loaded:
            self._since.pop(model, None)
            return False
        loaded = self._now() - self._since.setdefault(model, self._now())
        if idle < IDLE_SECONDS or loaded < IDLE_SECONDS:
            return False
        hours, pieces = self._settings.renew_hours, self._settings.renew_fragmentation
        return (hours > 0 and loaded >= hours * 3600) or (0 < pieces <= model.pool.fragmentation())

    def renew(self, model: OpenModel, unwanted: Callable[[], bool], cancel: CancelCheck | None = None) -> bool:
        """Release the model and load it again; nothing if `unwanted` by then. Runs in the model's thread. Raises
        Cancelled.
        """
        if unwanted():
            return False
        released = model.give_way()
        model.load(cancel=cancel)
        self._since[model] = self._now()
        log.info("%s was loaded anew; %d bytes had come back", model.name, sum(one.measured for one in released))
        return True


async def renew_when_idle(service: Service) -> None:
    """Check every LOOK_SECONDS until cancelled."""
    renewal = Renewal(service.settings)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for worker in service.workers:
            for model in service.registry.models():
                if model.name == worker.name and renewal.due(model, worker.idle_seconds):
                    try:
                        await worker.in_turn(lambda model=model, worker=worker: _renew(service, renewal, model, worker))
                    except (
                        OnedeskError
                    ) as error:  # a thread raises nothing else; the next check covers the other models too
                        log.warning("%s was not loaded anew: %s", model.name, error)


def _renew(service: Service, renewal: Renewal, model: OpenModel, worker: Worker) -> None:
    try:
        renewed = renewal.renew(
            model, lambda: len(worker.line) > 0 or service.asleep or service.stopping, lambda: worker.aborting
        )
    except OnedeskError as error:  # its files are gone or its memory is taken: the next request reports it
        log.warning("%s was not loaded anew: %s", model.name, error)
        return
    if renewed:
        service.figures.renewed()
