"""What a Dockerfile says, executed in empty roots where no builder of images is at hand.

Knows the instructions that ours has, and raises ValueError for others. A stage is a folder. The cache that
RUN mounts for pip is the root's own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.deploy.root import ENVIRONMENT, Root

__all__ = ["Image", "build", "instructions"]


@dataclass(frozen=True)
class Image:
    """A root and how programs are started in it."""

    root: Root
    env: dict[str, str] = field(default_factory=dict)
    user: int = 0
    cwd: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    stop_signal: str = "SIGTERM"
    volumes: tuple[str, ...] = ()


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Keyword and the rest of each instruction, with lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        yield keyword.upper(), rest.strip()


def build(
    text: str, context: Path, place: Path, base: Callable[[str, Path], Root], **arguments: str
) -> Image:
    """Execute all stages and return the last. ``base(name, folder)`` makes what FROM names."""
    stages: dict[str, Image] = {}
    values: dict[str, str] = {}
    image: Image | None = None
    for keyword, rest in instructions(text):
        if keyword == "FROM":
            source, _, name = expanded(rest, values).partition(" AS ")
            folder = place / str(len(stages))
            if source in stages:
                subprocess.run(["cp", "-a", str(stages[source].root.path), str(folder)], check=True)
                image = replace(stages[source], root=replace(stages[source].root, path=folder))
            else:
                image = Image(base(source, folder), dict(ENVIRONMENT))
            stages[name or folder.name], values = image, {}
        elif keyword == "ARG":
            name, _, default = rest.partition("=")
            values[name] = arguments.get(name, default)
        elif image is None:
            raise ValueError(f"{keyword} stands before FROM")
        else:
            image = _step(keyword, rest, image, values, stages, context)
            stages[[*stages][-1]] = image
    if image is None:
        raise ValueError("there is no FROM")
    return image


def expanded(text: str, values: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME}`` replaced; raises KeyError for one without a value."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: values[match[1] or match[2]], text)


def _step(
    keyword: str,
    rest: str,
    image: Image,
    values: Mapping[str, str],
    stages: Mapping[str, Image],
    context: Path,
) -> Image:
    """The image behind one instruction of a stage."""
    if keyword == "RUN":
        command = re.sub(r"^(--mount=\S+\s+)+", "", rest)
        env = {"HOME": "/root", **image.env, **values}  # as Docker sets it for root's commands
        image.root.run(["sh", "-c", command], env=env, user=image.user, cwd=image.cwd)
        return image
    if keyword == "COPY":
        _copy(rest.split(), image, stages, context)
        return image
    if keyword == "EXPOSE":  # a note for readers
        return image
    if keyword == "HEALTHCHECK":
        return replace(image, health=_words(re.sub(r"^(--\S+\s+)+CMD\s+", "", rest)))
    rest = expanded(rest, {**image.env, **values})
    if keyword == "WORKDIR":
        (image.root.path / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
    changes: dict[str, Callable[[], object]] = {
        "ENV": lambda: image.env | dict(word.split("=", 1) for word in rest.split()),
        "USER": lambda: int(rest),
        "WORKDIR": lambda: rest,
        "VOLUME": lambda: tuple(rest.split()),
        "STOPSIGNAL": lambda: rest,
        "ENTRYPOINT": lambda: _words(rest),
        "CMD": lambda: _words(rest),
    }
    if keyword not in changes:
        raise ValueError(f"no step for {keyword}")
    fields = {
        "WORKDIR": "cwd",
        "VOLUME": "volumes",
        "STOPSIGNAL": "stop_signal",
        "CMD": "command",
    }
    return replace(image, **{fields.get(keyword, keyword.lower()): changes[keyword]()})  # type: ignore[arg-type]


def _words(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


def _copy(words: list[str], image: Image, stages: Mapping[str, Image], context: Path) -> None:
    source, there = words[-2:]
    target = image.root.path / there.lstrip("/")
    if words[0].startswith("--from="):
        # Moved, which takes no time: no stage is read twice.
        target.parent.mkdir(parents=True, exist_ok=True)
        (stages[words[0].removeprefix("--from=")].root.path / source.lstrip("/")).rename(target)
    elif source == ".":
        _copy_context(context, target)
    else:
        raise ValueError(f"no step for COPY {' '.join(words)}")


def _copy_context(context: Path, target: Path) -> None:
    """What .dockerignore, which begins with ``*``, takes by ``!NAME`` and no pattern leaves out again."""
    lines = (context / ".dockerignore").read_text().split("\n")
    first, *patterns = (line for line in lines if line[:1] not in ("", "#"))
    if first != "*":
        raise ValueError(".dockerignore does not begin with *")
    left_out = shutil.ignore_patterns(
        *(each.removeprefix("**/") for each in patterns if not each.startswith("!"))
    )
    target.mkdir(parents=True)
    for name in (each[1:] for each in patterns if each.startswith("!")):
        if (context / name).is_dir():
            shutil.copytree(context / name, target / name, ignore=left_out)
        elif (context / name).exists():
            shutil.copy2(context / name, target / name)
