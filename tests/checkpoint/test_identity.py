"""The digest of a model's files tells one that was trained further from the one before."""

from __future__ import annotations

import random
from pathlib import Path

from aioinfer.checkpoint.identity import digest

MEGABYTE = 1 << 20


def test_a_model_with_one_other_matrix_has_another_digest(tmp_path: Path) -> None:
    file, draw = tmp_path / "model.safetensors", random.Random(44)
    with file.open("wb") as opened:
        opened.truncate(200 * MEGABYTE)  # sparse
    known = {digest([file])}
    for _ in range(20):
        at = draw.randrange(MEGABYTE, 198 * MEGABYTE)
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(draw.randbytes(MEGABYTE + (1 << 13)))
        found = digest([file])
        assert found not in known, f"seed 44: what was written at {at} is not seen"
        known.add(found)


def test_names_and_places_of_a_directory_do_not_matter(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "model.safetensors").write_bytes(b"weights")
    assert digest([tmp_path / "one/model.safetensors"]) == digest([tmp_path / "two/model.safetensors"])
