"""OnedeskRelease: at this point of a workflow, language models give their memory back, and it is measured."""

from __future__ import annotations

import asyncio
from typing import Any

from comfy_api.latest import io

from . import bridge
from .show import returned
from .sockets import CATEGORY, MODEL
from .values import ModelChoice


class OnedeskRelease(io.ComfyNode):
    """Passes a value on once models have given way. A model that is used again later loads again by itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskRelease",
            display_name="Release Language Model",
            category=CATEGORY,
            description="Lets language models give their memory back when the value arrives, and shows what was asked and measured.",
            search_aliases=["unload model", "free memory", "VRAM"],
            is_input_list=True,
            is_output_node=True,
            has_intermediate_output=True,
            inputs=[
                io.AnyType.Input(
                    "value", tooltip="Anything that must be ready first, for example the written text. It is passed on as it is."
                ),
                MODEL.Input("model", optional=True, tooltip="The model that gives way; without it every language model does."),
            ],
            outputs=[
                io.AnyType.Output(display_name="value", is_output_list=True, tooltip="What came in."),
                io.String.Output(display_name="report", tooltip="Bytes asked and measured, and seconds."),
            ],
        )

    @classmethod
    async def execute(cls, value: list[Any], model: list[ModelChoice] | None = None) -> io.NodeOutput:
        names = list(dict.fromkeys(choice.name for choice in model)) if model else [None]
        released = [item for name in names for item in await asyncio.to_thread(bridge.release, name)]
        report = returned(released) or "nothing to release: no language model is in memory"
        return io.NodeOutput(value, report, ui={"text": [report]})
