"""What a forward must read and compute is counted right, and its bench runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench.command import BadOptions, main
from bench.cpu.roofs import Phase, batch_of, needs, phases_of, shape_of
from bench.gpu.roofline import Shape
from tests.tiers import COMPILES, nightly

ROOT = Path(__file__).parents[2]
SHAPE = Shape("s", 2, 64, 4, 2, 16, 128, 500, True)


def test_a_decode_reads_all_weights_once_and_each_context() -> None:
    found = needs(SHAPE, "bf16", Phase("", 3, 1, 10))
    layer = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128
    weights = 2 * layer + 500 * 64
    assert found["linear"] == (2 * weights, 2 * 3 * weights)
    # Keys and values of 11 positions; each head has a product and a sum over them.
    assert found["attention"] == (2 * 3 * 11 * 2 * 2 * 2 * 16, 3 * 11 * 2 * 4 * 4 * 16)


def test_a_prefill_has_logits_of_its_last_token_and_attends_to_what_is_before() -> None:
    whole = needs(SHAPE, "bf16", Phase("", 1, 6, 4))
    ones = [needs(SHAPE, "bf16", Phase("", 1, 1, 4 + at)) for at in range(6)]
    head = 2 * 500 * 64
    assert whole["linear"][1] == sum(each["linear"][1] - head for each in ones) + head
    assert whole["attention"][1] == sum(each["attention"][1] for each in ones)
    assert whole["attention"][0] == ones[-1]["attention"][0]


@pytest.mark.parametrize(("precision", "layers", "head"), [("int8", 1 + 2 / 128, 1 + 2 / 128),
                                                          ("int4", 0.5 + 4 / 64, 1 + 2 / 128)])  # fmt: skip
def test_rounded_weights_have_scales(precision: str, layers: float, head: float) -> None:
    found = needs(SHAPE, precision, Phase("", 1, 1, 0))["linear"][0]  # type: ignore[arg-type]
    assert found == pytest.approx(SHAPE.layer_parameters * layers + 500 * 64 * head)


def test_rows_have_pages_of_their_own() -> None:
    batch = batch_of(Phase("", 3, 5, 60), 100)
    assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping) == 15
    assert batch.positions.tolist() == [60, 61, 62, 63, 64] * 3
    assert batch.block_table.shape == (3, 3)
    assert 0 not in batch.block_table
    assert batch.logits_rows.tolist() == [4, 9, 14]
    for row in range(3):
        for at, position in enumerate(range(60, 65)):
            page = int(batch.block_table[row, position // 32])
            assert int(batch.slot_mapping[5 * row + at]) == 32 * page + position % 32
    assert batch.num_decodes == 0
    assert batch_of(Phase("", 2, 1, 9), 100).num_decodes == 2


def test_phases_beyond_the_model_are_left_out() -> None:
    options = argparse.Namespace(
        prompt_tokens=8, prefill_tokens=100, concurrency=[1, 2], contexts=[400, 1000]
    )
    assert [phase.name for phase in phases_of(options, 500)] == [
        "decode 1", "decode 2", "decode 1 at 400", "prefill 100", "prefill 100 at 400"
    ]  # fmt: skip


def test_a_model_without_a_dense_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 4}')
    with pytest.raises(BadOptions, match="has no 'architectures'"):
        shape_of(tmp_path)


@nightly(COMPILES)
@pytest.mark.native
@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_the_bench_compares_parts_with_roofs(tmp_path: Path, precision: str) -> None:
    line, model, threads = tmp_path / "line.json", ROOT / "aioinfer" / "bundled" / "tiny-chat", 1
    before = torch.get_num_threads()
    command = f"cpu --roof --model {model} --precision {precision} --threads {threads} --concurrency 1 4"
    try:
        assert (
            main([*command.split(), "--contexts", "64", "--prefill-tokens", "128", "--json", str(line)]) == 0
        )
    finally:
        torch.set_num_threads(before)
    roofs, *rows = json.loads(line.read_text())["rows"]
    assert roofs["gb_s"] > 0.1
    assert min(roofs["bf16_gflop_s"], roofs["int8_gflop_s"], roofs["int4_gflop_s"]) > 0.1
    parts = [row for row in rows if row["part"] != "rest"]
    assert {row["phase"] for row in parts} == {
        "decode 1", "decode 4", "decode 1 at 64", "prefill 128", "prefill 128 at 64"
    }  # fmt: skip
    # Small weights may come from a cache, which is faster than memory.
    assert all(row["reached"] == pytest.approx(row["roof_ms"] / row["ms"]) for row in parts)
