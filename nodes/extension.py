"""The list of nodes that ComfyUI asks for."""

from __future__ import annotations

from comfy_api.latest import ComfyAPI, ComfyExtension, io

from . import bridge
from .describe import OnedeskDescribeImage
from .encode import OnedeskTextEncoder
from .folders import offer_folders
from .generate import OnedeskGenerate
from .load import OnedeskLoadModel
from .memory import OnedeskMemory, OnedeskRelease
from .prompt import OnedeskPrompt
from .room import RoomForComfyUI
from .sampling import OnedeskSampling


class Onedesk(ComfyExtension):
    """The pack."""

    async def on_load(self) -> None:
        offer_folders()
        bridge.correct_free_memory()
        if bridge.never_evicts():
            await ComfyAPI().caching.register_provider(RoomForComfyUI())

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        writing = [OnedeskLoadModel, OnedeskPrompt, OnedeskSampling, OnedeskGenerate, OnedeskDescribeImage]
        return [*writing, OnedeskTextEncoder, OnedeskRelease, OnedeskMemory]
