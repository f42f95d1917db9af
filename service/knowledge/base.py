"""A knowledge base: one SQLite file with sources, their pieces and a full-text index."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..core import CancelCheck
from ..errors import Cancelled, FileError, RequestError
from .pieces import cut, for_index, match_of
from .read_source import KNOWN, read_content, sources_in, text_of

FORMAT = "1"
COUNT_LIMIT = 1000  # pieces of one search
# A word in the titles above a piece counts twice.
_SEARCH = """
    select source.path, piece.heading, piece.start, piece.end, piece.text, -bm25(search, 2.0, 1.0) as score
    from search join piece on piece.id = search.rowid join source on source.id = piece.source
    where search match ? order by score desc, piece.id limit ?
"""
_SCHEMA = """
    create table meta(key text primary key, value text not null);
    create table root(path text primary key);
    create table source(id integer primary key, path text unique not null, sha256 text not null);
    create table piece(id integer primary key, source integer not null references source on delete cascade,
        heading text not null, start integer not null, end integer not null, text text not null);
    create index piece_source on piece(source);
    create virtual table search using fts5(heading, text, tokenize = 'porter unicode61 remove_diacritics 2');
"""
_NAME = re.compile(r"\w[\w .-]{0,63}")


@dataclass(frozen=True, slots=True)
class FoundPiece:
    """A piece that matches: characters `start` to `end` of the text of `source`. A higher `score` matches better."""

    source: str
    heading: str
    start: int
    end: int
    text: str
    score: float


@dataclass(slots=True)
class UpdateReport:
    """What an update has done, by the paths of the sources; `failed` has the reason of each."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: int = 0
    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class KnowledgeBase:
    """The base in `file`. Each call opens the file; several processes may use it at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.name = file.stem

    def add(self, roots: Sequence[Path], cancel: CancelCheck | None = None) -> UpdateReport:
        """Add files, and folders with everything in them that can be read; the base is made if it does not exist.

        A source is one transaction, so a stop loses the work on one file. Raises RequestError for a path that does not
        exist or cannot be read, FileError for a full disk, Cancelled.
        """
        for root in roots:
            if not root.exists():
                raise RequestError(f"{root} does not exist; name a file or a folder")
            if root.is_file() and root.suffix.lower() not in KNOWN:
                raise RequestError(f"{root.name} is of no kind that can be read; known: {', '.join(sorted(KNOWN))}")
        with self._open(make=True) as connection:
            with _transaction(connection):
                connection.executemany(
                    "insert or ignore into root values (?)", [(str(root.resolve()),) for root in roots]
                )
            return _update(connection, [root.resolve() for root in roots], cancel)

    def update(self, cancel: CancelCheck | None = None) -> UpdateReport:
        """Read again what has changed in all that was added, and remove the files that are gone. Raises as `add`."""
        with self._open() as connection:
            roots = [Path(path) for (path,) in connection.execute("select path from root order by path")]
            report = _update(connection, roots, cancel)
            for path in [path for (path,) in connection.execute("select path from source order by path")]:
                if not Path(path).is_file():
                    with _transaction(connection):
                        _forget(connection, path)
                    report.removed.append(path)
            return report

    def search(self, query: str, count: int = 5) -> list[FoundPiece]:
        """The `count` best pieces by bm25, the best first. Raises RequestError for a query without words."""
        if not 1 <= count <= COUNT_LIMIT:
            raise RequestError(f"count is {count}; use 1 to {COUNT_LIMIT}")
        match = match_of(query)
        if not match:
            raise RequestError("the query has no words; write at least one")
        with self._open() as connection:
            return [FoundPiece(*row) for row in connection.execute(_SEARCH, (match, count))]

    def counts(self) -> tuple[int, int]:
        """Sources and pieces."""
        with self._open() as connection:
            (sources,) = connection.execute("select count(*) from source").fetchone()
            (pieces,) = connection.execute("select count(*) from piece").fetchone()
            return sources, pieces

    def remove(self) -> None:
        """Delete the base; the documents stay. Raises RequestError if it does not exist."""
        self._require()
        with self._open() as connection, _transaction(connection):
            pass  # raises while another process writes
        for ending in ("", "-wal", "-shm"):
            self.file.with_name(self.file.name + ending).unlink(missing_ok=True)

    def _require(self) -> None:
        if not self.file.is_file():
            others = ", ".join(base.name for base in bases(self.file.parent)) or "none"
            raise RequestError(
                f"there is no knowledge base {self.name!r}; bases: {others}; make it with onedesk knowledge add"
            )

    @contextmanager
    def _open(self, *, make: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection in autocommit; SQLite's errors become ours."""
        if make:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        else:
            self._require()
        with _named(self.name), closing(sqlite3.connect(self.file, timeout=5, isolation_level=None)) as connection:
            connection.execute("pragma foreign_keys = on")
            connection.execute("pragma journal_mode = wal")
            _check_format(connection, self.name)
            yield connection


