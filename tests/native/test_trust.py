"""What decides what a process runs is read only where nobody else could have put it."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.model.weights_cache import PackedWeightsFile, WeightsCache
from aioinfer.native.bindings import Kernels, native_unsupported, shared_thread_pool
from aioinfer.native.build import UNITS, BuildFailed, build
from aioinfer.native.processor import choose_tiles
from aioinfer.native.trust import NotTrusted, check_folder, make_folder, open_trusted
from tests.native.compilers import WORKS, Compiler, calls

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
NOBODY = 65534


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


FILES: dict[str, Callable[[Path], None]] = {
    "writable for a group": lambda path: path.chmod(0o664),
    "writable for all": lambda path: path.chmod(0o646),
    "a link": _link,
    "a pipe": _pipe,
}
FOLDERS: dict[str, Callable[[Path], None]] = {
    "writable for a group": lambda path: path.chmod(0o775),
    "writable for all": lambda path: path.chmod(0o757),
}
GIVEN = pytest.param("of another user", marks=as_root)


def give(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "file"
    make_folder(path.parent)
    path.write_text("text")
    path.chmod(0o644)
    return path


def read(path: Path) -> str:
    with open(open_trusted(path)) as opened:
        return opened.read()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that were opened and not closed."""
    numbers: list[int] = []
    real_open, real_close = os.open, os.close

    def opening(*given: Any, **options: Any) -> int:
        numbers.append(real_open(*given, **options))
        return numbers[-1]

    def closing(number: int) -> None:
        real_close(number)
        if number in numbers:
            numbers.remove(number)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "close", closing)
    return numbers


@pytest.mark.parametrize("fault", [*FILES, GIVEN])
def test_a_file_that_others_could_have_written_is_not_opened(file: Path, held: list[int], fault: str) -> None:
    FILES.get(fault, give)(file)
    with pytest.raises(OSError, match="file"):
        open_trusted(file)
    assert held == []


@pytest.mark.parametrize("fault", [*FOLDERS, GIVEN])
def test_a_folder_that_others_could_have_written_to_has_no_files(
    file: Path, held: list[int], fault: str
) -> None:
    FOLDERS.get(fault, give)(file.parent)
    for attempt in (
        lambda: open_trusted(file),
        lambda: check_folder(file.parent),
        lambda: make_folder(file.parent),
    ):
        with pytest.raises(NotTrusted, match=r"folder (is writable for|belongs to).*AIOINFER_CACHE"):
            attempt()
    assert held == []


def test_in_a_folder_like_tmp_files_of_this_user_count(file: Path) -> None:
    file.parent.chmod(0o1777)
    assert read(file) == "text"
    file.chmod(0o666)
    with pytest.raises(NotTrusted, match="chmod go-w"):
        open_trusted(file)


def test_folders_above_and_links_to_folders_are_not_judged(file: Path) -> None:
    """A volume that a pod may write to is open to all, and a folder in it is not."""
    above = file.parent.parent
    above.chmod(0o777)
    (above / "link").symlink_to(file.parent)
    assert read(file) == read(above / "link" / "file") == "text"


# -- kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [*FILES, GIVEN])
def test_a_library_that_others_could_have_written_is_compiled_again(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    script = compiler(WORKS)
    path = build()
    FILES.get(fault, give)(path)
    assert build() == path
    assert calls(script) == 2 * (UNITS + 1)
    assert not path.is_symlink()
    assert build() == path
    assert calls(script) == 2 * (UNITS + 1)
    judged = [record for record in caplog.records if "compiled kernels are not used" in record.getMessage()]
    assert bool(judged) == (fault != "a link")


@pytest.mark.parametrize("fault", [*FOLDERS, GIVEN])
def test_no_library_is_compiled_in_a_folder_that_others_may_write_to(
    compiler: Compiler, unsettled: None, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    script = compiler(WORKS)
    path = build()
    FOLDERS.get(fault, give)(path.parent)
    with pytest.raises(BuildFailed, match=r"cache (is writable for|belongs to).*AIOINFER_CACHE"):
        build()
    assert calls(script) == UNITS + 1
    with caplog.at_level(logging.WARNING, "aioinfer"):
        assert "AIOINFER_CACHE" in (native_unsupported() or "")
    assert len(caplog.records) == 1


def test_a_library_is_judged_again_when_it_is_loaded(compiler: Compiler) -> None:
    compiler(WORKS)
    path = build()
    path.chmod(0o777)
    with pytest.raises(NotTrusted, match="chmod go-w"):
        Kernels(str(path), choose_tiles())


def test_an_error_of_the_loader_names_the_file(compiler: Compiler, held: list[int]) -> None:
    compiler(WORKS)
    path = build()
    with pytest.raises(OSError, match=f"{path.name} cannot be loaded"):
        Kernels(str(path), choose_tiles())
    assert held == []


# -- packed weights ------------------------------------------------------------------------------------


class Written:
    """Stands in for a model: one blob."""

    def __init__(self, blobs: object) -> None:
        self.mapped = isinstance(blobs, PackedWeightsFile)
        if blobs is not None and not self.mapped:
            data = ctypes.create_string_buffer(b"weights")
            blobs.add("one", ctypes.addressof(data), len(data))  # type: ignore[attr-defined]


def weights(folder: Path) -> tuple[bool, str]:
    assert native_unsupported() is None
    model, done = WeightsCache(folder, folder.parent, []).load(shared_thread_pool(1), Written)
    return model.mapped, done


def test_packed_weights_that_others_could_have_written_are_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert weights(folder) == (True, "weights were cached and mapped")
    assert weights(folder) == (True, "weights are mapped from the cache")
    [path] = folder.glob("*.packed")
    path.chmod(0o666)
    assert weights(folder) == (True, "weights were cached and mapped")
    [path] = folder.glob("*.packed")
    assert path.stat().st_mode & 0o022 == 0


def test_no_packed_weights_are_kept_where_others_may_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    weights(folder)
    os.mkfifo(folder / ".writing-pipe")
    os.utime(folder / ".writing-pipe", (0, 0))
    before = sorted(folder.iterdir())
    folder.chmod(0o777)
    mapped, done = weights(folder)
    assert not mapped
    assert "chmod go-w" in done
    assert sorted(folder.iterdir()) == before
