"""Workflows in ComfyUI's API format, as the node tests queue them."""

from __future__ import annotations

from typing import Any

from comfyui import Comfy, Outcome

Graph = dict[str, dict[str, Any]]

STAY = "stay"
GIVE_WAY = "give way after the prompt"
DEFAULTS = {
    "temperature": -1,
    "top_k": -1,
    "top_p": -1,
    "min_p": -1,
    "presence_penalty": -3,
    "frequency_penalty": -3,
    "repetition_penalty": -1,
    "stop": "",
    "thinking": "auto",
    "thinking_budget": -1,
    "stop_repetition": False,
    "logit_bias": "",
}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def load(
    model: str = "tiny-writer", *, context: int = 1024, policy: str = STAY, where: str | None = None
) -> dict[str, Any]:
    placed = {} if where is None else {"where": where}
    return node("OnedeskLoadModel", model=model, weights="as stored", context=context, policy=policy, **placed)


def prompt(text: Any, **inputs: Any) -> dict[str, Any]:
    return node(
        "OnedeskPrompt", **({"preset": "none", "system": "", "text": text, "dynamic": False, "seed": 0} | inputs)
    )


def sampling(**inputs: Any) -> dict[str, Any]:
    return node("OnedeskSampling", **(DEFAULTS | inputs))


def generate(model: str, messages: str, *, seed: int = 1, max_tokens: int = 12, **inputs: Any) -> dict[str, Any]:
    return node("OnedeskGenerate", model=[model, 0], messages=[messages, 0], seed=seed, max_tokens=max_tokens, **inputs)


def show(source: str, output: int = 0) -> dict[str, Any]:
    return node("PreviewAny", source=[source, output])


def writing(
    text: Any = "a cat",
    *,
    model: str = "tiny-writer",
    context: int = 1024,
    policy: str = STAY,
    where: str | None = None,
    **answer: Any,
) -> Graph:
    """One model ("load"), one prompt ("prompt"), one answer ("write"), its text and statistics shown ("text", "stats").

    The sampling options are the model's, but repetition does not end an answer, so that counts are certain.
    """
    return {
        "load": load(model, context=context, policy=policy, where=where),
        "prompt": prompt(text),
        "options": sampling(),
        "write": generate("load", "prompt", **({"sampling": ["options", 0]} | answer)),
        "text": show("write", 0),
        "stats": show("write", 3),
    }


def shown(outcome: Outcome, node_id: str) -> str:
    """The text that an output node showed."""
    if not outcome.ok:
        raise AssertionError(f"the workflow ended with {outcome.end}: {outcome.error}")
    return outcome.outputs[node_id]["text"][0]


def state(comfyui: Comfy) -> dict[str, Any]:
    """The state of the process: models, allocations, used (bytes leased), comfyui (its list of loaded models)."""
    return comfyui.client.ask("/onedesk_tests/state")


def held(comfyui: Comfy, model: str) -> int:
    """Bytes that all handles of a model hold."""
    return sum(entry["held"] for entry in state(comfyui)["models"] if entry["name"] == model)


def free(comfyui: Comfy) -> None:
    """Unload models and drop outputs before the next workflow: ComfyUI's worker does this only after a workflow, so one
    is queued.
    """
    comfyui.free()
    if not comfyui.run({"between": node("PreviewAny", source="between")}).ok:
        raise AssertionError("the workflow in between failed")
