"""The text of docx, odt and epub files by the standard library: zip archives of XML, read within limits."""

from __future__ import annotations

import lzma
import posixpath
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from io import BytesIO
from typing import IO, Any
from urllib.parse import unquote
from xml.parsers import expat

from ..errors import FileError
from .plain_text import SourceText, TextParts, read_html

# A novel has 1 MB of XML, and pictures are never unpacked.
UNPACKED_LIMIT = 64 << 20  # bytes of all parts that are read
ENTRIES_LIMIT = 20_000
DEPTH_LIMIT = 500
# What zipfile and its decompressors raise for damaged and encrypted archives.
_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    KeyError,
    ValueError,
)


def read_office(content: bytes, kind: str, name: str) -> SourceText:
    """The text of a file of `kind` docx, odt or epub. Raises FileError that says what is wrong with it."""
    with _named(name):
        archive = _Archive(BytesIO(content), name)
        return {"docx": _docx, "odt": _odt, "epub": _epub}[kind](archive)


@contextmanager
def _named(name: str) -> Any:
    try:
        yield
    except _FAULTS as error:
        raise FileError(f"{name} is damaged or encrypted ({error}); save it again without a password") from error
    except expat.ExpatError as error:
        raise FileError(f"{name} holds XML that cannot be read ({error}); save it again") from error


class _Archive:
    """Parts of a zip file, together at most UNPACKED_LIMIT bytes."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.name = name
        self._zip = zipfile.ZipFile(file)
        self._left = UNPACKED_LIMIT
        if len(self._zip.infolist()) > ENTRIES_LIMIT:
            raise FileError(
                f"{name} has {len(self._zip.infolist())} parts, more than the {ENTRIES_LIMIT} that are read; split it"
            )

    def read(self, part: str) -> bytes:
        """A part, unpacked no further than the limit: the sizes that an archive states may be wrong."""
        with self._zip.open(part) as file:
            found = file.read(self._left + 1)
        self._left -= len(found)
        if self._left < 0:
            raise FileError(f"{self.name} unpacks to more than {UNPACKED_LIMIT >> 20} MiB of text; split it")
        return found

    def walk(
        self,
        part: str,
        start: Callable[[str, dict[str, str]], None],
        end: Callable[[str], None],
        text: Callable[[str], None],
    ) -> None:
        """Call `start`, `end` and `text` for the XML of `part`, names without namespaces. A DOCTYPE is refused: it
        could define entities that expand without limit."""
        depth = 0

        def opened(tag: str, attributes: dict[str, str]) -> None:
            nonlocal depth
            depth += 1
            if depth > DEPTH_LIMIT:
                raise FileError(f"{self.name} nests XML deeper than {DEPTH_LIMIT}; save it again")
            start(_local(tag), {_local(key): value for key, value in attributes.items()})

        def closed(tag: str) -> None:
            nonlocal depth
            depth -= 1
            end(_local(tag))

        def refuse(*_: Any) -> None:
            raise FileError(f"{self.name} has a DOCTYPE in {part}, which is not read; save it again")

        parser = expat.ParserCreate(namespace_separator=" ")
        parser.StartElementHandler, parser.EndElementHandler = opened, closed
        parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, refuse
        parser.Parse(self.read(part), True)


def _local(name: str) -> str:
    return name.rpartition(" ")[2]


def _docx(archive: _Archive) -> SourceText:
    """Paragraphs `p` with runs of `t`; a style Heading1 to Heading6 or Title makes a heading."""
    parts, line, level, inside = TextParts(), list[str](), 0, False

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal level, inside
        if tag == "p":
            level = 0
        elif tag == "pStyle":
            found = re.fullmatch(r"(?i)heading ?([1-6])|title", attributes.get("val", ""))
            level = int(found[1] or 1) if found else 0
        elif tag in ("tab", "br", "cr"):
            line.append("\t" if tag == "tab" else "\n")
        inside = tag == "t"

    def end(tag: str) -> None:
        nonlocal inside
        inside = False
        if tag == "p":
            parts.add("".join(line), level)
            line.clear()

    archive.walk("word/document.xml", start, end, lambda text: line.append(text) if inside else None)
    return parts.finish()


def _odt(archive: _Archive) -> SourceText:
    """Paragraphs `p` and headings `h` with their outline level."""
    parts, line, levels = TextParts(), list[str](), list[int]()

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag in ("p", "h"):
            number = attributes.get("outline-level", "1")
            levels.append((int(number) if number.isascii() and number.isdigit() else 1) if tag == "h" else 0)
        elif tag in ("tab", "line-break", "s"):
            line.append({"tab": "\t", "s": " "}.get(tag, "\n"))

    def end(tag: str) -> None:
        if tag in ("p", "h"):
            parts.add("".join(line), levels.pop())
            line.clear()

    archive.walk("content.xml", start, end, lambda text: line.append(text) if levels else None)
    return parts.finish()


def _epub(archive: _Archive) -> SourceText:
    """The chapters in the order of the spine."""
    packages, files, spine = list[str](), dict[str, str](), list[str]()

    def rootfile(tag: str, attributes: dict[str, str]) -> None:
        if tag == "rootfile":
            packages.append(attributes["full-path"])

    def item(tag: str, attributes: dict[str, str]) -> None:
        if tag == "item":
            files[attributes["id"]] = attributes["href"]
        elif tag == "itemref":
            spine.append(attributes["idref"])

    archive.walk("META-INF/container.xml", rootfile, lambda _: None, lambda _: None)
    if not packages:
        raise FileError(f"{archive.name} names no package file in META-INF/container.xml; save it again")
    archive.walk(packages[0], item, lambda _: None, lambda _: None)
    parts = TextParts()
    for chapter in spine:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(packages[0]), unquote(files[chapter])))
        read_html(archive.read(path).decode("utf-8", "replace"), parts)
    return parts.finish()
