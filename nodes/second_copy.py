"""The nodes of a second copy of the pack in custom_nodes: none, so that nodes and scripts are registered once."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from ..service.config import package_folder

log = logging.getLogger(__name__)


class SecondCopy(ComfyExtension):
    """No nodes, and a warning."""

    async def on_load(self) -> None:
        log.warning(
            "Onedesk is in custom_nodes twice; the copy in %s is left out. Remove one of the two", package_folder()
        )

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return []
