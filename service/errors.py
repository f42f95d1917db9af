"""The one error family: a message says what happened, with the figures, and what to do next."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from types import TracebackType

# Requests to stop, not faults: nothing that catches faults catches them.
_STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_DETAIL_CHARACTERS = 300


class _Brief(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 128:  # also, Python refuses to write one of more than 4,300 digits
            return f"a whole number of {x.bit_length()} bits"
        return repr(x)


def brief(value: object) -> str:
    """A value for a message, cut to a few entries and a few hundred characters."""
    shown = _Brief()
    shown.maxlevel, shown.maxdict, shown.maxlist, shown.maxstring, shown.maxother = 3, 4, 8, 100, 100
    return shown.repr(value)


class Field(str):
    """The name of a value within a message. Front ends may rename it (CLI option, widget, JSON field); see
    `OnedeskError.render`."""

    __slots__ = ()


class OnedeskError(Exception):
    """Base of every error that Onedesk raises on purpose. Its arguments are the parts of its message, texts and
    fields."""

    def __str__(self) -> str:
        return self.render(str)

    def render(self, name: Callable[[str], str]) -> str:
        """The message, each field renamed by `name`: the command says --max-tokens for max_tokens."""
        return "".join(name(str(part)) if isinstance(part, Field) else str(part) for part in self.args)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the message names; the first one is wrong."""
        return tuple(str(part) for part in self.args if isinstance(part, Field))


class ModelError(OnedeskError):
    """A checkpoint whose configuration, tensors, tokenizer or template cannot be used."""


class FileError(OnedeskError):
    """A file that is missing, cut short, unreadable, or outside the folders that may be read."""


class MemoryFull(OnedeskError):
    """What is asked for does not fit; raised before anything of it is loaded."""


class RequestError(OnedeskError):
    """A request that cannot be served as it is: a wrong value, an empty or too long prompt."""


class Cancelled(OnedeskError):
    """The caller asked to stop while a model was being opened or a prompt was being read."""


class PeerError(OnedeskError):
    """An engine in another process failed or could not be reached."""


def in_family(error: BaseException, what: str) -> OnedeskError:
    """`error` as one of the family: itself, MemoryFull for a MemoryError, else an OnedeskError with it as the cause.

    `what`: what failed, for the message.
    """
    if isinstance(error, OnedeskError):
        return error
    if isinstance(error, MemoryError):
        named: OnedeskError = MemoryFull(
            f"{what} failed: this process got no more memory; ask for less at once, or free some"
        )
    else:
        detail = " ".join(f"{type(error).__name__} {error}".split())[:_DETAIL_CHARACTERS]
        named = OnedeskError(
            f"{what} failed: {detail}; this is a fault of Onedesk: report it with the request and the log"
        )
    named.__cause__ = error
    return named


class Caught:
    """Stores any error of its code block as `error` and continues after the block, for work where one of several may
    fail.

    Libraries also raise classes outside Exception, such as Rust panics. Requests to stop are raised as they are.
    """

    def __init__(self, what: str) -> None:
        """`what`: what the code block does, for the message."""
        self._what = what
        self.error: OnedeskError | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, _STOPS):
            return False
        self.error = in_family(error, self._what)
        return True


class Named:
    """Raises any error of its code block as one of the family, see `in_family`; requests to stop as they are."""

    def __init__(self, what: str) -> None:
        """`what`: what the code block does, for the message."""
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (*_STOPS, OnedeskError)):
            raise in_family(error, self._what) from error
