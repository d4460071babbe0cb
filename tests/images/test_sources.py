"""What callers may give as an image is copied, and becomes the same pixels in every form."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aioinfer.errors import InvalidRequest
from aioinfer.images.decoding import decoded
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits
from aioinfer.images.source import ImageSource, images_in, sourced, taken
from tests.images.checkpoints import picture

PICTURE = picture(7, 5)
PIXELS = np.asarray(PICTURE)


def png(image: Image.Image = PICTURE, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def pixels(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(decoded(ImageSource.of(value, "image"), DEFAULT_LIMITS, "image"))


@pytest.mark.parametrize(
    "value",
    [
        PICTURE,
        PIXELS,
        png(),
        bytearray(png()),
        memoryview(png()),
        f"data:image/png;base64,{base64.b64encode(png()).decode()}",
        f"DATA:image/PNG;BASE64,{base64.b64encode(png()).decode()}",
        Image.open(io.BytesIO(png())),
        PIXELS[::1, :, :],
        np.asfortranarray(PIXELS),
        np.repeat(PIXELS, 2, 0)[::2],
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_image_is_the_same_in_every_form(value: Any) -> None:
    assert np.array_equal(pixels(value), PIXELS)


def test_a_path_is_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(png())
    for path in (file, str(file), os.fsencode(file).decode()):
        found = ImageSource.of(path, "image")
        assert found.data == png()
    file.write_bytes(b"other")
    assert found.data == png()


def test_what_callers_change_later_is_not_read() -> None:
    data, array, image = bytearray(png()), PIXELS.copy(), PICTURE.copy()
    sources = [ImageSource.of(each, "image") for each in (data, array, image)]
    data[:] = b"\0" * len(data)
    array[:] = 0
    image.paste((0, 0, 0), (0, 0, 7, 5))
    for source in sources:
        assert np.array_equal(np.asarray(decoded(source, DEFAULT_LIMITS, "image")), PIXELS)


def test_grey_and_alpha_become_colours_on_white() -> None:
    grey = PIXELS[:, :, 0]
    assert np.array_equal(pixels(grey), np.repeat(grey[:, :, None], 3, 2))
    assert np.array_equal(pixels(grey[:, :, None]), pixels(grey))
    clear = np.dstack([PIXELS, np.zeros_like(grey)])
    assert (pixels(clear) == 255).all()
    assert np.array_equal(pixels(np.dstack([PIXELS, np.full_like(grey, 255)])), PIXELS)
    assert (pixels(np.dstack([grey, np.zeros_like(grey)])) == 255).all()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "must be an image of Pillow"),
        (None, "must be an image of Pillow"),
        ({"url": "x"}, "must be an image of Pillow"),
        (b"", "is empty"),
        ("", "cannot be read"),
        ("nowhere.png", "cannot be read"),
        ("no\0where", "cannot be read"),
        (Path("/dev/zero"), "cannot be read"),
        (Path("/tmp"), "cannot be read"),
        ("https://example.com/a.png", "is a URL"),
        ("file:///etc/passwd", "is a URL"),
        ("data:image/png;base64", "is no data URI"),
        ("data:text/plain;base64,AAAA", "must be of type image/png"),
        ("data:image/webp;base64,iVBORw0KGgoA", "stated to be image/webp, and begins as image/png"),
        ("data:image/png,%89PNG", "in base64"),
        ("data:image/png;base64,AA A=", "is not base64"),
        ("data:image/png;base64,AAA", "is not base64"),
        ("data:image/png;base64,AAAA\n", "is not base64"),
        ("data:image/png;base64,", "is empty"),
        (np.zeros((4, 4), np.float32), "an array of float32"),
        (np.zeros((4, 4, 5), np.uint8), "an array of uint8"),
        (np.zeros(4, np.uint8), "an array of uint8"),
        (np.zeros((0, 4), np.uint8), "is empty"),
        (Image.new("RGB", (0, 5)), "is empty"),
        (Image.new("RGB", (65_536, 1)), "more than 65535 pixels on a side"),
        (np.zeros((65_536, 1), np.uint8), "more than 65535 pixels on a side"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        ImageSource.of(value, "messages[0].content[1]")
    assert caught.value.field == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (png(), "max_image_bytes"),
        (f"data:image/png;base64,{base64.b64encode(png()).decode()}", "max_image_bytes"),
        (np.zeros((4, 4), np.uint8), "max_image_pixels"),
        (PICTURE, "max_image_pixels"),
        (ImageSource(b"\0" * 48, (4, 4)), "max_image_pixels"),
    ],
    ids=["bytes", "uri", "array", "pillow", "source"],
)
def test_limits_hold_before_anything_is_decoded(value: Any, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit):
        ImageSource.of(value, "image", ImageLimits(1, 40, 15))


def test_a_size_must_be_that_of_the_data() -> None:
    with pytest.raises(InvalidRequest):
        ImageSource(b"\0" * 5, (1, 1))


# -- in messages ----------------------------------------------------------------------------------------


def message(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_images_are_taken_out_of_messages_in_their_order() -> None:
    image, text = {"type": "image", "image": png()}, {"type": "text", "text": "a"}
    given = [
        message(image, text),
        {"role": "tool", "content": "b"},
        message(text, {**image, "image": PIXELS}),
    ]
    messages, found = taken(given, DEFAULT_LIMITS, "")
    assert [field for field, _ in found] == ["messages[0].content[0]", "messages[2].content[1]"]
    assert [source.size for _, source in found] == [None, (7, 5)]
    assert messages == [message({"type": "image"}, text), given[1], message(text, {"type": "image"})]
    assert given[0] == message(image, text)
    whole = sourced(given, DEFAULT_LIMITS)
    assert images_in(whole) == [source for _, source in found]
    assert taken(whole, DEFAULT_LIMITS, "") == (messages, found)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image"}, "must have the keys"),
        ({"type": "image", "image": png(), "detail": "low"}, "must have the keys"),
        ({"type": "image", "url": "x"}, "must have the keys"),
        ({"type": "image", "image": 7}, "must be an image of Pillow"),
    ],
)
def test_a_part_that_is_no_image_is_refused_by_its_place(part: Any, said: str) -> None:
    for change in (
        lambda given: taken(given, DEFAULT_LIMITS, ""),
        lambda given: sourced(given, DEFAULT_LIMITS),
    ):
        with pytest.raises(InvalidRequest, match=said) as caught:
            change([message({"type": "text", "text": "a"}, part)])
        assert caught.value.field == "messages[0].content[1]"


def test_too_many_images_and_a_model_without_are_refused() -> None:
    image = {"type": "image", "image": png()}
    with pytest.raises(InvalidRequest, match="max_images") as caught:
        taken([message(image), message(image, image)], ImageLimits(2), "")
    assert caught.value.field == "messages[1].content[1]"
    with pytest.raises(InvalidRequest, match="reads no images"):
        taken([message(image)], None, "this model reads no images")
