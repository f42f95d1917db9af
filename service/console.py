"""Terminal input and output of the command: output that no encoding can break, one JSON document, piped text,
interrupts.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from .core import Progress
from .errors import Cancelled, FileError, OnedeskError, RequestError

WIDTH = 100  # columns of a table, and of sentences below its rows
TEXT_LIMIT = 16 << 20  # bytes; the limit of a chat template


class UsageError(Exception):
    """The command line is wrong."""


class Stop:
    """The cancel check of a run: the first interrupt requests a stop, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Handle SIGINT while the block runs. A failure after an interrupt becomes Cancelled."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield self
        except OnedeskError as error:
            if self.asked:
                raise Cancelled("interrupted") from error
            raise
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def ends_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP in the block as an interrupt, so that its child processes are ended too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {kind: signal.signal(kind, interrupt) for kind in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def make_streams_safe() -> None:
    """Let stdout and stderr escape characters that their encoding lacks with backslashes, instead of failing. Writing
    to a closed stream does nothing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until exit
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Point stdout at the null device: its reader is gone, and Python flushes stdout once more at exit."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
    except (OSError, ValueError):  # a stdout without a descriptor: the flush goes nowhere
        return


def write_json(document: Any) -> None:
    """Write one JSON document to stdout, in ASCII, so that any reader and encoding accepts it."""
    sys.stdout.write(json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n")


def show_progress(progress: Progress) -> None:
    """Keep one line of a terminal's stderr up to date; does nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return
    share = progress.done / max(1, progress.total)
    sys.stderr.write(f"\r{progress.stage} {share:4.0%}" + ("\r\x1b[K" if share >= 1 else ""))
    sys.stderr.flush()


def failure(error: Exception, message: str | None = None) -> dict[str, Any]:
    """The document of an error, with its own message or `message`."""
    return {"error": {"type": type(error).__name__, "message": str(error) if message is None else message}}


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file of at most TEXT_LIMIT bytes. Raises FileError."""
    try:
        with path.open("rb") as file:
            raw = file.read(TEXT_LIMIT + 1)
    except OSError as error:
        raise FileError(
            f"cannot read the text file {path.name or path}: {error.strerror}; name a UTF-8 text file"
        ) from error
    if len(raw) > TEXT_LIMIT:
        raise FileError(f"the text file {path.name} has more than {TEXT_LIMIT} bytes; cut it into parts")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"the text file {path.name} is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def read_piped_text() -> str:
    """All of standard input without the last line end. Raises RequestError if it is not UTF-8 or too long."""
    raw = sys.stdin.buffer.read(TEXT_LIMIT + 1)
    if len(raw) > TEXT_LIMIT:
        raise RequestError(f"standard input has more than {TEXT_LIMIT} bytes; give a shorter prompt")
    text = _decoded(raw)
    return text.removesuffix("\n").removesuffix("\r")


def read_line(prompt: str) -> str | None:
    """The next line of standard input, None at its end; `prompt` is shown on a terminal. An interrupt here raises
    KeyboardInterrupt.
    """
    if sys.stdin is None:  # closed by the parent process
        return None
    if sys.stdin.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        raw = sys.stdin.buffer.readline(TEXT_LIMIT)
    finally:
        signal.signal(signal.SIGINT, before)
    return _decoded(raw).rstrip("\r\n") if raw else None


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 (byte {error.start}); write it as UTF-8") from error


def printable(text: str) -> str:
    """`text` for a terminal: what could move the cursor or change colours, such as the escape character in a file's
    name, is shown as its Python escape; line ends stay."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)


def write_text(text: str) -> None:
    """Write lines to stdout as `printable` has them."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


class PrintableFormatter(logging.Formatter):
    """Formats log lines for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, see `printable`."""
        return printable(super().format(record))


def columns(rows: list[tuple[str, ...]]) -> str:
    """Rows as left-aligned columns, each cell on one line; the first row is the header."""
    rows = [tuple(printable(cell).replace("\n", "\\n") for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def wrapped(text: str, indent: str) -> list[str]:
    """A sentence wrapped to lines of WIDTH columns, none if it is empty; a longer word is not split."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
