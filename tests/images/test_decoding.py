"""Files of images: what is decoded, and what is refused, whatever is in them."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from aioinfer.errors import InvalidRequest, Rejected
from aioinfer.images.decoding import decoded
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits
from aioinfer.images.pixels import upright
from aioinfer.images.source import ImageSource
from aioinfer.ledger import LEDGER
from aioinfer.system.memory import Available
from tests.images.checkpoints import picture

PICTURE = picture(9, 6)
FIELD = "messages[0].content[0]"


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> np.ndarray[Any, Any]:
    image = decoded(ImageSource(data), limits, FIELD)
    assert image.mode == "RGB"
    return np.asarray(image)


def refused(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        pixels(data, limits)
    assert caught.value.field == FIELD
    return caught.value.message


@pytest.mark.parametrize("form", ["PNG", "BMP", "WEBP", "GIF", "JPEG"])
def test_every_format_is_decoded(form: str) -> None:
    options = {"WEBP": {"lossless": True}}.get(form, {})
    data = saved(PICTURE, form, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(pixels(data), expected)
    if form in ("PNG", "BMP", "WEBP"):
        assert np.array_equal(expected, np.asarray(PICTURE))


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "CMYK", "YCbCr"])
def test_modes_are_converted_as_by_pillow(mode: str) -> None:
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    image = Image.fromarray(np.arange(54, dtype=np.uint16).reshape(6, 9) * 7)
    if mode != "I;16":
        image = PICTURE.convert(mode)
    data = saved(image, form)
    assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    options: dict[str, Any] = {}
    image = PICTURE.convert(mode)
    if mode == "P":
        image = PICTURE.quantize(4).point(lambda _: 2)
        options["transparency"] = 2
    else:
        image.putalpha(0)
    assert (pixels(saved(image, "PNG", **options)) == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_files_are_turned_upright(orientation: int) -> None:
    turned = {
        1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2,
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = pixels(saved(PICTURE, "PNG", exif=exif))
    expected = PICTURE if turned is None else PICTURE.transpose(Image.Transpose(turned))
    assert np.array_equal(found, np.asarray(expected))


def test_an_animation_is_refused() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    for form in ("GIF", "WEBP", "PNG"):
        lossless = {"lossless": True} if form == "WEBP" else {}
        data = saved(frames[0], form, save_all=True, append_images=frames[1:], **lossless)
        with pytest.raises(InvalidRequest, match="the image is animated"):
            pixels(data)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_head(width: int, height: int, kind: int = 2, bits: int = 8) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)


GOOD_PNG, GOOD_JPEG = saved(PICTURE, "PNG"), saved(PICTURE, "JPEG")
NOISE = random.Random(7).randbytes(4000)


def head(*segments: tuple[int, bytes]) -> bytes:
    """A JPEG file with these segments, by the last byte of their markers, in front of all others."""
    written = [struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data for marker, data in segments]
    return GOOD_JPEG[:2] + b"".join(written) + GOOD_JPEG[2:]


def overlapping(entries: int, size: int) -> bytes:
    """EXIF data whose entries are all of it, again and again."""
    listed = b"".join(struct.pack("<HHII", 1000 + number, 7, size, 8) for number in range(entries))
    data = struct.pack("<2sHIH", b"II", 42, 8, entries) + listed + bytes(4)
    return data + bytes(8 + size - len(data))


EXIF = b"Exif\0\0"
HOSTILE = {
    "nothing": b"\0",
    "noise": NOISE,
    "text": b"<html>no image</html>" * 9,
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "tiff": saved(PICTURE, "TIFF"),
    "ico": saved(PICTURE.resize((16, 16)), "ICO"),
    "ppm": saved(PICTURE, "PPM"),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "pdf": b"%PDF-1.7\n" + NOISE,
    "zip": b"PK\3\4" + NOISE,
    "png head alone": GOOD_PNG[:8],
    "png without data": png_head(9, 6),
    "png cut": GOOD_PNG[: len(GOOD_PNG) // 2],
    "png with noise": GOOD_PNG[:60] + NOISE,
    "png with a wrong sum": GOOD_PNG[:29] + b"\0\0\0\0" + GOOD_PNG[33:],
    "png of no width": png_head(0, 6) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""),
    "png of no such kind": png_head(9, 6, 5) + chunk(b"IDAT", zlib.compress(bytes(99))),
    "png with too little": png_head(900, 600) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b""),
    "png with a bomb of text": png_head(9, 6)
    + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20)))
    + GOOD_PNG[33:],
    "jpeg head alone": GOOD_JPEG[:4],
    "jpeg cut": GOOD_JPEG[: len(GOOD_JPEG) - 40],
    "jpeg with noise": GOOD_JPEG[:20] + NOISE,
    "jpeg of many scans": GOOD_JPEG[:-2] + b"\xff\xda\0\x08\1\1\0\0\x3f\0" * 200 + b"\xff\xd9",
    "jpeg of many scans in a file of several": saved(PICTURE, "MPO", save_all=True, append_images=[PICTURE])
    + b"\xff\xda" * 200,
    "jpeg of many segments": head(*[(0xE5, b"")] * 5000),
    "jpeg of joined segments": head(*[(0xE1, EXIF + bytes(60_000))] * 2),
    "jpeg of many joined segments": head((0xE1, EXIF + bytes(60_000)), *[(0xE1, EXIF + b"a")] * 4000),
    "jpeg of overlapping data": head(
        *[(0xE1, EXIF + overlapping(60, 120_000)[at:][:60_000]) for at in (0, 60_000)]
    ),
    "png of overlapping data": GOOD_PNG[:33] + chunk(b"eXIf", overlapping(60, 120_000)) + GOOD_PNG[33:],
    "png of overlapping data behind": GOOD_PNG[:-12]
    + chunk(b"eXIf", overlapping(60, 120_000))
    + GOOD_PNG[-12:],
    "gif head alone": b"GIF89a\x09\0\x06\0\0\0\0",
    "gif cut": saved(PICTURE, "GIF")[:-30],
    "webp head alone": b"RIFF\x20\0\0\0WEBPVP8 ",
    "webp cut": saved(picture(64, 64), "WEBP")[:-200],
    "bmp head alone": b"BM" + bytes(30),
    "bmp of negative width": b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, -9, 6, 1, 24, 0) + bytes(999),
    "bmp cut": saved(PICTURE, "BMP")[:-30],
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_one_clear_refusal(data: bytes) -> None:
    assert refused(data).startswith("the image ")


def test_what_costs_before_it_is_decoded_is_told() -> None:
    for name, said in {
        "jpeg of many scans in a file of several": "more than 100 scans",
        "jpeg of many segments": "more than 4096 segments",
        "jpeg of joined segments": "more than 65536 bytes of EXIF data",
        "jpeg of many joined segments": "more than 65536 bytes of EXIF data",
        "jpeg of overlapping data": "more than 65536 bytes of EXIF data",
        "png of overlapping data": "more than 65536 bytes of EXIF data",
        "png of overlapping data behind": "more than 65536 bytes of EXIF data",
    }.items():
        assert said in refused(HOSTILE[name]), name


@pytest.mark.parametrize("junk", [b"", b"\xff\xff", b"\0ab", b"\xff\0", b"\xff\xd0\xff\xd8", b"\xff\xf0"])
def test_a_head_is_walked_as_pillow_walks_it(junk: bytes) -> None:
    """What stands between segments hides none."""
    large = head((0xE1, EXIF + bytes(60_000)), (0xE1, EXIF + bytes(60_000)))
    assert "EXIF" in refused(large[:2] + junk + large[2:])


def test_only_what_is_in_the_head_of_a_jpeg_file_counts() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = head((0xE1, exif.tobytes()), (0xE1, EXIF + bytes(60_000)))
    assert np.array_equal(pixels(turned), pixels(GOOD_JPEG)[::-1, ::-1])
    thumbnails = head(*[(0xED, GOOD_JPEG[:20] + b"\xff\xe1\xff\xff" + EXIF)] * 9)
    behind = head((0xE1, EXIF + bytes(60_000)), (0xE1, EXIF + bytes(60_000)))
    assert np.array_equal(pixels(thumbnails + behind), pixels(GOOD_JPEG))


@pytest.mark.parametrize(("width", "height"), [(65_000, 65_000), (20_000, 4_000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_by_its_head(width: int, height: int) -> None:
    bomb = png_head(width, height) + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")
    refused(bomb)
    if width * height < 90_000_000:
        assert "max_image_pixels" in refused(bomb)


def test_an_image_may_be_long_and_not_longer() -> None:
    assert pixels(saved(Image.new("1", (65_535, 1)), "PNG")).shape == (1, 65_535, 3)
    assert "on a side" in refused(saved(Image.new("1", (1, 65_536)), "PNG"))


def test_an_image_for_which_no_memory_is_left_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.new("1", (4000, 1000)), "PNG")
    assert pixels(data).shape == (1000, 4000, 3)
    monkeypatch.setattr(LEDGER, "available", lambda: Available(1 << 20, "test"))
    with pytest.raises(Rejected, match="4000 x 1000"):
        pixels(data)


def test_large_images_are_composed_as_small_ones() -> None:
    rng = np.random.default_rng(3)
    image = Image.fromarray(rng.integers(0, 256, (1500, 1400, 4), np.uint8))
    below = Image.new("RGBA", image.size, (255, 255, 255, 255))
    expected = Image.alpha_composite(below, image).convert("RGB")
    assert np.array_equal(np.asarray(upright(image)), np.asarray(expected))


def test_limits_are_those_of_the_config() -> None:
    assert "max_image_pixels" in refused(GOOD_PNG, ImageLimits(1, 1 << 20, 53))
    assert "max_image_bytes" in refused(GOOD_PNG, ImageLimits(1, 50, 54))
    assert pixels(GOOD_PNG, ImageLimits(1, len(GOOD_PNG), 54)).shape == (6, 9, 3)


def test_a_polyglot_is_what_its_head_says() -> None:
    assert np.array_equal(pixels(GOOD_PNG + b"PK\3\4" + NOISE), np.asarray(PICTURE))


def test_nothing_global_is_changed() -> None:
    before = (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)
    for data in (GOOD_PNG, HOSTILE["png cut"]):
        try:
            pixels(data)
        except InvalidRequest:
            pass
    assert (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS) == before == (False, before[1])
