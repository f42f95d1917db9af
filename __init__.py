"""Onedesk: Qwen beside image models in one memory pool. ComfyUI finds its door here; without ComfyUI this is a plain
package.
"""

import sys
from typing import Any

# ComfyUI's own module `nodes` knows our nodes already where another copy of the pack stands in custom_nodes: that one
# serves.
SECOND_COPY = "OnedeskLoadModel" in getattr(sys.modules.get("nodes"), "NODE_DISPLAY_NAME_MAPPINGS", {})
WEB_DIRECTORY = None if SECOND_COPY else "./nodes/web"


async def comfy_entrypoint() -> Any:
    """What ComfyUI calls when it loads the pack; only then is anything of ComfyUI imported."""
    if SECOND_COPY:
        from .nodes.second_copy import SecondCopy

        return SecondCopy()
    from .nodes.extension import Onedesk

    return Onedesk()
