"""Tables that stay in their files: where their rows lie, planned beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..kernels.cpu.file_rows import FileRowReader
from ..loader.header import TensorInfo
from ..loader.kept import KeptFiles
from ..loader.table import FileTable
from .spec import Destination


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A table that stays in its file: where its rows lie, the one number that all are multiplied by, and the scales of
    each part's groups of columns, if there are such.
    """

    destination: Destination
    parts: tuple[TensorInfo, ...]
    scale: TensorInfo | None
    groups: tuple[TensorInfo, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(part.nbytes for part in (*self.parts, *self.groups))


def open_tables(planned: Sequence[PlannedTable], reader: FileRowReader | None = None) -> dict[str, FileTable]:
    """The tables of a model by their keys. Together they keep no more files open than one may."""
    files = KeptFiles()
    return {
        table.destination.key: FileTable(table.parts, table.scale, table.groups, reader, files) for table in planned
    }


def scale_name(name: str) -> str:
    """The scale's name beside that of a table, or of the first of its parts."""
    return name.removesuffix(".weight").removesuffix(".shard_0") + ".weight_scale"
