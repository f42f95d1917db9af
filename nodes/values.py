"""The values on the links between Onedesk's nodes. Plain frozen values: ComfyUI's output cache may keep or drop them
freely.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..service.core import Message, ModelSpec, Sampling, Thinking
from ..service.memory.policy import Policy

STAY = "stay"
GIVE_WAY = "give way after the prompt"
TTL = "give way when idle"
PINNED = "pinned"
# Choices are only ever appended.
POLICIES = (STAY, GIVE_WAY, TTL, PINNED)
TTL_SECONDS = 300.0
AS_STORED = "as stored"
# Where a model runs; the last is followed by the name of an entry [peers.NAME] of onedesk.toml.
HERE, SERVICE, OTHER = "in this process", "local service", "other server: "
# The service.api name of each `weights` choice of the loader; later choices are appended.
QUANT_OF_WEIGHTS = {AS_STORED: "none", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True)
class ModelChoice:
    """ONEDESK_MODEL: which model, in which quantization, and when it gives way. A description, never the model: the
    registry owns that.
    """

    name: str
    weights: str = AS_STORED
    context: int = 4096
    policy: str = STAY
    ttl: float = TTL_SECONDS
    where: str = HERE

    @property
    def terms(self) -> Policy:
        """The policy in the pool's terms. Raises RequestError for an invalid number of seconds."""
        return policy_of(self.policy, self.ttl)

    def spec(self, device: str) -> ModelSpec:
        """The model and its form. At its default the context is the usual one, which a model with a shorter context
        accepts."""
        context = None if self.context == ModelChoice.context else self.context
        return ModelSpec(self.name, context, QUANT_OF_WEIGHTS[self.weights], device)


def policy_of(choice: str, ttl: float) -> Policy:
    """One of POLICIES in the pool's terms; `ttl` is seconds, used by TTL alone. Raises RequestError for an invalid
    number of seconds.
    """
    if choice == TTL:
        return Policy("ttl", ttl)
    return Policy("phase" if choice == GIVE_WAY else "pinned" if choice == PINNED else "stay")


@dataclass(frozen=True)
class Conversation:
    """ONEDESK_MESSAGES: the turns so far, oldest first."""

    messages: tuple[Message, ...]

    def __str__(self) -> str:
        """Its text in Preview as Text."""
        return "\n\n".join(f"[{message.role}]\n{_shown(message)}" for message in self.messages)


def _shown(message: Message) -> str:
    return "".join(
        part if isinstance(part, str) else f"[picture of {part.width} x {part.height} pixels]\n"
        for part in message.parts or (message.content,)
    )


@dataclass(frozen=True)
class SamplingChoice:
    """ONEDESK_SAMPLING: how to choose tokens and when to stop. `bias` names tokens by id or by a text that is one
    token.
    """

    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    thinking: Thinking = "auto"
    thinking_budget: int | None = None
    repetition_stop: bool = True
    bias: tuple[tuple[int | str, float], ...] = ()
