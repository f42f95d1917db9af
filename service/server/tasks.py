"""Background tasks and threads of the service, and how they end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

log = logging.getLogger(__name__)

REST_SECONDS = 1.0


async def kept_up(title: str, work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` until it returns or this task is cancelled. Exceptions are logged, and `work` starts again after
    REST_SECONDS: a task that stayed dead would leave queued requests without a response, or the service without its
    upkeep.
    """
    while True:
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except BaseException:  # a panic of a Rust library is not an Exception
            log.exception("%s failed and begins again", title)
            await asyncio.sleep(REST_SECONDS)
        else:
            return


async def ended(executors: Sequence[ThreadPoolExecutor], seconds: float) -> bool:
    """Shut these threads' executors down and wait up to `seconds`; returns whether all have ended."""

    def wait() -> None:
        for executor in executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for executor in executors:
            executor.shutdown()

    return await in_daemon(wait, seconds)


async def in_daemon(work: Callable[[], object], seconds: float) -> bool:
    """Run `work` in a thread that the end of the process does not wait for; returns whether it finished within
    `seconds`.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        except BaseException:  # at shutdown this is the only chance to log it
            log.exception("the service did not end in order")
        with suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="onedesk-end", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True
