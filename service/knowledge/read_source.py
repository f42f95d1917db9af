"""Files that a knowledge base can read, by the endings of their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import FileError
from .office_text import read_office
from .plain_text import SourceText, TextParts, decode_text, read_html, read_markdown

SOURCE_LIMIT = 64 << 20  # bytes of one file; a long novel has 3 MB
_PLAIN = frozenset(
    [
        ".txt",
        ".rst",
        ".json",
        ".jsonl",
        ".csv",
        ".tsv",
        ".log",
        ".toml",
        ".yaml",
        ".yml",
        ".ini",
        ".xml",
        ".tex",
        ".py",
        ".js",
        ".ts",
        ".c",
        ".h",
        ".cpp",
        ".hpp",
        ".cc",
        ".cu",
        ".rs",
        ".go",
        ".java",
        ".sh",
        ".sql",
        ".css",
    ]
)
_MARKDOWN = frozenset((".md", ".markdown"))
_HTML = frozenset((".html", ".htm", ".xhtml"))
_OFFICE = frozenset((".docx", ".odt", ".epub"))
KNOWN = _PLAIN | _MARKDOWN | _HTML | _OFFICE


def read_content(path: Path) -> bytes:
    """The bytes of a source. Raises FileError beyond SOURCE_LIMIT, or when it cannot be read."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise FileError(f"{path.name!a} has a name that is not UTF-8; rename it") from error
    try:
        with path.open("rb") as file:
            content = file.read(SOURCE_LIMIT + 1)
    except OSError as error:
        raise FileError(f"{path.name} cannot be read ({error.strerror}); check the file and its rights") from error
    if len(content) > SOURCE_LIMIT:
        raise FileError(f"{path.name} has more than {SOURCE_LIMIT >> 20} MiB; split it")
    return content


def text_of(content: bytes, path: Path) -> SourceText:
    """The text of a source with its headings. Raises FileError."""
    ending = path.suffix.lower()
    if ending in _OFFICE:
        return read_office(content, ending[1:], path.name)
    text = decode_text(content, path.name)
    if ending in _HTML:
        parts = TextParts()
        read_html(text, parts)
        return parts.finish()
    return read_markdown(text) if ending in _MARKDOWN else SourceText(text)


def sources_in(root: Path) -> Iterator[Path]:
    """`root` itself if it is a file, else the files below it that can be read, in the order of their names. Hidden
    files and folders, and links to folders, are left out."""
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.suffix.lower() in KNOWN and path.is_file():
                yield path
