"""OnedeskLoadModel: which model, in which quantization, and when it gives way."""

from __future__ import annotations

from comfy_api.latest import io

from ..service.errors import OnedeskError
from .folders import (
    check_model,
    check_where,
    config_stamp,
    file_stamps,
    model_roots,
    where_choices,
)
from .link_types import CATEGORY, MODEL
from .values import (
    AS_STORED,
    HERE,
    OTHER,
    POLICIES,
    QUANT_OF_WEIGHTS,
    STAY,
    TTL_SECONDS,
    ModelChoice,
)


class OnedeskLoadModel(io.ComfyNode):
    """Chooses a model. Loads nothing: the first node that writes or encodes with the model loads it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = [entry.name for entry in model_roots().list()]
        return io.Schema(
            node_id="OnedeskLoadModel",
            display_name="Load Language Model",
            category=CATEGORY,
            description=(
                "Chooses a Qwen language model. The first node that uses it loads it; two equal loaders share one"
                " model."
            ),
            search_aliases=["LLM", "Qwen", "load language model", "text model"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=names,
                    tooltip=(
                        "A model folder in ComfyUI's models/llm or in the tree's models. Put a folder there and press R"
                        " to see it."
                    ),
                ),
                io.Combo.Input(
                    "weights",
                    options=list(QUANT_OF_WEIGHTS),
                    default=AS_STORED,
                    tooltip=(
                        "The form that the weights have in memory. As stored: exactly what the file holds. int8: half"
                        " of BF16's memory, no visible change. int4: a third to a quarter of it, with a small loss."
                    ),
                ),
                io.Int.Input(
                    "context",
                    default=4096,
                    min=2,
                    max=2**31 - 1,
                    tooltip=(
                        "Tokens that prompt, reasoning and answer may have together. Their memory is reserved when the"
                        " model loads. 4096: or what the model allows, if that is less."
                    ),
                ),
                io.Combo.Input(
                    "policy",
                    options=list(POLICIES),
                    default=STAY,
                    tooltip=(
                        "When the model returns its memory. Stay: when the image models need the room. Give way after"
                        " the prompt: as soon as the last text node of the workflow has run; the next use loads it"
                        " again. Give way when idle: after ttl seconds without use. Pinned: never for others, only by"
                        " Release Language Model."
                    ),
                ),
                io.Float.Input(
                    "ttl",
                    default=TTL_SECONDS,
                    min=0,
                    max=7 * 86400,
                    optional=True,
                    tooltip=(
                        "Seconds without use after which the model returns its memory; only for give way when idle."
                    ),
                ),
                io.Combo.Input(
                    "where",
                    options=where_choices(),
                    default=HERE,
                    optional=True,
                    tooltip=(
                        "Who runs the model. In this process: ComfyUI itself. Local service: one process for ComfyUI,"
                        " scripts and chat programs, started when it is first needed. Other server: an entry of"
                        " onedesk.toml, with that entry's own model."
                    ),
                ),
            ],
            outputs=[
                MODEL.Output(display_name="model", tooltip="The choice, for the nodes that write, describe or encode.")
            ],
        )

    @classmethod
    def validate_inputs(cls, model: str | None = None, where: str | None = None) -> bool | str:
        """Refuse a bad name when the workflow is queued. ComfyUI leaves the check of the inputs named here to us."""
        try:
            if where is not None:
                check_where(where)
            if model is not None and not (where or HERE).startswith(OTHER):
                model_roots().resolve(model)
        except OnedeskError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, model: str | None = None, where: str | None = None, **_: object
    ) -> list[list[str | int]]:
        """Names, sizes and times of the model's files: after a model was replaced on disk, cached answers are
        not used.
        """
        if where is not None and where.startswith(OTHER):
            return config_stamp(where)
        return file_stamps(model) if model else []

    @classmethod
    def execute(
        cls, model: str, weights: str, context: int, policy: str, ttl: float = TTL_SECONDS, where: str = HERE
    ) -> io.NodeOutput:
        check_where(where)
        choice = ModelChoice(model, weights, context, policy, ttl, where)
        _ = choice.terms  # raises for an invalid time
        check_model(choice)
        return io.NodeOutput(choice)
