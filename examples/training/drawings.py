"""Drawings for the bundled model that sees: shapes in colours and numbers, whose content is known.

A :class:`Scene` says what is in a drawing, not how it looks: sizes, places, tints, resolution, noise and the
file format are drawn at random by :func:`draw`. Which scenes are held out is decided by a checksum of the
scene, as in tasks.py: training never draws a scene that is held out.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from examples.training.words import is_held

__all__ = ["COLORS", "SHAPES", "Mark", "Scene", "draw", "draw_with_map", "scene_of"]

Point = tuple[float, float]
Rgb = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "star", "cross")

#: colours of backgrounds, which are lighter than what is drawn on them
PAPERS = ("white", "white", "yellow", "pink")

#: tints of each colour: the one that CSS and Pillow call so, and others
COLORS: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 40, 40), (205, 20, 30)),
    "green": ((0, 128, 0), (50, 160, 70), (0, 200, 0)),
    "blue": ((0, 0, 255), (45, 85, 215), (30, 60, 160)),
    "orange": ((255, 140, 0), (245, 130, 30)),
    "purple": ((128, 0, 128), (130, 60, 190)),
    "brown": ((140, 70, 30), (125, 75, 40)),
    "black": ((0, 0, 0), (25, 25, 30)),
    "yellow": ((255, 255, 0), (250, 235, 60)),
    "pink": ((255, 192, 203), (255, 180, 210)),
    "white": ((255, 255, 255), (245, 245, 240)),
}
_JITTER = 8
_CONTRAST = 75.0
_DARKER = 100
#: pixels of a side
_SHORTEST, _LONGEST = 34, 240
_HELD = 10


@dataclass(frozen=True)
class Mark:
    """A shape or a number in a colour."""

    name: str
    color: str


@dataclass(frozen=True)
class Scene:
    """What is in a drawing. ``kind`` is ``one`` (a shape) or ``number`` (a digit)."""

    kind: str
    marks: tuple[Mark]
    background: str

    @property
    def mark(self) -> Mark:
        """The shape or the digit."""
        return self.marks[0]

    @property
    def held(self) -> bool:
        """Training does not draw it."""
        # The text of which the checksums were taken when the bundled weights were trained.
        return is_held(f"{repr(self)[:-1]}, across=False)", _HELD)


# -- what is in a drawing ------------------------------------------------------------------------------


def scene_of(kind: str, rng: random.Random, test: bool) -> Scene:
    """A random scene of a kind that belongs to the wanted side of the split."""
    while (scene := _KINDS[kind](rng)).held != test:
        pass
    return scene


def _background(rng: random.Random) -> str:
    return rng.choice(PAPERS)


@lru_cache
def _inks(background: str) -> tuple[str, ...]:
    pairs = [(paper, ink) for paper in COLORS[background] for ink in COLORS if ink not in PAPERS]
    return tuple(sorted({ink for paper, ink in pairs if any(_told(paper, tint) for tint in COLORS[ink])}))


def _told(paper: Rgb, ink: Rgb) -> bool:
    """What is drawn is darker than the paper and can be told from it."""
    return sum(paper) - sum(ink) >= _DARKER and math.dist(paper, ink) >= _CONTRAST


def _color(rng: random.Random, background: str) -> str:
    return rng.choice(_inks(background))


def _one(rng: random.Random) -> Scene:
    background = _background(rng)
    return Scene("one", (Mark(rng.choice(SHAPES), _color(rng, background)),), background)


def _number(rng: random.Random) -> Scene:
    background = _background(rng)
    return Scene("number", (Mark(str(rng.randrange(10)), _color(rng, background)),), background)


_KINDS: dict[str, Callable[[random.Random], Scene]] = {
    "one": _one,
    "number": _number,
}


# -- how it looks --------------------------------------------------------------------------------------


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """The scene as an RGB image of 32 to 240 pixels a side, as if read from a PNG or JPEG file."""
    return draw_with_map(scene, rng)[0]


def draw_with_map(scene: Scene, rng: random.Random) -> tuple[Image.Image, Image.Image]:
    """As :func:`draw`; and where its shape or digit is: an image of the same sides or a multiple, whose
    pixels are 1 there and 0 elsewhere."""
    width, height = _size(rng)
    smooth = max(1, min(3, 260 // max(width, height))) if rng.random() < 0.8 else 1
    paper, ink = _tints(scene, rng)
    image = Image.new("RGB", (width * smooth, height * smooth), paper)
    where = Image.new("L", image.size)
    if scene.kind == "number":
        _write(image, where, scene.mark.name, ink, rng)
    else:
        turn = rng.uniform(-0.12, 0.12)
        radius = rng.uniform(0.34, 0.48) * min(image.size)
        at = rng.uniform(radius, image.width - radius), rng.uniform(radius, image.height - radius)
        _shape(ImageDraw.Draw(image), scene.mark.name, at, radius, turn, ink)
        _shape(ImageDraw.Draw(where), scene.mark.name, at, radius, turn, 1)
    if smooth > 1:
        image = image.reduce(smooth)
    return _spoil(image, rng), where


def _size(rng: random.Random) -> tuple[int, int]:
    aspect = math.exp(rng.uniform(0, math.log(1.2)))
    short = math.exp(rng.uniform(math.log(_SHORTEST), math.log(_LONGEST / aspect)))
    sides = round(short), round(short * aspect)
    return sides if rng.random() < 0.5 else sides[::-1]


def _tints(scene: Scene, rng: random.Random) -> tuple[Rgb, Rgb]:
    """Colours of the paper and of the mark, which can be told from the paper's."""

    def tint(name: str) -> Rgb:
        red, green, blue = rng.choice(COLORS[name])
        if rng.random() < 0.5:
            return red, green, blue
        moved = [value + rng.randint(-_JITTER, _JITTER) for value in (red, green, blue)]
        red, green, blue = (min(255, max(0, value)) for value in moved)
        return red, green, blue

    while True:
        paper, ink = tint(scene.background), tint(scene.mark.color)
        if _told(paper, ink):
            return paper, ink


