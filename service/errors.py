"""The one error family: a message says what happened, with the figures, and what to do next."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from types import TracebackType

# Orders to stop, not faults: they go through everything that catches faults.
_ORDERS = (KeyboardInterrupt, SystemExit, GeneratorExit)
_DETAIL_CHARACTERS = 300


class _Brief(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 128:  # also, Python refuses to write one of more than 4,300 digits
            return f"a whole number of {x.bit_length()} bits"
        return repr(x)


def brief(value: object) -> str:
    """A value that somebody gave, for a message: what it is, cut to a few entries and some hundred characters."""
    shown = _Brief()
    shown.maxlevel, shown.maxdict, shown.maxlist, shown.maxstring, shown.maxother = 3, 4, 8, 100, 100
    return shown.repr(value)


class Field(str):
    """Within a message: the name of a value that somebody gave. Whoever asked them for it may call it as they do, see `told`."""

    __slots__ = ()


class OnedeskError(Exception):
    """Base of every error that Onedesk raises on purpose. Its arguments are the parts of its message, texts and fields."""

    def __str__(self) -> str:
        return self.told(str)

    def told(self, name: Callable[[str], str]) -> str:
        """The message, with `name` of each field in its place: the command says --max-tokens for max_tokens."""
        return "".join(name(str(part)) if isinstance(part, Field) else str(part) for part in self.args)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the message is about, the one that is wrong first."""
        return tuple(str(part) for part in self.args if isinstance(part, Field))


class ModelError(OnedeskError):
    """A checkpoint whose configuration, tensors, tokenizer or template cannot be used."""


class FileError(OnedeskError):
    """A file that is missing, cut short, unreadable, or outside the folders that may be read."""


class MemoryFull(OnedeskError):
    """What is asked for does not fit; raised before anything of it is loaded."""


class RequestError(OnedeskError):
    """A request that cannot be served as it stands: a wrong value, an empty or over-long prompt."""


class Cancelled(OnedeskError):
    """The caller asked to stop while a model was being opened or a prompt was being read."""


class PeerError(OnedeskError):
    """Another engine that does the work for us failed or could not be reached."""


def in_family(error: BaseException, what: str) -> OnedeskError:
    """`error` as one of the family: itself, MemoryFull where memory was lacking, else an OnedeskError that names it as its cause.

    `what`: what was being done, for the message.
    """
    if isinstance(error, OnedeskError):
        return error
    if isinstance(error, MemoryError):
        named: OnedeskError = MemoryFull(f"{what} failed: this process got no more memory; ask for less at once, or free some")
    else:
        detail = " ".join(f"{type(error).__name__} {error}".split())[:_DETAIL_CHARACTERS]
        named = OnedeskError(f"{what} failed: {detail}; this is a fault of Onedesk: report it with the request and the log")
    named.__cause__ = error
    return named


class Caught:
    """Keeps what its block raises, of whatever class, as `error`, and goes on behind it: the fault of one among several.

    Libraries raise classes outside Exception too, such as the panics of those written in Rust. Orders to stop are no faults.
    """

    def __init__(self, what: str) -> None:
        """`what`: what the block does, for the message."""
        self._what = what
        self.error: OnedeskError | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or isinstance(error, _ORDERS):
            return False
        self.error = in_family(error, self._what)
        return True


class Named:
    """Whatever its block raises comes out as one of the family, see `in_family`. Orders to stop come out as they are."""

    def __init__(self, what: str) -> None:
        """`what`: what the block does, for the message."""
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, (*_ORDERS, OnedeskError)):
            raise in_family(error, self._what) from error
