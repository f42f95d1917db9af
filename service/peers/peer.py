"""The interface of another engine: its address, and its models' memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from ..core import CancelCheck, ModelSpec
from ..memory.policy import Policy
from ..memory.pool import Released

# "onedesk": our own service, which also sends tokens, progress and stages, and accepts options that OpenAI's API does
# not have.
Dialect = Literal["onedesk", "openai"]

# Seconds without a byte after which a server counts as dead. Ours sends something every 10 s; others send nothing
# during prefill.
SILENCE = 600.0


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A server's address and how to call it. `title` is the only part that people, logs and errors may see, such as
    "the server NAME".

    `path` is the prefix of every route, such as "/v1". `uds` is a unix socket that replaces host and port.
    """

    title: str
    host: str = field(default="127.0.0.1", repr=False)
    port: int = field(default=80, repr=False)
    uds: str | None = field(default=None, repr=False)
    path: str = field(default="/v1", repr=False)
    tls: bool = False
    key: str | None = field(default=None, repr=False)
    dialect: Dialect = "openai"
    silence: float = SILENCE


@dataclass(frozen=True, slots=True)
class Described:
    """What an engine reports about a model: its context length in tokens, and the bytes that it takes while loaded; 0
    if unknown.
    """

    context: int = 0
    nbytes: int = 0


class Peer(ABC):
    """An engine in another process. Every method may be called from any thread and waits no longer than it must.

    `title` is its name for people. `has_memory` says whether its models' memory is on this machine and can be released
    on request.
    """

    title: str
    has_memory: bool = False

    @abstractmethod
    def reach(self, cancel: CancelCheck | None = None) -> PeerAddress:
        """Its address. Called before each use; starts the engine if that is our task. Raises PeerError, FileError;
        Cancelled by `cancel`.
        """

    def describe(self, wanted: ModelSpec) -> Described:
        """What it reports about a model that it was reached for. Raises ModelError for an unknown model, PeerError."""
        return Described()

    def held(self, wanted: ModelSpec) -> int:
        """Bytes that the model holds now; 0 if no engine is running or it does not respond. Never raises, never starts
        anything.
        """
        return 0

    def release(self, wanted: ModelSpec) -> tuple[Released, ...]:
        """Release the model's memory; returns when the bytes are back, measured. () if there is nothing to release, or
        while it generates.

        Never interrupts a response. Raises PeerError.
        """
        return ()

    def busy(self, wanted: ModelSpec) -> bool:
        """Whether it kept its bytes at the last `release` because it was generating."""
        return False

    def using(self, wanted: ModelSpec) -> AbstractContextManager[None]:
        """Mark the model as in use within the block: an engine that we manage does not give way. Raises PeerError."""
        return nullcontext()

    def offer(self, wanted: ModelSpec, policy: Policy) -> None:  # noqa: B027 - most have nothing to do
        """Set when the model gives way without being asked, for engines that do not get this with each request."""

    def why(self) -> str:
        """The known reason for a recent failure, such as the end of its log; empty if there is none."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End the processes that we started, by their process ids."""
