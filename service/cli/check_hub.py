"""`onedesk doctor --hub`: whether the configured hubs and mirrors respond, and which hosts serve their files."""

from __future__ import annotations

import asyncio
import os

from ..config import Config
from .examine import Check


def check_hubs(config: Config) -> list[Check]:
    """One check per endpoint. Connects to each, as `onedesk pull` would. Raises RequestError, FileError."""
    from ..hub.names import endpoints, parse_name
    from ..hub.probe import REPOSITORY, Probe, probe
    from .pull import limits_of

    asked = endpoints(config, parse_name(REPOSITORY), None, os.environ)

    async def all_of_them() -> list[Probe]:
        return [await probe(endpoint, limits_of(config), lambda event: None) for endpoint in asked]

    fix = "check the network, a proxy (HTTPS_PROXY), or endpoints and order in [hub] of onedesk.toml"
    return [
        Check(
            f"hub {found.endpoint.title}", "ok" if found.works else "failure", found.detail, "" if found.works else fix
        )
        for found in asyncio.run(all_of_them())
    ]
