"""OnedeskMemory: budget, floor, policies, and what memory holds. OnedeskRelease: evicts models and measures the memory
returned.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict, replace
from typing import Any

from comfy_api.latest import ComfyAPI, io, ui

from ..service.api import Model
from ..service.errors import RequestError
from ..service.memory.budget import GIB, MemorySettings
from ..service.memory.pool import Pool
from ..service.registry import REGISTRY
from . import bridge
from .desk import DeskMemory, Seat, desk_bars, desk_text
from .link_types import CATEGORY, MODEL
from .node_run import AtTheEnd
from .picture import draw
from .show import returned
from .values import GIVE_WAY, POLICIES, TTL_SECONDS, ModelChoice, policy_of

AS_CHOSEN = "as their loaders say"


class OnedeskRelease(io.ComfyNode):
    """Passes a value on after models have been evicted. A model that is used again later loads again by itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskRelease",
            display_name="Release Language Model",
            category=CATEGORY,
            description=(
                "Lets language models give their memory back when the value arrives, and shows what was asked and"
                " measured."
            ),
            search_aliases=["unload model", "free memory", "VRAM"],
            is_input_list=True,
            is_output_node=True,
            has_intermediate_output=True,
            inputs=[
                io.AnyType.Input(
                    "value",
                    tooltip=(
                        "Anything that must be ready first, for example the written text. It is passed on as it is."
                    ),
                ),
                MODEL.Input(
                    "model", optional=True, tooltip="The model that gives way; without it every language model does."
                ),
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


class OnedeskMemory(io.ComfyNode):
    """Sets the memory limits of language models and their eviction policy, and shows all leases at this point. Loads
    nothing.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OnedeskMemory",
            display_name="Memory of Language Models",
            category=CATEGORY,
            description=(
                "How much memory language models may hold, when they give it back, and who holds what now, as text and"
                " picture."
            ),
            search_aliases=["memory budget", "VRAM", "RAM", "unified memory", "show memory"],
            is_output_node=True,
            has_intermediate_output=True,
            inputs=[
                io.Int.Input(
                    "budget",
                    default=0,
                    min=0,
                    max=100,
                    tooltip=(
                        "Percent of the available memory that language models may hold, 10 to 95; 0 for what"
                        " onedesk.toml says."
                    ),
                ),
                io.Float.Input(
                    "floor",
                    default=0.0,
                    min=0.0,
                    max=2.0**20,
                    step=0.1,
                    tooltip=(
                        "GiB that are always left to the system and the image models; 0 for what onedesk.toml says."
                    ),
                ),
                io.Combo.Input(
                    "policy",
                    options=[AS_CHOSEN, *POLICIES],
                    default=AS_CHOSEN,
                    tooltip=(
                        "When open language models return their memory, from now until a text node with another policy"
                        " uses them."
                    ),
                ),
                io.Float.Input(
                    "ttl",
                    default=TTL_SECONDS,
                    min=0,
                    max=7 * 86400,
                    tooltip="Seconds without use after which a model returns its memory; only for give way when idle.",
                ),
                MODEL.Input(
                    "model",
                    optional=True,
                    tooltip="The model that the policy is for; without it every open language model.",
                ),
                io.AnyType.Input(
                    "value", optional=True, tooltip="Anything that must be ready first. It is passed on as it is."
                ),
            ],
            outputs=[
                io.AnyType.Output(display_name="value", tooltip="What came in."),
                io.String.Output(
                    display_name="report", tooltip="Truth, budget, leases, policies and counters as text."
                ),
                io.Image.Output(display_name="picture", tooltip="The same as bars whose lengths are the bytes."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """Never equal, not even to itself: memory changes without a change of inputs."""
        return float("nan")

    @classmethod
    async def execute(
        cls,
        budget: int,
        floor: float,
        policy: str,
        ttl: float,
        model: ModelChoice | None = None,
        value: Any = None,
    ) -> io.NodeOutput:
        pool = bridge.pool()
        try:
            _resize(pool, budget, floor)
        except RequestError as error:
            raise RequestError(error.render(_as_widget)) from error
        if policy != AS_CHOSEN:
            terms = policy_of(policy, ttl)
            for chosen in [bridge.open_model(model)] if model else bridge.open_models():
                chosen.policy = terms
                if policy == GIVE_WAY and chosen.loaded:
                    await ComfyAPI().caching.register_provider(AtTheEnd(chosen))
        desk = await asyncio.to_thread(_look, pool)
        report, picture = desk_text(desk), draw(desk_bars(desk))
        return io.NodeOutput(
            value, report, picture, ui={**ui.PreviewImage(picture, cls=cls).as_dict(), "text": [report]}
        )


def _resize(pool: Pool, budget: int, floor: float) -> None:
    """Give the pool a budget in percent and a floor in GiB; 0: as configured. Raises RequestError. Recomputes only what
    has changed.
    """
    configured: dict[str, Any] = dict(REGISTRY.config.memory)
    settings = MemorySettings(**configured)
    if budget:
        settings = replace(settings, limit=budget / 100, limit_bytes=None)
    if floor:
        nbytes = floor * GIB
        settings = replace(settings, floor=int(nbytes) if math.isfinite(nbytes) else nbytes)  # type: ignore[arg-type] - the pool refuses it
    if settings != pool.settings:
        pool.resize(settings)


def _as_widget(name: str) -> str:
    """The node's name for a setting of the pool."""
    return "budget" if name == "limit" else name


def _look(pool: Pool) -> DeskMemory:
    """The current state of all memory."""
    return DeskMemory(
        truth=pool.read_truth(),
        pool=pool,
        leases=pool.leases(),
        resident=sum(lease.resident() for lease in pool.holders()),
        comfyui=bridge.comfyui_models(),
        seats=[_seat(model) for model in bridge.open_models()],
        leaks=[asdict(report) for report in REGISTRY.leak_reports()],
    )


def _seat(model: Model) -> Seat:
    seen = bridge.listed(model)
    return Seat(bridge.title(model), str(model.policy), model.held_bytes(), seen.evictions, seen.given)