def base_of(folder: Path, name: str) -> KnowledgeBase:
    """The base `name` in `folder`. Raises RequestError for a name that is none."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{name!r} is not a name of a knowledge base; use up to 64 letters, digits, spaces, dots, dashes and"
            " underscores"
        )
    return KnowledgeBase(folder / f"{name}.sqlite")


def bases(folder: Path) -> list[KnowledgeBase]:
    """All bases in `folder`, by name."""
    return [KnowledgeBase(file) for file in sorted(folder.glob("*.sqlite"))]


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        message = str(error)
        if "locked" in message:
            raise RequestError(
                f"another process writes to the knowledge base {name}; try again when it is done"
            ) from error
        if "full" in message:
            raise FileError(
                f"the disk is full while {name} was written; what was finished before is kept: free space and repeat"
            ) from error
        raise FileError(
            f"the knowledge base {name} cannot be used ({message}); remove it and add its documents again"
        ) from error


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("begin immediate")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("rollback")
        raise
    connection.execute("commit")


def _check_format(connection: sqlite3.Connection, name: str) -> None:
    """Make the tables of a new file. Raises FileError for another format."""
    tables = "select 1 from sqlite_master limit 1"
    if not connection.execute(tables).fetchone():
        with _transaction(connection):
            if not connection.execute(tables).fetchone():  # another process may have been first
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    connection.execute(statement)
                connection.execute("insert into meta values ('format', ?)", (FORMAT,))
    row = connection.execute("select value from meta where key = 'format'").fetchone()
    if row is None or row[0] != FORMAT:
        raise FileError(
            f"the knowledge base {name} has format {row and row[0]}, and this version reads {FORMAT};"
            " remove it and add its documents again"
        )


def _update(connection: sqlite3.Connection, roots: Sequence[Path], cancel: CancelCheck | None) -> UpdateReport:
    report = UpdateReport()
    for path in dict.fromkeys(path for root in roots if root.exists() for path in sources_in(root)):
        if cancel is not None and cancel():
            raise Cancelled("stopped; the files read so far are in the base, repeat the command for the others")
        try:
            _take(connection, path, report)
        except FileError as error:
            report.failed[str(path).encode(errors="backslashreplace").decode()] = str(error)
    return report


def _take(connection: sqlite3.Connection, path: Path, report: UpdateReport) -> None:
    """Read one source and store its pieces, unless it is stored as it is. One that fails stays as it was."""
    content = read_content(path)
    digest = hashlib.sha256(content).hexdigest()
    known = "select sha256 from source where path = ?"
    if connection.execute(known, (str(path),)).fetchone() == (digest,):
        report.unchanged += 1
        return
    pieces = cut(text_of(content, path))
    with _transaction(connection):
        before = _forget(connection, str(path))
        added = connection.execute("insert into source(path, sha256) values (?, ?)", (str(path), digest))
        for piece in pieces:
            row = (added.lastrowid, piece.heading, piece.start, piece.end, piece.text)
            stored = connection.execute(
                "insert into piece(source, heading, start, end, text) values (?, ?, ?, ?, ?)", row
            )
            index = (stored.lastrowid, for_index(piece.heading), for_index(piece.text))
            connection.execute("insert into search(rowid, heading, text) values (?, ?, ?)", index)
    (report.changed if before else report.added).append(str(path))


def _forget(connection: sqlite3.Connection, path: str) -> bool:
    """Remove a source with its pieces; returns whether there was one."""
    row = connection.execute("select id from source where path = ?", (path,)).fetchone()
    if row is None:
        return False
    connection.execute("delete from search where rowid in (select id from piece where source = ?)", row)
    connection.execute("delete from source where id = ?", row)
    return True
