"""System prompts as plain text files: the pack's, and the user's own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ..service.errors import FileError

log = logging.getLogger(__name__)

NONE = "none"
PACK_FOLDER = Path(__file__).resolve().parent / "presets"
# More than any system prompt needs; keeps a misnamed file from being read whole.
MAX_BYTES = 1 << 20


def preset_files(folders: Sequence[Path]) -> dict[str, Path]:
    """Names (file names without .txt) and their files, sorted; the last folder with a name wins. Absent folders are
    empty.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        try:
            files = sorted(folder.iterdir())
        except OSError as error:
            log.debug("preset folder %s is skipped: %s", folder.name, error.strerror)
            continue
        found |= {
            file.stem: file
            for file in files
            if file.suffix == ".txt" and not file.name.startswith(".") and file.is_file()
        }
    found.pop(NONE, None)
    return dict(sorted(found.items()))


def read_preset(name: str, folders: Sequence[Path]) -> str:
    """The text of a preset, without its final line end; "" for "none". Raises FileError for an unknown or unreadable
    one.
    """
    if name == NONE:
        return ""
    files = preset_files(folders)
    if name not in files:
        raise FileError(
            f"there is no preset {name!r}; there are {', '.join((NONE, *files))}: add {name}.txt or choose another"
        )
    try:
        with files[name].open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise FileError(f"the preset {name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"the preset {name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    if len(content) > MAX_BYTES:
        raise FileError(f"the preset {name} has more than {MAX_BYTES} bytes; a system prompt must be shorter")
    return text.replace("\r\n", "\n").rstrip("\n")
