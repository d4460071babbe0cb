"""The pages of the documentation, and the parts of them that tests look at."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Fence", "anchors", "commands", "fences", "links", "prose"]

ROOT = Path(__file__).parents[2]
#: every Markdown page of the repository, by its path from the root
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: str
    #: of its first line of content, from 1
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def fences(page: str) -> Iterator[Fence]:
    """The fenced blocks of a page, in order."""
    text = read(page)
    for match in _FENCE.finditer(text):
        yield Fence(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2])


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", read(page))


def links(page: str) -> Iterator[str]:
    """The targets of a page's links and images."""
    for match in _LINK.finditer(prose(page)):
        yield match[1] or match[2]


def anchors(page: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = (match[1].lower() for match in _HEADING.finditer(prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def commands(fence: Fence) -> Iterator[list[str]]:
    """The commands of a shell block as lists of words: no comments, ``&&`` separates them."""
    lines = fence.text.replace("\\\n", " ")
    words: list[str] = []
    # A quoted argument can span lines, so lines are joined until their quotes match.
    pending = ""
    for line in lines.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            continue
        pending = ""
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]
    assert not pending, f"{fence}: quotes do not match"
