"""Images on the command line: the options, the files, and their description in documents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import Picture
from .options import named_path, whole_from

if TYPE_CHECKING:
    from ..api import OpenModel


def add_pixels(parser: argparse.ArgumentParser) -> None:
    """Add --pixels."""
    pixels = "at most N pixels per picture after resizing; default 1,048,576 on a GPU, 262,144 on a CPU"
    parser.add_argument("--pixels", type=whole_from(1), metavar="N", help=pixels)


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add --image and --pixels."""
    image = "a picture for a model that sees; may be repeated. With --ids its image token stands once per picture"
    parser.add_argument("--image", type=named_path, action="append", default=[], metavar="FILE", help=image)
    add_pixels(parser)


def read_pictures(paths: Sequence[Path]) -> tuple[Picture, ...]:
    """Decode the files. Raises FileError, RequestError."""
    if not paths:
        return ()
    from ..vision.decode import read_picture

    return tuple(read_picture(path) for path in paths)


def picture_documents(
    model: OpenModel, paths: Sequence[Path], pictures: Sequence[Picture], pixels: int | None
) -> list[dict[str, Any]]:
    """The images for --json: their files, sizes after resizing, and tokens."""
    sizes = model.picture_sizes(pictures, pixels)
    return [
        {"file": str(path), "width": width, "height": height, "tokens": tokens}
        for path, (width, height, tokens) in zip(paths, sizes, strict=True)
    ]