def _shape(
    canvas: ImageDraw.ImageDraw, name: str, at: Point, radius: float, turn: float, ink: Rgb | int
) -> None:
    x, y = at
    if name == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        return
    cos, sin = math.cos(turn), math.sin(turn)
    canvas.polygon(
        [(x + radius * (cos * a - sin * b), y + radius * (sin * a + cos * b)) for a, b in _outline(name)],
        fill=ink,
    )


@lru_cache
def _outline(name: str) -> tuple[Point, ...]:
    """Corners of a shape within the unit circle; y points down."""
    if name == "square":
        return (-0.74, -0.74), (0.74, -0.74), (0.74, 0.74), (-0.74, 0.74)
    if name == "triangle":
        return (0.0, -0.95), (0.9, 0.7), (-0.9, 0.7)
    if name == "star":
        turns = [math.pi * at / 5 for at in range(10)]
        reach = [1.0 if at % 2 == 0 else 0.42 for at in range(10)]
        return tuple((r * math.sin(t), -r * math.cos(t)) for r, t in zip(reach, turns, strict=True))
    a, b = 0.3, 0.93
    quarter = [(-a, -b), (a, -b), (a, -a)]
    turned = [quarter, [(-y, x) for x, y in quarter], [(-x, -y) for x, y in quarter]]
    return tuple(point for part in [*turned, [(y, -x) for x, y in quarter]] for point in part)


@lru_cache(128)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _write(image: Image.Image, where: Image.Image, digit: str, ink: Rgb, rng: random.Random) -> None:
    """Write a digit about as high as fits."""
    width, height = image.size
    bold = rng.random() < 0.4
    unit = 100
    left, top, right, bottom = _font(unit).getbbox(digit, stroke_width=4 * bold)
    fitting = min(0.94 * width / (right - left), 0.9 * height / (bottom - top))
    share = rng.uniform(0.75, 1.0)
    size = max(8, int(unit * fitting * share))
    font, stroke = _font(size), round(size * 0.04) if bold else 0
    left, top, right, bottom = font.getbbox(digit, stroke_width=stroke)
    x = rng.uniform(0, max(0, width - (right - left))) - left
    y = rng.uniform(0, max(0, height - (bottom - top))) - top
    center = x + (left + right) / 2, y + (top + bottom) / 2
    mask = Image.new("L", image.size)
    ImageDraw.Draw(mask).text((x, y), digit, fill=255, font=font, stroke_width=stroke)
    if share < 0.9 and rng.random() < 0.5:
        mask = mask.rotate(rng.uniform(-6, 6), Image.Resampling.BILINEAR, center=center)
    image.paste(ink, mask=mask)
    where.paste(1, mask=mask.point(_HALF))


_HALF = [0] * 128 + [255] * 128


def _spoil(image: Image.Image, rng: random.Random) -> Image.Image:
    """Noise, and the losses of a JPEG file, or neither."""
    if rng.random() < 0.25:
        strength = rng.randint(2, 12)
        values = np.asarray(image, dtype=np.int16)
        noise = np.frombuffer(rng.randbytes(values.size), dtype=np.uint8).reshape(values.shape)
        moved = values + (noise.astype(np.int16) * strength >> 8) - strength // 2
        image = Image.fromarray(moved.clip(0, 255).astype(np.uint8))
    if rng.random() < 0.35:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(75, 95))
        image = Image.open(file).convert("RGB")
    return image
