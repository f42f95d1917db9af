"""What a model that runs elsewhere needs of the engine that runs it: a way there, and its memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from ..core import CancelCheck, ModelSpec
from ..memory.policy import Policy
from ..memory.pool import Released

# "onedesk": our own service, which also tells tokens, progress and stages, and takes options that OpenAI's API does not
# have.
Dialect = Literal["onedesk", "openai"]

# Seconds without a byte after which a server is taken for dead. Ours says something every 10; others say nothing while
# they read a prompt.
SILENCE = 600.0


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a server listens and how to ask it. `title` is all of it that people, logs and errors may see, such as "the
    server NAME".

    `path` stands before every route, such as "/v1". `uds` is a unix socket in place of host and port.
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
    """What an engine says of a model: tokens of context, and bytes that it takes while it is loaded; 0 for not
    known.
    """

    context: int = 0
    nbytes: int = 0


class Peer(ABC):
    """An engine in another process. Every method may be called from any thread; none waits longer than it must.

    `title` names it for people; `has_memory` says whether its models' bytes are on this machine, can be asked for and
    given back.
    """

    title: str
    has_memory: bool = False

    @abstractmethod
    def reach(self, cancel: CancelCheck | None = None) -> PeerAddress:
        """Where it is, started first if that is our task. Called before each use. Raises PeerError, FileError;
        Cancelled by `cancel`.
        """

    def describe(self, wanted: ModelSpec) -> Described:
        """What it says of a model that it was reached for. Raises ModelError for one that it does not have,
        PeerError.
        """
        return Described()

    def held(self, wanted: ModelSpec) -> int:
        """Bytes that the model holds now; 0 where nobody runs or answers. Never raises, never starts anything."""
        return 0

    def release(self, wanted: ModelSpec) -> tuple[Released, ...]:
        """Let the model give its bytes back; returns when they are back, measured. () when there is nothing, or while
        it writes.

        Never cuts an answer. Raises PeerError.
        """
        return ()

    def busy(self, wanted: ModelSpec) -> bool:
        """Whether it kept its bytes at the last `release` because it writes for somebody."""
        return False

    def using(self, wanted: ModelSpec) -> AbstractContextManager[None]:
        """The model is at work for us while the block runs: where its memory is ours to end, it does not give way.
        Raises PeerError.
        """
        return nullcontext()

    def offer(self, wanted: ModelSpec, policy: Policy) -> None:  # noqa: B027 - nothing to do for most
        """When the model should give way without being asked, where that is not told with each request."""

    def why(self) -> str:
        """What is known of why it failed just now, such as the end of its log; empty for nothing."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End what we started, by its process id."""
