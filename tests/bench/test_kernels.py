"""The bench of linear layers: a row for every shape, format and number of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.command import main
from tests.model.harness import require
from tests.tiers import SECONDS, rest

SHORT = "--cold-mib 1 --seconds 0.01 --threads 1"


@rest(SECONDS)
def test_every_format_is_measured_with_any_number_of_rows(tmp_path: Path) -> None:
    require("native")
    file = tmp_path / "line.json"
    arguments = f"kernels --shapes 64x96 208x40 --rows 1 3 {SHORT} --json {file}".split()
    assert main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 6 * 2
    sizes = {row["format"]: row["gb_s"] * row["us"] for row in rows if row["shape"] == "64x96"}
    of_bytes = {name: round(size * 1e3) / (64 * 96) for name, size in sizes.items()}
    # Bytes a weight: a single group has scale and offset of four bytes.
    assert of_bytes["bf16"] == 2
    assert of_bytes["int8"] == pytest.approx(1 + 4 / 64)
    assert of_bytes["int4-64"] == pytest.approx(0.5 + 8 / 64)
    long = {row["format"]: row["gb_s"] * row["us"] for row in rows if row["shape"] == "208x40"}
    # Four groups of 64 with scales and offsets of two bytes.
    assert round(long["int4-64"] * 1e3) == pytest.approx(40 * (128 + 4 * 4))


def test_a_shape_that_no_layer_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kernels", "--shapes", "100x3"])
    assert "a shape is INNERxOUTPUTS" in capsys.readouterr().err
