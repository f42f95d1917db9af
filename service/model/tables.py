"""Tables that stay in their files: the location of their rows, planned with the weights."""

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
    """A table that stays in its file: the location of its rows, the one scale of all numbers, and the scales per group
    of columns in each part, if any.
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
    """The tables of a model by their keys. Together they keep at most as many files open as one table may."""
    files = KeptFiles()
    return {
        table.destination.key: FileTable(table.parts, table.scale, table.groups, reader, files) for table in planned
    }


def scale_name(name: str) -> str:
    """The name of a table's scale, or of its first part's."""
    return name.removesuffix(".weight").removesuffix(".shard_0") + ".weight_scale"
