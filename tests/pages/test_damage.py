"""Files that were cut, flipped or put there by others: a miss each, and no wrong byte."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioinfer.tiers.archive import Archive, ArchiveError, ArchiveWriter
from aioinfer.tiers.directory import DirectoryStore
from aioinfer.tiers.records import HEADER
from tests.pages.content import name_of, page_of, read_right, state_of
from tests.tiers import scaled

NAME, OTHER = name_of(1), name_of(2)
#: places of damage in all, of each kind of file
PLACES = 1000


def damaged(whole: bytes, first: int, count: int) -> Iterator[tuple[str, bytes]]:
    """A file with one bit flipped: each byte of its first, and of as many others as make up the count; and
    cut there; and longer."""
    draw = random.Random(count)
    others = draw.sample(range(first, len(whole)), min(count, len(whole) - first))
    for place in [*range(first), *others]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        yield f"flipped at {place}", bytes(flipped)
        yield f"cut at {place}", whole[:place]
    yield "one byte longer", whole + b"\0"
    yield "twice", whole * 2


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "pages", 1 << 20)


def file_of(store: DirectoryStore, name: bytes, kind: str = "p") -> Path:
    return Path(store._path, name.hex()[:2], f"{name.hex()}.{kind}")


@pytest.mark.parametrize("kind", ["p", "s"])
def test_a_damaged_file_is_a_miss_and_removed(
    store: DirectoryStore, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.put(NAME, page_of(NAME), state_of(NAME))
    file = file_of(store, NAME, kind)
    whole = file.read_bytes()
    count = 0
    for what, content in damaged(whole, HEADER, PLACES - HEADER):
        file.write_bytes(content)
        store.refresh([NAME], states=True)
        assert store.has_state(NAME), what
        assert read_right(store, [NAME], states=True) == 0, what
        assert not file.exists(), what
        assert not store.has_state(NAME), what
        count += 1
    assert sum(store.counts().misses.values()) == count
    assert len(caplog.records) <= 2, "more than one line for a reason"
    assert store.put(NAME, page_of(NAME), state_of(NAME))
    assert read_right(store, [NAME], states=True) == 1


def test_a_file_of_another_name_or_kind_or_version_is_a_miss(store: DirectoryStore) -> None:
    assert store.put(NAME, page_of(NAME), state_of(NAME))
    whole = file_of(store, NAME).read_bytes()
    later = bytearray(whole)
    struct.pack_into("<I", later, 8, 2)
    struct.pack_into("<I", later, HEADER - 4, zlib.crc32(later[: HEADER - 4]))
    for content, reason in ((file_of(store, NAME, "s").read_bytes(), "damaged"), (later, "version")):
        file_of(store, NAME).write_bytes(content)
        assert read_right(store, [NAME]) == 0
        assert store.counts().misses[reason] == 1
    assert store.put(OTHER, page_of(OTHER))
    file_of(store, OTHER).write_bytes(whole)
    assert read_right(store, [OTHER]) == 0
    assert not file_of(store, OTHER).exists()


def test_what_is_no_file_of_this_user_is_not_read(store: DirectoryStore, tmp_path: Path) -> None:
    elsewhere = DirectoryStore(tmp_path / "elsewhere", 1 << 20)
    assert elsewhere.put(NAME, page_of(NAME))
    secret = file_of(elsewhere, NAME)
    place = file_of(store, NAME)
    place.parent.mkdir(mode=0o700)

    place.symlink_to(secret)
    store.refresh()
    assert not store.has(NAME)
    assert read_right(store, [NAME]) == 0
    assert store.put(NAME, page_of(NAME)), "a link is replaced"
    assert not place.is_symlink()
    assert secret.exists()

    place.unlink()
    os.mkfifo(place)
    assert read_right(store, [NAME]) == 0
    place.unlink()
    place.mkdir()
    assert read_right(store, [NAME]) == 0
    assert not store.put(NAME, page_of(NAME))
    assert store.counts().refused.keys() == {"EISDIR"}


def test_an_archive_that_was_damaged(tmp_path: Path) -> None:
    """Refused, or a page is a miss; never a wrong byte. All bytes of header, index and end, and samples of
    records."""
    path, names = tmp_path / "archive", [name_of(number) for number in range(4)]
    header = {"ids": [1, 2, 3]}
    writer = ArchiveWriter(path, header)
    for name in names:
        assert writer.put(name, page_of(name), state_of(name))
    writer.finish()
    whole = path.read_bytes()
    records = range(24 + len(json.dumps(header, separators=(",", ":"))), len(whole) - 20 - 8 * 33)
    draw = random.Random(7)
    samples = draw.sample(records, scaled(PLACES))
    for place in [*range(records.start), *samples, *range(records.stop, len(whole))]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        if place in records:
            archive = Archive(path)
            assert archive.header == header
            assert sum(read_right(archive, [name], states=True) for name in names) == 3, place
        else:
            with pytest.raises(ArchiveError):
                Archive(path)
        path.write_bytes(whole[:place])
        with pytest.raises(ArchiveError):
            Archive(path)


def crafted(path: Path, text: bytes, entries: bytes = b"", offset: int | None = None) -> Path:
    """An archive with right checksums, and anything in it."""
    head = struct.pack("<8sIQI", b"aioinfAR", 1, len(text), zlib.crc32(text)) + text
    place = len(head) if offset is None else offset
    path.write_bytes(head + entries + struct.pack("<QI8s", place, zlib.crc32(entries), b"aioinfAR"))
    return path


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"1",
        b"",
        b"{",
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b"\xff",
        b"9" * 5000,
    ],
)
def test_a_header_that_is_no_small_object_of_json_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ArchiveError):
        Archive(crafted(tmp_path / "archive", text))


def test_numbers_in_an_archive_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    assert Archive(crafted(path, b"{}")).header == {}
    huge = 2**64 - 1
    for start, size in ((huge, 1), (0, huge), (26, 1), (huge, huge)):
        with pytest.raises(ArchiveError):
            Archive(crafted(path, b"{}", struct.pack("<17sQQ", NAME + b"p", start, size)))
    for offset in (huge, 0, 1 << 63):
        with pytest.raises(ArchiveError):
            Archive(crafted(path, b"{}", offset=offset))
    for content in (b"", b"aioinfAR", struct.pack("<8sIQI", b"aioinfAR", 1, huge, 0)):
        path.write_bytes(content)
        with pytest.raises(ArchiveError):
            Archive(path)
    path.unlink()
    os.mkfifo(path)
    for each in (path, tmp_path, tmp_path / "nothing"):
        with pytest.raises(ArchiveError):
            Archive(each)


def test_a_header_that_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(64):
        deep = [deep]
    for header in ({"a": float("nan")}, {"a": b"bytes"}, {"a": deep}):
        with pytest.raises(ArchiveError):
            ArchiveWriter(tmp_path / "archive", header)
    assert [*tmp_path.iterdir()] == []
