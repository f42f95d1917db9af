"""Decoding: formats, orientation, transparency, depth. What is not a picture, damaged or too large is refused."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.core import Picture
from onedesk.service.errors import FileError, RequestError
from onedesk.service.vision.decode import DecodeLimits, decode_picture, read_picture
from pictures import array, drawn, encoded, pillow
from PIL import Image

PICTURE = drawn(24, 16)


def png(width: int, height: int, depth: int, colour: int, raw: bytes) -> bytes:
    """A PNG file of these header fields, whatever Pillow can write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})])
def test_formats_without_loss_give_their_pixels(kind: str, options: dict[str, bool]):
    assert decode_picture(encoded(pillow(PICTURE), kind, **options), "a") == Picture(24, 16, PICTURE.rgb, "a")


def test_a_jpeg_gives_what_its_decoder_gives():
    data = encoded(pillow(PICTURE), "JPEG", quality=90)
    assert decode_picture(data, "a").rgb == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_the_name_does_not_decide_what_a_file_is(tmp_path: Path):
    (tmp_path / "a.jpg").write_bytes(encoded(pillow(PICTURE)))
    assert read_picture(tmp_path / "a.jpg").rgb == PICTURE.rgb


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(orientation: int):
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode_picture(encoded(pillow(PICTURE), "PNG", exif=exif), "a")
    wanted = pillow(PICTURE).transpose(turn[orientation]) if orientation > 1 else pillow(PICTURE)
    assert (found.width, found.height, found.rgb) == (*wanted.size, wanted.tobytes())


def test_transparent_pixels_are_laid_on_white():
    layer = pillow(PICTURE).convert("RGBA")
    alpha = np.zeros((16, 24), np.uint8)
    alpha[:, 12:] = 255
    layer.putalpha(Image.fromarray(alpha))
    found = array(decode_picture(encoded(layer), "a"))
    assert (found[:, :12] == 255).all()
    assert (found[:, 12:] == array(PICTURE)[:, 12:]).all()


def test_a_palette_with_a_transparent_entry():
    image = Image.new("P", (4, 2))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1, 0, 1, 1, 0, 1, 0])
    found = array(decode_picture(encoded(image, "PNG", transparency=1), "a"))
    assert (found[0, 0] == (255, 0, 0)).all()
    assert (found[0, 1] == (255, 255, 255)).all()


def test_sixteen_bits_of_grey_and_of_colour_keep_their_upper_eight():
    levels = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    grey = decode_picture(encoded(Image.fromarray(levels)), "a")
    assert (array(grey) == (levels >> 8)[:, :, None]).all()
    rows = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in levels)
    colour = decode_picture(png(4, 4, 16, 2, rows), "a")
    assert (array(colour) == array(grey)).all()


def test_cmyk_jpegs_become_rgb():
    red = decode_picture(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), "a")
    assert array(red)[4, 4, 0] > 200
    assert array(red)[4, 4, 1:].max() < 60


def test_the_first_frame_of_an_animation_is_read():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (array(decode_picture(data, "a")) == (255, 0, 0)).all()


def test_one_pixel_is_a_picture():
    assert decode_picture(encoded(Image.new("RGB", (1, 1), "blue")), "a").rgb == bytes((0, 0, 255))


def test_a_bomb_is_refused_before_it_is_decoded():
    bomb = png(60_000, 60_000, 8, 2, b"\0")
    with pytest.raises(RequestError, match=r"picture bomb.png has .* pixels, more than the 67,108,864"):
        decode_picture(bomb, "bomb.png")
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(RequestError, match=r"has 12000 x 12000 = 144,000,000 pixels"),
    ):
        decode_picture(png(12_000, 12_000, 8, 2, b"\0"), "large.png")
    with pytest.raises(RequestError, match=r"24 x 16 = 384 pixels, more than the 383"):
        decode_picture(encoded(pillow(PICTURE)), "a", DecodeLimits(pixels=383))


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(FileError, match=r"pipe\.png"):
        read_picture(tmp_path / "pipe.png")


def test_bytes_are_limited_before_decoding(tmp_path: Path):
    path = tmp_path / "long.png"
    path.write_bytes(encoded(pillow(PICTURE)) + b"\0" * 5000)
    with pytest.raises(RequestError, match=r"picture long.png has more than 5,000 bytes"):
        read_picture(path, DecodeLimits(file_bytes=5000))


@pytest.mark.parametrize("data", [b"this is a text", b"\x89PNG\r\n\x1a\n", b"%PDF-1.7", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_what_is_no_picture_is_named(data: bytes):
    with pytest.raises(RequestError, match=r"notes\.png"):
        decode_picture(data, "notes.png")


def test_an_empty_and_a_missing_file_are_named(tmp_path: Path):
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(RequestError, match=r"the picture empty.png is empty"):
        read_picture(tmp_path / "empty.png")
    with pytest.raises(FileError, match=r"the picture gone.png cannot be read: No such file"):
        read_picture(tmp_path / "gone.png")
    with pytest.raises(FileError, match=r"cannot be read: Is a directory"):
        read_picture(tmp_path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_file_cut_short_is_refused_and_named(kind: str):
    data = encoded(pillow(drawn(64, 64)), kind)
    for share in (0.2, 0.5, 0.8):
        with pytest.raises(RequestError, match=r"cut\.bin"):
            decode_picture(data[: int(len(data) * share)], "cut.bin")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]), st.data())
def test_damage_gives_a_picture_or_a_named_error(kind: str, data: st.DataObject):
    damaged = bytearray(encoded(pillow(PICTURE), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_picture(bytes(damaged), "damaged.bin", DecodeLimits(pixels=10**6))
    except RequestError as error:
        message = str(error)
    else:
        message = f"damaged.bin of {len(found.rgb) / found.width / found.height:g} bytes per pixel"
        assert message.endswith("of 3 bytes per pixel")
    assert "damaged.bin" in message
