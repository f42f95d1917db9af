"""Text of a source with its headings: decoding, Markdown and HTML."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from html.parser import HTMLParser

from ..errors import FileError

_BLOCKS = frozenset(
    [
        "p",
        "div",
        "li",
        "tr",
        "br",
        "table",
        "ul",
        "ol",
        "dl",
        "dt",
        "dd",
        "pre",
        "blockquote",
        "section",
        "article",
        "header",
        "footer",
        "hr",
        "title",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
    ]
)
_HIDDEN = frozenset(("script", "style", "template", "noscript"))
_HEADING = re.compile(r"(#{1,6})[ \t]+(.+?)[ \t#]*$")
_FENCE = re.compile(r"[ ]{0,3}(```+|~~~+)")


@dataclass(frozen=True, slots=True)
class SourceText:
    """`headings`: (position in `text`, level from 1, title), by position."""

    text: str
    headings: tuple[tuple[int, int, str], ...] = ()


class TextParts:
    """Collects paragraphs and headings."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._headings: list[tuple[int, int, str]] = []
        self._at = 0

    def add(self, text: str, level: int = 0) -> None:
        """A paragraph, or a heading of `level` from 1. A text of blanks is left out."""
        text = text.strip()
        if not text:
            return
        if level:
            self._headings.append((self._at, level, " ".join(text.split())))
        self._lines.append(text)
        self._at += len(text) + 2

    def finish(self) -> SourceText:
        """All that was added, a blank line between paragraphs."""
        return SourceText("\n\n".join(self._lines), tuple(self._headings))


def decode_text(content: bytes, name: str) -> str:
    """Text in UTF-8, in UTF-16 with a byte order mark, in GB 18030, else in Latin-1. Raises FileError for a file that
    is not text."""
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if content.startswith(mark):
            return content.decode(encoding, "replace")
    if b"\0" in content:
        raise FileError(f"{name} is not text: it has null bytes; save it as UTF-8")
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    return content.decode("latin-1")


def read_markdown(text: str) -> SourceText:
    """`text` with its # headings; those within fences of code are none."""
    headings: list[tuple[int, int, str]] = []
    at, fence = 0, ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
            fence = ""
        elif not fence and (found := _HEADING.match(line.rstrip("\r\n"))):
            headings.append((at, len(found[1]), found[2]))
        at += len(line)
    return SourceText(text, tuple(headings))


class _HtmlText(HTMLParser):
    def __init__(self, parts: TextParts) -> None:
        super().__init__(convert_charrefs=True)
        self._parts = parts
        self._line: list[str] = []
        self._hidden = 0
        self._level = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _HIDDEN:
            self._hidden += 1
        if tag in _BLOCKS:
            self.flush()
            self._level = int(tag[1]) if len(tag) == 2 and tag[1].isdigit() else 0
        elif tag in ("td", "th"):
            self._line.append("\t")

    def handle_endtag(self, tag: str) -> None:
        if tag in _HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        if tag in _BLOCKS:
            self.flush()
            self._level = 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._line.append(data)

    def flush(self) -> None:
        """End the paragraph."""
        self._parts.add(re.sub(r"[ \r\n]+", " ", "".join(self._line)), self._level)
        self._line.clear()


def read_html(text: str, parts: TextParts) -> None:
    """Add the visible text of a page to `parts`."""
    reader = _HtmlText(parts)
    reader.feed(text)
    reader.close()
    reader.flush()
