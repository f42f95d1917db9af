"""A single check of a hub: its list of one repository and the first KB of one file, with the host that serves it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ..errors import OnedeskError, PeerError
from ..loader.shards import SINGLE
from . import huggingface, modelscope
from .hubs import file_address
from .limits import HubLimits
from .remote import Report
from .web import Endpoint, TransientError, Web

REPOSITORY = "Qwen/Qwen3-0.6B"
BYTES = 1024


@dataclass(frozen=True, slots=True)
class Probe:
    """The result for one endpoint: `detail` has status, seconds and the serving host, or the failure."""

    endpoint: Endpoint
    works: bool
    detail: str


async def probe(endpoint: Endpoint, limits: HubLimits, report: Report) -> Probe:
    """Check one endpoint once, without retries. Writes nothing."""
    started = time.monotonic()
    try:
        async with Web(endpoint, replace(limits, tries=1), report) as web:
            read = modelscope.read_snapshot if endpoint.hub == "modelscope" else huggingface.read_snapshot
            snapshot = await read(web, REPOSITORY, None)
            listed = time.monotonic() - started
            headers = {"Range": f"bytes=0-{BYTES - 1}", "Accept-Encoding": "identity"}
            async with web.open(file_address(snapshot, SINGLE), headers) as (response, _):
                count = len(await response.content.read(BYTES))
                seconds = time.monotonic() - started - listed
                detail = (
                    f"{len(snapshot.files)} files of {REPOSITORY} listed in {listed:.2f} s; {count} bytes of {SINGLE} "
                )
                detail += f"from {response.url.host} in {seconds:.2f} s, status {response.status}"
                if response.status != 206:
                    raise PeerError(f"{detail}: ranges are not honoured, so a pull cannot resume here")
                return Probe(endpoint, True, detail)
    except (OnedeskError, TransientError) as error:
        return Probe(endpoint, False, str(error))
