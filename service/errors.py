"""The one error family: a message says what happened, with the figures, and what to do next."""

from __future__ import annotations

import reprlib
from collections.abc import Callable


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
