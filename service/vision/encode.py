"""Pictures as data: URIs, as other engines accept them."""

from __future__ import annotations

import base64
import binascii
import io
import re
from math import sqrt

from PIL import Image

from ..core import Picture
from ..errors import RequestError
from .decode import DecodeLimits, decode_picture

_DATA = re.compile(r"data:(image/[a-z0-9.+-]+)?((?:;[a-z0-9=.+-]+)*?)(;base64)?,", re.IGNORECASE)


def picture_of_uri(uri: str, name: str, limits: DecodeLimits | None = None) -> Picture:
    """Decode a data: URI of a picture in base64. Nothing is fetched: any other URL and damaged data raise
    RequestError.
    """
    limits = limits or DecodeLimits()
    head = _DATA.match(uri)
    if head is None or not head.group(3):
        raise RequestError(
            f"{name} is not a data: URL in base64; pictures are never fetched, send data:image/png;base64,... (or jpeg,"
            " webp)"
        )
    if head.group(1) is None:
        raise RequestError(f"{name} does not say that it is a picture; send data:image/png;base64,... (or jpeg, webp)")
    if (len(uri) - head.end()) * 3 // 4 > limits.file_bytes + 3:
        raise RequestError(f"{name} has more than {limits.file_bytes:,} bytes; save it smaller")
    try:
        data = base64.b64decode(uri[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{name} is not valid base64; encode the file's bytes again") from None
    return decode_picture(data, name, limits)


def uri_of_picture(picture: Picture, pixels: int | None = None) -> str:
    """The picture as PNG in a data: URI, scaled down where it has more than `pixels`."""
    image = Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
    area = picture.width * picture.height
    if pixels is not None and area > pixels:
        share = sqrt(pixels / area)
        image = image.resize(
            (max(1, int(picture.width * share)), max(1, int(picture.height * share))), Image.Resampling.BICUBIC
        )
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
