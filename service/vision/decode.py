"""Picture files to RGB pixels. Sizes are checked before anything is decoded; a damaged file is refused by name."""

from __future__ import annotations

import io
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from ..core import Picture
from ..errors import FileError, RequestError

# The decoders in use. Pillow has more, some of which start other programs (EPS).
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# The exceptions of Pillow's decoders on damaged input.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    NotImplementedError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The largest file in bytes and the largest picture in pixels that are decoded (201 MB of RGB at the default)."""

    file_bytes: int = 64 * 2**20
    pixels: int = 2**26


def read_picture(path: Path, limits: DecodeLimits | None = None) -> Picture:
    """Decode the file at `path`. Raises FileError if it is unreadable, RequestError if it is not a picture or too
    large.
    """
    limits = limits or DecodeLimits()
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileError(f"{path.name} is not a regular file; name a picture file")
            data = file.read(limits.file_bytes + 1)
    except OSError as error:
        raise FileError(f"the picture {path.name} cannot be read: {error.strerror}") from None
    return decode_picture(data, path.name, limits)


def decode_picture(data: bytes, name: str, limits: DecodeLimits | None = None) -> Picture:
    """The upright first frame of a picture file as RGB; `name` identifies it in errors. Raises RequestError.

    The content decides the format, not the name. The EXIF orientation is applied. Transparent pixels are blended onto
    white. Of 16 bits per value the upper 8 are kept, as Pillow does for colour.
    """
    limits = limits or DecodeLimits()
    if not data:
        raise RequestError(f"the picture {name} is empty (0 bytes)")
    if len(data) > limits.file_bytes:
        raise RequestError(f"the picture {name} has more than {limits.file_bytes:,} bytes; save it smaller")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise RequestError(
            f"{name} is not a picture that can be decoded; supported are {', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
        ) from None
    except Image.DecompressionBombError:
        raise _too_large(name, "far more", limits) from None
    except _DAMAGED as error:
        raise _damaged(name, error) from None
    with image:
        width, height = image.size
        if width * height > limits.pixels:
            raise _too_large(name, f"{width} x {height} = {width * height:,}", limits)
        if width < 1 or height < 1:
            raise RequestError(f"the picture {name} has {width} x {height} pixels; at least 1 x 1 is needed")
        try:
            upright = ImageOps.exif_transpose(image)
            rgb = _to_rgb(upright, name)
        except _DAMAGED as error:
            raise _damaged(name, error) from None
    return Picture(rgb.width, rgb.height, rgb.tobytes(), name)


def _too_large(name: str, size: str, limits: DecodeLimits) -> RequestError:
    return RequestError(
        f"the picture {name} has {size} pixels, more than the {limits.pixels:,} that are decoded; save it smaller"
    )


def _damaged(name: str, error: BaseException) -> RequestError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return RequestError(f"the picture {name} is damaged or cut short: {reason}")


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    image.load()
    if image.mode == "F":
        raise RequestError(f"the picture {name} has floating-point pixels without a range; save it as PNG")
    if image.mode in _SIXTEEN_BITS or image.mode == "I":
        wide = np.asarray(image).astype(np.int64)
        return Image.fromarray((wide >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer).convert("RGB")
    return image.convert("RGB")
